"""Replay on the screen of a run: the time shown, whether it plays, and the thread that makes snapshots.

The keys set the wanted time; a thread makes the snapshot of the newest wanted time, and reads on through a
long log in between. Outdated requests are skipped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from textual.message import Message

from engine.log.folder import RunFolder
from engine.units import format_seconds
from workbench.feed import Snapshot
from workbench.past_views import ReplayFeed

SPEEDS = (1, 10, 60, 600, 3600)
TICK_S = 0.25
"""Seconds between two frames of a playing replay; a higher rate would overload a terminal."""


class Replayed(Message):
    """The run as it was at the requested time."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self.snapshot = snapshot


class Replay:
    """One replay, from the key that begins it to the key that ends it."""

    def __init__(self, run: RunFolder, unix_s: float, post: Callable[[Replayed], object]) -> None:
        self._feed = ReplayFeed(run)
        self._post = post
        self.unix_s = unix_s
        self.speed = SPEEDS[1]
        self.is_playing = False
        self._asked = threading.Condition()
        self._wanted: float | None = unix_s
        self._is_over = False
        # A daemon thread: quitting must not wait for a long log.
        threading.Thread(target=self._answer, name="replay", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        with self._asked:
            self._is_over = True
            self._asked.notify()

    def seek(self, unix_s: float) -> None:
        """Show another time."""
        self.unix_s = unix_s
        with self._asked:
            self._wanted = unix_s
            self._asked.notify()

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

    def _answer(self) -> None:
        while True:
            with self._asked:
                while self._wanted is None and self._feed.is_read and not self._is_over:
                    self._asked.wait()
                wanted = self._wanted
            if self._is_over:
                return
            if not self._feed.is_read and (wanted is None or wanted >= self._feed.last_unix_s):
                self._feed.read()
                continue
            if wanted is None:
                continue
            snapshot = self._feed.at(wanted)
            with self._asked:
                if self._wanted == wanted:
                    self._wanted = None
            if not self._is_over:
                self._post(Replayed(snapshot))


def clock(seconds: float) -> str:
    """Format as 12:03, or 1:12:03 from an hour on; days are hours."""
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    begin = f"{hours}:{minutes:02d}" if hours else f"{minutes:02d}"
    return f"{begin}:{whole % 60:02d}"
