"""Rules about the step time: waiting for data, slow phases, time outside training, drift, compiles.

`step_s` covers the optimizer step alone, without evaluations and checkpoints between two steps; `wall_s` covers all
from the record of one step to that of the next. Steps that are slow while other processes have the CPU are not
judged.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from engine.log.events import OUTSIDE
from engine.log.view import STEPS_KEPT
from engine.machine.rates import Rates, kept_rates
from engine.units import format_seconds
from engine.watch.rules.rule import NO_SETTINGS, CannotJudge, Case, Symptom, median, rule

PART_WARM_UP = 4
"""Number of first steps that are skipped: compilers and caches are still warming up."""
COMPARED_TIMES = 4.0
"""Ratio of a phase's measured to its computed time from which it is slow."""
PART_RATIO = 3.0
"""Multiple of the other phases' median ratio that a slow phase must reach too."""
ALONE_TIMES = 10.0
"""Ratio that replaces both limits if fewer than two other phases are known."""
PART_SHARE, PART_LEAST_S = 0.1, 0.02
"""Smallest time of a phase that is judged: as a share of the step, 0 to 1, and in seconds."""
OF_MATMULS = frozenset({"student", "loss", "backward", "teacher"})
"""Phases of a step whose time is mostly matmuls."""
LAUNCH_S = {"cuda": 10e-6, "cpu": 20e-6}
"""Seconds to launch one operation."""
DATA_STEPS = 20
DATA_SHARE = 0.2
"""Share of the step time, 0 to 1, from which waiting for data raises the alert."""
MORE_WORKERS = "loader.workers=4"
"""Setting that the probe can change in a script whose steps wait for data."""
DATA_LEAST_S = 0.5
"""Smallest total wait in seconds: a fifth of a 1 ms step is not worth fixing."""
DATA_BURST_S = 5.0
"""Smallest total wait in seconds if most steps do not wait: a single slow read of the disk is not a pattern."""
OUTSIDE_SHARE = 1 / 3
SELDOM_SHARE, SELDOM_LEAST_S = 0.5, 20.0
DRIFT_WARM_UP, DRIFT_STEPS = 20, 50
DRIFT_RATIO = 1.5
DRIFT_LEAST_S = 30.0
"""Minimum duration of slow steps, in seconds, if the machine's load is read: the load is a mean over a minute, so
another job that takes the CPU does not show in it at once."""
LEAST_STEP_S = 0.005
"""Shortest step that is judged, in seconds: the time of a shorter step varies with the operating system's
scheduling."""


class _LostTime(NamedTuple):
    """Time that one activity (such as waiting for data) takes of the newest steps."""

    rows: range
    lossy: list[int]
    """Rows of the steps in which the activity takes at least the limiting share."""
    steps: int
    """Number of steps with a time in both columns."""
    share: float
    seconds: float
    least_s: float
    in_most_steps: bool
    """Whether most steps lose time; False if a few steps lose much."""


def _lost_time(case: Case, part: str, whole: str, least: float) -> _LostTime | None:
    """Return the time of column `part` within column `whole`; None if its share is below `least`, or if it is too
    short to be worth fixing."""
    rows = case.steps(DATA_STEPS, at_least=DATA_STEPS)
    times = case.pairs(part, whole, rows)
    seconds, total_s = sum(p for p, _ in times), sum(w for _, w in times)
    share = seconds / total_s if total_s > 0 else 0.0
    median_share = median([p / w for p, w in times if w > 0] or [0.0])
    in_most_steps = median_share >= least
    least_s = DATA_LEAST_S if in_most_steps else DATA_BURST_S
    if share < least or seconds < least_s:
        return None
    parts, wholes = (
        case.view.steps.values(column, rows.start, rows.stop) for column in (part, whole)
    )
    lossy = [
        row
        for row, p, w in zip(rows, parts, wholes, strict=True)
        if p is not None and w is not None and p >= least * w
    ]
    return _LostTime(rows, lossy, len(times), share, seconds, least_s, in_most_steps)


