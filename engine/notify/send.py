"""Send a message to receivers, each in a separate thread that is waited for only up to a time limit.

A receiver that hangs or answers very slowly keeps a daemon thread, which ends with the process at the latest. URLs
are passed in no argument, no environment variable and no file.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from engine.notify.message import Message, body_of
from engine.notify.receivers import Receiver

LIMIT_S = 4.0
"""Time limit for a receiver's answer, in seconds."""
LATE_S = 0.5
"""Seconds after LIMIT_S within which the thread of a receiver that timed out reports that."""
ANSWER_BYTES = 4096
"""Maximum number of bytes of an answer that are read."""
_LATE = (False, f"no answer within {LIMIT_S:g} s")


class Outcome(NamedTuple):
    receiver: Receiver
    sent: bool
    text: str
    """The receiver's answer or the error, without secrets."""


class Delivery:
    def __init__(self, message: Message, receivers: Sequence[Receiver]) -> None:
        """Start sending."""
        self._receivers = receivers
        self._answers: dict[int, tuple[bool, str]] = {}
        self._by_s = time.monotonic() + LIMIT_S + LATE_S
        fields = message.as_dict()

        def serve(number: int, receiver: Receiver) -> None:
            send = _post if receiver.url else _run
            self._answers[number] = send(receiver, fields)

        self._threads = [
            threading.Thread(target=serve, args=pair, daemon=True) for pair in enumerate(receivers)
        ]
        for thread in self._threads:
            thread.start()

    def poll(self) -> list[Outcome] | None:
        """Return the outcomes, or None while one is unknown; never waits."""
        is_open = any(thread.is_alive() for thread in self._threads)
        return None if is_open and time.monotonic() < self._by_s else self.wait()

    def wait(self) -> list[Outcome]:
        """Wait for the outcomes and return them; takes LIMIT_S + LATE_S at most."""
        for thread in self._threads:
            thread.join(max(0.0, self._by_s - time.monotonic()))
        return [
            Outcome(receiver, *self._answers.get(number, _LATE))
            for number, receiver in enumerate(self._receivers)
        ]


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
        if isinstance(reason, TimeoutError):
            return _LATE
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
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return _LATE
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a command"
        return False, f"it could not be started: {reason}"
    return done.returncode == 0, f"exit {done.returncode}"
