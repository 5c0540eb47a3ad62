"""Render a run as text: its events, its readings, and a whole RunView. The terminal, the
commands and the notebook print these texts, so that they agree.

An unknown value reads "not measured" or gives its reason; a non-finite number reads `NaN`, `+inf` or `-inf`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from engine.decision import Decision
from engine.limits import PRINTED_LINE
from engine.log.events import (
    ALERT,
    FAIL,
    IDENTITY,
    PASS,
    STAGE,
    SUSPICION,
    AnyEvent,
    CheckpointSaved,
    Compiled,
    DataReady,
    DecisionMade,
    Evaluated,
    FactsRead,
    GpuSample,
    HostSample,
    Imported,
    Judged,
    KernelCounts,
    LauncherGone,
    Logged,
    LogOpened,
    MemoryMeasured,
    MemoryPlanned,
    ModelReady,
    Note,
    Notified,
    Phase,
    ProcessFound,
    ReceiptWritten,
    Recorded,
    RunFinished,
    RunStarted,
    ScriptEnded,
    StackDump,
    StepDone,
    StopForwarded,
    StopRequested,
    StudentSaved,
    TrainerExited,
    TrainerStarted,
    Unrecognised,
    VocabularyCut,
    Watched,
    Worked,
    Wrote,
)
from engine.log.folder import WatchedCommand
from engine.log.gpus import gpu_lines, over_run, rank_lines
from engine.log.read import Liveness
from engine.log.table import Table
from engine.log.view import GOING_ON, SILENT_S, ErrorNote, LogLine, RunView, host_of
from engine.log.write import read_host
from engine.terminal import clipped
from engine.units import NOT_MEASURED, format_bytes, format_count, format_seconds, format_value


def one_line(text: str) -> str:
    """Return `text` as one line that a terminal prints literally: without line breaks or control characters, and
    truncated to the longest line that is printed."""
    text = clipped(text, PRINTED_LINE.most)
    if text.isprintable():
        return text
    spaced = " ".join(line.strip() for line in text.splitlines() if line.strip())
    return "".join(c if c.isprintable() else " " if c.isspace() else ascii(c)[1:-1] for c in spaced)


def number_text(value: float | None, spec: str) -> str:
    """Format a finite number by a Python format spec; an absent or non-finite one by `format_value`."""
    if value is None or not math.isfinite(value):
        return format_value(value)
    return format(value, spec)


def nats_text(loss: float | None) -> str:
    """Format a loss with its unit."""
    return NOT_MEASURED if loss is None else f"{format_value(loss)} nats/token"


def clock_text(unix_s: float) -> str:
    """Format a time as local wall time."""
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


# Events, each on one line as in a log; decisions and alerts also on several lines.


def decision_lines(decision: DecisionMade) -> list[str]:
    """Render a logged decision as `engine.decision.Decision` does."""
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


LEVEL_WORDS = {
    (ALERT, FAIL): "error",
    (ALERT, SUSPICION): "warning",
    (IDENTITY, FAIL): "contradiction",
}


def level_text(judged: Judged) -> str:
    """Return the word for the level of a result; LEVEL_WORDS has those that differ from the level."""
    return LEVEL_WORDS.get((judged.by, judged.level), judged.level)


def alert_lines(alert: Judged) -> list[str]:
    """Render an alert with its numbers, what it means, and the flip that would test it."""
    numbers = [
        f"{name} {number_text(value, '.4g')} ({alert.compared.get(name, '')})"
        for name, value in alert.numbers.items()
    ]
    begin, end = clock_text(alert.from_unix_s), clock_text(alert.to_unix_s)
    steps = f"steps {alert.first_step} to {alert.step}, " if alert.step else ""
    lines = [
        f"{level_text(alert)}: {alert.id}: {alert.text}",
        *(f"  {text}" for text in numbers),
        f"  seen in {steps}{begin} to {end}",
        f"  means: {alert.meaning}",
        f"  test it: {alert.flip}" if alert.flip else f"  no flip: {alert.no_flip}",
    ]
    return [line[: len(line) - len(line.lstrip())] + one_line(line.lstrip()) for line in lines]


def event_text(event: AnyEvent) -> str:
    """Render one event on one line."""
    return one_line(_event_text(event))


def _event_text(event: AnyEvent) -> str:
    match event:
        case LogOpened():
            torn = event.torn_bytes_dropped
            cut = f", {torn} bytes of an unfinished line dropped" if torn else ""
            return f"{event.writer} (pid {event.pid}) opened its log{cut}"
        case Watched():
            return _watched_text(event)
        case ScriptEnded():
            return _script_ended_text(event)
        case Imported():
            return imported_text(event)
        case RunStarted():
            return _started_text(event)
        case Phase():
            return f"{event.name}: {event.detail}" if event.detail else event.name
        case DecisionMade():
            # The rejected values and the override are shown with the decisions, not in the log.
            return ", ".join(line.strip() for line in decision_lines(event)[:2])
        case DataReady():
            return f"data: {'; '.join(' '.join(line.split()) for line in _data_lines(event))}"
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
            return f"kernels {_counts_text(event)}"
        case VocabularyCut():
            return (
                f"vocabulary: the teacher's {event.teacher_ids} ids are cut to {event.student_ids}; "
                f"dropped mass {number_text(event.dropped_mass_mean, '.2e')} mean, "
                f"{number_text(event.dropped_mass_max, '.2e')} max over {event.tokens} tokens"
            )
        case Judged():
            return judged_text(event)
        case StepDone():
            return step_text(event)
        case Worked():
            return f"step {event.step} worked on {len(event.called)} rows"
        case Recorded():
            return f"recorded {event.tensor} of step {event.step} and one token's hidden states"
        case Logged():
            numbers = (f"{name} {format_value(value)}" for name, value in event.values.items())
            return f"step {event.step}: {', '.join(numbers)}"
        case Wrote():
            return wrote_text(event)
        case Evaluated(labelled=None):
            return f"held-out loss at step {event.step}: {format_value(event.loss)}"
        case Evaluated():
            whose = f"{'saved ' if event.saved else ''}{event.subject}"
            return (
                f"held-out loss of the {whose} at step {event.step}: {nats_text(event.loss)} "
                f"({event.labelled} tokens, {format_seconds(event.eval_s)})"
                f"{event.sample and '; '}{event.sample and _sample_text(event)}"
            )
        case CheckpointSaved():
            return (
                f"checkpoint {event.path}: {format_bytes(event.size_bytes)} "
                f"in {format_seconds(event.save_s)}{', best so far' if event.best else ''}"
            )
        case StudentSaved():
            size = format_bytes(event.size_bytes)
            return f"student saved: {event.path} ({size}, sha256 {event.sha256[:12]})"
        case ReceiptWritten():
            return f"receipt written: {event.files} files by hash, its own is {event.sha256[:12]}"
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
        case ProcessFound():
            return _process_text(event)
        case TrainerExited():
            return f"trainer exited: {event.sentence}"
        case LauncherGone():
            return f"launcher is gone ({event.how}); the run continues in the background"
        case StopForwarded():
            return f"{event.signal} forwarded to the trainer"
        case Notified():
            to = [*event.sent, *(f"not {name} ({why})" for name, why in event.failed.items())]
            return f"message {event.message}: {', '.join(to)}"
        case StackDump():
            return f"stacks of the trainer in {event.path}: {event.summary}"
        case HostSample() | GpuSample():
            return sample_text(event)
        case Unrecognised():
            return f"{event.kind} (written by another version): {event.fields}"


def _process_text(event: ProcessFound) -> str:
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.started_unix_s))
    text = f"watching process {event.pid} from outside: {event.executable}, of {event.user}, started {began}"
    ranks = ", ".join(f"rank {rank} is {pid}" for rank, pid in event.ranks.items())
    below = f"; it and {event.processes - 1} below it" if event.processes > 1 else ""
    stacks = f"; no Python stacks: {event.no_stacks}" if event.no_stacks else ""
    return f"{text}{below}{f'; {ranks}' if ranks else ''}; its steps are unknown{stacks}"


def _watched_text(event: Watched) -> str:
    return (
        f"watching process {event.pid}: {event.optimizer} of {format_count(event.parameters)} parameters on "
        f"{event.device}, torch {event.torch}, Python {event.python}"
    )


def imported_text(event: Imported) -> str:
    """Name the tool and the files that a run was imported from."""
    size = format_bytes(sum(size for _, size, _ in event.files))
    count = f"{len(event.files)} file{'' if len(event.files) == 1 else 's'}"
    return f"imported from {event.source}: {event.path} ({count}, {size})"


def _script_ended_text(event: ScriptEnded) -> str:
    if event.exception is None:
        return "the training ended" + (", the script goes on" if event.how == "goes on" else "")
    message = f": {event.message}" if event.message else ""
    return f"the script ended with {event.exception} at {event.where or 'an unknown line'}{message}"


def _started_text(event: RunStarted) -> str:
    resumed = f", resumed from step {event.resumed_from}" if event.resumed_from is not None else ""
    return (
        f"run {event.name}: {event.steps} steps of {event.rows_per_step} x {event.seq_len} tokens "
        f"on {event.device}, alpha {number_text(event.alpha, 'g')} (weight of CE), "
        f"T {number_text(event.temperature, 'g')}, peak lr {number_text(event.peak_lr, 'g')}, "
        f"{format_count(event.trainable_parameters)} trainable{resumed}"
    )


def _plan_text(plan: MemoryPlanned) -> str:
    available = f"available unknown: {plan.available_source}"
    if plan.available_bytes is not None:
        available = f"{format_bytes(plan.available_bytes)} available ({plan.available_source})"
    return f"memory: {format_bytes(plan.predicted_bytes)} predicted at the peak, {plan.peak_phase}; {available}"


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
        f"; differs from a kernel compiled during warm-up in {', '.join(event.differs)}"
        if event.differs
        else ""
    )
    return f"COMPILE AFTER WARM-UP: {text}{differs}"


def judged_text(judged: Judged) -> str:
    """Render the result of a check, rule or identity: a failure is in capitals, and unknown never reads as a pass."""
    match judged.by:
        case "check":
            level = {PASS: PASS, FAIL: "FAIL"}.get(judged.level, "unknown")
            return f"check {judged.id}: {level}: {judged.text} ({format_seconds(judged.cost_s)})"
        case "alert" if judged.level == PASS:
            return (
                f"alert {judged.id} is over after {format_seconds(judged.numbers.get('active_s'))}"
            )
        case "alert":
            return f"ALERT {judged.id}: {judged.text}"
        case "number":
            return f"NON-FINITE: {judged.id} is {judged.text} at step {judged.step}"
    level = level_text(judged)
    level = level.upper() if judged.level == FAIL else level
    return f"{judged.by} {judged.id} at step {judged.step}: {level}: {judged.text}"


LOSSES = 4
"""Maximum number of losses shown for one step."""


def step_text(step: StepDone) -> str:
    """Render the numbers of a step. Cross entropy, KL divergence and agreement are left out where they are absent (no
    teacher, or a watched script); any other absent number is shown as not measured."""
    parts = [f"step {step.step}", f"loss {format_value(step.loss)}"]
    if step.losses:
        parts[-1] += f" = {' + '.join(map(format_value, step.losses[:LOSSES]))}"
        parts[-1] += " + ..." if len(step.losses) > LOSSES else ""
    if step.ce is not None:
        parts.append(f"ce {format_value(step.ce)}")
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
    """Render the readings of a sample by name."""
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


# Readings: GPU, host, and the memory that the trainer reports.


def device_lines(view: RunView, width: int = 100) -> list[str]:
    """Render GPU and host readings; a missing one is shown with its reason, if known."""
    lines = [*gpu_lines(view, width), *rank_lines(view), *host_lines(view)]
    for host, host_view in view.hosts_now.items():
        lines += [f"{host}:", *host_lines(host_view)]
    no_lines = "no reading yet" if view.imported is None else "the imported log has no readings"
    return lines or [no_lines]


def host_lines(view: RunView) -> list[str]:
    """Render the memory that the trainer reports, the host's readings and, if no GPU is read, the reason."""
    lines: list[str] = []
    if view.memory_peak is not None and view.memory_peak.measured_bytes is not None:
        lines.append(
            f"       job {format_bytes(view.memory_peak.measured_bytes)} at its peak by step "
            f"{view.memory_peak.step} ({view.memory_peak.source})"
        )
    # Shown after the memory that contains it: the GPU's, or the host's on a machine without a GPU.
    held = _held_lines(view)
    lines += held if view.gpus else []
    lines += _no_gpu_lines(view)
    if view.host is not None:
        cell = _cells(view, view.host, "")
        free, total = cell("host_available_bytes"), cell("host_total_bytes")
        lines += [
            f"host   available {free} / {total}{_shared_memory_note(view)}  load {cell('load1')}",
            f"       trainer rss {cell('trainer_rss_bytes')}  cpu {cell('trainer_cpu_pct')}",
        ]
    return lines + ([] if view.gpus else held)


