"""One run of an arm: start an ordinary run, watch it until its end or its time limit, and summarise it.

The run is a separate process that knows nothing of the experiment; everything known about it comes from its logs. A run
that takes too long is asked to stop, and killed if it does not react, because a process that hangs in a system call or
was stopped by a signal cannot react. Its folder is kept.

Times are medians over the steps after the warm-up; for a watched script, `usual_step_s` averages them. A run that did
not complete has no metric value; its end is described by the exit attribution.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine import limits
from engine.errors import BadInput, RunLogError, write_error
from engine.files import open_plain
from engine.flips import command
from engine.flips.plan import BURSTS, Plan
from engine.flips.script_folder import (
    copy_folder,
    hash_files,
    keep_code,
    read_code,
    remove_copy,
    write_line,
)
from engine.log.fold import Follower
from engine.log.folder import RunFolder, create_run, is_run
from engine.log.held import ALLOCATOR, read_held
from engine.log.observed import is_shown, shown, trace_of
from engine.log.text import has_ended, one_line
from engine.log.view import RunView, Table
from engine.signals import descendants, end
from engine.spec import spec_to_toml
from engine.version import VERSION
from engine.watch.machine_guard import SUSPENDED
from engine.watch.start_and_stop import Launched, launch

OVER_THE_LIMIT = "over the limit"
ENDED_EARLY, NO_STEPS = "ended early", "not seen"
"""States of a command that exited with code 0 after too few optimizer steps, or without any."""
ANSWERED = "answered"
"""State of a run that was ended because its logs had answered the flip's question."""
FROM_OUTSIDE = frozenset(
    {"killed_external", "terminated", "interrupted", "host_lost", "unknown", "stopped", "vanished"}
)
"""States that say nothing about the arm: something else ended it, or the cause is unknown."""
_STEPS_COMPARED = 3
_TAIL_BYTES = 4096
_LAST_LINE_CHARS = 200
POLL_S = 0.05
STOP_GRACE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one run of an arm."""

    arm: str
    run: str
    """The run's folder, relative to that of the flip."""
    state: str
    """`completed`, `over the limit` for a run that was ended because it took too long, otherwise the state of
    the exit attribution: crashed, alloc_failed, oom_memcg, killed_external, ..."""
    reason: str
    steps: int
    seconds: float
    """Wall time of the process, including start and loading."""
    value: float | None
    """The plan's metric; None when the run has none."""
    no_value: str = ""
    """Reason why `value` is None."""
    shown: bool | None = None
    """Whether its logs show the observation of the plan; None where they cannot tell, or the plan has none."""
    metrics: dict[str, float] = field(default_factory=dict)
    losses: list[float | None] = field(default_factory=list)
    """Losses of the first steps; None for one that is NaN or infinite."""
    teacher_loss: float | None = None
    """Held-out loss of the teacher before the first step: its output, in one number."""
    choices: dict[str, str] = field(default_factory=dict)
    """The choice of every decision, by its setting."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts that the run logged about itself, by the names in `pair.FACTS`."""
    slowed: float | None = None
    """Fraction of the measured time in which heat or a power brake held the clocks down."""
    late_compiles: int = 0
    """Kernels compiled after the warm-up, which a step had to wait for."""
    alerts: list[str] = field(default_factory=list)
    """Alerts that were active at its end."""
    gpu_used_before_bytes: float | None = None
    """Memory of the first GPU that other processes held when the run began; None without a GPU."""
    neighbour_load: float | None = None
    """Mean number of other processes that ran or waited for a CPU."""
    suspended: bool = False
    """Whether the machine slept during the run."""
    trace: str = ""
    """Hash of what the run computed (`trace_of`), if the plan has an observation; equal for bit-identical runs."""
    code: str = ""
    """SHA-256 of the list of the script's files, before its line was changed; empty where no copy was made."""

    @property
    def completed(self) -> bool:
        return self.state == "completed"

    @property
    def ended_from_outside(self) -> bool:
        return self.state in FROM_OUTSIDE

    def in_words(self) -> str:
        """Describe the end of the run: `failed after 3 steps: ...`"""
        if self.state == OVER_THE_LIMIT:
            return f"made {self.reason}"
        steps = f"{self.steps} step{'s' if self.steps != 1 else ''}"
        return f"{self.state} after {steps}{f': {self.reason}' if self.reason else ''}"


