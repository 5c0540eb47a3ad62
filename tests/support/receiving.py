"""A web server on 127.0.0.1 that receives messages, or misbehaves as the path of the URL says."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar


@dataclass
class Received:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Receiving:
    url: str
    got: list[Received] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def events(self) -> list[str]:
        return [one.json["event"] for one in self.got]


@contextmanager
def receiving() -> Iterator[Receiving]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version: ClassVar[str] = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.got.append(Received(self.path, dict(self.headers), body))
            if self.path == "/hang":
                found.over.wait()
                return
            self.send_response({"/500": 500, "/redirect": 307}.get(self.path, 200))
            if self.path == "/redirect":
                self.send_header("Location", f"{found.url}/elsewhere")
            if self.path != "/endless":
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.end_headers()
            with suppress(OSError):
                while not found.over.is_set():
                    self.wfile.write(bytes(1 << 16))

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Receiving(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield found
        finally:
            found.over.set()
            server.shutdown()
            thread.join()