def _no_gpu_lines(view: RunView) -> list[str]:
    """Return the reason why no GPU is read; empty if one is read, or before the facts of the machine are logged."""
    if view.gpus or view.facts is None:
        return []
    return [
        f"GPU    {view.absent.get('gpu_count') or view.facts.get('nvml_absent') or NOT_MEASURED}"
    ]


def run_device_lines(view: RunView, width: int = 100) -> list[str]:
    """Render the GPU and host readings of the whole run: medians and extremes."""
    gpus = gpu_lines(view, width, whole_run=True)
    lines = [*gpus, *rank_lines(view), *run_host_lines(view)]
    for host, host_view in view.hosts_now.items():
        lines += [f"{host}:", *run_host_lines(host_view)]
    return [*_no_gpu_lines(view), *lines] if lines else []


def run_host_lines(view: RunView) -> list[str]:
    """Render the host's readings over the whole run."""
    lines: list[str] = []
    if view.memory_peak is not None and view.memory_peak.measured_bytes is not None:
        peak = view.memory_peak
        lines.append(f"job    {format_bytes(peak.measured_bytes)} at its peak ({peak.source})")
    hosts = view.hosts
    least = _over_run(hosts, "host_available_bytes", "lowest")
    lines += _reading_line("host   available", least, "min")
    rss = _over_run(hosts, "trainer_rss_bytes", "highest")
    cpu = _over_run(hosts, "trainer_cpu_pct", "median")
    lines += _reading_line("       trainer rss", rss, "peak", f" cpu {cpu} (median)" if cpu else "")
    return lines


