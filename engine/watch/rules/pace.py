"""The step time: what a step waits for, and whether its time stays the same.

`step_s` covers the optimizer step alone, without evaluations and checkpoints between two steps; `wall_s` covers all
from the record of one step to that of the next.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.log.events import DATA, OUTSIDE
from engine.units import format_seconds
from engine.watch.rules.rule import OTHERS, WARNING, CannotJudge, Case, Symptom, median, rule

SLOW_SHARE = 0.4
DATA_STEPS = 20
DATA_SHARE = 0.2
MORE_WORKERS = "loader.workers=4"
"""What the probe can change in a script whose steps wait for data."""
DATA_LEAST_S = 0.5
"""Total wait in seconds: a fifth of a 1 ms step is not worth fixing."""
DATA_BURST_S = 5.0
"""Total wait in seconds when most steps do not wait: a single hiccup of the disk is no pattern."""
OUTSIDE_SHARE = 1 / 3
BESIDE_SHARE, BESIDE_LEAST_S = 0.5, 20.0
BIMODAL_STEPS, BIMODAL_LEAST = 200, 60
BIMODAL_RATIO = 1.8
BIMODAL_SHARE = 0.15
"""Share of the steps in the smaller group: single slow steps are not a second mode."""
BIMODAL_GAP = 3.0
"""Gap between the groups, divided by the wider spread within one of them."""
DRIFT_WARM_UP, DRIFT_STEPS = 20, 50
DRIFT_RATIO = 1.5
LEAST_STEP_S = 0.005
"""Shorter steps vary with the operating system's scheduling."""


class _Lost(NamedTuple):
    """What a part takes of the newest steps."""

    rows: range
    steps: int
    """Steps that have both numbers."""
    share: float
    seconds: float
    least_s: float


def _lost(case: Case, part: str, whole: str, least: float) -> _Lost | None:
    """Return what the column `part` takes of the column `whole`; None below the share `least`, or where it is too few
    seconds to be worth fixing."""
    rows = case.steps(DATA_STEPS, at_least=DATA_STEPS)
    times = case.pairs(part, whole, rows)
    seconds, of = sum(p for p, _ in times), sum(w for _, w in times)
    share = seconds / of if of > 0 else 0.0
    usual = median([p / w for p, w in times if w > 0] or [0.0])
    least_s = DATA_LEAST_S if usual >= least else DATA_BURST_S
    if share < least or seconds < least_s:
        return None
    return _Lost(rows, len(times), share, seconds, least_s)


@rule(
    WARNING,
    asks="Does a part of the step take many times what its arithmetic needs on this machine?",
    reads=("parts_measured",),
    threshold="10 times what its FLOPs, bytes and launches need at the machine's own matmul and copy rates, measured "
    "again before it is said, or 4 times and 3 times what the other parts take of theirs, a tenth of the step or more; "
    "of data 5 times what other code takes to read the rows, and a twentieth of the step",
)
def slow_part(case: Case) -> Symptom | None:
    parts = case.view.parts
    if parts is None:
        raise CannotJudge("the machine was not measured: that is after step 12 of a session")
    if not parts.slow:
        return None
    part = max(parts.slow, key=lambda one: parts.seconds[one])
    what = "reading its rows takes" if part == DATA else "its arithmetic needs"
    taken, needed = parts.seconds[part], parts.needed[part]
    return Symptom(
        f"{part} takes {taken / needed:.0f} times what {what} on this machine",
        [
            (f"{part}, seconds", taken, "median of 8 steps"),
            (f"{part} needs, seconds", needed, "at the rates below; of data, by other code"),
            ("matmul, GFLOP/s", parts.matmul_flops_per_s / 1e9, "measured again"),
            ("copy, GB/s", parts.copy_bytes_per_s / 1e9, "measured again"),
        ],
        case.recent(0.0),
        meaning="it does something else than its arithmetic: another kernel, another device, a loop over rows, weights "
        "that are converted or an order that is made anew at each step",
        no_flip="profile that part; its precision, kernel and compile settings are what decides its kernels",
    )


@rule(
    WARNING,
    asks="Is this machine as fast as it was in earlier runs?",
    reads=("parts_measured",),
    threshold=f"{SLOW_SHARE:.0%} of its usual matmul or copy rate, the median of 3 runs or more in the same dtype with "
    "as many threads; measured twice, and not judged where others want the CPUs",
)
def slow_machine(case: Case) -> Symptom | None:
    parts = case.view.parts
    if parts is None:
        raise CannotJudge("the machine was not measured: that is after step 12 of a session")
    if parts.usual_flops_per_s is None or parts.usual_bytes_per_s is None:
        raise CannotJudge(
            "what is usual is not known: fewer than 3 runs before, or others want the CPUs"
        )
    rates = (
        ("multiplies", "matmul, GFLOP/s", parts.matmul_flops_per_s, parts.usual_flops_per_s),
        ("copies", "copy, GB/s", parts.copy_bytes_per_s, parts.usual_bytes_per_s),
    )
    what, _, rate, usual = min(rates, key=lambda one: one[2] / one[3])
    if rate >= SLOW_SHARE * usual:
        return None
    return Symptom(
        f"this machine {what} at {rate / usual:.0%} of its usual rate",
        [(name, rate / 1e9, f"usually {usual / 1e9:.4g}") for _, name, rate, usual in rates],
        case.recent(0.0),
        meaning="its clock is throttled or limited, or somebody else uses it: the run is slow, and not by its settings",
        no_flip="look at clocks, temperature and power (`engine tail RUN`), and at what else runs here",
    )


