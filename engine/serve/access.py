"""Control access: only a browser or another client on this machine that has the token is answered, and only for pages
of this server. A client may send the token as a bearer token.

The URL that the command prints has the token. The first response sets it as a cookie and redirects to the URL without
it, so that it appears in no history, link or referrer.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import BadInput, write_error
from engine.files import read_text
from engine.limits import TOKEN_FILE
from engine.report import page as report

POLICY = (
    report.POLICY.replace("script-src", "script-src 'self'").replace(
        "style-src ", "style-src 'self' "
    )
    + "; connect-src 'self'; form-action 'self'; frame-ancestors 'none'"
)
"""Content-Security-Policy of every response: that of a report, which also allows the files of this server."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TOKEN = re.compile(r"[A-Za-z0-9_-]{32,128}")


def read_token(file: Path) -> str:
    """Return the token in a file that only its owner can read; write a new token if there is no file. Raises
    BadInput."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(mode=0o600, exist_ok=False)
        file.write_text(f"{secrets.token_urlsafe(32)}\n")
    except FileExistsError:
        pass
    except OSError as error:
        raise write_error("token", file, "to write it", error) from error
    token = read_text(file, "token", TOKEN_FILE).strip()
    if mode := file.stat().st_mode & 0o077:
        found = f"the mode {mode | 0o600:o}"
        hint = f"chmod 600 {file}"
        raise BadInput.expected(
            "token", file, "a file that only its owner can read", found, hint=hint
        )
    if not _TOKEN.fullmatch(token):
        hint = "remove the file, and a new token is written"
        raise BadInput.expected("token", file, "32 to 128 letters and digits", "others", hint=hint)
    return token


class Guard:
    """ASGI middleware that passes an allowed request on, and refuses any other."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app, self._token = app, token
        self._hosts = (f"127.0.0.1:{port}", f"localhost:{port}")
        # A cookie is sent to every port of a host, so its name has the port: two servers must not overwrite each
        # other's.
        self._cookie = f"apr-serve-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
            await send(message)

        app = self._refusal(Request(scope)) or self._app
        await app(scope, receive, answer)

    def _refusal(self, request: Request) -> Response | None:
        """Return the response to a refused or redirected request; None if the request is allowed."""
        host, origin = request.headers.get("host"), request.headers.get("origin")
        if request.method != "GET":
            return PlainTextResponse("This server only answers GET.\n", 405)
        if host not in self._hosts:
            names = " or ".join(self._hosts)
            text = f"Expected the host {names}; through ssh -L, use the same port on both sides.\n"
            return PlainTextResponse(text, 403)
        if origin is not None and origin != f"http://{host}":
            return PlainTextResponse("Expected no other origin.\n", 403)
        bearer = request.headers.get("authorization", "").partition("Bearer ")[2]
        if self._is_token(bearer):
            return None
        given = request.query_params.get("token")
        if not self._is_token(request.cookies.get(self._cookie) if given is None else given):
            text = "Expected the token: open the URL that `engine serve` printed.\n"
            return PlainTextResponse(text, 403)
        if given is None:
            return None
        # Redirect to an absolute URL: the path `//elsewhere` would lead to another host.
        away = RedirectResponse(str(request.url.remove_query_params("token")), 303)
        away.set_cookie(self._cookie, given, httponly=True, samesite="strict", max_age=30 * 86400)
        return away

    def _is_token(self, given: str | None) -> bool:
        return given is not None and secrets.compare_digest(given.encode(), self._token.encode())