def _reading_line(label: str, reading: str, *after: str) -> list[str]:
    """Return a reading as a list of one line; an empty list if it was never read."""
    return [" ".join(filter(None, (label, reading, *after)))] if reading else []


def _over_run(table: Table, name: str, which: Literal["lowest", "median", "highest"]) -> str:
    """Format the min, median or max of a reading over all rows of a table; empty if it was never read. The last word
    of the reading's name is its unit."""
    reading = over_run(table, name, which)
    return "" if reading is None else _UNITS[name.rsplit("_", 1)[-1]](reading)


def _held_lines(view: RunView) -> list[str]:
    """Render the memory that the trainer reports; empty if it reports none."""
    host = view.host
    if host is None or host.memory_held_bytes is None:
        return []
    cell = _cells(view, host, "")
    reserved = ""
    if host.memory_reserved_bytes is not None:
        reserved = f", {cell('memory_reserved_bytes')} reserved"
    return [
        f"       job holds {cell('memory_held_bytes')}{reserved}, {cell('memory_peak_bytes')} at its peak "
        f"({host.memory_source or NOT_MEASURED})"
    ]


def _shared_memory_note(view: RunView) -> str:
    """Return a note that host and GPU share their memory; empty if they do not."""
    unified = (view.facts or {}).get("cuda0_integrated") == "yes"
    return " (host pool, shared with the GPU)" if unified else ""