@rule(
    WARNING,
    asks="Do steps wait for data?",
    reads=("data_s", "step_s"),
    threshold=f"{DATA_SHARE:.0%} of the time of {DATA_STEPS} steps or more, and {DATA_LEAST_S:g} s; "
    f"{DATA_BURST_S:g} s where most steps do not wait",
)
def data_wait(case: Case) -> Symptom | None:
    found = _lost(case, "data_s", "step_s", DATA_SHARE)
    if found is None:
        return None
    return Symptom(
        f"{100 * found.share:.0f} % of the step time is waiting for data",
        [
            ("data_s / step_s", found.share, f"at least {DATA_SHARE:g}"),
            ("seconds waited", found.seconds, f"at least {found.least_s:g} in {found.steps} steps"),
        ],
        case.span(found.rows),
        meaning="the next batch is not ready when the step begins: reading, tokenizing or packing is too slow",
        flip=f"--set {MORE_WORKERS}" if case.view.is_foreign else "",
        no_flip=""
        if case.view.is_foreign
        else "nothing to flip: look at what reads and prepares the data, and what else reads from that disk",
    )


@rule(
    WARNING,
    asks="Is the time between two steps spent on training?",
    reads=("outside_s", "wall_s"),
    threshold=f"{OUTSIDE_SHARE:.0%} of the time of {DATA_STEPS} steps or more in observers, the log or nothing, "
    f"and {DATA_LEAST_S:g} s; {DATA_BURST_S:g} s where it is not so of most steps",
)
def unaccounted(case: Case) -> Symptom | None:
    found = _lost(case, "outside_s", "wall_s", OUTSIDE_SHARE)
    if found is None:
        return None
    parts = {part: case.view.host_s.get(part) or 0.0 for part in OUTSIDE}
    most = f", lately most in: {max(parts, key=lambda part: parts[part])}"
    if sum(parts.values()) < found.seconds / found.steps / 2:
        # The newest step is not like those that lost the time. Where most do, the next one tells in what.
        if found.least_s == DATA_LEAST_S:
            return None
        most = ""
    return Symptom(
        f"{100 * found.share:.0f} % of the time between steps is in no phase of training{most}",
        [
            ("outside_s / wall_s", found.share, f"at least {OUTSIDE_SHARE:.2g}"),
            (
                "seconds outside",
                found.seconds,
                f"at least {found.least_s:g} in {found.steps} steps",
            ),
            *(
                (f"seconds in: {part}", spent, "of the newest step")
                for part, spent in parts.items()
            ),
        ],
        case.span(found.rows),
        meaning="training waits for what watches it: something is done at each step, or the log's disk is slow",
        no_flip="nothing to flip: look at what is called after a step, and at the disk of the run folder",
    )


@rule(
    WARNING,
    asks="Does most of the time go into training?",
    reads=("evaluations", "checkpoints"),
    threshold=f"{BESIDE_SHARE:.0%} of the time from the first step of a session to the newest in evaluations and "
    f"checkpoints, and {BESIDE_LEAST_S:g} s",
)
def seldom_training(case: Case) -> Symptom | None:
    if case.view.is_foreign:
        raise CannotJudge(OTHERS)
    rows = case.steps(len(case.view.steps), at_least=DATA_STEPS)
    span = case.span(rows)
    whole_s = span.to_unix_s - span.from_unix_s
    # What follows the newest step is not yet in that time.
    steps = range(span.first_step, span.last_step)
    evals = [e.eval_s or 0.0 for e in case.view.evals if e.subject == "student" and e.step in steps]
    saves = [c.save_s or 0.0 for c in case.view.checkpoints if c.step in steps]
    spent_s = sum(evals) + sum(saves)
    if spent_s < max(BESIDE_LEAST_S, BESIDE_SHARE * whole_s):
        return None
    mostly_evals = sum(evals) >= sum(saves)
    most, key = ("evaluations", "eval") if mostly_evals else ("checkpoints", "checkpoint")
    return Symptom(
        f"{100 * spent_s / whole_s:.0f} % of the time goes into evaluations and checkpoints, most of it into {most}",
        [
            ("seconds of evaluations", sum(evals), f"{len(evals)} of them"),
            ("seconds of checkpoints", sum(saves), f"{len(saves)} of them"),
            ("seconds in all", whole_s, f"{len(rows)} steps"),
        ],
        span,
        meaning="the run is slow, and its steps are not: they stand still while it is evaluated or saved",
        no_flip=f"set {key}.every higher{', or eval.rows lower' if mostly_evals else ''}; no step's time shows it",
    )


