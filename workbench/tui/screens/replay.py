"""Replay on the screen of a run: the time shown, and the worker that makes snapshots.

Each key sets the wanted time and starts a worker, which makes the snapshot and reads on through a long log; the worker
before it is cancelled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from textual.widget import Widget
from textual.worker import get_current_worker

from engine.log.folder import RunFolder
from workbench.feed import Snapshot
from workbench.past_views import ReplayFeed

GROUP = "replay"
"""The group of its workers."""


class Replay:
    """One replay, from the key that begins it to the key that ends it."""

    def __init__(
        self, screen: Widget, run: RunFolder, unix_s: float, show: Callable[[Snapshot], None]
    ) -> None:
        """Begin at a time of the run on `screen`; `show` draws it."""
        self._screen, self._feed, self._show = screen, ReplayFeed(run), show
        # A worker that was cancelled may still be reading.
        self._reading = threading.Lock()
        self.seek(unix_s)

    def close(self) -> None:
        """Stop reading."""
        self._screen.workers.cancel_group(self._screen, GROUP)

    def seek(self, unix_s: float) -> None:
        """Show another time."""
        self.unix_s = unix_s
        answer = partial(self._answer, unix_s)
        self._screen.run_worker(answer, group=GROUP, exclusive=True, thread=True)

    def words(self, first_unix_s: float, last_unix_s: float) -> str:
        """Return the position as text for the status line."""
        at, whole = self.unix_s - first_unix_s, last_unix_s - first_unix_s
        progress = "" if self._feed.is_read else " (reading the log)"
        return f"REPLAY {clock(at)} of {clock(whole)}{progress}"

    def _answer(self, wanted: float) -> None:
        """Post the run as it was, and read on."""
        worker, feed = get_current_worker(), self._feed
        with self._reading:
            while not (worker.is_cancelled or feed.is_read) and wanted >= feed.last_unix_s:
                feed.read()
            if not worker.is_cancelled:
                self._screen.call_later(self._show, feed.at(wanted))
            while not (worker.is_cancelled or feed.is_read):
                feed.read()


def clock(seconds: float) -> str:
    """Format as 1:12:03, in whole seconds."""
    return str(timedelta(seconds=int(max(0.0, seconds))))
