"""What a screen is fed: frozen snapshots of one run, and one row for each of many.

A feed is polled from one thread and hands out values that never change afterwards, so that a screen
in another thread can draw them without locks. Everything that walks a long column (traces, pace,
time left) is computed here, in the polling thread: the storage of a table goes on growing behind
the snapshot.

A log that cannot be read is a fact to be shown. It becomes the text of `error`, with the state
`unreadable`, and never an exception: what was read before it stays in the view.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.errors import RunLogError
from engine.runlog.folder import RunFolder, find_runs, is_run
from engine.runlog.follow import Follower
from engine.runlog.read import Liveness
from engine.runlog.text import has_ended, status_text
from engine.runlog.view import RunView
from workbench.traces import STEP_COLUMNS, Column, TableTraces, Trace

READ_BUDGET_S = 0.5
UNREADABLE = "unreadable"
READING = "reading"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """One run as of one poll. Equal only to itself: comparing long views is no screen's work."""

    run: RunFolder
    view: RunView
    alive: Liveness
    state: str
    """The state of the view; `unreadable` when there is an error, `reading` while `behind`."""
    status: str
    """The run in one line."""
    now_unix_s: float
    error: str | None
    traces: Mapping[str, Trace]
    behind: bool
    """True while a long log is still being read: the next poll will know more without anything new
    being written."""

    @property
    def has_ended(self) -> bool:
        """Whether the run is over; an unreadable one is over when none of its processes exists."""
        if self.state == READING:
            return False
        if self.state == UNREADABLE:
            return not (self.alive.trainer or self.alive.supervisor)
        return has_ended(self.state)


def _catch_up(follower: Follower, until_s: float, monotonic: Callable[[], float]) -> bool:
    """Read what is new; False when the time was up before the end was reached.

    Raises what is wrong with a log once all three are read as far as they can be.
    """
    fault: RunLogError | None = None
    while True:
        before = follower.view
        try:
            follower.poll()
        except RunLogError as broken:
            fault = broken
        if follower.view is before:
            break
        if monotonic() >= until_s:
            return False
    if fault is not None:
        raise fault
    return True


def _not_read(run: RunFolder, problem: OSError) -> str:
    return f"run folder: {run.path} — expected to read it, found {problem.strerror}"


def _check_exists(run: RunFolder) -> None:
    if not is_run(run.path):
        raise RunLogError(
            f"run folder: {run.path} — expected effective.json in it, found none: "
            "the folder was moved or deleted"
        )


