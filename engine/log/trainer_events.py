"""What the trainer writes into events.jsonl: what was decided and built, each step, what was measured, how it ended."""

# ruff: noqa: RUF012 (msgspec gives each event an empty list or dict of its own)

from __future__ import annotations

from engine.log.envelope import Count, Event, Number, Whole


class RunStarted(Event, frozen=True, kw_only=True, tag="run_started"):
    """What this session will do, read back from the built objects, not echoed from the request."""

    name: str
    device: str
    steps: Count
    resumed_from: Count | None
    alpha: Number
    temperature: Number
    peak_lr: Number
    rows_per_step: Count
    seq_len: Count
    trainable_parameters: Count
    spec_sha256: str
    engine: str
    python: str
    torch: str
    flops_per_token: Number | None = None
    """Operations that one token of a step needs: its arithmetic, by shapes alone."""
    peak_flops_per_s: Number | None = None
    """What the device's datasheet says it does in a second, dense bf16."""
    peak_source: str = ""
    """Where that comes from, or why there is none."""


TRAINING = "training"
"""The phase that begins with the first step: before it a run has nothing to save."""


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
    train_files: Count
    train_tokens: Count
    train_sha256: str
    heldout_files: Count
    heldout_tokens: Count
    heldout_sha256: str
    skipped_files: Count
    epoch_rows: Count


class ModelReady(Event, frozen=True, kw_only=True, tag="model"):
    role: str
    """`teacher` or `student`."""
    source: str
    parameters: Count
    layers: Count
    hidden_size: Count
    vocab_size: Count
    precision: str
    sha256: str


class MemoryPlanned(Event, frozen=True, kw_only=True, tag="memory_plan"):
    """What the run is predicted to hold at its peak, before anything is uploaded."""

    predicted_bytes: Number
    available_bytes: Number | None
    available_source: str
    """Where the number comes from, or why there is none."""
    peak_phase: str
    items: list[tuple[str, Number, str]] = []
    """Each item with its bytes and the arithmetic behind them."""


class MemoryMeasured(Event, frozen=True, kw_only=True, tag="memory_peak"):
    """The peak that the allocator saw, beside the prediction."""

    step: Count
    measured_bytes: Number | None
    predicted_bytes: Number
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
    compile_s: Number | None
    disk_hit: bool | None
    """Whether a cache on disk had the code; absent where the compiler does not say."""
    after_warm_up: bool = False
    """True when a step had to wait for it."""
    differs: list[str] = []
    """What sets it apart from the nearest kernel that was compiled before."""


class KernelCounts(Event, frozen=True, kw_only=True, tag="kernel_counts"):
    """Hits and misses of the kernel caches of this process so far."""

    step: Count
    hits: Count
    misses: Count
    disk_hits: Count
    by_kernel: dict[str, tuple[Count, Count]] = {}
    """Hits and misses of each kernel."""


class VocabularyCut(Event, frozen=True, kw_only=True, tag="vocabulary_cut"):
    """The teacher's columns beyond the student's ids are cut before the softmax; what that drops."""

    teacher_ids: Count
    student_ids: Count
    dropped_mass_mean: Number | None
    """Mean over tokens of the probability the teacher gives to the ids that are cut."""
    dropped_mass_max: Number | None
    tokens: Count
    """Held-out tokens it was measured on."""


class Checked(Event, frozen=True, kw_only=True, tag="check"):
    """The answer of one first-minute check (`engine checks --list`)."""

    id: str
    level: str
    """`pass`, `unknown` or `fail`."""
    reason: str
    numbers: dict[str, Number] = {}
    """What the answer was read from."""
    cost_s: Number | None
    step: Count
    """Optimizer steps done when it was asked."""


class StepDone(Event, frozen=True, kw_only=True, tag="step"):
    """One optimizer step. Losses are means over the step's labelled tokens, in nats."""

    step: Count
    loss: Number | None
    ce: Number | None
    kd: Number | None
    """T^2 * KL(teacher || student); absent when there is no teacher in the objective."""
    agreement: Number | None
    """Share of labelled tokens where teacher and student have the same most likely token."""
    lr: Number | None
    grad_norm: Number | None
    """Global norm before clipping."""
    rows: Count
    tokens: Count
    labelled: Count
    step_s: Number | None
    data_s: Number | None
    teacher_s: Number | None
    """Seconds the host spent in the teacher's forward; on a GPU this is time to launch, not time to
    run."""
    position: Count
    """Rows consumed since the start of training: where the data loader would resume."""
    lowest_kl: Number | None = None
    """The least divergence of a row from its teacher, nats; below 0 only by rounding."""
    largest_dz_sum: Number | None = None
    """The largest sum of the gradients of a row's logits, without sign; 0 but for rounding."""
    phases: dict[str, Number] = {}
    """Seconds of each phase by the device's own clock, and of `idle`, when it had nothing to do; empty
    where nobody measured."""


class Evaluated(Event, frozen=True, kw_only=True, tag="eval"):
    """Cross entropy on the held-out documents, in nats per token."""

    step: Count
    subject: str
    """`student`, `teacher` or `untrained` (the student before its first step)."""
    loss: Number | None
    labelled: Count
    eval_s: Number | None


class NonFinite(Event, frozen=True, kw_only=True, tag="non_finite"):
    """A number of a step that is NaN or infinite: its own event, so that nothing can average it
    away."""

    step: Count
    field: str
    value: str


class CheckpointSaved(Event, frozen=True, kw_only=True, tag="checkpoint"):
    step: Count
    path: str
    size_bytes: Count
    save_s: Number | None
    manifest_sha256: str
    best: bool


class StudentSaved(Event, frozen=True, kw_only=True, tag="student_saved"):
    path: str
    size_bytes: Count
    sha256: str


class StopRequested(Event, frozen=True, kw_only=True, tag="stop_requested"):
    reason: str
    step: Count


class Note(Event, frozen=True, kw_only=True, tag="note"):
    """Something a person should read. `level` is `info`, `warning` or `error`."""

    level: str
    text: str


class RunFinished(Event, frozen=True, kw_only=True, tag="run_finished"):
    """Written by the run itself. Its absence from a dead run is what `vanished` means."""

    state: str
    """`completed`, `stopped` or `failed`."""
    reason: str
    exit_code: Whole
    step: Count