class _PhaseTime(NamedTuple):
    seconds: float
    """Median time in the newest steps, in seconds."""
    needs_s: float
    """Time computed from the phase's FLOPs, bytes and launches, in seconds."""

    @property
    def times(self) -> float:
        return self.seconds / self.needs_s


def _phase_times(case: Case) -> tuple[range, Rates, dict[str, _PhaseTime]]:
    """Return the rows of the newest steps, this machine's measured speeds, and each phase's measured and computed
    time. The computed time is its FLOPs at the matmul rate, its bytes at the copy rate, and the time of its
    launches."""
    started = case.started
    if not started.costs:
        raise CannotJudge("the costs of the phases of a step are not logged")
    rates = kept_rates(started.machine)
    if rates is None:
        raise CannotJudge(
            f"the rates of {started.machine} are not known: `engine doctor` measures them there"
        )
    rows = case.steps(STEPS_KEPT, at_least=PART_WARM_UP + STEPS_KEPT)
    launch_s = LAUNCH_S["cuda" if started.device.startswith("cuda") else "cpu"]
    parts = {}
    for part, (flops, moved, launches) in started.costs.items():
        taken = [
            phases.get(part, math.nan)
            for phases in (step.phases for step in case.view.recent_steps)
        ]
        if all(map(math.isfinite, taken)) and len(taken) == STEPS_KEPT:
            needs_s = flops / rates.flops + moved / rates.bytes + launches * launch_s
            parts[part] = _PhaseTime(median(taken), needs_s)
    if not parts:
        raise CannotJudge("the phases of its steps are not timed")
    return rows, rates, parts


def _numbers(rates: Rates, parts: dict[str, _PhaseTime]) -> list[tuple[str, float, str]]:
    return [
        *(
            (f"{name}, seconds", part.seconds, f"needs {part.needs_s:.3g} at the rates below")
            for name, part in parts.items()
        ),
        ("matmul, GFLOP/s", rates.flops / 1e9, "measured by `engine doctor`"),
        ("copy, GB/s", rates.bytes / 1e9, "measured by `engine doctor`"),
    ]


@rule(
    reads=("costs", "phases", "rates of `engine doctor`"),
    threshold="the ratio of its time to the time that its FLOPs, bytes and launches need, at the speeds measured by "
    f"`engine doctor`, is {COMPARED_TIMES:g} or more, and {PART_RATIO:g} times the median ratio of the other phases "
    "with "
    f"matmuls; {ALONE_TIMES:g} if fewer than two of them are known; median of {STEPS_KEPT} steps, {PART_SHARE:.0%} "
    "of the step or more",
)
def slow_part(case: Case) -> Symptom | None:
    rows, rates, parts = _phase_times(case)
    least_s = max(PART_LEAST_S, PART_SHARE * median(case.column("step_s", rows)))

    def is_slow(part: str) -> bool:
        others = [parts[name].times for name in parts.keys() & OF_MATMULS - {part}]
        limit = max(COMPARED_TIMES, PART_RATIO * median(others or [0.0]))
        if len(others) < 2:
            limit = ALONE_TIMES
        return parts[part].seconds >= least_s and parts[part].times >= limit

    slow = [part for part in parts if is_slow(part)]
    if not slow:
        return None
    part = max(slow, key=lambda name: parts[name].seconds)
    return Symptom(
        f"{part} takes {parts[part].times:.0f} times what its arithmetic needs on this machine",
        _numbers(rates, parts),
        case.span(rows),
        meaning="most of its time is not arithmetic: a slow kernel, the wrong device, a loop over rows, or weights "
        "that "
        "are converted at each step",
        no_flip="profile that phase; the settings of precision, kernels and compile select its kernels",
        part=part,
    )


