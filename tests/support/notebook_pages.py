"""The page's side in tests of the notebook: a comm that counts, and the state of a page after some messages."""

from __future__ import annotations

import json
import re
import struct
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from typing import Any

import comm
import pytest
from comm.base_comm import BaseComm

from workbench.notebook.live import Live
from workbench.notebook.stream import Message


class CountedComm(BaseComm):
    """A comm that sends nowhere and counts its messages."""

    alive: list[CountedComm]
    sent: list[tuple[str, int]]

    def __init__(self, *a: Any, **k: Any) -> None:
        super().__init__(*a, **k)
        self.alive.append(self)

    def publish_msg(
        self,
        msg_type: str,
        data: Any = None,
        metadata: Any = None,
        buffers: Any = None,
        **keys: Any,
    ) -> None:
        size = len(json.dumps(data or {}, default=str)) + sum(map(len, buffers or []))
        self.sent.append((msg_type, size))

    def close(self, *a: Any, **k: Any) -> None:
        if self in self.alive:
            self.alive.remove(self)
        super().close(*a, **k)


@pytest.fixture
def comms(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[CountedComm]]:
    CountedComm.alive, CountedComm.sent = [], []
    monkeypatch.setattr(comm, "create_comm", CountedComm)
    yield CountedComm


def drawn(still: str) -> str:
    """Return the figures of a still, which are embedded as images."""
    found = re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', still)
    return "".join(b64decode(svg).decode() for svg in found)


def until(seen: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 240
    while not (found := seen()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


def rows_of(messages: list[Message]) -> dict[str, list[tuple[float, float]]]:
    """Return the rows that a page has after these messages."""
    known: dict[str, list[tuple[float, float]]] = {}
    for message in messages:
        content = message.content
        if content["kind"] == "clear":
            for name in content["series"] or list(known):
                known.pop(name, None)
        elif content["kind"] == "rows":
            for name, buffer in zip(content["series"], message.buffers, strict=True):
                values = struct.unpack(f"{len(buffer) // 4}f", buffer)
                half = len(values) // 2
                pairs = zip(values[:half], values[half:], strict=True)
                known.setdefault(name, []).extend(pairs)
    return known


def opened(live: Live, comms: type[CountedComm]) -> None:
    """Open the widget as a page does when it draws it."""
    before = len(comms.sent)
    live._hear(None, {"kind": "ready"}, [])
    until(lambda: len([1 for kind, _ in comms.sent[before:] if kind == "comm_msg"]) >= 4)