_UNITS: dict[str, Callable[[float], str]] = {
    "bytes": format_bytes,
    "pct": lambda value: f"{number_text(value, '.0f')}%",
    "w": lambda value: f"{number_text(value, '.0f')} W",
    "mhz": lambda value: f"{number_text(value, '.0f')} MHz",
    "c": lambda value: f"{number_text(value, '.0f')} C",
    "load1": lambda value: number_text(value, ".1f"),
}


def _cells(view: RunView, sample: HostSample | GpuSample, prefix: str) -> Callable[[str], str]:
    """Return a function that formats a reading of `sample` by its name; the last word of a name is its unit."""

    def cell(name: str) -> str:
        value: Any = getattr(sample, name)
        if value is None:
            return one_line(view.absent.get(prefix + name, NOT_MEASURED))
        return _UNITS[name.rsplit("_", 1)[-1]](value)

    return cell


# A whole view.


def has_ended(state: str) -> bool:
    """Return whether a run in this state has ended."""
    return state not in GOING_ON


ERRORS_SHOWN = 20
"""Maximum number of error notes shown at once."""


def errors_text(count: int) -> str:
    """Format the number of error notes: `2 errors`; empty if there are none."""
    return f"{count} error{'s' if count > 1 else ''}" if count else ""


def error_lines(errors: Sequence[ErrorNote], path: object = "RUN") -> list[str]:
    """Render the first ERRORS_SHOWN error notes, and the number of the rest."""
    lines = [one_line(f"{clock_text(e.unix_s)} error: {e.note.text}") for e in errors]
    more = len(lines) - ERRORS_SHOWN
    return [
        *lines[:ERRORS_SHOWN],
        *([f"{more} more errors: engine tail {path}"] if more > 0 else []),
    ]


def line_text(line: LogLine) -> str:
    """Render a log line with its local wall time, and with its host if that is not the run's first host."""
    return f"{clock_text(line.unix_s)} {host_words(line)}{event_text(line.event)}"


def host_words(line: LogLine) -> str:
    """Return the prefix of a line that a host other than the first has logged; empty for the first host."""
    host = host_of(line.source)
    return f"{host}: " if host else ""


