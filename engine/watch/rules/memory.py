"""Rules about memory: its growth and the cause of it, and memory pressure.

    held       bytes of tensors, as torch counts them
    reserved   what the allocator has reserved on the device; reserved - held is fragmentation and cache
    used       what all processes use on the device

When several of the three grow, the first of them is the cause: a leaked tensor makes all three grow, fragmentation
`reserved` and `used`, another process only `used`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from engine.log.table import Table
from engine.units import format_bytes, format_seconds
from engine.watch.rules.rule import CannotJudge, Case, Number, Symptom, mean, median, rule

TREND_WINDOW_S = 600.0
TREND_READINGS = 120
"""Number of readings needed for a trend, which take two minutes: the allocator's caching in the first steps is not a
trend."""
TREND_STEPS = 20
GROWTH_SHARE = 0.02
"""Minimum growth within the window, as a share of the total; a smaller one is the noise of other processes."""
HORIZON_S = 3600.0
"""Horizon of the short window in seconds: an alert is raised if memory runs out within it at the growth rate of the
window."""
LONG_WINDOW_S = 3 * TREND_WINDOW_S
"""Length of a session in seconds from which a long window, the session without its first tenth, is also judged: slow
leaks take hours."""
LONG_READINGS = 120
"""Number of means that replace the readings of the long window, so that its cost does not grow with the run."""
UNKNOWN_END_S = 86400.0
"""Horizon of the long window in seconds if the run's last step is unknown."""
PRESSURE_PCT = 10.0
PRESSURE_WINDOW_S = 30.0
_INNER_SHARE = 0.5
"""Share of a growth, 0 to 1, that an inner number (`held`, `reserved`) must explain to be its cause."""


@rule(
    reads=("gpu_mem_used_bytes or host_available_bytes", "step"),
    threshold=f"the medians of the three thirds of up to {format_seconds(TREND_WINDOW_S)} rise evenly, by "
    f"{GROWTH_SHARE:.0%} of the total memory or more, and at that rate memory is full within "
    f"{format_seconds(HORIZON_S)}; or those of a whole session of {format_seconds(LONG_WINDOW_S)} or more, without its "
    f"first tenth, and memory is full before the run's last step",
)
def memory_ceiling(case: Case) -> Symptom | None:
    """Judge three memories: the GPU's, if it has counters; torch's reserved memory; and the host's."""
    case.require_running()
    case.steps(TREND_STEPS, at_least=TREND_STEPS)
    reasons = []
    pools = (_gpu_pool, _allocator_pool, _host_pool)
    windows = [window for window in (_short_window(case), _long_window(case)) if window is not None]
    for window, pool in itertools.product(windows, pools):
        try:
            name, used, total = pool(window)
        except CannotJudge as missing:
            reasons.append(str(missing))
            continue
        if pool is _host_pool and _is_taken_by_others(window, used):
            continue
        cause = _LEAK if pool is _host_pool else _cause_of(window, used)
        if (symptom := _trend(window, name, used, total, cause)) is not None:
            return symptom
    if len(reasons) == len(windows) * len(pools):
        raise CannotJudge("; ".join(dict.fromkeys(reasons)))
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """A time window in which a trend is looked for, and the horizon to which it is extrapolated."""

    case: Case
    seconds: float
    horizon_s: float
    in_words: str
    """Description of the horizon."""
    means: int = 0
    """Number of means that replace the readings; 0 to use the readings."""

    def host(self, name: str) -> list[float]:
        return self._readings(self.case.view.hosts, name, "")

    def gpu(self, index: int, name: str) -> list[float]:
        return self._readings(self.case.view.gpu_tables[index], name, f"gpu{index}")

    def _readings(self, table: Table, name: str, subject: str) -> list[float]:
        if not self.means:
            return self.case.readings(
                table, name, self.seconds, at_least=TREND_READINGS, subject=subject
            )
        now_s = self.case.now_unix_s
        edges = [now_s - self.seconds * index / self.means for index in range(self.means, -1, -1)]
        means = [v for v in table.means(name, "unix_s", edges) if v is not None]
        if len(means) < self.means / 2:
            raise CannotJudge(f"needs more readings of {name}")
        return means


