"""Watch a run from inside the supervisor: read its logs, evaluate the rules, and capture stacks.

    every tick          new log lines are folded into the view, a bounded amount at a time
    every EVALUATE_EVERY_S
                        the rules are evaluated, unless stacks are being captured; alerts go to watch.jsonl, each raised
                        and cleared once
    at a stall          the stacks of the trainer are captured first, so that the alert can name the line;
                        then, if `watch.on_stall` is `stop`, the trainer is asked to stop, and killed if it has
                        not ended within STOP_GRACE_S
    in a long silence   that is not yet a stall, once in each phase: the stacks are captured, and a note says
                        where the trainer is and how long that may take; loading or compiling takes minutes
    when the GPU idles  the stacks are captured: they show why no work reaches the GPU
    every STACKS_EVERY_S
                        the stacks of a process that was already running, which has no log, are captured

An error of the watcher never ends the run. If a log cannot be read, a note is logged and only the watching ends;
if a rule raises an error, a note is logged and the rule is disabled.

Its memory is bounded: of a long run it keeps the first steps of the run and of the session, the newest steps and the
newest readings, since no rule uses more.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from engine.errors import RunLogError
from engine.log.beats import Beat, behind, read_beats, waited_for
from engine.log.events import Event, Judged, Note, StackDump
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.log.view import RunView, Table
from engine.units import format_seconds
from engine.watch.active_alerts import ActiveAlerts
from engine.watch.rules.rule import CannotJudge, Case, read_settings
from engine.watch.rules.stall import Silence, silence
from engine.watch.stacks import TRAINER_FILE, Capture, dump_file

EVALUATE_EVERY_S = 5.0
"""Seconds between two evaluations of the rules."""
CHUNK_BYTES = 1 << 20
"""Bytes read from each log per tick: about 30 ms of work. The long log of a resumed run takes some minutes to
read."""
HEAD_ROWS, TAIL_ROWS = 512, 4096
"""Number of first and of newest rows of a long table that are kept; of readings only the newest are."""
STALLS = ("stalled", "stalled_at_start", "nobody_works")
STACKS_EVERY_S = 300.0
"""Time between two captures of the stacks of an attached process, in seconds; the first is immediate."""
STOP_GRACE_S = 60.0
"""Seconds after which a trainer that was asked to stop is killed, if it has not ended."""


class Watcher:
    def __init__(
        self,
        run: RunFolder,
        pid: int,
        write: Callable[[Event], None],
        stop: Callable[[str, bool], None],
        *,
        process: Callable[[RunView, Beat | None], tuple[int, str]] | None = None,
        attached_pids: Callable[[], Sequence[int]] | None = None,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`write` appends an event to watch.jsonl. `stop(why, now)` asks the trainer to stop, or kills it if `now`.
        `process` takes the rank that the other ranks wait for, and returns the process whose stacks are captured and
        the file to which it writes them; by default that process is `pid`. If the processes were already running when
        watching began, `attached_pids` returns those whose stacks are captured instead."""
        self.run = run
        self.training_is_over = False
        """Whether the process continues without training, so that its silence is no stall."""

        def trainer_process(view: RunView, rank: Beat | None) -> tuple[int, str]:
            return (pid, TRAINER_FILE) if rank is None else (rank.pid, dump_file(rank.rank))

        self._process = process or trainer_process
        self._write, self._stop = write, stop
        self._wall, self._monotonic = wall, monotonic
        self.settings = read_settings(run)
        self.alerts = ActiveAlerts()
        self.follower = Follower(run)
        self._is_watching = True
        self._next_evaluation_s = 0.0
        self._attached_pids = attached_pids
        self._next_stacks_s = 0.0 if attached_pids is not None else math.inf
        self.capturing: list[Capture] = []
        """Captures that wait for py-spy."""
        self._captured_for: float | None = None
        """Time of the newest log line when stacks were captured, so that each silence is captured once."""
        self._captures = 0
        self._quiet: Silence | None = None
        """The silence that a pending note is about."""
        self._noted_phases: set[str] = set()
        """Phases that already had a note about a long silence."""
        self._stop_asked_s: float | None = None
        self._ended = False

    @property
    def view(self) -> RunView:
        return self.follower.view

    def tick(self) -> None:
        """Read new lines, and evaluate the rules every EVALUATE_EVERY_S. A damaged log raises no error."""
        if not self._is_watching:
            return
        now_s = self._monotonic()
        try:
            self.follower.poll(CHUNK_BYTES)
        except RunLogError as broken:
            self._is_watching = False
            self._write(Note(level="warning", text=f"the run is watched no further: {broken}"))
            return
        self.follower.view = trimmed(self.view)
        if self.capturing:
            self._finish_captures(now_s)
        elif now_s >= self._next_stacks_s:
            self._next_stacks_s = now_s + STACKS_EVERY_S
            self._begin_capture(f"captured every {STACKS_EVERY_S:.0f} s", native=False)
        elif now_s >= self._next_evaluation_s:
            self._next_evaluation_s = now_s + EVALUATE_EVERY_S
            self._evaluate(now_s)
        self._end_if_unanswered(now_s)

    def judge_end(self) -> None:
        """Evaluate the rules, except those about stalls, once more with the last lines of the log. Evaluates nothing
        for a run that did not record its end: `engine diagnose` judges it."""
        with contextlib.suppress(RunLogError):
            self.follower.read_all()
        if self._is_watching and (self.view.finished or self.view.script_ended) is not None:
            self._judge(self._case(), without=STALLS)

    def _case(self) -> Case:
        return Case(
            view=self.view,
            settings=self.settings,
            now_unix_s=self._wall(),
        )

    def _silence(self, case: Case) -> Silence | None:
        try:
            return None if self.training_is_over else silence(case)
        except CannotJudge:
            return None

    def _evaluate(self, now_s: float) -> None:
        case = self._case()
        silent = self._silence(case)
        if silent is not None and silent.is_stall and self._captured_for != silent.since_unix_s:
            self._captured_for = silent.since_unix_s
            self._begin_capture(f"silent for {silent.silent_s:.0f} s in {silent.doing}")
            # The alert is raised a tick or two later, with the stacks.
            self._judge(case, without=STALLS)
            return
        self._judge(case, without=STALLS if self.training_is_over else ())
        if silent is not None and silent.is_quiet and not self.capturing:
            self._note_quiet(case.phase, silent)

    def _note_quiet(self, phase: str, silent: Silence) -> None:
        if phase not in self._noted_phases:
            self._noted_phases.add(phase)
            self._begin_capture(f"quiet for {silent.silent_s:.0f} s in {silent.doing}")
            self._quiet = silent if self.capturing else None

    def _judge(self, case: Case, without: tuple[str, ...] = ()) -> None:
        for event in self.alerts.evaluate(case, without):
            self._write(event)
            if not isinstance(event, Judged) or not event.raises_alert:
                continue
            if event.id == "gpu_idle" and not self.capturing:
                self._begin_capture(event.text)
            if event.id in STALLS and self.settings and self.settings.watch.on_stall == "stop":
                self._stop_asked_s = self._monotonic()
                self._stop(f"watch.on_stall = stop: {event.text}", False)

    def _begin_capture(self, why: str, *, native: bool = True) -> None:
        self._captures += 1
        name = f"{self._captures:03}-step-{self.view.last_step}"
        if self._attached_pids is not None:
            for pid in self._attached_pids():
                self._begin(
                    Capture(
                        run=self.run.path,
                        pid=pid,
                        name=f"{pid}-{self._captures:03}",
                        why=why,
                        is_attached=True,
                        native=native,
                    )
                )
            return
        beats, hosts = read_beats(self.run), self.view.rank_hosts if self.view.hosts_now else {}
        # The stacks of waiting ranks are all alike, so the rank that they wait for is captured, if it is on this
        # host.
        late = [beat for beat in behind(beats) if hosts.get(beat.rank) == hosts.get(0)]
        pid, file = self._process(self.view, (late or beats)[0] if beats else None)
        if beats:
            why = f"{why}; {waited_for(beats, hosts) or 'all ranks have come equally far'}"
        self._begin(
            Capture(run=self.run.path, pid=pid, dump_file=file, name=f"{pid}-{name}", why=why)
        )

    def _begin(self, capture: Capture) -> None:
        try:
            capture.begin()
        except OSError as error:
            self._write(Note(level="warning", text=f"no stacks were taken: {error}"))
            return
        self.capturing.append(capture)

    def _finish_captures(self, now_s: float) -> None:
        # A list, not a generator: `is_ready` also ends a capture that takes too long, so each is called.
        if not all([capture.is_ready(now_s) for capture in self.capturing]):
            return
        taken, self.capturing = self.capturing, []
        try:
            dumps = [capture.finish() for capture in taken]
            lines = Counter(dump.python_frame for dump in dumps)
            # An alert quotes the last dump. So the rank that is alone at its line is written last: the others wait
            # for it.
            for dump in sorted(dumps, key=lambda dump: -lines[dump.python_frame]):
                self._write(dump)
                if self._quiet is not None:
                    level = "warning" if dump.collective else "info"
                    self._write(Note(level=level, text=quiet_text(self._quiet, dump)))
        except OSError as error:
            self._write(Note(level="warning", text=f"the stacks could not be kept: {error}"))
        self._quiet = None
        # The rules are evaluated at the next tick, when the dump has been read back from the log.
        self._next_evaluation_s = 0.0

    def _end_if_unanswered(self, now_s: float) -> None:
        if self._stop_asked_s is None or self._ended or now_s - self._stop_asked_s < STOP_GRACE_S:
            return
        self._ended = True
        self._stop(f"it has not ended within {STOP_GRACE_S:.0f} s", True)