class RunFeed:
    """Follows one run. `poll` reads for about `budget_s` at most; `columns` are those that get a trace."""

    def __init__(
        self,
        run: RunFolder,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        budget_s: float = READ_BUDGET_S,
        columns: Mapping[str, Column] = STEP_COLUMNS,
    ) -> None:
        self.run = run
        self._wall, self._monotonic, self._budget_s = wall, monotonic, budget_s
        self._follower = Follower(run)
        self._traces = TableTraces(columns)

    def poll(self) -> Snapshot:
        """The run as it is now."""
        follower, error, caught_up = self._follower, None, True
        try:
            _check_exists(self.run)
            caught_up = _catch_up(follower, self._monotonic() + self._budget_s, self._monotonic)
        except RunLogError as problem:
            error = str(problem)
        except OSError as problem:
            error = _not_read(self.run, problem)
        view, alive = follower.view, follower.alive
        state, status = follower.state, status_text(view, alive)
        if error is not None or not caught_up:
            # What the view says of the end may be the opposite of what the rest of the log says.
            state = READING if error is None else UNREADABLE
            status = " | ".join([state.upper(), *status.split(" | ")[1:]])
        return Snapshot(
            run=self.run,
            view=view,
            alive=alive,
            state=state,
            status=status,
            now_unix_s=self._wall(),
            error=error,
            traces=self._traces.update(view.steps),
            behind=not caught_up,
        )

    def read_all(self) -> Snapshot:
        """Poll until nothing is left to read."""
        while (snapshot := self.poll()).behind:
            pass
        return snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run in a list."""

    path: Path
    name: str
    state: str
    last_step: int
    total_steps: int | None
    loss: float | None
    heldout: float | None
    tokens_per_second: float | None
    age_s: float | None
    """Seconds since the first line of its log, or since its folder was made when there is no line
    yet."""
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsSnapshot:
    """All runs of some folders as of one poll."""

    folders: tuple[Path, ...]
    rows: tuple[RunRow, ...]
    now_unix_s: float
    error: str | None
    """Why a folder could not be listed."""
    behind: bool


@dataclass(frozen=True, slots=True)
class _Ended:
    """An ended run that was read to its end: its row, and the sizes of its logs at that time."""

    sizes: tuple[int, ...]
    row: RunRow
    began_unix_s: float


def _sizes(run: RunFolder) -> tuple[int, ...]:
    return tuple(
        path.stat().st_size if path.exists() else -1 for path in (run.events, run.device, run.watch)
    )


class RunsFeed:
    """Follows every run of some folders. An ended run is read once, and again only when one of its
    logs changes size."""

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        budget_s: float = READ_BUDGET_S,
    ) -> None:
        self.folders = tuple(folders)
        self._wall, self._monotonic, self._budget_s = wall, monotonic, budget_s
        self._followers: dict[Path, Follower] = {}
        self._ended: dict[Path, _Ended] = {}

    def poll(self) -> RunsSnapshot:
        """A row for each run, in the order of the folders and newest first in each."""
        now_unix_s, until_s = self._wall(), self._monotonic() + self._budget_s
        runs, error = self._find()
        self._forget_all_but(runs)
        rows = [self._row(run, now_unix_s, until_s) for run in runs.values()]
        return RunsSnapshot(
            folders=self.folders,
            rows=tuple(rows),
            now_unix_s=now_unix_s,
            error=error,
            behind=any(row.state == READING for row in rows),
        )

    def _find(self) -> tuple[dict[Path, RunFolder], str | None]:
        runs: dict[Path, RunFolder] = {}
        problems = []
        for folder in self.folders:
            try:
                for run in find_runs(folder):
                    runs.setdefault(run.path.resolve(), run)
            except OSError as problem:
                problems.append(f"{folder} — expected to list it, found {problem.strerror}")
        return runs, "; ".join(problems) or None

    def _forget_all_but(self, runs: Iterable[Path]) -> None:
        kept = set(runs)
        self._followers = {path: f for path, f in self._followers.items() if path in kept}
        self._ended = {path: e for path, e in self._ended.items() if path in kept}

    def _row(self, run: RunFolder, now_unix_s: float, until_s: float) -> RunRow:
        key = run.path.resolve()
        try:
            sizes, made_unix_s = _sizes(run), run.effective.stat().st_mtime
        except OSError as problem:
            return _row_of(run, RunView(), UNREADABLE, None, _not_read(run, problem))
        ended = self._ended.pop(key, None)
        if ended is not None and ended.sizes == sizes:
            self._ended[key] = ended
            return replace(ended.row, age_s=now_unix_s - ended.began_unix_s)
        follower = self._followers.get(key)
        if follower is None:
            follower = self._followers[key] = Follower(run)
        state, error = self._read(follower, until_s)
        view, alive = follower.view, follower.alive
        began_unix_s = made_unix_s if view.first_unix_s is None else view.first_unix_s
        row = _row_of(run, view, state, now_unix_s - began_unix_s, error)
        is_over = state == UNREADABLE or (state != READING and has_ended(state))
        if is_over and not (alive.trainer or alive.supervisor):
            self._ended[key] = _Ended(sizes, row, began_unix_s)
            del self._followers[key]
        return row

    def _read(self, follower: Follower, until_s: float) -> tuple[str, str | None]:
        """State and error after reading what is new, as far as the time allows."""
        if self._monotonic() >= until_s:
            return READING, None
        try:
            caught_up = _catch_up(follower, until_s, self._monotonic)
        except RunLogError as problem:
            return UNREADABLE, str(problem)
        except OSError as problem:
            return UNREADABLE, _not_read(follower.run, problem)
        return follower.state if caught_up else READING, None


def _row_of(
    run: RunFolder, view: RunView, state: str, age_s: float | None, error: str | None
) -> RunRow:
    student = view.eval_of("student")
    return RunRow(
        path=run.path,
        name=run.name,
        state=state,
        last_step=view.last_step,
        total_steps=view.total_steps,
        loss=view.steps.last("loss"),
        heldout=student.loss if student else None,
        tokens_per_second=view.tokens_per_second(),
        age_s=age_s,
        error=error,
    )