@rule(
    reads=("data_s", "step_s"),
    threshold=f"{DATA_SHARE:.0%} of the time of {DATA_STEPS} steps or more, and {DATA_LEAST_S:g} s; "
    f"{DATA_BURST_S:g} s where most steps do not wait",
)
def data_wait(case: Case) -> Symptom | None:
    lost = _lost_time(case, "data_s", "step_s", DATA_SHARE)
    if lost is None:
        return None
    if case.view.imported is not None:
        remedy = {"no_flip": "give the DataLoader more workers in the script"}
    elif case.view.is_foreign:
        remedy = {"flip": f"--set {MORE_WORKERS}"}
    else:
        remedy = {
            "no_flip": "nothing to flip: check the code that reads and prepares the data, and other users of that disk"
        }
    return Symptom(
        f"{100 * lost.share:.0f} % of the step time is waiting for data",
        [
            ("data_s / step_s", lost.share, f"at least {DATA_SHARE:g}"),
            ("seconds waited", lost.seconds, f"at least {lost.least_s:g} in {lost.steps} steps"),
        ],
        case.span(lost.rows),
        meaning="the next batch is not ready when the step begins: reading, tokenizing or packing is too slow",
        **remedy,
    )


@rule(
    reads=("outside_s", "wall_s", "load1, family_cpu_pct"),
    threshold=f"{OUTSIDE_SHARE:.0%} or more of the time of {DATA_STEPS} steps goes into observers of the steps, the "
    f"log, or work that is not timed: {DATA_LEAST_S:g} s or more; {DATA_BURST_S:g} s where most steps lose less",
)
def unaccounted(case: Case) -> Symptom | None:
    lost = _lost_time(case, "outside_s", "wall_s", OUTSIDE_SHARE)
    if lost is None:
        return None
    parts = {part: case.view.host_s.get(part) or 0.0 for part in OUTSIDE}
    most = f", lately most in: {max(parts, key=lambda part: parts[part])}"
    if sum(parts.values()) < lost.seconds / lost.steps / 2:
        # The newest step does not lose time as the others do. If most steps lose time, the next step shows where.
        if lost.in_most_steps:
            return None
        most = ""
    case.require_cpu_available(lost.lossy)
    return Symptom(
        f"{100 * lost.share:.0f} % of the time between steps is spent outside training{most}",
        [
            ("outside_s / wall_s", lost.share, f"at least {OUTSIDE_SHARE:.2g}"),
            (
                "seconds outside",
                lost.seconds,
                f"at least {lost.least_s:g} in {lost.steps} steps",
            ),
            *(
                (f"seconds in: {part}", spent, "of the newest step")
                for part, spent in parts.items()
            ),
        ],
        case.span(lost.rows),
        meaning="training waits for code that runs after each step, or for the disk of the log",
        no_flip="nothing to flip: check the code that runs after a step, and the disk of the run folder",
    )


@rule(
    reads=("evaluations", "checkpoints"),
    threshold=f"{SELDOM_SHARE:.0%} of the time from the first step of a session to the newest in evaluations and "
    f"checkpoints, and {SELDOM_LEAST_S:g} s",
)
def seldom_training(case: Case) -> Symptom | None:
    if case.view.is_foreign:
        raise CannotJudge(NO_SETTINGS)
    rows = case.steps(len(case.view.steps), at_least=DATA_STEPS)
    span = case.span(rows)
    whole_s = span.to_unix_s - span.from_unix_s
    # Work after the newest step is not part of that time.
    steps = range(span.first_step, span.last_step)
    evals = [e.eval_s or 0.0 for e in case.view.evals if e.subject == "student" and e.step in steps]
    saves = [c.save_s or 0.0 for c in case.view.checkpoints if c.step in steps]
    spent_s = sum(evals) + sum(saves)
    if spent_s < max(SELDOM_LEAST_S, SELDOM_SHARE * whole_s):
        return None
    mostly_evals = sum(evals) >= sum(saves)
    most, key = ("evaluations", "eval") if mostly_evals else ("checkpoints", "checkpoint")
    return Symptom(
        f"{100 * spent_s / whole_s:.0f} % of the time goes into evaluations and checkpoints, most of it into {most}",
        [
            ("seconds of evaluations", sum(evals), f"{len(evals)} of them"),
            ("seconds of checkpoints", sum(saves), f"{len(saves)} of them"),
            ("seconds in total", whole_s, f"{len(rows)} steps"),
        ],
        span,
        meaning="the run is slow although its steps are fast: no step runs during an evaluation or a save",
        no_flip=f"set {key}.every higher{', or eval.rows lower' if mostly_evals else ''}; a flip compares step times, "
        "which leave out evaluations and checkpoints",
        part=most,
    )