def status_text(view: RunView, alive: Liveness) -> str:
    """Render the run in one line: state, progress, loss, pace and time left. The verdict line
    (`engine.watch.verdict_line`) has what is wrong with the run and how it ended."""
    state = view.state(alive)
    parts = [state.upper()]
    if view.total_steps is not None:
        parts.append(f"step {view.last_step}/{view.total_steps}")
    elif view.last_step:
        parts.append(f"step {view.last_step}")
        if view.batch is not None:
            parts.append("batch {}/{} of this epoch".format(*view.batch))
    if state == "starting" and view.phase is not None:
        parts.append(event_text(view.phase))
    if len(view.steps):
        parts.append(f"loss {format_value(view.steps.last('loss'))}")
    student = view.eval_of("student")
    if student is not None:
        parts.append(f"held-out {format_value(student.loss)}")
    parts += [] if has_ended(state) else _pace(view, state, alive)
    return one_line(" | ".join(parts))


def _pace(view: RunView, state: str, alive: Liveness) -> list[str]:
    parts = []
    eta_s = view.eta_s()
    if view.tokens_per_second() is not None:
        parts.append(_pace_text(view))
    if eta_s and state == "running":
        parts.append(f"{format_seconds(eta_s)} left")
    if alive.trainer and not alive.supervisor:
        parts.append("UNWATCHED: the supervisor is gone")
    return parts


def share_of_peak(view: RunView) -> float | None:
    """Return the model FLOPs utilisation: FLOP/s of the training as a fraction (0 to 1) of the device's dense bf16
    peak; None if the pace or the peak is not known."""
    started, pace = view.started, view.tokens_per_second()
    if started is None or not started.flops_per_token or not started.peak_flops_per_s or not pace:
        return None
    return pace * started.flops_per_token / started.peak_flops_per_s


def _pace_text(view: RunView) -> str:
    pace, share = view.tokens_per_second(), share_of_peak(view)
    return f"{format_count(pace)} tok/s" + (f" ({share:.0%} of peak bf16)" if share else "")


def ending_text(view: RunView, state: str) -> str:
    """Return one sentence on how a run ended; empty if that is unknown."""
    if view.finished is not None:
        return view.finished.reason
    if view.ended_by_rank is not None and view.exit is None:
        return view.ended_by_rank.reason
    if view.exit is not None:
        return view.exit.sentence
    if state == "host_lost":
        return host_lost_text(view)
    return "none of its processes exists and no end was recorded" if state == "vanished" else ""


def identity_text(identity: Judged) -> str:
    """Render the result of an identity of a watched script."""
    return f"{level_text(identity)} {identity.id} at step {identity.step}: {identity.text}"


def host_lost_text(view: RunView) -> str:
    """Describe a run whose end neither the trainer nor its supervisor could record."""
    host = view.host_elsewhere(read_host())
    words = (
        "the machine stopped or restarted while it ran (its boot id differs from the present one; a run copied from "
        "another machine looks the same)"
    )
    if host:
        words = (
            f"it ran on {host}, and nothing was written for {SILENT_S:g} s: that machine stopped, or the run was "
            "copied"
        )
    if (view.facts or {}).get("cuda0_integrated") == "yes":
        words += (
            "; where GPU and host share memory, it may have run out of memory; that is not proved"
        )
    return f"{words}; continue it with `engine distill --resume`"


def result_lines(view: RunView) -> list[str]:
    """Compare the student with the teacher and the untrained student; empty until there is something to compare."""
    names = {"untrained": "student before training", "student": "student", "teacher": "teacher"}
    lines = []
    for subject, words in names.items():
        done = view.eval_of(subject)
        if done is not None and done.labelled is None:
            lines.append(_event_text(done))
        elif done is not None:
            at = f" at step {done.step}" if subject == "student" else ""
            whose = f"{'saved ' if done.saved else ''}{words}{at}"
            lines.append(
                f"held-out loss of the {whose}: {nats_text(done.loss)}{_perplexity(done)}"
                f"{_loss_before_saving(view, done)}"
            )
    if view.student is not None:
        lines.append(f"student saved in {view.student.path}")
    return [one_line(line) for line in lines]


SAMPLES = 40
"""Maximum number of samples shown, the newest ones."""
WRITTEN = 8
"""Maximum number of records of written text shown: the first and the newest ones."""


def has_samples(view: RunView) -> bool:
    """Return whether a model has written text in an evaluation or for training."""
    return bool(view.wrote) or any(done.sample for done in view.evals)


def sample_lines(view: RunView) -> list[str]:
    """Render the texts that a model wrote for training, then the continuations of one held-out prompt at each
    evaluation, the newest last.
    """
    asked = [done for done in view.evals if done.sample]
    lines = _written_lines(view)
    if not asked:
        return lines or [
            "no evaluation has continued a prompt: eval.sample_tokens is 0, or the tokenizer is not known"
        ]
    lines += ["prompt", f"  {_quoted(asked[0].prompt)}"]
    for done in asked[-SAMPLES:]:
        whose = {"student": f"student at step {done.step}", "untrained": "student before training"}
        lines += [
            f"{whose.get(done.subject, done.subject)}  {nats_text(done.loss)}",
            f"  {_quoted(done.sample)}",
        ]
    return lines


