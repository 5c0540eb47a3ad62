"""The page's end in tests of the notebook: a comm that counts, and what a page has after some messages."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from typing import Any

from comm.base_comm import BaseComm

from workbench.notebook.stream import Message


class CountedComm(BaseComm):
    """A comm that goes nowhere and counts."""

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


def until(seen: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (found := seen()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


def rows_of(messages: list[Message]) -> dict[str, list[tuple[float, float]]]:
    """What the page has after these messages."""
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
