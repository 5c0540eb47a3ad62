"""What reaches a screen from other threads: always one message with one frozen value."""

from __future__ import annotations

from textual.message import Message

from workbench.compared import Comparison
from workbench.feed import Snapshot
from workbench.flips import FlipSnapshot
from workbench.listing import Listing
from workbench.runs_feed import RunsSnapshot


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


class ComparePolled(Message):
    """Several runs as a poll found them."""

    def __init__(self, comparison: Comparison) -> None:
        super().__init__()
        self.comparison = comparison
        self.behind = comparison.behind


class ListPolled(Message):
    """A list as a poll found it."""

    behind = False

    def __init__(self, listing: Listing) -> None:
        super().__init__()
        self.listing = listing


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
