"""Rules about stalls: a trainer that has logged nothing for too long, and what it was doing.

Progress is the step counter, not liveness, memory or utilisation. The heartbeat is the newest line of the
trainer that is not a note. The limit on a silence, in seconds:

    `watch.stall_seconds`, when it is set
    in training        max(LEAST_S, TIMES * median time between the last steps,
                           LONG_WORK * the longest evaluation and checkpoint so far)
    before the first step, or in a named phase           that phase's own limit

    in any of these, if nothing was computed, read or written     STILL_S

Loading may take ten minutes and compiling two without a line in the log, but both compute or read. So the run counts
as stalled before the long limit of its phase if, for STILL_S, the trainer and its descendants used almost no CPU time
and read or wrote almost nothing, and the run's GPU ran no kernel. A busy but silent trainer gets a notice after
QUIET_S, which is not an alert: it reports what the trainer is doing and how long that may take.

A process that was already running when watching began has no log: its silence is the time since it or one of its
descendants last computed, read or wrote, or any GPU of the machine ran a kernel.

A limit that is too low costs a warning that is cleared when the step arrives; one that is too high costs
hours of a hung run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from engine.log.events import TRAINING, StackDump
from engine.log.table import Table
from engine.units import format_seconds
from engine.watch.rules.rule import (
    CannotJudge,
    Case,
    Number,
    Span,
    Symptom,
    median,
    rule,
)
from engine.watch.stacks import own_frame

LEAST_S = 30.0
"""Shortest limit between two steps in seconds."""
TIMES = 5.0
LONG_WORK = 3.0
"""Factors in the formula of the module docstring: for the median step, and for the longest evaluation and
checkpoint."""
STEPS = 50
"""Number of the last steps whose median time is used."""
FIRST_STEP_S = 45.0
"""Limit for the first step in seconds, which includes loading libraries; each compiled kernel logs a line."""
PHASE_S = {
    "reading the corpus": 120.0,
    "tokenizing": 300.0,
    "loading the teacher": 600.0,
    "loading the student": 600.0,
    "making the student": 300.0,
    "restoring": 600.0,
    "compiling": 600.0,
    "saving": 600.0,
    "evaluating": FIRST_STEP_S,
    "measuring": FIRST_STEP_S,
}
"""Limit of each phase in seconds, by prefix of its name. Loading reads up to hundreds of GB, possibly over a network;
an evaluation logs its progress every few seconds."""
OTHER_PHASE_S = 120.0
"""Limit of any other phase in seconds."""
FIRST_LINE_S = 120.0
"""Limit from the start of the process to its first line in seconds: it imports torch, maybe from a cold disk."""
UNSEEN_WORK_S = 600.0
"""Limit between two steps of a watched script in seconds: its evaluations and saves between steps are not
observed."""
STILL_S = 50.0
STILL_WINDOW_S = 30.0
"""Window of the readings in seconds, shorter than the silence. The process tree is read every ten seconds."""
STILL_READINGS = 10
STACKS_S = 30.0
"""Time in seconds that an alert waits for the stacks of a process that is watched from outside."""
WORK_WINDOW_S = 600.0
"""Window in seconds that is searched for the last activity of a process watched from outside."""
STILL_CPU_PCT = 5.0
"""CPU use below which a process tree is idle, in percent of one core. Housekeeping threads use a few tenths of a
percent."""
STILL_IO_BYTES_PER_S = 1024.0
QUIET_S = 50.0
COMPUTING = "computing"
"""State of a busy thread in a StackDump."""
_DEVICE_WAIT = re.compile(
    r"torch/cuda/\w+\.py:\d+ in synchronize$|^cu\w*Synchronize\b", re.MULTILINE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """The duration of the trainer's silence, and its limit."""

    silent_s: float
    limit_s: float
    limit_source: str
    """Reason for the limit, in words."""
    doing: str
    """Activity of the run, according to its log."""
    since_unix_s: float

    @property
    def is_stall(self) -> bool:
        return self.silent_s > self.limit_s

    @property
    def is_quiet(self) -> bool:
        """Whether to log a notice: the silence is long but not yet a stall."""
        return QUIET_S < self.silent_s <= self.limit_s


def silence(case: Case) -> Silence:
    """Return the trainer's silence now. Raises CannotJudge if the trainer has ended, or has logged nothing and has no
    start time."""
    view = case.view
    case.require_watched()
    case.require_running()
    if view.process is not None:
        active_unix_s = _last_activity_unix_s(case)
        return Silence(
            silent_s=case.now_unix_s - active_unix_s,
            limit_s=STILL_S,
            limit_source="nothing was computed, read or written",
            doing=f"process {view.process.pid}",
            since_unix_s=active_unix_s,
        )
    # A process that never opened its log has been silent since it was started.
    since_unix_s = view.heartbeat_unix_s or view.trainer_started_unix_s
    if since_unix_s is None:
        raise CannotJudge("no trainer was started")
    limit_s, limit_source = _limit(case)
    silent_s = case.now_unix_s - since_unix_s
    if min(silent_s, limit_s) > STILL_S and _is_idle(case):
        limit_s, limit_source = STILL_S, "nothing was computed, read or written"
    configured_s = case.settings.watch.stall_seconds if case.settings else 0
    if configured_s > 0:
        limit_s, limit_source = float(configured_s), "watch.stall_seconds"
    doing, phase = case.phase, view.phase
    if phase is not None and phase.detail and phase.name == doing:
        doing += f" ({phase.detail})"
    return Silence(
        silent_s=silent_s,
        limit_s=limit_s,
        limit_source=limit_source,
        doing=doing,
        since_unix_s=since_unix_s,
    )