def _short_window(case: Case) -> _Window:
    return _Window(
        case=case,
        seconds=TREND_WINDOW_S,
        horizon_s=HORIZON_S,
        in_words=f"under {format_seconds(HORIZON_S)}",
    )


def _long_window(case: Case) -> _Window | None:
    first_s = case.view.first_step_unix_s
    session_s = 0.0 if first_s is None else case.now_unix_s - first_s
    if session_s < LONG_WINDOW_S:
        return None
    left_s = case.view.eta_s()
    return _Window(
        case=case,
        seconds=0.9 * session_s,
        horizon_s=UNKNOWN_END_S if left_s is None else left_s,
        in_words="within a day" if left_s is None else "before the run's last step",
        means=LONG_READINGS,
    )


def _gpu_pool(window: _Window) -> tuple[str, list[float], float]:
    case = window.case
    gpu = case.gpu
    used = window.gpu(gpu, "gpu_mem_used_bytes")
    total = case.view.gpus[gpu].gpu_mem_total_bytes if gpu in case.view.gpus else None
    if not total:
        raise CannotJudge(case.view.absent.get(f"gpu{gpu}.gpu_mem_total_bytes", "no total"))
    return f"memory of GPU {gpu}", used, total


def _allocator_pool(window: _Window) -> tuple[str, list[float], float]:
    """Return torch's reserved memory and the limit of the memory plan. Nothing else is known of a GPU without
    counters, such as one that shares the host's memory."""
    reserved = window.host("memory_reserved_bytes")
    plan = window.case.view.memory_plan
    if plan is None or not plan.available_bytes:
        raise CannotJudge("the log has no memory plan")
    return "memory that the allocator may take", reserved, plan.available_bytes


def _host_pool(window: _Window) -> tuple[str, list[float], float]:
    case = window.case
    free = window.host("host_available_bytes")
    total = case.view.host.host_total_bytes if case.view.host else None
    if not total:
        raise CannotJudge(case.view.absent.get("host_total_bytes", "no total of the host's memory"))
    return "memory of the host", [total - available for available in free], total


def _is_taken_by_others(window: _Window, used: list[float]) -> bool:
    """Return whether another process fills the host's memory. False if that is not known because the trainer's
    resident size leaves out some of its memory: CUDA allocations in shared memory, or other ranks."""
    case = window.case
    if case.settings is not None and case.settings.compute.gpus > 1:
        return False
    try:
        gpu = case.gpu
    except CannotJudge:
        gpu = None
    if gpu is not None and (
        gpu not in case.view.gpus or not case.view.gpus[gpu].gpu_mem_total_bytes
    ):
        return False
    try:
        own = window.host("trainer_rss_bytes")
    except CannotJudge:
        return False
    return _growth(own) < _growth(used) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cause:
    """The cause of growing memory, in words."""

    meaning: str
    no_flip: str
    numbers: tuple[Number, ...] = ()


_LEAK = _Cause(
    meaning="something is kept from step to step: a graph, a list of tensors, an unbounded cache",
    no_flip="a leak is in the code: compare the memory snapshots of two steps",
)
_FRAGMENTS = _Cause(
    meaning="tensors do not account for it: the allocator's memory is fragmented, as happens with tensors of changing "
    "sizes",
    no_flip="start the run with PYTORCH_ALLOC_CONF=expandable_segments:True in its environment; the engine's trainer "
    "sets it unless the variable is set already",
)
_OTHERS = _Cause(
    meaning="it is not in torch's allocator: a library's workspace, or another process on this GPU",
    no_flip="no setting changes this: check which processes use the GPU (nvidia-smi)",
)