def wrote_text(event: Wrote) -> str:
    """Describe the text that a model generated for a training step."""
    return f"{_wrote_numbers(event)}; {_quoted(event.prompt)} -> {_quoted(event.sample)}"


def _wrote_numbers(event: Wrote) -> str:
    return (
        f"step {event.step}: the {event.by} wrote {event.tokens:,} tokens in {event.rows} rows of {event.shortest} to "
        f"{event.longest}, {number_text(event.ended, '.0%')} ended, {number_text(event.repeated, '.0%')} repeated; "
        f"entropy {number_text(event.entropy, '.3f')}, divergence {number_text(event.divergence, '.3f')} nats"
    )


def _written_lines(view: RunView) -> list[str]:
    """Render the first and the newest records of text that a model wrote for training, and the newest text itself."""
    wrote = view.wrote
    if not wrote:
        return []
    shown = wrote if len(wrote) <= WRITTEN else (wrote[0], *wrote[1 - WRITTEN :])
    newest = wrote[-1]
    return [
        *map(_wrote_numbers, shown),
        f"  {_quoted(newest.prompt)}",
        f"  {_quoted(newest.sample)}",
        "",
    ]


def _sample_text(done: Evaluated) -> str:
    return f"{_quoted(done.prompt)} continues {_quoted(done.sample)}"


def _quoted(text: str) -> str:
    """Return a text as a JSON string, so that its spaces and line breaks are visible on one line."""
    return one_line(json.dumps(text, ensure_ascii=False))


def _loss_before_saving(view: RunView, done: Evaluated) -> str:
    """Render the loss before the student was rounded to the dtype of its files; empty if it is the same."""
    unsaved = [
        e.loss
        for e in view.evals
        if e.subject == done.subject and e.step == done.step and not e.saved
    ]
    if not done.saved or not unsaved or unsaved[-1] == done.loss:
        return ""
    return f" ({format_value(unsaved[-1])} before it was saved)"


def _perplexity(done: Evaluated) -> str:
    # exp(x) overflows a float above x = 709.78; a larger loss, or a missing one, has no perplexity to show.
    if done.loss is None or not done.loss < 709:
        return ""
    return f", perplexity {format_value(math.exp(done.loss), 2)}"


def ledger_line(view: RunView) -> str:
    """Break down the time of the newest step by phase; empty when it was not measured."""
    return _shares_of_newest_step("step ", view.phases, least=0.0)


def start_line(view: RunView) -> str:
    """Break down the time to the session's first step by phase; empty before the trainer has opened its log."""
    return _shares("start", view.start_s(), least=0.01)


def start_parts(view: RunView) -> list[dict[str, Any]]:
    """Return the phases of the session's start in order, each with its seconds, as objects for JSON."""
    return [{"phase": name, "seconds": s} for name, s in view.start_s().items()]


def _shares_of_newest_step(title: str, seconds: Mapping[str, float], *, least: float) -> str:
    shares = _shares(title, seconds, least=least)
    return shares and f"{shares}, in the newest step"


def _shares(title: str, seconds: Mapping[str, float], *, least: float) -> str:
    """Render the share of each name in the total seconds, the largest first; shares up to `least` are left out."""
    total = sum(seconds.values())
    if not total:
        return ""
    shares = sorted(seconds.items(), key=lambda item: -item[1])
    words = ", ".join(
        f"{name} {format_seconds(s)} ({s / total:.0%})" for name, s in shares if s > least * total
    )
    return f"{title}  {format_seconds(total)}: {words}"


def speed_lines(view: RunView) -> list[str]:
    """Render the pace of the last steps (and its share of the device's peak, if known), and break down three times by
    phase: the
    device's and the host's time of the newest step, and the start."""
    pace = [] if view.tokens_per_second() is None else [f"speed  {_pace_text(view)}"]
    host = _shares_of_newest_step("host ", view.host_s, least=0.01)
    return [*pace, *filter(None, [ledger_line(view), host, start_line(view)])]


# Longer summaries of a view: checks and compiles.


CHECK_SIGNS = {"fail": "x FAIL", "unknown": "? unknown", "pass": "+ pass"}