def _last_activity_unix_s(case: Case) -> float:
    """Return the last time at which a process watched from outside was active, or at which its activity was unknown.
    If the silence is longer than the searched window, return the start of the active alert."""
    process, tables = case.view.process, list(case.view.gpu_tables.values())
    if not tables and process is not None and process.opens_gpu is not False:
        raise CannotJudge(f"no GPU reading: {case.view.absent.get('gpu') or 'none was taken'}")
    limits = {"family_cpu_pct": STILL_CPU_PCT, "family_io_bytes_per_s": STILL_IO_BYTES_PER_S}
    active = [_last_active_reading_s(case, case.view.hosts, limits)]
    # It is not known which process uses a GPU, so any use counts as activity.
    active += [_last_active_reading_s(case, table, {"gpu_util_pct": 1.0}) for table in tables]
    alert = case.view.alerts.get(nobody_works.id)
    if alert is not None and case.now_unix_s - max(active) > STILL_S:
        return alert.from_unix_s
    return max(active)


def _last_active_reading_s(case: Case, table: Table, limits: dict[str, float]) -> float:
    """Return the time of the newest row with a reading that is missing or reaches its limit; without such a row, the
    time of the oldest."""
    rows = case.reading_rows(table, WORK_WINDOW_S)
    times, *columns = (table.values(name, rows.start, rows.stop) for name in ("unix_s", *limits))
    pairs = list(zip(columns, limits.values(), strict=True))
    if not times or any(values[-1] is None for values, _ in pairs):
        raise CannotJudge(f"{' or '.join(limits)} has no reading")
    active_rows = (
        row
        for row in reversed(range(len(times)))
        if any((value := values[row]) is None or value >= limit for values, limit in pairs)
    )
    return times[next(active_rows, 0)] or 0.0


def _limit(case: Case) -> tuple[float, str]:
    """Return the limit on a silence, in seconds, and the reason for it."""
    view = case.view
    phase = case.phase
    if view.phase is None:
        return FIRST_LINE_S, "before the first phase"
    if phase != TRAINING:
        if view.started_unix_s is not None and (view.phase_unix_s or 0.0) <= view.started_unix_s:
            return FIRST_STEP_S, "before the first step"
        named = next((s for name, s in PHASE_S.items() if phase.startswith(name)), None)
        return named or OTHER_PHASE_S, f"phase {phase!r}"
    if view.is_foreign:
        return UNSEEN_WORK_S, "evaluations and saves of a script are not seen"
    rows = range(max(view.session_row, len(view.steps) - STEPS), len(view.steps))
    if len(rows) < 2:
        return max(FIRST_STEP_S, _long_work(case)), "before the second step"
    times = view.steps.values("unix_s", rows.start, rows.stop)
    known = [t for t in times if t is not None]
    between = median([b - a for a, b in pairwise(known)])
    limit_s = max(LEAST_S, TIMES * between, _long_work(case))
    return (
        limit_s,
        f"{TIMES:g} times the median step, at least {LEAST_S:g} s, more after long evaluations or checkpoints",
    )


def _is_idle(case: Case) -> bool:
    """Return whether nothing was computed, read or written lately; False if that is not known."""
    window_s, least = STILL_WINDOW_S, STILL_READINGS
    try:
        if max(case.host_readings("family_cpu_pct", window_s, at_least=least)) >= STILL_CPU_PCT:
            return False
        moved = case.host_readings("family_io_bytes_per_s", window_s, at_least=least)
        if max(moved) >= STILL_IO_BYTES_PER_S:
            return False
        device = case.choice("compute.device") or ""
        return not device.startswith("cuda") or not any(
            case.gpu_readings("gpu_util_pct", window_s, at_least=least)
        )
    except CannotJudge:
        return False


def _long_work(case: Case) -> float:
    """Return LONG_WORK times the sum of the longest recent evaluation and checkpoint, in seconds."""
    evals = max((e.eval_s or 0.0 for e in case.view.evals[-20:]), default=0.0)
    saves = max((c.save_s or 0.0 for c in case.view.checkpoints[-20:]), default=0.0)
    return LONG_WORK * (evals + saves)


def stall_dump(case: Case, since_unix_s: float) -> StackDump | None:
    """Return the stacks that were captured in this silence; None if there are none."""
    taken_s = case.view.stack_dump_unix_s
    return case.view.stack_dump if taken_s is not None and taken_s >= since_unix_s else None


