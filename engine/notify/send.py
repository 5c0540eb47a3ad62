"""Send a message to receivers from a child process, `python -m engine.notify.send`, which is killed at a time limit.

    Delivery(message, receivers) --(memory file: message, URLs)--> child: a thread for each receiver
                                 <--(memory file: a line each)----

A receiver that hangs, drips or streams ends with the child, so the process that watches a run never waits for one.
URLs are in no argument, no variable and no file of a disk.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from engine import child
from engine.notify.message import Message, body_of, escape_of
from engine.notify.receivers import Receiver

LIMIT_S = 4.0
"""Seconds that all receivers of a message have together, the start of the child included."""
ANSWER_BYTES = 4096
"""Bytes of an answer that are read."""


class Outcome(NamedTuple):
    receiver: Receiver
    sent: bool
    text: str
    """Answer that came back, without secrets."""


class Delivery:
    def __init__(
        self, message: Message, receivers: Sequence[Receiver], *, terminal: int | None = None
    ) -> None:
        """Start to send. `terminal` is the descriptor of the terminal for a desktop notification. Raises OSError."""
        self._receivers = receivers
        self.outcomes: list[Outcome] | None = None
        """Outcome at each receiver; None while they are open."""
        self._by_s = time.monotonic() + LIMIT_S
        # Unlike a pipe, a memory file never makes its writer wait.
        self._results = open(os.memfd_create("results"), "w+")  # noqa: SIM115 - closed by poll
        with open(os.memfd_create("message"), "w+") as order:
            json.dump(
                [message.as_dict(), list(map(dataclasses.asdict, receivers)), terminal], order
            )
            order.seek(0)
            self._child = subprocess.Popen(
                child.command("engine.notify.send"),
                stdin=order,
                stdout=self._results,
                stderr=subprocess.DEVNULL,
                pass_fds=() if terminal is None else (terminal,),
                env=child.environment(),
                start_new_session=True,
            )

    def poll(self) -> list[Outcome] | None:
        """Return the outcomes where they are known; never waits."""
        if self.outcomes is not None:
            return self.outcomes
        if self._child.poll() is None:
            if time.monotonic() < self._by_s:
                return None
            # The whole session, with the commands that the child has started.
            with contextlib.suppress(OSError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
        results_by_number: dict[str, tuple[bool, str]] = {}
        with self._results as results:
            results.seek(0)
            for line in results:
                number, sent, text = line.rstrip("\n").split(" ", 2)
                results_by_number[number] = (sent == "sent", text)
        late = (False, f"no answer within {LIMIT_S:g} s")
        self.outcomes = [
            Outcome(receiver, *results_by_number.get(str(n), late))
            for n, receiver in enumerate(self._receivers)
        ]
        return self.outcomes

    def wait(self) -> list[Outcome]:
        """Return the outcomes; takes LIMIT_S at most."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(max(0.0, self._by_s - time.monotonic()))
        return self.poll() or []


def _send(receiver: Receiver, message: dict[str, Any], terminal: int | None) -> tuple[bool, str]:
    if receiver.url:
        return _post(receiver, message)
    if receiver.command:
        return _run(receiver, message)
    if terminal is None:
        return False, "there is no terminal"
    try:
        os.write(terminal, escape_of(message))
    except OSError as error:
        return False, f"the terminal cannot be written to: {error.strerror}"
    return True, "written"


def _post(receiver: Receiver, message: dict[str, Any]) -> tuple[bool, str]:
    # Imported here: the process that watches a run needs neither HTTP nor TLS.
    from http.client import HTTPException
    from urllib import request
    from urllib.error import HTTPError

    class Refuse(request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            return None

    parts = urlsplit(receiver.url)
    user, at, place = parts.netloc.rpartition("@")
    body, headers = body_of(receiver.format, message)
    if at:
        coded = base64.b64encode(unquote(user).encode()).decode()
        headers["Authorization"] = f"Basic {coded}"
    url = parts._replace(netloc=place, fragment="").geturl()
    post = request.Request(url, data=body, headers=headers, method="POST")
    try:
        with request.build_opener(Refuse).open(post, timeout=LIMIT_S) as answer:
            answer.read(ANSWER_BYTES)
            return True, f"HTTP {answer.status}"
    except HTTPError as error:
        moved = ", a redirection, which is not followed" if 300 <= error.code < 400 else ""
        return False, f"HTTP {error.code}{moved}"
    except (OSError, HTTPException, ValueError) as error:
        # The text of some of these errors repeats the URL.
        reason = getattr(error, "reason", error)
        return False, getattr(reason, "strerror", None) or type(reason).__name__


def _run(receiver: Receiver, message: dict[str, Any]) -> tuple[bool, str]:
    variables = {
        f"APR_NOTIFY_{name.upper()}": "" if value is None else str(value)
        for name, value in message.items()
    }
    try:
        done = subprocess.run(
            receiver.command,
            input=json.dumps(message).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **variables},
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a command"
        return False, f"it could not be started: {reason}"
    return done.returncode == 0, f"exit {done.returncode}"


def main() -> None:
    # Ends this process where the one that would kill it is gone.
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S + 1)
    message, receivers, terminal = json.load(sys.stdin)

    def serve(number: int, receiver: Receiver) -> None:
        sent, text = _send(receiver, message, terminal)
        os.write(1, f"{number} {'sent' if sent else 'failed'} {text}\n".encode())

    for number, fields in enumerate(receivers):
        threading.Thread(target=serve, args=(number, Receiver(**fields))).start()


if __name__ == "__main__":
    main()