def check_lines(view: RunView) -> list[str]:
    """Render the first-minute checks (failed, then unknown, then passed), and the error notes."""
    checks, errors = view.checks, error_lines(view.errors)
    if not checks:
        return ["no check has run yet", *errors]
    order = list(CHECK_SIGNS)
    levels = {
        check.id: check.level if check.level in order else "unknown" for check in checks.values()
    }
    ordered = sorted(checks.values(), key=lambda check: order.index(levels[check.id]))
    counts = ", ".join(f"{list(levels.values()).count(level)} {level}" for level in reversed(order))
    cost = sum(check.cost_s or 0.0 for check in ordered)
    return [
        f"{counts}; they took {format_seconds(cost)}",
        *filter(None, [audit_text(view)]),
        *(
            one_line(f"{CHECK_SIGNS[levels[check.id]]} {check.id}: {check.text}")
            for check in ordered
        ),
        *errors,
    ]


AUDITED_STEPS_SHOWN = 4


def audit_text(view: RunView) -> str:
    """Render the coverage of the audit: `audited: steps 1, 20; stages 10 of 10; positions 384 of 384; parameters 100
    %`; empty if no step was audited."""
    steps = [f"{step:,}" for step in view.audited_steps]
    if not steps:
        return ""
    if len(steps) > AUDITED_STEPS_SHOWN:
        steps = [*steps[: AUDITED_STEPS_SHOWN - 1], f"... {steps[-1]} ({len(steps):,} steps)"]
    stages = [check for id, check in view.checks.items() if id.startswith(STAGE)]
    parts = [
        f"step{'s' * (len(view.audited_steps) > 1)} {', '.join(steps)}",
        f"stages {sum(check.level != 'unknown' for check in stages)} of {len(stages)}",
    ]
    student, weights = (
        view.checks[id].numbers if id in view.checks else {}
        for id in ("step_student", "step_weights")
    )
    if all_positions := student.get("all_positions"):
        parts.append(f"positions {student.get('positions') or 0:,.0f} of {all_positions:,.0f}")
    if all_parameters := weights.get("all_parameters"):
        parts.append(f"parameters {100 * (weights.get('compared') or 0) / all_parameters:.0f} %")
    return f"audited: {'; '.join(parts)}"


# Shown for a watched script in place of readings that only a run of the engine has.
UNSEEN_COMMAND = "no probe reported a step, so the optimizer and the gradients are unknown"
OTHERS_KERNELS = "nothing compiled by torch.compile was seen"
OTHERS_DATA = (
    "the data of a watched script is not read; the numbers of its batches are in the steps"
)
OTHERS_RESULT = (
    "held-out losses and checkpoints of a watched script are not seen; it can log its held-out loss with "
    "apr_watch.log(held_out=...)"
)
OTHERS_SAMPLES = "no text is generated from the model of a watched script"

GROUPS = 6
"""Maximum number of an optimizer's parameter groups shown."""


def data_lines(view: RunView) -> list[str]:
    """Render the corpus that the run trains on; empty until it has been read."""
    return [] if view.data is None else [one_line(line) for line in _data_lines(view.data)]


def _data_lines(data: DataReady) -> list[str]:
    lines = [
        f"corpus     {data.source}",
        f"train      {data.train_files:,} documents, {format_count(data.train_tokens)} tokens; an epoch is "
        f"{data.epoch_rows:,} rows",
        f"held out   {data.heldout_files:,} documents, {format_count(data.heldout_tokens)} tokens",
    ]
    if data.labelled_tokens is not None:
        share = data.labelled_tokens / data.train_tokens if data.train_tokens else 0.0
        lines.append(
            f"labels     {format_count(data.labelled_tokens)} tokens, {share:.1%}, are predicted"
        )
    if data.padding:
        lines.append(
            f"padding    {data.padding / (data.padding + data.train_tokens):.1%} of the positions in rows"
        )
    if data.unlabelled_rows:
        lines.append(
            f"           {data.unlabelled_rows:,} rows have no label and are not trained on"
        )
    if data.skipped_files:
        lines.append(f"skipped    {data.skipped_files:,} files")
    if data.copies:
        named = ", ".join(data.copies_named)
        more = ", ..." if data.copies > len(data.copies_named) else ""
        lines.append(
            f"copies     {data.copies:,} of the skipped files copy held-out text: {named}{more}"
        )
    if data.repeated:
        lines.append(f"repeated   {data.repeated:,} training documents repeat an earlier one")
    lines += [f"left out   {count:,}: {why}" for why, count in data.left_out.items()]
    if data.partly_labelled:
        lines.append(
            f"in part    {data.partly_labelled:,} conversations have a turn without labels"
        )
    lines += [f"note       in {count:,}: {remark}" for remark, count in data.remarks.items()]
    lines.append(f"tokens     sha256 {data.train_sha256[:12]}, held out {data.heldout_sha256[:12]}")
    return lines


SETTINGS = "settings of "
"""Prefix of the note that records a framework's settings."""