def sum_up(
    plan: Plan, arm: str, run: RunFolder, view: RunView, state: str, seconds: float, *, over: bool
) -> Outcome:
    """Summarise a run whose processes have ended. `state` is the view's state; `over` means that the run was
    ended because it exceeded the plan's limit."""
    state, reason = _end_state(plan, view, state, over=over)
    metrics = metrics_of(view, plan.warm_up_steps)
    if plan.command is not None:
        # A command leaves in its folder what its logs lack.
        if (held := read_held(run)) is not None and held.source == ALLOCATOR:
            metrics.setdefault("peak_memory_bytes", held.peak_bytes)
        if state not in ("completed", OVER_THE_LIMIT) and (last := _last_line(run)):
            reason = f"{reason.rstrip('.')}; its last line: {last}"
    value = metrics.get(plan.metric) if state == "completed" else None
    no_value = ""
    if value is None:
        no_value = (
            "it did not complete" if state != "completed" else _why_no_value(plan.metric, view)
        )
    teacher = view.eval_of("teacher")
    window = _window(view, plan.warm_up_steps)
    return Outcome(
        arm=arm,
        run=f"{run.path.parent.name}/{run.name}",
        state=state,
        reason=reason,
        steps=view.last_step,
        seconds=seconds,
        value=value,
        no_value=no_value,
        metrics=metrics,
        losses=[_finite(loss) for loss in view.steps.values("loss", 0, plan.warm_up_steps)],
        teacher_loss=None if teacher is None else _finite(teacher.loss),
        choices={decision.knob: decision.choice for decision in view.decisions},
        facts=_facts(view),
        slowed=_mean(_first_gpu(view), "slowed", window),
        late_compiles=sum(event.after_warm_up for event in view.compiles),
        alerts=sorted(view.alerts),
        gpu_used_before_bytes=(view.facts or {}).get("gpu0_memory_used_bytes"),
        neighbour_load=_neighbour_load(view, window),
        suspended=any(note.text.startswith(SUSPENDED) for note in view.notes),
    )


def _end_state(plan: Plan, view: RunView, state: str, *, over: bool) -> tuple[str, str]:
    if over:
        phase = view.phase.name if view.phase is not None else "starting"
        text = f"{view.last_step} steps in {plan.run_limit_s:.0f} s, the last phase was {phase}"
        if view.stack_dump is not None:
            text += f"; {view.stack_dump.summary}"
        return OVER_THE_LIMIT, text
    if plan.kind == "command":
        return _end_state_of_command(plan, view, state)
    done, own_reason = view.finished, ""
    if done is not None:
        # The plan's steps may be fewer than the spec's.
        made_its_steps = done.exit_code == 0 and view.last_step >= plan.steps
        if done.state == "completed" or made_its_steps:
            return "completed", done.reason
        own_reason = done.reason
    if view.exit is None:
        return state, own_reason
    # A run that logged a stop had been asked to stop; its exit code adds nothing.
    is_stopped = done is not None and done.state == "stopped"
    return "stopped" if is_stopped else view.exit.state.lower(), own_reason or view.exit.sentence


def _last_line(run: RunFolder) -> str:
    """Return the last line that a command printed; empty where there is none."""
    try:
        with open_plain(run.stderr) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return ""
    return one_line(lines[-1])[:_LAST_LINE_CHARS] if lines else ""


