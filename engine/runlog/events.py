"""What a run says about itself: one record per line of a log, with the envelope `v, seq, t_s, kind`
and flat fields.

A run has three logs, each with one writer:

    events.jsonl   the trainer     decisions, steps, evaluations, checkpoints, how it ended
    device.jsonl   the supervisor  GPU and host readings
    watch.jsonl    the supervisor  the trainer process: started, stopped, killed; alerts, stacks

`t_s` is seconds on the monotonic clock since the writer opened its log; `log_opened` says what wall
time that was, so durations never see a clock step and yet three files and several sessions (a
resumed run) share one axis.

Numbers are floats or absent, never a placeholder. JSON has no NaN, so a non-finite value is written
as null with its name under `nf`: `{"loss": null, "nf": {"loss": "nan"}}`. Missing and NaN can
therefore be told apart, and every parser can read the line. A value inside a field is named by its
path, as in a JSON pointer without the first slash: `facts/gpu0_power_w`, with `~1` for a slash in a
name and `~0` for a tilde. Reading puts the values back and empties `nf`: it belongs to the line,
not to the event.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias, get_args

import msgspec

VERSION = 1

NON_FINITE = {"nan": math.nan, "+inf": math.inf, "-inf": -math.inf}


def name_of_non_finite(value: float) -> str:
    """The name a non-finite float has in a log: 'nan', '+inf' or '-inf'."""
    if math.isnan(value):
        return "nan"
    return "+inf" if value > 0 else "-inf"


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """The envelope. A writer fills `seq` and `t_s`; `seq` counts lines of one file from 0, across
    resumes."""

    v: int = VERSION
    seq: int = -1
    t_s: float = -1.0
    nf: dict[str, str] | None = None


class LogOpened(Event, frozen=True, kw_only=True, tag="log_opened"):
    """First line of each session of a writer: ties its monotonic `t_s` to the wall clock."""

    unix_s: float
    boot_id: str
    pid: int
    writer: str
    torn_bytes_dropped: int = 0
    """Bytes of an unfinished last line, left by a killed writer and removed on reopening."""


class RunStarted(Event, frozen=True, kw_only=True, tag="run_started"):
    """What this session will do, read back from the built objects, not echoed from the request."""

    name: str
    device: str
    steps: int
    resumed_from: int | None
    alpha: float
    temperature: float
    peak_lr: float
    rows_per_step: int
    seq_len: int
    trainable_parameters: int
    spec_sha256: str
    engine: str
    python: str
    torch: str
    flops_per_token: float | None = None
    """Operations that one token of a step needs: its arithmetic, by shapes alone."""
    peak_flops_per_s: float | None = None
    """What the device's datasheet says it does in a second, dense bf16."""
    peak_source: str = ""
    """Where that comes from, or why there is none."""


class Phase(Event, frozen=True, kw_only=True, tag="phase"):
    """What the trainer is doing now, written before it begins: the last one names what a silent run
    is stuck in."""

    name: str
    detail: str = ""


class DecisionMade(Event, frozen=True, kw_only=True, tag="decision"):
    knob: str
    choice: str
    reason: str
    rejected: list[tuple[str, str]] = []
    override: str = ""
    overridden: bool = False


class DataReady(Event, frozen=True, kw_only=True, tag="data"):
    source: str
    train_files: int
    train_tokens: int
    train_sha256: str
    heldout_files: int
    heldout_tokens: int
    heldout_sha256: str
    skipped_files: int
    epoch_rows: int


class ModelReady(Event, frozen=True, kw_only=True, tag="model"):
    role: str
    """`teacher` or `student`."""
    source: str
    parameters: int
    layers: int
    hidden_size: int
    vocab_size: int
    precision: str
    sha256: str


class MemoryPlanned(Event, frozen=True, kw_only=True, tag="memory_plan"):
    """What the run is predicted to hold at its peak, before anything is uploaded."""

    predicted_bytes: float
    available_bytes: float | None
    available_source: str
    """Where the number comes from, or why there is none."""
    peak_phase: str
    items: list[tuple[str, float, str]] = []
    """Each item with its bytes and the arithmetic behind them."""


class MemoryMeasured(Event, frozen=True, kw_only=True, tag="memory_peak"):
    """The peak that the allocator saw, beside the prediction."""

    step: int
    measured_bytes: float | None
    predicted_bytes: float
    source: str


class Compiled(Event, frozen=True, kw_only=True, tag="compile"):
    """A kernel that this process had not compiled before."""

    compiler: str
    """`triton` for our own kernels, `inductor` for what torch.compile made."""
    kernel: str
    key: str
    """Everything baked into its code, in words."""
    digest: str
    """A hash of the key; empty where the compiler gives none."""
    compile_s: float | None
    disk_hit: bool | None
    """Whether a cache on disk had the code; absent where the compiler does not say."""
    after_warm_up: bool = False
    """True when a step had to wait for it."""
    differs: list[str] = []
    """What sets it apart from the nearest kernel that was compiled before."""


