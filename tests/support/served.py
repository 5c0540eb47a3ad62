"""A real server of `engine serve` on a free port of 127.0.0.1, in a thread, and requests to it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

import numpy  # noqa: F401 - a server that reads logs would import it while a test uses it

from engine.serve.app import build_app, listen, server_of

TOKEN = "a-token-of-these-tests-0123456789"
DEADLINE_S = 60


@dataclass
class Answer:
    status: int
    headers: Message
    text: str


@dataclass
class Served:
    port: int
    token: str = TOKEN

    @property
    def cookie(self) -> dict[str, str]:
        return {"Cookie": f"apr-serve-{self.port}={self.token}"}

    def ask(
        self, path: str, *, method: str = "GET", headers: dict[str, str] | None = None
    ) -> Answer:
        """Return the answer to a request, with the cookie unless other headers are given."""
        with self.opened(path, method=method, headers=headers) as answer:
            return Answer(answer.status, answer.headers, answer.read().decode(errors="replace"))

    @contextmanager
    def opened(
        self,
        path: str,
        *,
        method: str = "GET",
        headers: dict[str, str] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """Yield an answer that goes on."""
        head = (self.cookie if headers is None else headers) | {"Connection": "close"}
        with closing(socket.socket()) as to:
            to.settimeout(DEADLINE_S)
            to.connect(("127.0.0.1", self.port))
            lines = {"Host": f"127.0.0.1:{self.port}"} | head
            text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
            to.sendall(f"{method} {path} HTTP/1.1\r\n{text}\r\n".encode())
            with closing(http.client.HTTPResponse(to, method=method)) as answer:
                answer.begin()
                yield answer

    @contextmanager
    def following(self, page: str) -> Iterator[Iterator[dict[str, Any]]]:
        """Yield what an open page is sent."""

        def answers() -> Iterator[dict[str, Any]]:
            have = ""
            for _ in range(DEADLINE_S * 20):
                answer = self.ask(f"/news?page={page}&have={have}")
                if answer.status == 200:
                    news = json.loads(answer.text)
                    have = news["version"]
                    yield news
                assert answer.status in (200, 204), answer.status
                time.sleep(0.05)

        yield answers()

    def text(self, path: str) -> str:
        answer = self.ask(path)
        assert answer.status == 200, (answer.status, path)
        return answer.text

    def page_of(self, name: str) -> str:
        """Return the path of the page of a run, by its row in the list."""
        row = self.text("/").partition(f'">{name}<')[0]
        return "/page/" + row.rpartition(' id="name-')[2]


@contextmanager
def serving(folders: Sequence[Path], port: int = 0) -> Iterator[Served]:
    heard, _ = listen(port)
    port = heard.getsockname()[1]
    server = server_of(build_app(folders, TOKEN, port))
    thread = threading.Thread(target=server.run, args=([heard],))
    thread.start()
    try:
        yield Served(port)
    finally:
        server.should_exit = server.force_exit = True
        thread.join(DEADLINE_S)
        heard.close()
        assert not thread.is_alive()
