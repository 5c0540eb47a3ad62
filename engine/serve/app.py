"""Define the server: its routes, and the socket on 127.0.0.1 that it listens on."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from engine.errors import BadInput
from engine.report import page as report
from engine.serve.access import Guard
from engine.serve.folders import Folders
from engine.serve.pages import COMPARE, document, error_state, list_page, report_page, runs_of
from engine.serve.topics import MOST_TOPICS, Topic
from engine.watch.metrics import CONTENT_TYPE, metrics_text
from engine.watch.runs_feed import READING

PORT = 8765
MISSING = (
    f"Expected a run, a flip or a finding, or two to {report.MOST_COMPARED} runs to compare; "
    "found nothing there."
)
STALLED_MS = 30_000
"""Milliseconds after which a client that reads nothing is disconnected."""
SEND_BYTES = 64 << 10
MOST_REQUESTS = 256
"""Maximum number of simultaneous connections."""
LONGEST_FILTER = 1000
"""Maximum number of characters of a filter that are read."""
_HERE = Path(__file__).parent


class _Site:
    """The pages of some folders, by their paths in URLs."""

    def __init__(self, given: Sequence[Path]) -> None:
        self._folders = Folders(given)
        self._topics: dict[str, Topic] = {}
        self._pool = ThreadPoolExecutor(2, "pages")
        self._runs = runs_of(self._folders)
        self._list = list_page(self._folders, self._runs)
        # Reading begins now: a thousand runs can be read before the user has opened the URL.
        self._pool.submit(self._list)

    def topic(self, page: str) -> Topic | None:
        """Return the topic of the page at `/`, at `/page/KEY` or at `/compare?runs=KEY,KEY`; None if there is no such
        page."""
        if page not in self._topics:
            render = self._list
            if page != "/":
                keys = page.removeprefix("/page/").removeprefix(f"{COMPARE}?runs=").split(",")
                if len(keys) > report.MOST_COMPARED:
                    return None
                paths = []
                for key in keys:
                    # An unknown key costs a walk through the folders, so stop at the first.
                    if (path := self._folders.find(key)) is None:
                        return None
                    paths.append(path)
                render = report_page(self._folders, paths)
            if len(self._topics) >= MOST_TOPICS:
                del self._topics[next(key for key in self._topics if key != "/")]
            self._topics[page] = Topic(render, self._pool)
        return self._topics[page]

    async def show(self, request: Request) -> HTMLResponse:
        page = request.url.path
        if page == COMPARE:
            # A form sends a separate field for each run.
            keys = [key for text in request.query_params.getlist("runs") for key in text.split(",")]
            page = f"{COMPARE}?runs={','.join(dict.fromkeys(keys))}"
        topic = self.topic(page)
        wanted = request.query_params.get("filter", "")[:LONGEST_FILTER]
        missing = error_state(MISSING, 404)
        state = missing if topic is None else await topic.refresh()
        return HTMLResponse(document(state, wanted, page if topic else "/"), state.status)

    async def metrics(self, request: Request) -> Response:
        snapshot = await asyncio.get_running_loop().run_in_executor(self._pool, self._runs)
        rows = [row for row in snapshot.rows if row.state != READING]
        return Response(metrics_text(rows), media_type=CONTENT_TYPE)

    async def news(self, request: Request) -> Response:
        """Answer an open page with the parts that have changed since its version."""
        page, wanted, have = (
            request.query_params.get(name, "") for name in ("page", "filter", "have")
        )
        if (topic := self.topic(page)) is None:
            return PlainTextResponse("", 404)
        news = await topic.news(wanted[:LONGEST_FILTER], have)
        if news is None:
            return Response(status_code=204)
        return Response(json.dumps(news), media_type="application/json")


def build_app(given: Sequence[Path], token: str, port: int) -> ASGIApp:
    """Return the application for some folders. Raises BadInput if a folder does not exist."""
    site = _Site(given)

    report_files = {"/report.js": report.SCRIPT, "/report.css": report.STYLE}

    async def file(request: Request) -> Response:
        path = request.url.path
        if path not in report_files:
            return FileResponse(_HERE / path.lstrip("/"))
        kind = "text/javascript" if path.endswith(".js") else "text/css"
        return Response(report_files[path], media_type=kind)

    routes = [
        Route("/", site.show),
        Route("/page/{key}", site.show),
        Route(COMPARE, site.show),
        Route("/news", site.news),
        Route("/metrics", site.metrics),
        *(Route(path, file) for path in (*report_files, "/page.js", "/page.css")),
    ]
    pages = Starlette(routes=routes)
    pages.router.redirect_slashes = False
    return Guard(pages, token, port)


def listen(port: int | None) -> tuple[socket.socket, str]:
    """Return a socket on 127.0.0.1, and a message if another port is used because PORT is taken. Raises BadInput if a
    given `port` is taken."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted sockets inherit both options. Without them, the kernel would buffer megabytes for ever for a client
    # that reads nothing.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_MS)
    notice = ""
    try:
        listener.bind(("127.0.0.1", PORT if port is None else port))
    except OSError as error:
        if port is not None:
            listener.close()
            found = error.strerror or str(error)
            raise BadInput.expected("serve", f"port {port}", "a free port", found) from None
        listener.bind(("127.0.0.1", 0))
        notice = f"port {PORT} is taken; another is used"
    listener.listen()
    return listener, notice


def server_of(app: ASGIApp) -> uvicorn.Server:
    """Return the server of an application; `run([socket])` answers requests until a signal ends the command."""
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="critical",
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MOST_REQUESTS,
        # Pages stay open for hours.
        timeout_graceful_shutdown=0,
    )
    return uvicorn.Server(config)