@rule(
    WARNING,
    asks="Are there two kinds of step?",
    reads=("step_s",),
    threshold=f"two groups with a gap of {BIMODAL_GAP:g} times their spread, medians {BIMODAL_RATIO:g} "
    f"times apart, {BIMODAL_SHARE:.0%} of {BIMODAL_STEPS} steps in the smaller",
)
def step_time_bimodal(case: Case) -> Symptom | None:
    rows = case.steps(BIMODAL_STEPS, at_least=BIMODAL_LEAST)
    times = sorted(case.column("step_s", rows))
    if len(times) < BIMODAL_LEAST:
        raise CannotJudge(f"needs {BIMODAL_LEAST} timed steps")
    least = max(1, round(BIMODAL_SHARE * len(times)))
    # Split at the widest gap that leaves enough steps on either side.
    cut = max(range(least, len(times) - least + 1), key=lambda i: times[i] - times[i - 1])
    low, high = times[:cut], times[cut:]
    gap, spread = high[0] - low[-1], max(_spread(low), _spread(high))
    fast, slow = median(low), median(high)
    if fast < LEAST_STEP_S or slow < BIMODAL_RATIO * fast or gap < BIMODAL_GAP * spread:
        return None
    return Symptom(
        f"steps take either {format_seconds(fast)} or {format_seconds(slow)}, and little between",
        [
            ("slow over fast", slow / fast, f"at least {BIMODAL_RATIO:g}"),
            ("share of slow steps", len(high) / len(times), f"at least {BIMODAL_SHARE:g}"),
        ],
        case.span(rows),
        meaning="two kinds of step: two shapes, a cache that is hit or missed, or another process that comes and goes",
        no_flip="find what the slow steps share: length, a compile, another job on the machine",
    )


def _spread(times: list[float]) -> float:
    """Distance between the 10th and the 90th percentile, so that a few outliers do not widen a group."""
    tenth = len(times) // 10
    return times[-1 - tenth] - times[tenth]


@rule(
    WARNING,
    asks="Does a step take longer than it did at the beginning?",
    reads=("step_s",),
    threshold=f"medians of the last two {DRIFT_STEPS} steps {DRIFT_RATIO:g} times that of the first "
    f"{DRIFT_STEPS} after {DRIFT_WARM_UP}",
)
def step_time_drift(case: Case) -> Symptom | None:
    everything = case.steps(10**9, at_least=DRIFT_WARM_UP + 3 * DRIFT_STEPS)
    begin = everything.start + DRIFT_WARM_UP
    before = median(case.column("step_s", range(begin, begin + DRIFT_STEPS)))
    # Two consecutive windows: another job that comes and goes is not drift.
    rows = everything[-2 * DRIFT_STEPS :]
    halves = rows[:DRIFT_STEPS], rows[DRIFT_STEPS:]
    now = min(median(case.column("step_s", half)) for half in halves)
    if before < LEAST_STEP_S or now < DRIFT_RATIO * before:
        return None
    return Symptom(
        f"a step takes {format_seconds(now)}; at the beginning it took {format_seconds(before)}",
        [("now over then, medians", now / before, f"at least {DRIFT_RATIO:g}")],
        case.span(rows),
        meaning="the run slows down: heat, memory in pieces, a growing list, or another job on the machine",
        no_flip="resume the run: if a fresh process is fast again, the cause is inside it",
    )


@rule(
    WARNING,
    asks="Did a step wait for a compiler?",
    reads=("compile events",),
    threshold="one compile after warm-up",
)
def compile_after_warm_up(case: Case) -> Symptom | None:
    case.must_have_been_watched()
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
            meaning="a graph was not compiled in the first steps, or a guard of one no longer held: often a new shape",
            no_flip="pad batches to one shape, drop a last batch that is smaller, or mark what changes with "
            "torch._dynamo.mark_dynamic",
        )
    return Symptom(
        f"{len(late)} kernels were compiled while steps waited; the last: {newest.kernel}{why}",
        numbers,
        case.span(rows),
        meaning=f"the kernel that was launched is not the one that was warmed: {newest.key}",
        flip="--set kernels.prewarm=true" if _prewarm_is_off(case) else "",
        no_flip=""
        if _prewarm_is_off(case)
        else "warm-up missed this key: the set that is launched must lie in the set that is warmed",
    )


def _prewarm_is_off(case: Case) -> bool:
    return case.settings is not None and not case.settings.kernels.prewarm
