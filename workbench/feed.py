"""Frozen snapshots of one run for its screen. (`engine.watch.runs_feed` makes one row for each of many runs.)

A feed is polled from one thread and returns values that never change afterwards, so that a screen in another
thread can draw them without locks. Whatever iterates over a long column (pace, time left) is computed here,
in the polling thread, because the storage of a table keeps growing after the snapshot was taken.

A log that cannot be read never raises: its problem becomes the text of `error`, with the state `unreadable`,
and the view keeps what was read before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import RunLogError
from engine.log.fold import Follower
from engine.log.folder import RunFolder, WatchedCommand, is_run, read_command
from engine.log.read import Liveness
from engine.log.text import has_ended, status_text
from engine.log.view import RunView
from engine.watch.runs_feed import READ_BUDGET_S, READING, UNREADABLE, not_read
from workbench.log_pages import Log, LogBook
from workbench.paths import stamps

LONGEST = 4
"""Largest multiple of the budget for one poll of a long log: drawing a part of it costs reading time."""
FIRST_BUDGET_S = 0.1
"""Budget of the first poll: the screen shows something at once, however long the log is."""


@dataclass(frozen=True, slots=True)
class Target:
    """The run that the keys act on, as of the last poll."""

    run: RunFolder
    state: str
    alive: bool
    """Whether a process of it exists."""
    step: int
    is_command: bool = False
    """Whether it is known to be a watched script, which cannot be resumed."""

    def can(self, action: str) -> bool:
        """Return whether `stop` or `resume` is possible now."""
        if action == "stop":
            return self.alive
        if self.is_command:
            return False
        ended = self.state != READING and has_ended(self.state)
        return ended and not self.alive and self.state not in ("completed", UNREADABLE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """One run at one poll. Compared by identity: comparing long views would be too slow for a screen."""

    run: RunFolder
    view: RunView
    alive: Liveness
    state: str
    """State of the view; `unreadable` if there is an error, `reading` while lines are unread."""
    status: str
    """Status of the run in one line."""
    now_unix_s: float
    error: str | None
    behind: bool
    """True while a long log is still being read: the next poll will know more without any new lines being
    written."""
    log: Log
    """Every line of the logs."""
    command: WatchedCommand | None = None
    """Command of a watched script; None for a run of the engine."""
    share_read: float = 1.0
    """Share of the logs that has been read, 0 to 1."""
    verification: str = ""
    """Outcome of `engine verify` for a run that has ended, or that there is none, in one line; empty before the end,
    and for a watched script."""

    @property
    def has_ended(self) -> bool:
        """Whether the run is over; an unreadable one is over when none of its processes exists."""
        if self.state == READING:
            return False
        if self.state == UNREADABLE:
            return not self.target.alive
        return has_ended(self.state)

    @property
    def target(self) -> Target:
        """The run as the target of actions."""
        return Target(
            self.run,
            self.state,
            self.alive.trainer or self.alive.supervisor,
            self.view.last_step,
            is_command=self.command is not None,
        )


def _check_exists(run: RunFolder) -> None:
    if not is_run(run.path):
        raise RunLogError(
            f"run folder: {run.path} — expected effective.json in it, found none: "
            "the folder was moved or deleted"
        )


def command_of(run: RunFolder) -> WatchedCommand | None:
    """Return the command of a watched script; None for a run of the engine, or if its settings cannot be read."""
    try:
        return read_command(run)
    except RunLogError:
        return None


class _Verified:
    """The kept outcome of `engine verify`, read again once its file or the log has changed."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._seen: object = None
        self._words = ""

    def words(self, last_step: int) -> str:
        # Imported here: the first frame does not need it.
        from engine.verify.kept_outcome import NAME, is_stale, outcome_text, read_outcome

        stamp = stamps((self._run.path / NAME, self._run.events)), last_step
        if stamp != self._seen:
            try:
                outcome = read_outcome(self._run)
            except RunLogError as problem:
                self._words = f"not verified: {problem.message}"
            else:
                stale = outcome is not None and is_stale(self._run, outcome)
                text = outcome_text(outcome, stale=stale, last_step=last_step)
                self._words = text if outcome is None else f"verified: {text}"
            self._seen = stamp
        return self._words


class RunFeed:
    """Follows one run. `poll` reads for about `budget_s` at most."""

    def __init__(
        self,
        run: RunFolder,
        *,
        wall: Callable[[], float] = time.time,
        budget_s: float = READ_BUDGET_S,
    ) -> None:
        self.run = run
        self._wall, self._budget_s = wall, budget_s
        self._follower = Follower(run)
        self._book = LogBook(self._follower.reader("events"))
        self._verified = _Verified(run)
        self._command: WatchedCommand | None = None
        self._behind: int | None = None
        """Polls since the last one that reached the end; None before the first."""

    def poll(self) -> Snapshot:
        """Return the run as it is now."""
        follower, error, behind = self._follower, None, False
        try:
            _check_exists(self.run)
            if self._behind is None:
                # The command is written before the log, and never changed.
                self._command = command_of(self.run)
            follower.read_all(time.monotonic() + self._budget())
            behind = follower.is_behind
        except RunLogError as problem:
            error = str(problem)
        except OSError as problem:
            error = not_read(self.run, problem)
        self._behind = 0 if not behind or self._behind is None else self._behind + 1
        view, alive = follower.view, follower.alive
        state, status = follower.state, status_text(view, alive)
        share_read = follower.share_read if behind else 1.0
        if error is not None or behind:
            # The rest of the log may contradict the state of the view so far.
            state = READING if error is None else UNREADABLE
            words = f"{state.upper()} {share_read:.0%}" if state == READING else state.upper()
            status = " | ".join([words, *status.split(" | ")[1:]])
        is_own = self._command is None and error is None and not behind
        verification = self._verified.words(view.last_step) if is_own and has_ended(state) else ""
        return Snapshot(
            run=self.run,
            view=view,
            alive=alive,
            state=state,
            status=status,
            now_unix_s=self._wall(),
            error=error,
            behind=behind,
            log=self._book.log(view.asides),
            command=self._command,
            share_read=share_read,
            verification=verification,
        )

    def _budget(self) -> float:
        """Return the seconds that this poll may spend on reading."""
        if self._behind is None:
            return min(self._budget_s, FIRST_BUDGET_S)
        return self._budget_s * min(2 << self._behind, LONGEST)

    def read_all(self) -> Snapshot:
        """Poll until nothing is left to read."""
        while (snapshot := self.poll()).behind:
            pass
        return snapshot