def _stall_symptom(case: Case, what: str) -> Symptom | None:
    silent = silence(case)
    if not silent.is_stall:
        return None
    dump = stall_dump(case, silent.since_unix_s)
    numbers: list[Number] = [
        (
            "seconds of silence",
            silent.silent_s,
            f"{silent.limit_s:.0f} allowed: {silent.limit_source}",
        )
    ]
    for name, value in _machine_numbers(case):
        numbers.append((name, value, "now"))
    where = ""
    meaning = "its stacks were not taken: see `--all` and stderr.txt"
    if dump is not None:
        line = dump.python_frame
        if case.view.process is not None:
            # The script's line is more useful than a line of a library.
            line = own_frame(dump.python_stack) or line
        where = f": {_state(dump)}" + (f" at {line}" if line else "")
        where += f" ({dump.native_frame})" if dump.native_frame else ""
        first = f"{dump.collective}; " if dump.collective else ""
        meaning = f"{first}{dump.summary}; all threads are in {dump.path}"
    backend = case.choice("teacher.backend")
    in_teacher = dump is not None and any("engine/teachers/" in f for f in dump.python_stack)
    flip = ""
    if in_teacher and backend not in (None, "dequantized"):
        flip = "--set teacher.backend=dequantized"
    return Symptom(
        f"{what} for {format_seconds(silent.silent_s)} in {silent.doing}{where}",
        numbers,
        Span(
            first_step=case.view.last_step,
            last_step=case.view.last_step,
            from_unix_s=silent.since_unix_s,
            to_unix_s=case.now_unix_s,
        ),
        meaning=meaning,
        flip=flip,
        no_flip="no setting is known to cause a stall: read the stacks",
        part=case.phase,
    )


def _state(dump: StackDump) -> str:
    """Return the main thread's state. A wait for CUDA spins, so the kernel reports it as computing."""
    frames = f"{dump.python_frame}\n{dump.native_frame}"
    if dump.state == COMPUTING and _DEVICE_WAIT.search(frames):
        return "waiting for the GPU"
    return dump.state


def _machine_numbers(case: Case) -> list[tuple[str, float]]:
    """Return the GPU and CPU readings during the silence, as far as they are known."""
    known: list[tuple[str, float]] = []
    host = case.view.host
    if host is not None:
        names = ("trainer_cpu_pct", "family_cpu_pct", "family_io_bytes_per_s")
        readings = [(name, getattr(host, name)) for name in names]
        known += [(name, value) for name, value in readings if value is not None]
    try:
        gpu = case.view.gpus[case.gpu]
    except (CannotJudge, KeyError):
        return known
    if gpu.gpu_util_pct is not None:
        known.append(("gpu_util_pct", gpu.gpu_util_pct))
    return known


@rule(
    reads=("family_cpu_pct, family_io_bytes_per_s", "gpu_util_pct of every GPU"),
    threshold=f"{STILL_S:g} s with less than {STILL_CPU_PCT:g} % of a core and {STILL_IO_BYTES_PER_S:g} B/s in all "
    "its processes, and nothing on any GPU",
    clear_after_s=0.0,
)
def nobody_works(case: Case) -> Symptom | None:
    if case.view.process is None:
        raise CannotJudge("the run reports its steps: see stalled")
    silent = silence(case)
    # Wait for the stacks, captured once the process counts as silent, because the alert names the line.
    if silent.silent_s < STILL_S + STACKS_S and stall_dump(case, silent.since_unix_s) is None:
        return None
    return _stall_symptom(case, "no activity")


def _steps_in_session(case: Case) -> int:
    return len(case.view.steps) - case.view.session_row


@rule(
    reads=("the newest line of the trainer", "phase", "family_cpu_pct, family_io_bytes_per_s"),
    threshold=f"{STILL_S:g} s where nothing is computed, read or written; else "
    f"{FIRST_STEP_S:g} s before the first step; "
    + ", ".join(f"{name} {seconds:g} s" for name, seconds in PHASE_S.items()),
    clear_after_s=0.0,
)
def stalled_at_start(case: Case) -> Symptom | None:
    case.require_watched()
    if case.view.process is not None:
        raise CannotJudge("the steps of an attached process are unknown: see nobody_works")
    if _steps_in_session(case):
        return None
    return _stall_symptom(case, "no step and no log line")


@rule(
    reads=(
        "the newest line of the trainer",
        "unix_s of the steps",
        "family_cpu_pct, family_io_bytes_per_s",
    ),
    threshold=f"{TIMES:g} times the median time between steps, at least {LEAST_S:g} s, and "
    f"{LONG_WORK:g} times the longest evaluation and checkpoint; "
    f"{STILL_S:g} s where nothing is computed, read or written",
    clear_after_s=0.0,
)
def stalled(case: Case) -> Symptom | None:
    if not _steps_in_session(case):
        raise CannotJudge("no step was done in this session: see stalled_at_start")
    title = f"no step after step {case.view.last_step}"
    return _stall_symptom(case, title)
