"""The file calls that write a checkpoint, with a hook before each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from engine.train.checkpoint.write import FileCalls, Sink

OPERATIONS = {name for name, _ in inspect.getmembers(FileCalls, inspect.isfunction)}


class Halves:
    """A writer that writes in two pieces, so that a failure can fall between them."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.size_bytes = len(content)

    def write_to(self, sink: Sink) -> None:
        middle = len(self._content) // 2
        sink.write(self._content[:middle])
        sink.write(memoryview(self._content)[middle:])


def files(step: int) -> dict[str, Any]:
    return {
        "model.bin": Halves(bytes(range(step, step + 40))),
        "optimizer.bin": Halves(b"moments" * step),
        "state.json": b'{"step": %d}' % step,
    }


class WatchedCalls(FileCalls):
    """Calls `before(n, name)` ahead of the n-th operation, counted from 1."""

    def __init__(self, before: Callable[[int, str], None]) -> None:
        self._before = before
        self.count = 0

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name not in OPERATIONS:
            return method

        def watched(*arguments: Any) -> Any:
            self.count += 1
            self._before(self.count, name)
            return method(*arguments)

        return watched
