"""One event in words: on one line as in a log, and decisions and alerts with all that they say.

What is not known reads "not measured" or gives its reason; a non-finite number reads `NaN` or `+inf`.
"""

from __future__ import annotations

from engine.decision import Decision
from engine.log.events import (
    AlertCleared,
    AlertRaised,
    AnyEvent,
    Checked,
    CheckpointSaved,
    Compiled,
    DataReady,
    DecisionMade,
    Evaluated,
    FactsRead,
    GpuSample,
    HostSample,
    KernelCounts,
    LauncherGone,
    LogOpened,
    MemoryMeasured,
    MemoryPlanned,
    ModelReady,
    NonFinite,
    Note,
    Phase,
    RunFinished,
    RunStarted,
    StackDump,
    StepDone,
    StopForwarded,
    StopRequested,
    StudentSaved,
    TrainerExited,
    TrainerStarted,
    Unrecognised,
    VocabularyCut,
)
from engine.log.phrases import clock_text, nats_text, number_text, one_line
from engine.units import NOT_MEASURED, format_bytes, format_count, format_seconds, format_value


def decision_lines(decision: DecisionMade) -> list[str]:
    """A decision as it stands in the log, in the words of `engine.decision`."""
    lines = Decision(
        knob=decision.knob,
        choice=decision.choice,
        reason=decision.reason,
        rejected=tuple(decision.rejected),
        overridden=decision.overridden,
    ).lines()
    if decision.override:
        lines[-1] = f"  override: {decision.override}"
    return [line[: len(line) - len(line.lstrip())] + one_line(line.lstrip()) for line in lines]


def alert_lines(alert: AlertRaised) -> list[str]:
    """An alert with its numbers, what it means, and what would test it."""
    numbers = [
        f"{name} {number_text(value, '.4g')} ({held})" for name, value, held in alert.numbers
    ]
    begin, end = clock_text(alert.from_unix_s), clock_text(alert.to_unix_s)
    steps = f"steps {alert.first_step} to {alert.last_step}, " if alert.last_step else ""
    lines = [
        f"{alert.severity}: {alert.id}: {alert.title}",
        *(f"  {text}" for text in numbers),
        f"  seen in {steps}{begin} to {end}",
        f"  means: {alert.meaning}",
        f"  test it: {alert.flip}" if alert.flip else f"  no flip: {alert.no_flip}",
    ]
    return [line[: len(line) - len(line.lstrip())] + one_line(line.lstrip()) for line in lines]


def event_text(event: AnyEvent) -> str:
    """One event on one line."""
    return one_line(_event_text(event))


def _event_text(event: AnyEvent) -> str:
    match event:
        case LogOpened():
            torn = event.torn_bytes_dropped
            cut = f", {torn} bytes of an unfinished line dropped" if torn else ""
            return f"{event.writer} (pid {event.pid}) opened its log{cut}"
        case RunStarted():
            return _started_text(event)
        case Phase():
            return f"{event.name}: {event.detail}" if event.detail else event.name
        case DecisionMade():
            # What was rejected and how to override it stands with the decisions, not in the log.
            return ", ".join(line.strip() for line in decision_lines(event)[:2])
        case DataReady():
            return (
                f"data {event.source}: {event.train_files} files, "
                f"{format_count(event.train_tokens)} tokens to train on; "
                f"{event.heldout_files} files, {format_count(event.heldout_tokens)} tokens held "
                f"out; {event.skipped_files} skipped"
            )
        case ModelReady():
            return (
                f"{event.role}: {format_count(event.parameters)} parameters, "
                f"{event.layers} layers x {event.hidden_size}, vocabulary {event.vocab_size}, "
                f"{event.precision}, from {event.source} (sha256 {event.sha256[:12]})"
            )
        case MemoryPlanned():
            return _plan_text(event)
        case MemoryMeasured():
            return _peak_text(event)
        case Compiled():
            return _compiled_text(event)
        case KernelCounts():
            return (
                f"kernels by step {event.step}: {event.hits} hits, {event.misses} misses, "
                f"{event.disk_hits} of them from the cache on disk"
            )
        case VocabularyCut():
            return (
                f"vocabulary: the teacher's {event.teacher_ids} ids are cut to {event.student_ids}; "
                f"dropped mass {number_text(event.dropped_mass_mean, '.2e')} mean, "
                f"{number_text(event.dropped_mass_max, '.2e')} at most over {event.tokens} tokens"
            )
        case Checked():
            return check_text(event)
        case StepDone():
            return step_text(event)
        case Evaluated():
            return (
                f"held-out loss of the {event.subject} at step {event.step}: {nats_text(event.loss)} "
                f"({event.labelled} tokens, {format_seconds(event.eval_s)})"
            )
        case NonFinite():
            return f"NON-FINITE: {event.field} is {event.value} at step {event.step}"
        case CheckpointSaved():
            return (
                f"checkpoint {event.path}: {format_bytes(event.size_bytes)} "
                f"in {format_seconds(event.save_s)}{', best so far' if event.best else ''}"
            )
        case StudentSaved():
            size = format_bytes(event.size_bytes)
            return f"student saved: {event.path} ({size}, sha256 {event.sha256[:12]})"
        case StopRequested():
            return f"stop requested ({event.reason}) at step {event.step}"
        case Note():
            return f"{event.level}: {event.text}"
        case RunFinished():
            return f"{event.state} at step {event.step}: {event.reason} (exit {event.exit_code})"
        case FactsRead():
            return "device: " + ", ".join(f"{k}={v}" for k, v in event.facts.items())
        case TrainerStarted():
            return (
                f"trainer started (pid {event.trainer_pid}, supervisor pid {event.supervisor_pid})"
            )
        case TrainerExited():
            return f"trainer exited: {event.sentence}"
        case LauncherGone():
            return f"launcher is gone ({event.how}); the run goes on by itself"
        case StopForwarded():
            return f"{event.signal} forwarded to the trainer"
        case AlertRaised():
            return f"ALERT {event.id}: {event.title}"
        case AlertCleared():
            return f"alert {event.id} is over; it stood for {format_seconds(event.stood_s)}"
        case StackDump():
            return f"stacks of the trainer in {event.path}: {event.summary}"
        case HostSample() | GpuSample():
            return sample_text(event)
        case Unrecognised():
            return f"{event.kind} (written by another version): {event.fields}"