@rule(
    reads=("step_s", "load1, family_cpu_pct"),
    threshold=f"the median of {DRIFT_STEPS} steps, in the last two such windows, is {DRIFT_RATIO:g} times that of the "
    f"{DRIFT_STEPS} steps after the first {DRIFT_WARM_UP}",
)
def step_time_drift(case: Case) -> Symptom | None:
    all_rows = case.steps(10**9, at_least=DRIFT_WARM_UP + 3 * DRIFT_STEPS)
    begin = all_rows.start + DRIFT_WARM_UP
    before = median(case.column("step_s", range(begin, begin + DRIFT_STEPS)))
    # Two consecutive windows: a short job of another user is not drift.
    rows = all_rows[-2 * DRIFT_STEPS :]
    halves = rows[:DRIFT_STEPS], rows[DRIFT_STEPS:]
    now = min(median(case.column("step_s", half)) for half in halves)
    if before < LEAST_STEP_S or now < DRIFT_RATIO * before:
        return None
    slow_s = sum(case.column("step_s", rows))
    if len(case.view.hosts) and slow_s < DRIFT_LEAST_S:
        raise CannotJudge(
            f"its steps are slower for {format_seconds(slow_s)} only, expected {DRIFT_LEAST_S:g} s or more"
        )
    case.require_cpu_available(rows)
    return Symptom(
        f"a step takes {format_seconds(now)}; at the beginning it took {format_seconds(before)}",
        [
            (
                "median step time, newest over first",
                now / before,
                f"at least {DRIFT_RATIO:g}",
            )
        ],
        case.span(rows),
        meaning="the run slows down: heat, fragmented memory, a growing list, or another job on the machine",
        no_flip=("start the script again" if case.view.is_foreign else "resume the run")
        + ": if the new process is fast again, the cause was inside the old one",
    )


@rule(
    reads=("compile events",),
    threshold="one compile after warm-up",
)
def compile_after_warm_up(case: Case) -> Symptom | None:
    case.require_watched()
    case.steps(1, at_least=1)
    late = [c for c in case.view.compiles if c.after_warm_up]
    if not late:
        return None
    spent = sum(c.compile_s or 0.0 for c in late)
    newest = late[-1]
    why = f"; differs in {', '.join(newest.differs)}" if newest.differs else ""
    numbers: list[tuple[str, float, str]] = [
        ("compiles after warm-up", len(late), "expected 0"),
        ("seconds", spent, "in total, as far as they are known"),
    ]
    rows = case.steps(1, at_least=1)
    if newest.compiler == "torch.compile":
        return Symptom(
            f"torch.compile compiled {len(late)} times while the script waited; the last: {newest.kernel}{why}",
            numbers,
            case.span(rows),
            meaning="a graph was not compiled in the first steps, or a guard of a compiled graph failed: often a new "
            "shape",
            no_flip="pad batches to one shape, drop a smaller last batch, or mark the changing dimensions with "
            "torch._dynamo.mark_dynamic",
        )
    prewarm_is_off = case.settings is not None and not case.settings.kernels.prewarm
    return Symptom(
        f"{len(late)} kernels were compiled while steps waited; the last: {newest.kernel}{why}",
        numbers,
        case.span(rows),
        meaning=f"the kernel that was launched differs from the one that was warmed up: {newest.key}",
        flip="--set kernels.prewarm=true" if prewarm_is_off else "",
        no_flip="the warm-up missed this key: it must compile every kernel that a step launches",
    )
