"""What reaches a screen from other threads: always one message with one frozen value."""

from __future__ import annotations

from textual.message import Message

from workbench.feed import RunsSnapshot, Snapshot
from workbench.flips import FlipSnapshot


class RunPolled(Message):
    """A run as a poll found it."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self.snapshot = snapshot
        self.behind = snapshot.behind


class RunsPolled(Message):
    """All runs as a poll found them."""

    def __init__(self, snapshot: RunsSnapshot) -> None:
        super().__init__()
        self.snapshot = snapshot
        self.behind = snapshot.behind


class FlipPolled(Message):
    """A flip as a poll found it; None while none was started."""

    behind = False

    def __init__(self, snapshot: FlipSnapshot | None) -> None:
        super().__init__()
        self.snapshot = snapshot


class CommandEnded(Message):
    """An engine command that a key started has ended."""

    def __init__(self, text: str, *, failed: bool) -> None:
        super().__init__()
        self.text, self.failed = text, failed