def _end_state_of_command(plan: Plan, view: RunView, state: str) -> tuple[str, str]:
    if view.exit is None:
        return state, ""
    if view.exit.returncode != 0:
        return view.exit.state.lower(), view.exit.sentence
    if view.last_step >= plan.steps:
        return "completed", f"ended after {plan.steps} steps"
    if view.watched is None:
        return NO_STEPS, "no optimizer of torch stepped in a Python process that the probe reached"
    return ENDED_EARLY, f"the script ended by itself before the {plan.steps} of --steps"


def metrics_of(view: RunView, warm_up_steps: int) -> dict[str, float]:
    """Compute every metric that the logs of a run allow, over the steps after the warm-up."""
    metrics: dict[str, float] = {}
    seconds = [s for s in view.steps.values("step_s", warm_up_steps) if s is not None and s > 0]
    tokens = [n for n in view.steps.values("tokens", warm_up_steps) if n is not None]
    if seconds:
        metrics["step_s"] = usual_step_s(seconds) if view.is_foreign else statistics.median(seconds)
    if seconds and tokens:
        metrics["tokens_per_s"] = sum(tokens) / sum(seconds)
    losses = [x for x in view.steps.values("loss", warm_up_steps) if x is not None]
    if losses and all(map(math.isfinite, losses)):
        metrics["final_loss"] = statistics.fmean(losses[-max(1, len(losses) // 4) :])
    if view.memory_peak is not None and view.memory_peak.measured_bytes:
        metrics["peak_memory_bytes"] = view.memory_peak.measured_bytes
    window = _window(view, warm_up_steps)
    power = _mean(_first_gpu(view), "gpu_power_w", window)
    if window is not None and power and tokens[1:]:
        # The window begins when the first measured step is done, so that step's tokens are outside.
        metrics["energy_per_token_j"] = power * (window[1] - window[0]) / sum(tokens[1:])
    return metrics


def usual_step_s(seconds: Sequence[float]) -> float:
    """Return the usual time of a step whose times are uneven: the mean, or with many steps the median of the means of
    BURSTS consecutive steps.

    Several loader workers yield their batches in bursts: one step waits for all of them, and the median of single steps
    would be one that does not wait.
    """
    if len(seconds) < 4 * BURSTS:
        return statistics.fmean(seconds)
    begins = range(len(seconds) - BURSTS + 1)
    return statistics.median(statistics.fmean(seconds[b : b + BURSTS]) for b in begins)


def _why_no_value(metric: str, view: RunView) -> str:
    if metric == "peak_memory_bytes" and view.memory_peak is not None:
        return view.memory_peak.source
    if metric == "energy_per_token_j":
        return (
            view.absent.get("gpu0.gpu_power_w") or view.absent.get("gpu") or "no reading of power"
        )
    return "the log has no number for it"


def _window(view: RunView, warm_up_steps: int) -> tuple[float, float] | None:
    """Return the wall times of the first and the last measured step."""
    times = [t for t in view.steps.values("unix_s", warm_up_steps) if t is not None]
    return (times[0], times[-1]) if len(times) >= 2 else None


def _first_gpu(view: RunView) -> Table | None:
    return view.gpu_tables[min(view.gpu_tables)] if view.gpu_tables else None


def _mean(table: Table | None, name: str, window: tuple[float, float] | None) -> float | None:
    if table is None or window is None:
        return None
    values = [
        value
        for row, t in enumerate(table.values("unix_s"))
        if t is not None
        and window[0] <= t <= window[1]
        and (value := table.value(name, row)) is not None
    ]
    return statistics.fmean(values) if values else None


def _neighbour_load(view: RunView, window: tuple[float, float] | None) -> float | None:
    load = _mean(view.hosts, "load1", window)
    own_pct = _mean(view.hosts, "trainer_cpu_pct", window)
    return None if load is None or own_pct is None else max(0.0, load - own_pct / 100)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


_START_FACTS = {
    "device": "device",
    "rows per step": "rows_per_step",
    "seq_len": "seq_len",
    "trainable parameters": "trainable_parameters",
    "engine": "engine",
    "torch": "torch",
}
_DATA_FACTS = {"training tokens": "train_sha256", "held-out tokens": "heldout_sha256"}
_STUDENT_FACTS = {"student precision": "precision"}
_TEACHER_FACTS = {"teacher precision": "precision", "teacher": "sha256"}
_SCRIPT_FACTS = {
    "device": "device",
    "optimizer": "optimizer",
    "trainable parameters": "parameters",
    "ranks": "world",
    "torch": "torch",
}


def _facts(view: RunView) -> dict[str, Any]:
    """Return the facts of `pair.FACTS` that the run has logged by now; a run that hangs has logged few."""
    facts = {
        name: getattr(event, field)
        for event, fields in (
            (view.started, _START_FACTS),
            (view.data, _DATA_FACTS),
            (view.models.get("student"), _STUDENT_FACTS),
            (view.models.get("teacher"), _TEACHER_FACTS),
            (view.watched, _SCRIPT_FACTS),
        )
        if event is not None
        for name, field in fields.items()
    }
    if view.watched is not None:
        facts["rows per step"] = view.steps.values("rows", 0, _STEPS_COMPARED)
    if len(view.steps):
        facts["tokens per step"] = view.steps.values("tokens", 0, _STEPS_COMPARED)
    return facts


class Stopped(Exception):
    """The caller asked the experiment to stop."""


def run_arm(
    plan: Plan,
    *,
    b: bool,
    pair: int,
    folder: Path,
    watch: Callable[[RunView], object],
    stop: Callable[[], bool],
) -> Outcome:
    """Run one arm to its end in the new run folder `folder`.

    `watch` is called with the view while the run goes on. When `stop` returns True, the run is ended and
    Stopped is raised.
    """
    begun_s = time.monotonic()
    start = _start_spec if plan.command is None else _start_command
    launched = start(plan, b, pair, folder)
    follower = Follower(launched.run)
    over = answered = False
    try:
        while launched.process.poll() is None:
            _poll(follower)
            watch(follower.view)
            if stop():
                raise Stopped
            answered = (
                plan.observed is not None
                and is_shown(plan.observed, follower.view, steps=plan.steps) is not None
            )
            over = not answered and time.monotonic() - begun_s > plan.run_limit_s
            if answered or over:
                _end_run(plan, launched, follower)
                break
            time.sleep(POLL_S)
    except BaseException:
        # When the experiment ends early, its arm ends with it.
        _end_run(plan, launched, follower)
        raise
    finally:
        # Closing stdin tells the supervisor that the flip has ended; the supervisor may have exited first.
        with contextlib.suppress(BrokenPipeError):
            if launched.process.stdin is not None:
                launched.process.stdin.close()
        refusal = ""
        if plan.command is not None and plan.command.copied:
            remove_copy(plan.command.where(output_folder(folder)))
        if launched.process.stderr is not None:
            # `engine watch` itself writes to this pipe only when it refuses the command.
            with launched.process.stderr as pipe:
                refusal = pipe.read().decode(errors="replace").strip()
    if not is_run(folder):
        raise BadInput(refusal)
    # Settle before the view is read: this reads the last lines of the logs.
    state = _wait_for_end_state(follower)
    outcome = sum_up(
        plan,
        "B" if b else "A",
        launched.run,
        follower.view,
        state,
        time.monotonic() - begun_s,
        over=over,
    )
    fields = shown_fields(plan, outcome.arm, launched.run, ANSWERED if answered else outcome.state)
    if answered and fields["shown"] is not None:
        fields["state"] = ANSWERED
    return dataclasses.replace(outcome, **fields)


def shown_fields(plan: Plan, arm: str, run: RunFolder, state: str) -> dict[str, Any]:
    """Return the fields of an outcome that say whether its run shows the observation of the plan; none where the plan
    has no observation. `state` is the state in which the run ended."""
    if plan.observed is None:
        return {}
    try:
        is_stopped = state == ANSWERED
        is_seen, reason = shown(plan.observed, run, steps=plan.steps, is_stopped=is_stopped)
    except RunLogError as error:
        is_seen, reason = None, error.message
    if state == OVER_THE_LIMIT and plan.observed.kind == "exit":
        is_seen, reason = None, f"it was ended after {plan.run_limit_s:.0f} s"
    fields = {"shown": is_seen, "reason": reason, "value": None, "no_value": reason}
    if plan.attempt:
        # All runs of an arm make at least these steps, so their traces can be compared.
        fields["trace"] = trace_of(run, plan.steps if arm == "B" else plan.observed.step)
        fields["code"] = read_code(code_folder(run.path))
    return fields


def _start_spec(plan: Plan, b: bool, pair: int, folder: Path) -> Launched:
    spec = plan.arm(b, folder.parent, folder.name, pair).without_receivers
    effective = {
        "engine": VERSION,
        "spec_file": plan.source,
        "sets": [],
        "flip_sha256": plan.sha256,
        "spec": spec.to_dict(),
        "spec_sha256": spec.sha256,
    }
    return launch(create_run(folder, spec_to_toml(spec), effective))


def _start_command(plan: Plan, b: bool, pair: int, folder: Path) -> Launched:
    assert plan.command is not None, "the arms are a command"
    out = output_folder(folder)
    try:
        out.mkdir(parents=True)
    except OSError as error:
        raise write_error("flip", out, "to create it", error) from error
    arm = plan.arm_of_command(b, out, pair)
    slow_by = 0.0 if b else plan.slow_a_by
    where = plan.command.where(out)
    if plan.command.copied:
        try:
            copy_folder(Path(plan.command.folder), where)
            if plan.attempt:
                keep_code(where, hash_files(where), code_folder(folder))
            for name, text in arm.lines.items():
                write_line(where, name, text)
        except OSError as error:
            raise write_error("flip", where, "to copy the script's folder", error) from error
    # An arm with an observation runs until its logs answer the question.
    steps = plan.steps if plan.observed is None else int(limits.STEPS.most)
    return command.start(folder, arm, where, steps=steps, slow_by=slow_by)


def output_folder(folder: Path) -> Path:
    """Return the folder for the output of a command whose run folder is `folder`."""
    return folder.parent.parent / "out" / folder.name


def code_folder(folder: Path) -> Path:
    """Return the folder of the script's files kept for the run `folder` of an arm."""
    return folder.parent.parent / "code" / folder.name


def _wait_for_end_state(follower: Follower) -> str:
    """Return the state after the supervisor has exited. A trainer that outlived it saves and logs its end first."""
    deadline_s = time.monotonic() + STOP_GRACE_S
    while True:
        with contextlib.suppress(RunLogError):
            follower.read_all()
        if has_ended(follower.state):
            return follower.state
        if time.monotonic() > deadline_s:
            return "vanished"
        time.sleep(POLL_S)


def _poll(follower: Follower) -> None:
    # A killed writer may leave an incomplete last line; the view has the lines before it.
    with contextlib.suppress(RunLogError):
        follower.poll()


def _end_run(plan: Plan, launched: Launched, follower: Follower) -> None:
    """Ask the run to stop; if it does not, kill its trainer, then its supervisor."""
    process, pid = launched.process, follower.view.trainer_pid
    # The engine's runs end their child processes; a command, such as a launcher, may leave its workers running.
    workers = descendants(pid) if plan.kind == "command" and pid is not None else {}
    if process.poll() is None:
        launched.send(signal.SIGTERM)
        _wait_for_exit(launched, follower)
    pid = follower.view.trainer_pid
    # The supervisor has not reaped the trainer yet, so the pid still belongs to the trainer.
    if process.poll() is None and pid is not None and follower.view.exit is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _wait_for_exit(launched, follower)
    if process.poll() is None:
        process.kill()
    process.wait()
    end(workers.values())


def _wait_for_exit(launched: Launched, follower: Follower) -> None:
    deadline_s = time.monotonic() + STOP_GRACE_S
    while launched.process.poll() is None and time.monotonic() < deadline_s:
        _poll(follower)
        time.sleep(POLL_S)
