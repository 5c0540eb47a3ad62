"""Replay on the screen of a run: the time shown, whether it plays, and the worker that makes snapshots.

Each key sets the wanted time and starts a worker, which makes the snapshot and reads on through a long log; the worker
before it is cancelled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from textual.widget import Widget
from textual.worker import get_current_worker

from engine.log.folder import RunFolder
from engine.units import format_seconds
from workbench.feed import Snapshot
from workbench.past_views import ReplayFeed

SPEEDS = (1, 10, 60, 600, 3600)
TICK_S = 0.25
"""Seconds between two frames of a playing replay; a higher rate would overload a terminal."""


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
        self.speed = SPEEDS[1]
        self.is_playing = False
        self.seek(unix_s)

    def close(self) -> None:
        """Stop reading."""
        self._screen.workers.cancel_group(self._screen, GROUP)

    def seek(self, unix_s: float) -> None:
        """Show another time."""
        self.unix_s = unix_s
        answer = partial(self._answer, unix_s)
        self._screen.run_worker(answer, group=GROUP, exclusive=True, thread=True)

    def tick(self, last_unix_s: float) -> None:
        """Advance by one tick at this speed; stops at the end."""
        if not self.is_playing:
            return
        to = self.unix_s + self.speed * TICK_S
        self.is_playing = to < last_unix_s
        self.seek(min(to, last_unix_s))

    def next_speed(self) -> None:
        self.speed = SPEEDS[(SPEEDS.index(self.speed) + 1) % len(SPEEDS)]

    def words(self, first_unix_s: float, last_unix_s: float) -> str:
        """Return the position as text for the status line."""
        at, whole = self.unix_s - first_unix_s, last_unix_s - first_unix_s
        how = f"playing {self.speed}x" if self.is_playing else f"paused, space plays {self.speed}x"
        far = "" if self._feed.is_read else ", reading the log"
        return f"REPLAY {clock(at)} of {clock(whole)} ({how}{far})"

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
    """Format as 12:03, or 1:12:03 from an hour on; days are hours."""
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    begin = f"{hours}:{minutes:02d}" if hours else f"{minutes:02d}"
    return f"{begin}:{whole % 60:02d}"