def _growth(values: list[float]) -> float:
    """Return the growth of the median from the first third to the last."""
    third = len(values) // 3
    return median(values[2 * third :]) - median(values[:third])


def _cause_of(window: _Window, used: list[float]) -> _Cause:
    """Return the cause of the growth of `used`; a leak if the allocator's numbers are not logged."""
    try:
        held, reserved = map(window.host, ("memory_held_bytes", "memory_reserved_bytes"))
    except CannotJudge:
        return _LEAK
    held_growth, reserved_growth, used_growth = _growth(held), _growth(reserved), _growth(used)
    if held_growth >= _INNER_SHARE * used_growth:
        cause = _LEAK
    elif reserved_growth >= _INNER_SHARE * used_growth:
        cause = _FRAGMENTS
    else:
        cause = _OTHERS
    numbers = (
        ("held by tensors, GiB more", held_growth / 2**30, "from the first third to the last"),
        (
            "reserved by the allocator, GiB more",
            reserved_growth / 2**30,
            "from the first third to the last",
        ),
    )
    return _Cause(meaning=cause.meaning, no_flip=cause.no_flip, numbers=numbers)


def _trend(
    window: _Window, name: str, used: list[float], total: float, cause: _Cause
) -> Symptom | None:
    """Judge whether the medians of the three thirds of a window rise; a single jump or a sawtooth is no trend."""
    third = len(used) // 3
    first, middle, last = (median(used[i * third : (i + 1) * third]) for i in range(3))
    grown = last - first
    if grown < GROWTH_SHARE * total or not (grown / 4 < middle - first < 3 * grown / 4):
        return None
    case, table = window.case, window.case.view.hosts
    times = case.reading_rows(table, window.seconds)
    begin, end = (table.value("unix_s", r) or 0.0 for r in (times.start, times.stop - 1))
    per_s = grown / max((end - begin) * 2 / 3, 1.0)
    left_s = max(0.0, total - last) / per_s
    if left_s > window.horizon_s:
        return None
    return Symptom(
        f"the {name} fills up: {format_bytes(total)} will be reached in about {format_seconds(left_s)}",
        [
            ("used, GiB", last / 2**30, f"of {total / 2**30:.1f}"),
            ("growth, GiB per minute", 60 * per_s / 2**30, "from the first third to the last"),
            ("seconds left", left_s, window.in_words),
            *cause.numbers,
        ],
        case.recent(end - begin),
        meaning=cause.meaning,
        no_flip=cause.no_flip,
        part=name,
    )


@rule(
    reads=("psi_memory_full_avg10_pct",),
    threshold=f"{PRESSURE_PCT:g} % of {PRESSURE_WINDOW_S:g} s or more",
)
def memory_pressure(case: Case) -> Symptom | None:
    case.require_running()
    full = mean(case.host_readings("psi_memory_full_avg10_pct", PRESSURE_WINDOW_S, at_least=10))
    if full < PRESSURE_PCT:
        return None
    faults = case.view.host.major_faults_per_s if case.view.host else None
    return Symptom(
        f"all processes waited for memory during {full:.0f} % of the last {PRESSURE_WINDOW_S:.0f} s",
        [
            ("psi_memory_full_avg10_pct, mean", full, f"at least {PRESSURE_PCT:g}"),
            *([("major_faults_per_s", faults, "now")] if faults is not None else []),
        ],
        case.recent(PRESSURE_WINDOW_S),
        meaning="the machine is swapping: with unified memory it may hang before the kernel kills any process",
        **_fewer_rows(case),
    )


def _fewer_rows(case: Case) -> dict[str, str]:
    """Return the flip to half of the rows, or advice if there is none."""
    if case.view.is_foreign:
        return {"no_flip": "lower the batch size in the script, or use a smaller model"}
    half = case.settings.train.rows // 2 if case.settings else 0
    if half:
        return {"flip": f"--set train.rows={half}"}
    return {"no_flip": "the batch already has one row: use smaller models"}