def _started_text(event: RunStarted) -> str:
    again = f", resumed from step {event.resumed_from}" if event.resumed_from is not None else ""
    return (
        f"run {event.name}: {event.steps} steps of {event.rows_per_step} x {event.seq_len} tokens "
        f"on {event.device}, alpha {number_text(event.alpha, 'g')} (weight of CE), "
        f"T {number_text(event.temperature, 'g')}, peak lr {number_text(event.peak_lr, 'g')}, "
        f"{format_count(event.trainable_parameters)} trainable{again}"
    )


def _plan_text(plan: MemoryPlanned) -> str:
    room = f"available unknown: {plan.available_source}"
    if plan.available_bytes is not None:
        room = f"{format_bytes(plan.available_bytes)} available ({plan.available_source})"
    return f"memory: {format_bytes(plan.predicted_bytes)} predicted at the peak, {plan.peak_phase}; {room}"


def _peak_text(peak: MemoryMeasured) -> str:
    if peak.measured_bytes is None:
        return f"memory peak by step {peak.step}: {NOT_MEASURED} ({peak.source})"
    text = f"memory peak by step {peak.step}: {format_bytes(peak.measured_bytes)} ({peak.source})"
    if not peak.predicted_bytes:
        return f"{text}, nothing was predicted"
    return f"{text}, {number_text(peak.measured_bytes / peak.predicted_bytes, '.0%')} of the prediction"


def _compiled_text(event: Compiled) -> str:
    how = {True: "from the cache on disk", False: "compiled", None: "compiled or from a cache"}
    text = (
        f"{event.compiler}: {event.key} {how[event.disk_hit]} in {format_seconds(event.compile_s)}"
    )
    if not event.after_warm_up:
        return text
    differs = (
        f"; differs from one that was warmed in {', '.join(event.differs)}" if event.differs else ""
    )
    return f"COMPILE AFTER WARM-UP: {text}{differs}"


def check_text(check: Checked) -> str:
    """A check's answer with what it cost: a failure stands out, what is unknown is never a pass."""
    level = {"pass": "pass", "fail": "FAIL"}.get(check.level, "unknown")
    return f"check {check.id}: {level}: {check.reason} ({format_seconds(check.cost_s)})"


def step_text(step: StepDone) -> str:
    """A step with every number that was logged; what needs a teacher is left out where there is
    none, another number that is missing is said to be."""
    parts = [f"step {step.step}", f"loss {format_value(step.loss)}", f"ce {format_value(step.ce)}"]
    if step.kd is not None:
        parts.append(f"kd {format_value(step.kd)}")
    if step.agreement is not None:
        parts.append(f"agree {number_text(step.agreement, '.1%')}")
    parts += [
        f"lr {number_text(step.lr, '.2e')}",
        f"|g| {format_value(step.grad_norm, 3)}",
        format_seconds(step.step_s) if step.step_s is not None else f"time {NOT_MEASURED}",
    ]
    return "  ".join(parts)


def sample_text(sample: HostSample | GpuSample) -> str:
    """The readings that a sample has, by name."""
    subject = "host" if isinstance(sample, HostSample) else f"gpu {sample.index}"
    readings = []
    for name in sample.__struct_fields__:
        value = getattr(sample, name)
        if name in ("v", "seq", "t_s", "nf", "absent", "index") or value is None:
            continue
        if name.endswith("_bytes"):
            readings.append(f"{name.removesuffix('_bytes')}={format_bytes(value)}")
        else:
            readings.append(
                f"{name}={value if isinstance(value, str) else number_text(value, 'g')}"
            )
    return f"{subject}: {', '.join(readings) or NOT_MEASURED}"