class KernelCounts(Event, frozen=True, kw_only=True, tag="kernel_counts"):
    """Hits and misses of the kernel caches of this process so far."""

    step: int
    hits: int
    misses: int
    disk_hits: int
    by_kernel: dict[str, tuple[int, int]] = {}
    """Hits and misses of each kernel."""


class VocabularyCut(Event, frozen=True, kw_only=True, tag="vocabulary_cut"):
    """The teacher's columns beyond the student's ids are cut before the softmax; what that drops."""

    teacher_ids: int
    student_ids: int
    dropped_mass_mean: float | None
    """Mean over tokens of the probability the teacher gives to the ids that are cut."""
    dropped_mass_max: float | None
    tokens: int
    """Held-out tokens it was measured on."""


class Checked(Event, frozen=True, kw_only=True, tag="check"):
    """The answer of one first-minute check (`engine checks --list`)."""

    id: str
    level: str
    """`pass`, `unknown` or `fail`."""
    reason: str
    numbers: dict[str, float] = {}
    """What the answer was read from."""
    cost_s: float | None
    step: int
    """Optimizer steps done when it was asked."""


class StepDone(Event, frozen=True, kw_only=True, tag="step"):
    """One optimizer step. Losses are means over the step's labelled tokens, in nats."""

    step: int
    loss: float | None
    ce: float | None
    kd: float | None
    """T^2 * KL(teacher || student); absent when there is no teacher in the objective."""
    agreement: float | None
    """Share of labelled tokens where teacher and student have the same most likely token."""
    lr: float | None
    grad_norm: float | None
    """Global norm before clipping."""
    rows: int
    tokens: int
    labelled: int
    step_s: float | None
    data_s: float | None
    teacher_s: float | None
    """Seconds the host spent in the teacher's forward; on a GPU this is time to launch, not time to
    run."""
    position: int
    """Rows consumed since the start of training: where the data loader would resume."""
    lowest_kl: float | None = None
    """The least divergence of a row from its teacher, nats; below 0 only by rounding."""
    largest_dz_sum: float | None = None
    """The largest sum of the gradients of a row's logits, without sign; 0 but for rounding."""
    phases: dict[str, float] = {}
    """Seconds of each phase by the device's own clock, and of `idle`, when it had nothing to do; empty
    where nobody measured."""


class Evaluated(Event, frozen=True, kw_only=True, tag="eval"):
    """Cross entropy on the held-out documents, in nats per token."""

    step: int
    subject: str
    """`student`, `teacher` or `untrained` (the student before its first step)."""
    loss: float | None
    labelled: int
    eval_s: float | None


class NonFinite(Event, frozen=True, kw_only=True, tag="non_finite"):
    """A number of a step that is NaN or infinite: its own event, so that nothing can average it
    away."""

    step: int
    field: str
    value: str


class CheckpointSaved(Event, frozen=True, kw_only=True, tag="checkpoint"):
    step: int
    path: str
    size_bytes: int
    save_s: float | None
    manifest_sha256: str
    best: bool


class StudentSaved(Event, frozen=True, kw_only=True, tag="student_saved"):
    path: str
    size_bytes: int
    sha256: str


class StopRequested(Event, frozen=True, kw_only=True, tag="stop_requested"):
    reason: str
    step: int


class Note(Event, frozen=True, kw_only=True, tag="note"):
    """Something a person should read. `level` is `info`, `warning` or `error`."""

    level: str
    text: str


class RunFinished(Event, frozen=True, kw_only=True, tag="run_finished"):
    """Written by the run itself. Its absence from a dead run is what `vanished` means."""

    state: str
    """`completed`, `stopped` or `failed`."""
    reason: str
    exit_code: int
    step: int


class FactsRead(Event, frozen=True, kw_only=True, tag="device_facts"):
    facts: dict[str, Any]


class HostSample(Event, frozen=True, kw_only=True, tag="host"):
    host_available_bytes: float | None = None
    host_total_bytes: float | None = None
    swap_free_bytes: float | None = None
    load1: float | None = None
    psi_memory_some_avg10_pct: float | None = None
    psi_memory_full_avg10_pct: float | None = None
    psi_cpu_some_avg10_pct: float | None = None
    psi_io_full_avg10_pct: float | None = None
    major_faults_per_s: float | None = None
    """Pages that were read from a disk because a process touched them, of the whole machine."""
    swap_in_pages_per_s: float | None = None
    swap_out_pages_per_s: float | None = None
    oom_kills: float | None = None
    """Processes the kernel has killed for memory since the machine started."""
    cgroup_memory_bytes: float | None = None
    cgroup_memory_limit_bytes: float | None = None
    trainer_rss_bytes: float | None = None
    trainer_cpu_pct: float | None = None
    trainer_threads: float | None = None
    duty_s: float | None = None
    """What taking this sample cost."""
    duty_pct: float | None = None
    """Share of the time that went into the last samples."""
    tick_s: float | None = None
    """Seconds to the next sample."""
    absent: dict[str, str] = {}