def quiet_text(silent: Silence, dump: StackDump) -> str:
    """Describe for the user a silence that is not yet a stall."""
    frame = f" at {dump.python_frame}" if dump.python_frame else ""
    first = f"{dump.collective}; " if dump.collective else ""
    return (
        f"silent for {format_seconds(silent.silent_s)} in {silent.doing}{frame}: {first}{dump.summary}; it counts as "
        f"stalled after {format_seconds(silent.limit_s)} ({silent.limit_source}); all threads are in {dump.path}"
    )


def trimmed(view: RunView) -> RunView:
    """Return `view` without the middle of a long table of steps and the beginning of a long table of readings, once the
    table is twice as long as the rows that are kept."""
    changes: dict[str, Any] = {}
    if len(view.steps) >= 2 * (2 * HEAD_ROWS + TAIL_ROWS):
        begin, end = view.session_row, len(view.steps)
        session = max(begin, HEAD_ROWS)
        tail = max(session, end - TAIL_ROWS)
        head = range(session, min(session + HEAD_ROWS, tail))
        changes["steps"] = _rows(view.steps, range(HEAD_ROWS), head, range(tail, end))
        changes["session_row"] = min(begin, HEAD_ROWS)
    if len(view.hosts) >= 2 * TAIL_ROWS:
        changes["hosts"] = _tail(view.hosts)
    if any(len(table) >= 2 * TAIL_ROWS for table in view.gpu_tables.values()):
        changes["gpu_tables"] = {i: _tail(table) for i, table in view.gpu_tables.items()}
    if view.further_hosts:
        changes["further_hosts"] = {host: trimmed(v) for host, v in view.further_hosts.items()}
    return replace(view, **changes) if changes else view


def _tail(table: Table) -> Table:
    return _rows(table, range(max(0, len(table) - TAIL_ROWS), len(table)))


def _rows(table: Table, *parts: range) -> Table:
    """Return a new table with some rows of another."""
    columns = {
        name: [v for part in parts for v in table.values(name, part.start, part.stop)]
        for name in table.columns
    }
    return Table(table.columns).extended_by(columns)