def command_lines(view: RunView, command: WatchedCommand) -> list[str]:
    """Render the command, optimizer and settings of a watched script, which logs no decisions of a plan."""
    no_commit = "unknown" + ("" if view.imported else ": no git repository was found there")
    lines = [
        f"command    {command.line}",
        f"folder     {command.folder}",
        f"commit     {commit_text(command) or no_commit}",
    ]
    if view.imported is not None:
        lines += _imported_lines(view.imported)
        return [one_line(line) for line in [*lines, *_logged_lines(view)]]
    if view.process is not None:
        return [one_line(line) for line in [*lines, f"process    {event_text(view.process)}"]]
    if view.watched is None:
        return [one_line(line) for line in [*lines, f"optimizer  {UNSEEN_COMMAND}"]]
    watched = view.watched
    lines += [
        f"optimizer  {watched.optimizer} of {format_count(watched.parameters)} parameters on {watched.device}",
        *_group_lines(watched),
        f"versions   torch {watched.torch}, Python {watched.python}",
    ]
    if watched.world > 1:
        lines.append(f"processes  {watched.world}; rank {watched.rank} is shown")
    # Known only if the script uses `apr_watch.callback`.
    settings = [
        note.text.partition(" of ")[2] for note in view.notes if note.text.startswith(SETTINGS)
    ]
    lines.append(f"settings   {settings[-1] if settings else 'unknown'}")
    lines += [f"changed    {made.knob}={made.choice}: {made.reason}" for made in view.decisions]
    return [one_line(line) for line in [*lines, *_logged_lines(view)]]


def _logged_lines(view: RunView) -> list[str]:
    return [
        f"{'logged' if not at else '':11}{name} {format_value(value)} at step {step}"
        for at, (name, (step, value)) in enumerate(view.logged.items())
    ]


FILES = 6
"""Maximum number of an import's files shown."""


def _imported_lines(imported: Imported) -> list[str]:
    lines = [f"source     {imported_text(imported)}"]
    lines += [
        f"{'sha256' if not at else '':11}{sha256[:16]} {name}"
        for at, (name, _, sha256) in enumerate(imported.files[:FILES])
    ]
    if len(imported.files) > FILES:
        lines.append(f"           {len(imported.files) - FILES} more files")
    lines += [
        f"{'names' if not at else '':11}{name} is {original} in {imported.source}"
        for at, (name, original) in enumerate(imported.names.items())
    ]
    return lines


def _group_lines(watched: Watched) -> list[str]:
    lines = []
    for number, group in enumerate(watched.groups[:GROUPS], 1):
        settings = {"lr": "learning rate", "weight_decay": "weight decay"}
        words = [f"{format_count(group.get('parameters'))} parameters"]
        words += [f"{word} {group[name]:g}" for name, word in settings.items() if name in group]
        lines.append(f"{f'group {number}':10} {', '.join(words)}")
    if len(watched.groups) > GROUPS:
        lines.append(f"           {len(watched.groups) - GROUPS} more groups")
    return lines


def commit_text(command: WatchedCommand) -> str:
    """Return the commit, marked if files differ from it; empty if it is not known."""
    if command.commit is None:
        return ""
    clean = command.commit.removesuffix("+")
    return command.commit if clean == command.commit else f"{command.commit} (files differ)"


def _counts_text(counts: KernelCounts) -> str:
    return (
        f"by step {counts.step}: {counts.hits} hits, {counts.misses} misses, "
        f"{counts.disk_hits} of the misses loaded from the disk cache"
    )


def kernel_lines(view: RunView) -> list[str]:
    """Render the kernel caches: hits, misses, and each compile, newest first, with its difference from
    earlier kernels if known."""
    counts = view.kernel_counts
    lines = []
    if counts is not None:
        lines.append(_counts_text(counts))
    late = sum(compiled.after_warm_up for compiled in view.compiles)
    took = sum(compiled.compile_s or 0.0 for compiled in view.compiles)
    if view.compiles:
        lines.append(
            f"{len(view.compiles)} compiled in {format_seconds(took)}, {late} after warm-up"
        )
    for compiled in reversed(view.compiles):
        seconds = "" if compiled.compile_s is None else f" {format_seconds(compiled.compile_s)}"
        where = " from disk" if compiled.disk_hit else ""
        sign = "x LATE" if compiled.after_warm_up else "+"
        lines.append(
            one_line(
                f"{sign} {compiled.compiler} {compiled.kernel}{seconds}{where}: {compiled.key}"
            )
        )
        if compiled.differs:
            lines.append("    " + one_line(f"differs in {', '.join(compiled.differs)}"))
    return lines or ["nothing compiled: this run has no custom kernels, or none yet"]