class GpuSample(Event, frozen=True, kw_only=True, tag="gpu"):
    index: int
    gpu_util_pct: float | None = None
    """Share of the time in which any kernel ran, however small: not how much of the GPU worked."""
    gpu_mem_util_pct: float | None = None
    gpu_mem_used_bytes: float | None = None
    gpu_mem_total_bytes: float | None = None
    gpu_power_w: float | None = None
    gpu_power_limit_w: float | None = None
    gpu_energy_j: float | None = None
    """Since the driver was loaded."""
    gpu_temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    sm_util_pct: float | None = None
    """Share of the multiprocessors that were busy."""
    sm_occupancy_pct: float | None = None
    tensor_util_pct: float | None = None
    """Share of the time in which the tensor pipes worked, mean over all of them."""
    dram_util_pct: float | None = None
    clock_event_reasons: str | None = None
    absent: dict[str, str] = {}

    @property
    def slowed(self) -> float | None:
        """1 when heat or a power brake holds the clocks down, 0 when not, None when not known."""
        if self.clock_event_reasons is None:
            return None
        return float(not SLOWED.isdisjoint(self.clock_event_reasons.split(",")))


SLOWED = frozenset({"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake"})
"""Reasons for low clocks that a healthy machine does not have. A power cap is not among them: a card
under full load runs at its limit."""


class AlertRaised(Event, frozen=True, kw_only=True, tag="alert"):
    """Something is wrong, by the rule `id`; it stands until an `alert_cleared` of the same id."""

    id: str
    severity: str
    """`warning` or `error`."""
    title: str
    """What is seen, in one sentence with its most telling number."""
    numbers: list[tuple[str, float, str]] = []
    """Each number with its unit in its name, its value, and what it is held against."""
    first_step: int = 0
    last_step: int = 0
    from_unix_s: float = 0.0
    to_unix_s: float = 0.0
    """The steps and the time that the numbers were taken from."""
    meaning: str = ""
    flip: str = ""
    """The argument that would test the suspicion: `--set knob=value`; empty where there is none."""
    no_flip: str = ""
    """Why there is none."""


class AlertCleared(Event, frozen=True, kw_only=True, tag="alert_cleared"):
    id: str
    stood_s: float


class StackDump(Event, frozen=True, kw_only=True, tag="stack_dump"):
    """What the threads of a silent trainer were doing; the whole of it is in the file."""

    path: str
    """Relative to the run folder."""
    state: str
    """`computing`, `waiting for a lock`, `stopped by a signal`, ... of the main thread."""
    summary: str
    python_frame: str
    """Innermost Python line of the main thread: `file:line in function`; empty when not known."""
    native_frame: str
    """Innermost C function, or the system call, of the main thread; empty when not known."""
    python_stack: list[str] = []
    """The main thread, innermost first."""
    busy_threads: int | None = None
    """Threads that computed when they were looked at, the main thread included."""
    missing: list[str] = []
    """What could not be had, each with the reason."""


class TrainerStarted(Event, frozen=True, kw_only=True, tag="trainer_started"):
    trainer_pid: int
    supervisor_pid: int


class TrainerExited(Event, frozen=True, kw_only=True, tag="trainer_exited"):
    """How the trainer process ended, as its parent saw it; `sentence` claims no more than was
    proved."""

    trainer_pid: int
    returncode: int
    state: str
    signal: str | None
    cause: str
    certainty: str
    sentence: str


class LauncherGone(Event, frozen=True, kw_only=True, tag="launcher_gone"):
    """Whoever started the run is no longer attached: `how` is `detached`, `hangup` or `killed`. The
    run goes on."""

    how: str


class StopForwarded(Event, frozen=True, kw_only=True, tag="stop_forwarded"):
    signal: str


class Unrecognised(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a kind this version does not know: kept and shown, never an error."""

    kind: str
    v: int = VERSION
    seq: int = -1
    t_s: float = -1.0
    fields: dict[str, Any] = {}


Known: TypeAlias = (
    LogOpened
    | RunStarted
    | Phase
    | DecisionMade
    | DataReady
    | ModelReady
    | MemoryPlanned
    | MemoryMeasured
    | Compiled
    | KernelCounts
    | VocabularyCut
    | Checked
    | StepDone
    | Evaluated
    | NonFinite
    | CheckpointSaved
    | StudentSaved
    | StopRequested
    | Note
    | RunFinished
    | FactsRead
    | HostSample
    | GpuSample
    | TrainerStarted
    | TrainerExited
    | LauncherGone
    | StopForwarded
    | AlertRaised
    | AlertCleared
    | StackDump
)
AnyEvent: TypeAlias = Known | Unrecognised

KINDS: dict[str, type[Known]] = {kind.__struct_config__.tag: kind for kind in get_args(Known)}
"""Every kind this version knows, by its name in the log."""


def kind_of(event: Event | Unrecognised) -> str:
    """The `kind` an event has in the log."""
    if isinstance(event, Unrecognised):
        return event.kind
    tag = type(event).__struct_config__.tag
    assert isinstance(tag, str)
    return tag
