"""Rules about the GPU while a model should be computing.

`gpu_util_pct` shows only that some kernel ran: enough to find an idle GPU, and no proof that a busy one works well.
"""

from __future__ import annotations

from engine.units import format_seconds
from engine.watch.rules.rule import CannotJudge, Case, Symptom, mean, rule

WINDOW_S = 30.0
"""Window of the readings in seconds: long enough to cover the gap between two steps and a small evaluation, short
enough to report within a minute."""
READINGS = 10
"""Minimum number of readings in the window, which has 30 at 1 Hz: the sampler may have halved its rate or missed
some."""
IDLE_PCT = 5.0
"""Utilisation up to which a GPU is idle, in percent; a GPU that waits for data between steps shows tens of
percent."""
SLOWED_SHARE = 0.2
"""Share of the readings with throttled clocks, 0 to 1, that raises the alert."""
SLOWED_WINDOW_S = 60.0
CPU_PCT = 80.0
"""Minimum CPU use of a trainer that is the bottleneck, in percent of one core."""
TEACHER_SHARE = 0.5
"""Share of the step time in the teacher, 0 to 1, from which the teacher is the bottleneck."""
TEACHER_STEPS = 3


def _require_computing(case: Case) -> None:
    case.require_running()
    if not case.is_computing:
        raise CannotJudge(f"no model is computing: {case.phase}")
    # Readings from before the phase began do not describe it.
    begun = max(case.view.started_unix_s or 0.0, case.view.phase_unix_s or 0.0)
    if case.now_unix_s - begun < WINDOW_S:
        raise CannotJudge(f"needs {WINDOW_S:.0f} s of work")


@rule(
    reads=("gpu_util_pct",),
    threshold=f"mean utilisation of at most {IDLE_PCT:g} % over {WINDOW_S:g} s",
)
def gpu_idle(case: Case) -> Symptom | None:
    gpu = case.gpu
    _require_computing(case)
    util = mean(case.gpu_readings("gpu_util_pct", WINDOW_S, at_least=READINGS))
    if util > IDLE_PCT:
        return None
    silent_s = case.now_unix_s - (case.view.heartbeat_unix_s or case.now_unix_s)
    backend = case.choice("teacher.backend")
    flip = "--set teacher.backend=dequantized" if backend not in (None, "dequantized") else ""
    return Symptom(
        f"GPU {gpu} was {util:.1f} % busy for {format_seconds(WINDOW_S)} while step "
        f"{case.view.last_step + 1} should be computed",
        [
            ("gpu_util_pct, mean", util, f"at most {IDLE_PCT:g} is idle"),
            ("seconds since the last line of the trainer", silent_s, "how long nothing was done"),
        ],
        case.recent(WINDOW_S),
        meaning="the work is not on the GPU: it is done by the CPU, or the process waits for something else",
        flip=flip,
        no_flip="read the stacks of the trainer: they show its current line",
    )


@rule(
    reads=("gpu_util_pct", "trainer_cpu_pct", "teacher_s or a stack dump"),
    threshold=f"utilisation at most {IDLE_PCT:g} %, trainer at {CPU_PCT:g} % CPU or more, half of the "
    "step time (or the stack) in the teacher",
)
def cpu_bound_teacher(case: Case) -> Symptom | None:
    gpu = case.gpu
    _require_computing(case)
    util = mean(case.gpu_readings("gpu_util_pct", WINDOW_S, at_least=READINGS))
    cpu = mean(case.host_readings("trainer_cpu_pct", WINDOW_S, at_least=READINGS))
    evidence, in_teacher = _time_in_teacher(case)
    if util > IDLE_PCT or cpu < CPU_PCT or not in_teacher:
        return None
    backend = case.choice("teacher.backend") or "not logged"
    flip = "--set teacher.backend=dequantized" if backend != "dequantized" else ""
    dump = case.view.stack_dump
    line = f", at {dump.python_frame}" if dump is not None and dump.python_frame else ""
    stacks = f"; all threads are in {dump.path}" if dump is not None else ""
    return Symptom(
        f"the teacher is computed by the CPU: GPU {gpu} at {util:.1f} %, the trainer at {cpu:.0f} % CPU{line}",
        [
            ("gpu_util_pct, mean", util, f"at most {IDLE_PCT:g}"),
            ("trainer_cpu_pct, mean", cpu, f"at least {CPU_PCT:g}; 100 is one core"),
            evidence,
        ],
        case.recent(WINDOW_S),
        meaning=f"the operators of the teacher's backend ({backend}) run on the host, whatever its name says{stacks}",
        flip=flip,
        no_flip="this backend is the reference, with no other to try; the stacks show the line",
    )


def _time_in_teacher(case: Case) -> tuple[tuple[str, float, str], bool]:
    """Return evidence of the host's time in the teacher, and whether the teacher takes most of the time. The evidence
    is the time of the steps, or a stack dump before the first steps."""
    view = case.view
    if len(view.steps) - view.session_row >= TEACHER_STEPS:
        rows = case.steps(20, at_least=TEACHER_STEPS)
        times = case.pairs("teacher_s", "step_s", rows)
        share = sum(a for a, _ in times) / max(sum(b for _, b in times), 1e-9)
        number = ("share of step time in the teacher", share, f"at least {TEACHER_SHARE:g}")
        return number, share >= TEACHER_SHARE
    if view.stack_dump is None:
        raise CannotJudge(f"needs {TEACHER_STEPS} steps or the stacks of the trainer")
    depth = next(
        (n for n, f in enumerate(view.stack_dump.python_stack) if "engine/teachers/" in f), -1
    )
    number = ("frames between the innermost line and the teacher", depth, "in the stack dump")
    return number, depth >= 0


@rule(
    reads=("clock_event_reasons",),
    threshold=f"in {100 * SLOWED_SHARE:g} % of the readings of {SLOWED_WINDOW_S:g} s",
)
def throttled(case: Case) -> Symptom | None:
    gpu = case.gpu
    case.require_running()
    slowed = case.gpu_readings("slowed", SLOWED_WINDOW_S, at_least=2 * READINGS)
    share = mean(slowed)
    if share < SLOWED_SHARE:
        return None
    now = case.view.gpus.get(gpu)
    words = (now.clock_event_reasons if now else None) or "none"
    heat = [("gpu_temperature_c", now.gpu_temperature_c, "now")] if now else []
    return Symptom(
        f"the clocks of GPU {gpu} were throttled for {100 * share:.0f} % of the last minute ({words})",
        [
            ("share of readings", share, f"at least {SLOWED_SHARE:g}"),
            *((n, v, h) for n, v, h in heat if v is not None),
        ],
        case.recent(SLOWED_WINDOW_S),
        meaning="heat or the power supply limits the GPU: times measured now cannot be compared with earlier ones",
        no_flip="the cause is outside the run: cooling, power supply, or a limit that was set",
    )


@rule(
    reads=("any GPU reading",),
    threshold="NVML says that the GPU is lost",
)
def gpu_lost(case: Case) -> Symptom | None:
    gpu = case.gpu
    reasons = [r for n, r in case.view.absent.items() if n.startswith(f"gpu{gpu}.")]
    lost = [r for r in reasons if "GPU is lost" in r]
    if not lost:
        return None
    return Symptom(
        f"GPU {gpu} is lost: it has fallen off the bus until the machine is rebooted",
        [("readings that say so", len(lost), f"of {len(reasons)} without a value")],
        case.recent(0.0),
        meaning="the driver lost the GPU (an Xid 79 in the kernel's log); no restart of the run can help",
        no_flip="this is hardware or driver: look for Xid in the kernel's log",
    )
