"""The events of a run: one record per line, with the envelope `v, seq, t_s, kind` and flat fields.

A run has three logs, each with one writer (each further rank has an events log, and each further host a device and a
watch log, under other names):

    events.jsonl   the trainer     decisions, steps, evaluations, checkpoints, how it ended
    device.jsonl   the supervisor  GPU and host readings
    watch.jsonl    the supervisor  the trainer process: started, stopped, killed; alerts, stacks

`t_s` is seconds on the monotonic clock since the writer opened its log, and `log_opened` gives the wall time
of that moment. So durations are immune to clock steps, and yet three files and several sessions (a resumed
run) share one axis.

Numbers are floats or absent, never a placeholder. JSON has no NaN, so a non-finite value is written as null
with its name under `nf`: `{"loss": null, "nf": {"loss": "nan"}}`. Missing and NaN can therefore be
distinguished, and every parser can read the line. A nested value is named by its path, as in a JSON pointer without
the first slash: `facts/gpu0_power_w`, with `~1` for a slash in a name and `~0` for a tilde. Reading puts the
values back and empties `nf`, which belongs to the line and not to the event.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, TypeAlias, get_args

import msgspec
from msgspec import Meta

from engine.limits import LOG_COUNT, LOG_ELAPSED, LOG_GPU, LOG_NUMBER, LOG_PID, LOG_UNIX

VERSION = 2

# The numbers of a record have ranges, checked when a line is decoded, so that every decoded time has a date
# and every number fits a column and can be subtracted and squared. A line with a number out of range is a
# broken line.
_MOST = float(LOG_NUMBER.most)
Number = Annotated[float, Meta(ge=-_MOST, le=_MOST)]
"""A measured number. A writer treats a number out of range like an infinite one: null, and its name under `nf`."""
Count = Annotated[int, Meta(ge=0, le=LOG_COUNT.most)]
Whole = Annotated[int, Meta(ge=-LOG_COUNT.most, le=LOG_COUNT.most)]
Elapsed = Annotated[float, Meta(ge=0, le=LOG_ELAPSED.most)]
"""Seconds on the monotonic clock since the log was opened."""
UnixTime = Annotated[float, Meta(ge=0, le=LOG_UNIX.most)]
"""Seconds since 1970, small enough that the sum with any `Elapsed` is a valid date."""
Pid = Annotated[int, Meta(ge=1, le=LOG_PID.most)]
"""Id of one process; never 0 or less, which would signal process groups."""
GpuIndex = Annotated[int, Meta(ge=0, le=LOG_GPU.most)]

PASS, UNKNOWN, FACT, SUSPICION, FAIL = LEVELS = ("pass", "unknown", "fact", "suspicion", "fail")
"""Levels of a result, from good to bad. A fact is neither good nor bad; a suspicion may be what the user intended."""
CHECK, ALERT, IDENTITY, NUMBER = "check", "alert", "identity", "number"
"""Sources of a result (`Judged.by`)."""

WITHDRAWN = "withdrawn"
"""Name of the number in an identity's `pass` result that marks its earlier suspicions as withdrawn."""

NON_FINITE = {"nan": math.nan, "+inf": math.inf, "-inf": -math.inf}


def is_written(value: float) -> bool:
    """Return whether a line can hold this float as a number: it is finite and within the range of `Number`."""
    return abs(value) <= _MOST


def nan_if_absent(value: float | None) -> float:
    return math.nan if value is None else value


def name_of_non_finite(value: float) -> str:
    """Name a float that no line can hold: 'nan', '+inf' or '-inf'."""
    if math.isnan(value):
        return "nan"
    return "+inf" if value > 0 else "-inf"


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """The envelope of every event. The writer fills `seq` and `t_s`; `seq` numbers the lines of one file from 0, and
    a resume continues it."""

    v: Count = VERSION
    seq: Count = -1
    t_s: Elapsed = -1.0
    nf: dict[str, str] | None = None


class LogOpened(Event, frozen=True, kw_only=True, tag="log_opened"):
    """First line of each session of a writer: ties its monotonic `t_s` to the wall clock."""

    unix_s: UnixTime
    boot_id: str
    pid: Pid
    writer: str
    host: str = ""
    """Name of the machine; empty in logs of earlier versions."""
    torn_bytes_dropped: Count = 0
    """Bytes of an unfinished last line, left by a killed writer and removed on reopening."""


class Unrecognised(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a kind that this version does not know. It is kept and shown; it is not an error."""

    kind: str
    v: Count = VERSION
    seq: Count = -1
    t_s: Elapsed = -1.0
    fields: dict[str, Any] = {}


# The trainer, in events.jsonl: what was decided and built, each step, what was measured, how it ended.


class RunStarted(Event, frozen=True, kw_only=True, tag="run_started"):
    """The configuration of this session, read back from the built objects, not echoed from the request."""

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
    """FLOPs of a training step per token, computed from the shapes."""
    peak_flops_per_s: Number | None = None
    """The device's dense bf16 peak in FLOP/s, from its datasheet."""
    peak_source: str = ""
    """The source of the peak, or why it is not known."""
    costs: dict[str, tuple[Number, Number, Number]] = {}
    """FLOPs, bytes moved and kernel launches of each phase of one rank's step, computed from the shapes
(`engine.plan.cost`). Communication between ranks is left out."""
    machine: str = ""
    """Device, dtype and threads: the key under which `engine doctor` stores the measured speeds of this machine."""


class Watched(Event, frozen=True, kw_only=True, tag="watched"):
    """A watched training script, as its probe (`apr_watch`) found it at its first optimizer step."""

    pid: Pid
    python: str
    executable: str
    torch: str
    device: str
    """Device of the optimizer's first parameter."""
    optimizer: str
    """Class name of the optimizer."""
    parameters: Count
    """Number of elements in the optimizer's parameters."""
    groups: list[dict[str, Number]] = []
    """Parameter groups of the optimizer at the first step: each group's number of elements (`parameters`) and its
    numeric settings."""
    rank: Count = 0
    world: Count = 1
    places: dict[str, str] = {}
    """Lines of the script, as `FILE:LINE`, that call `backward` and `step`, and that make the `optimizer`."""
    names: dict[str, str] = {}
    """Variables of the script: its `model`, an untrained `teacher` and its `schedule` at the step, and its
    `optimizer_model` at the line that makes the optimizer."""


class ScriptEnded(Event, frozen=True, kw_only=True, tag="script_ended"):
    """The end of a watched training, as its probe saw it. Only the parent process knows the exit code."""

    how: str
    """`returned`, `raised` (an uncaught exception), or `goes on` (the script continues with another training, or
    after a block that it marked)."""
    exception: str | None = None
    """Class name of the exception."""
    message: str | None = None
    where: str | None = None
    """File and line that raised the exception."""
    optimizers: Count | None = None
    """Number of torch optimizers that a process without a step created."""


class Worked(Event, frozen=True, kw_only=True, tag="worked"):
    """Batch rows and counters of a step of a watched script, logged by an experiment that looks for the cause of a
    failure."""

    step: Count
    counters: dict[str, Whole] = {}
    """Integer local variables of the script's running functions, by function and name."""
    failed: bool = False
    """Whether the script failed in this step."""
    asked: list[Count] = []
    """Dataset indices that a data loader's sampler yielded; empty if they are not integers."""
    rows: list[str] | None = None
    """Digests of the rows of a loader's batches; None in logs of earlier versions, which have none of these fields."""
    called: list[str] = []
    """Digests of the rows that the model was trained on; empty ones for a call whose rows were not on the host."""
    evaluated: list[str] = []
    """Digests of the rows of forward calls without gradients."""
    judged: dict[str, Count] = {}
    """Number of results of each identity so far."""
    calls: list[str] = []
    """Call stack of the failure within the script: each frame as `FILE:LINE NAME`, with the name of the called
    function."""
    raised: bool = False
    """Whether a test in the script failed it: its own `raise` or `assert`, an assertion, or a warning made an
    error."""
    held: list[Number] = []
    """Numeric variables of the script when it failed."""
    answers: list[Number] = []
    """Mean absolute output of the model in each forward call without gradients on the host; 0 if it is not finite."""
    pieces: Count = 0
    """Number of distinct runs of neighbouring values in the rows that the model was trained on so far."""


class Imported(Event, frozen=True, kw_only=True, tag="imported"):
    """Files of another tool that a run was imported from (`engine import`). The run was not watched."""

    source: str
    """`tensorboard`, `wandb` or `csv`."""
    path: str
    files: list[tuple[str, Count, str]] = []
    """Name, size in bytes and SHA-256 of each file."""
    names: dict[str, str] = {}
    """Original name of each renamed value, by its name here; the other values keep their names (`Logged`)."""


TRAINING = "training"
"""Name of the phase that begins with the first step; before it a run has nothing to save."""


class Phase(Event, frozen=True, kw_only=True, tag="phase"):
    """The phase that the trainer is about to begin. It is logged before the phase begins, so that the last `phase`
    event names the phase in which a silent run hangs."""

    name: str
    detail: str = ""


class DecisionMade(Event, frozen=True, kw_only=True, tag="decision"):
    knob: str
    choice: str
    reason: str
    rejected: list[tuple[str, str]] = []
    impossible: list[str] = []
    """Rejected values that are impossible on this machine."""
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
    """Number of documents that are in neither split, including copies of held-out text."""
    copies: Count = 0
    """Number of documents that are not trained on because their text is held out."""
    copies_named: list[str] = []
    """Names of the first few copies."""
    repeated: Count = 0
    """Number of training documents with the same text as an earlier one."""
    epoch_rows: Count
    labelled_tokens: Count | None = None
    """Number of labels in the training split, for a corpus with conversations or padding; None if all tokens are."""
    padding: Count = 0
    """Number of padding positions in the training rows."""
    left_out: dict[str, Count] = {}
    """Number of invalid records and of conversations that cannot be rendered, by reason with the first file and
    line."""
    partly_labelled: Count = 0
    """Number of conversations in which a turn that should be trained on has no labels."""
    remarks: dict[str, Count] = {}
    """Number of records for each warning about fields or turns that are not read, rendered or labelled."""
    unlabelled_rows: Count = 0
    """Rows without a label, which are not trained on."""


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
    """The predicted peak memory of the run, logged before anything is copied to the device."""

    predicted_bytes: Number
    available_bytes: Number | None
    available_source: str
    """The source of the number, or why there is none."""
    peak_phase: str
    items: list[tuple[str, Number, str]] = []
    """Name, bytes and calculation of each item."""


class MemoryMeasured(Event, frozen=True, kw_only=True, tag="memory_peak"):
    """The measured peak memory, and the prediction."""

    step: Count
    measured_bytes: Number | None
    predicted_bytes: Number
    source: str
    host_peak_bytes: Number | None = None
    """Peak of the resident bytes of the trainer's process, as the kernel counts them."""


class Compiled(Event, frozen=True, kw_only=True, tag="compile"):
    """A kernel compiled for the first time in this process."""

    compiler: str
    """`triton` for the engine's kernels, `inductor` for those of torch.compile, `torch.compile` in a watched script
    with any backend."""
    kernel: str
    key: str
    """Description of everything that the compiled code is specialised for."""
    digest: str
    """A hash of the key; empty where the compiler gives none."""
    compile_s: Number | None
    disk_hit: bool | None
    """Whether the code came from a disk cache; absent where the compiler does not report it."""
    after_warm_up: bool = False
    """Whether a step had to wait for the compile; in a watched script, whether a step after the first few had to."""
    differs: list[str] = []
    """Differences from the nearest kernel that was compiled before, or the guard that failed."""


class KernelCounts(Event, frozen=True, kw_only=True, tag="kernel_counts"):
    """Hits and misses of this process's kernel caches so far."""

    step: Count
    hits: Count
    misses: Count
    disk_hits: Count
    by_kernel: dict[str, tuple[Count, Count]] = {}
    """Hits and misses by kernel."""


class VocabularyCut(Event, frozen=True, kw_only=True, tag="vocabulary_cut"):
    """The teacher's logits beyond the student's vocabulary are cut before the softmax; this records their probability
    mass."""

    teacher_ids: Count
    student_ids: Count
    dropped_mass_mean: Number | None
    """Mean over tokens of the teacher's total probability of the cut logits."""
    dropped_mass_max: Number | None
    tokens: Count
    """Number of held-out tokens it was measured on."""


STAGE = "step_"
"""Prefix of the ids of checks that are stages of the audit of a step."""


class Judged(Event, frozen=True, kw_only=True, tag="judged"):
    """The result of a check, a rule, an identity or a number (`engine/catalogue.py` describes each)."""

    by: str
    """Source of the result: `check` (a check or a stage of the audit), `alert` (a rule of the supervisor), `identity`
    (a property of every healthy training, in a watched script; logged once for each level, at the first step with it;
    a pass with the number `withdrawn` takes its earlier suspicions back), or `number` (a NaN or infinite number of a
    step, logged so that no average can hide it)."""
    id: str
    """Id of the check, rule or identity, or name of the number."""
    level: str
    """One of LEVELS. An alert is active until a result `pass`."""
    text: str
    """Result in one sentence; for a `number`, its value."""
    numbers: dict[str, Number | None] = {}
    """Numbers that the result is based on, by name with unit."""
    compared: dict[str, str] = {}
    """Limit or reference of each number, by its name."""
    step: Count
    """Number of optimizer steps done at that time."""
    first_step: Count = 0
    """First step that an alert's numbers come from; the last one is `step`."""
    from_unix_s: UnixTime = 0.0
    """Start of the time range that an alert's numbers come from."""
    to_unix_s: UnixTime = 0.0
    """End of the time range that an alert's numbers come from."""
    cost_s: Number | None = None
    """Duration of a check, in seconds."""
    meaning: str = ""
    flip: str = ""
    """Argument of `engine flip` that would test an alert's suspicion, `--set knob=value`; empty if there is none."""
    no_flip: str = ""
    """Reason why an alert has no flip."""
    framework: str = ""
    """Framework of a watched script, `transformers` or `lightning`; the advice for an identity depends on it."""
    part: str = ""
    """Subject of the alert, if its rule judges several subjects: a memory, a phase, a number or an identity."""

    @property
    def raises_alert(self) -> bool:
        """Whether this starts an alert."""
        return self.by == ALERT and self.level != PASS


def by_name(
    numbers: Iterable[tuple[str, float, str]],
) -> tuple[dict[str, Number | None], dict[str, str]]:
    """Return the numbers of an alert by name, and the reference of each by name."""
    values: dict[str, Number | None] = {}
    compared: dict[str, str] = {}
    for name, value, reference in numbers:
        values[name] = float(value)
        compared[name] = f"{compared[name]}; {reference}" if name in compared else reference
    return values, compared


def alert_over(id: str, *, active_s: float, step: int) -> Judged:
    """Return the end of the alert `id`, which was active for `active_s` seconds."""
    numbers: dict[str, Number | None] = {"active_s": active_s}
    return Judged(by=ALERT, id=id, level=PASS, text="over", numbers=numbers, step=step)


class StepRow(Event, frozen=True, kw_only=True, tag="step", gc=False):
    """Numbers of one optimizer step, as its table keeps them. Losses are means over the labelled tokens, in nats.

    In a watched script (`Watched`) only what the probe could see is present, and `loss` is the sum of the tensors on
    which `backward` was called.
    """

    step: Count
    loss: Number | None = None
    ce: Number | None = None
    kd: Number | None = None
    """T^2 * KL(teacher || student); absent when there is no teacher in the objective."""
    agreement: Number | None = None
    """Share of labelled tokens where teacher and student have the same most likely token."""
    lr: Number | None = None
    grad_norm: Number | None = None
    """Global norm before clipping."""
    rows: Count | None = None
    tokens: Count | None = None
    labelled: Count | None = None
    step_s: Number | None = None
    data_s: Number | None = None
    """Seconds that the step waited for its rows and for the next step's rows; `phases` has them as `data`."""
    wall_s: Number | None = None
    """Seconds from the record of the previous step, or the start of training, to this one."""
    outside_s: Number | None = None
    """Seconds of `wall_s` that are not the work of training: the sum of the entries of `host` named in OUTSIDE."""
    teacher_s: Number | None = None
    """Host seconds in the teacher's forward; on a GPU this is the time to launch it, not to run it."""
    position: Count | None = None
    """Rows consumed since the start of training: where the data loader would resume."""


class StepDone(StepRow, frozen=True, kw_only=True, tag="step", gc=True):
    """One optimizer step."""

    rows_digest: str | None = None
    """Running digest of the contents of the rows that the first rank trained on (`engine.log.rows`)."""
    lowest_kl: Number | None = None
    """Smallest KL divergence of a row from its teacher, in nats; below 0 only by rounding."""
    largest_dz_sum: Number | None = None
    """Largest absolute sum of the logit gradients of a row; 0 except for rounding."""
    losses: list[Number | None] = []
    """Values of the tensors on which a watched script called `backward`, if there were several."""
    rates: list[Number | None] = []
    """Learning rate of each parameter group of a watched script, if they differ."""
    phases: dict[str, Number] = {}
    """Seconds of each of STEP_PHASES by the device's clock; empty if not measured. IDLE, if known, is the time that
    the device waited for work before a step that was launched while the previous one was running."""
    host: dict[str, Number] = {}
    """Seconds of the host's main thread in each of HOST_PARTS; their sum is `wall_s`."""
    total_steps: Count | None = None
    """Steps of the whole training; None if the framework of a watched script does not report it."""
    batch: Count | None = None
    """Last batch that the data loader of a watched script yielded in the current epoch."""
    batches: Count | None = None
    """Batches of an epoch of a watched script."""

    @property
    def updated(self) -> bool:
        """Whether loss and gradient norm are finite; otherwise the engine does not apply the update. False also if one
        of them is absent."""
        return all(math.isfinite(nan_if_absent(n)) for n in (self.loss, self.grad_norm))


class Recorded(Event, frozen=True, kw_only=True, tag="recorded"):
    """A few numbers of the step logged just before, with which a replay is compared (`engine.train.recorder`). A list
    is empty if the step has no such values."""

    step: Count
    micro_batch: Count
    token: Count
    """Position of the hidden states in the flattened micro-batch."""
    tensor: str
    """Name of the student's parameter."""
    first: Count
    """Index of the first recorded element of the flattened parameter."""
    teacher: list[Number | None] = []
    """Elements of the teacher's hidden state or stored targets."""
    student: list[Number | None] = []
    gradient: list[Number | None] = []
    """Elements of the gradient before clipping."""
    mean: list[Number | None] = []
    """Elements of AdamW's first moment after the update."""
    square: list[Number | None] = []
    """Elements of AdamW's second moment after the update."""
    weight: list[Number | None] = []
    """Elements of the parameter after the update."""


class Wrote(Event, frozen=True, kw_only=True, tag="wrote"):
    """The text that a model generated for the step logged just before (`engine.train.rollout`); with several ranks,
    the first rank's text. Means are over its tokens, in nats."""

    step: Count
    by: str
    """`student` or `teacher`."""
    temperature: Number
    """Temperature at which tokens were drawn."""
    rows: Count
    tokens: Count
    shortest: Count
    """Fewest tokens written in a row."""
    longest: Count
    """Most tokens written in a row."""
    ended: Number
    """Share of the rows that end with an end token, not at the length limit."""
    entropy: Number
    """Mean negative log-probability of the tokens under the distribution that they were drawn from."""
    cross_entropy: Number
    """Mean negative log-probability from the step's forward pass at temperature 1. If the tokens were drawn at
    temperature 1 from the same model, it equals `entropy` except for rounding."""
    divergence: Number
    """Divergence of teacher and student on the written tokens, without T^2."""
    repeated: Number
    """Share of the tokens that equal the one before them."""
    repeated_in_prompts: Number | None = None
    """Share of repeated tokens in the prompts, which are text of the corpus. None in logs of earlier versions."""
    turn_end: str = ""
    """The token that ends the assistant's turns in the corpus; empty for a corpus of plain documents."""
    turn_tokens: Number | None = None
    """Median length of the assistant's turns, in tokens."""
    write_s: Number
    prompt: str
    sample: str
    """The first row's prompt and text."""


STEP_PHASES = ("data", "rollout", "teacher", "student", "loss", "backward", "optimizer")
"""Phases of a step by the device's clock, in order."""
IDLE = "idle"
LAUNCH, DATA, ROLLOUT, DEVICE = "launch", "data", "rollout", "device"
CHECKS, EVALUATING, SAVING = "checks", "evaluate", "save"
OBSERVERS, LOGGING, REST = "observers", "log", "rest"
OUTSIDE = (OBSERVERS, LOGGING, REST)
HOST_PARTS = (LAUNCH, DATA, ROLLOUT, DEVICE, CHECKS, EVALUATING, SAVING, *OUTSIDE)
"""Activities of the host between the records of two steps: launching work (on a CPU, the work itself), reading rows,
writing rows, waiting for the device, checks, evaluation, saving, observers of the steps, writing the log, the rest."""


class Evaluated(Event, frozen=True, kw_only=True, tag="eval"):
    """Cross entropy on the held-out documents, in nats per token."""

    step: Count
    subject: str
    """`student`, `teacher` or `untrained` (the student before its first step)."""
    loss: Number | None
    labelled: Count | None
    eval_s: Number | None
    """Duration in seconds. This and `labelled` are None for a loss logged by `apr_watch.log(held_out=...)`."""
    saved: bool = False
    """Whether the loss is of the saved student, read back from its files at the end of the run."""
    prompt: str = ""
    """Beginning of a held-out row, the same in every evaluation; empty if no text was generated."""
    sample: str = ""
    """The most likely continuation of the prompt, token by token."""


class Logged(Event, frozen=True, kw_only=True, tag="logged"):
    """Numbers that a script logs by `apr_watch.log` after its step `step`; None for a value that is not a number."""

    step: Count
    values: dict[str, Number | None]


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


class ReceiptWritten(Event, frozen=True, kw_only=True, tag="receipt_written"):
    sha256: str
    """Hash of receipt.json, which has the hashes of the other files of the run folder."""
    files: Count
    """Files that it names."""


class StopRequested(Event, frozen=True, kw_only=True, tag="stop_requested"):
    reason: str
    step: Count


class Note(Event, frozen=True, kw_only=True, tag="note"):
    """A message to the user. `level` is `info`, `warning` or `error`."""

    level: str
    text: str


class RunFinished(Event, frozen=True, kw_only=True, tag="run_finished"):
    """The end of a run, written by the run itself. A dead run without this record has the state of its
    supervisor's record, or `host_lost` or `vanished`."""

    state: str
    """`completed`, `stopped` or `failed`."""
    reason: str
    exit_code: Whole
    step: Count


# The supervisor: machine readings in device.jsonl; the trainer process, alerts and stacks in watch.jsonl.
# Notes, which both processes write, are defined with the trainer's events.


class FactsRead(Event, frozen=True, kw_only=True, tag="device_facts"):
    facts: dict[str, Any]


class HostSample(Event, frozen=True, kw_only=True, tag="host"):
    host_available_bytes: Number | None = None
    host_total_bytes: Number | None = None
    swap_free_bytes: Number | None = None
    load1: Number | None = None
    psi_memory_full_avg10_pct: Number | None = None
    psi_cpu_some_avg10_pct: Number | None = None
    psi_io_full_avg10_pct: Number | None = None
    major_faults_per_s: Number | None = None
    """Pages read from disk on a page fault, over the whole machine."""
    oom_kills: Number | None = None
    """Processes the kernel's OOM killer has ended since boot."""
    trainer_rss_bytes: Number | None = None
    trainer_cpu_pct: Number | None = None
    trainer_state: str | None = None
    """State of its main thread: R running, S sleeping, D uninterruptible in the kernel, T stopped."""
    family_cpu_pct: Number | None = None
    """CPU of the trainer and all its descendants; 100 is one core busy."""
    family_io_bytes_per_s: Number | None = None
    """Bytes per second that the trainer and its descendants read and wrote: by system calls, and on disks."""
    family_rss_bytes: Number | None = None
    """Sum of the resident bytes of the trainer and its descendants; a page that several processes share counts once
    for each."""
    family_processes: Number | None = None
    memory_held_bytes: Number | None = None
    """Memory in use as the trainer counts it: tensor bytes on a GPU, resident bytes of the process on a CPU."""
    memory_reserved_bytes: Number | None = None
    """Bytes that torch's allocator has reserved on the GPU."""
    memory_peak_bytes: Number | None = None
    """Peak of `memory_held_bytes` in this session."""
    memory_source: str | None = None
    """The source of `memory_held_bytes`, `memory_reserved_bytes` and `memory_peak_bytes`."""
    duty_s: Number | None = None
    """Seconds that taking this sample cost."""
    duty_pct: Number | None = None
    """Share of the time that taking the last samples took, in percent."""
    tick_s: Number | None = None
    """Seconds to the next sample."""
    absent: dict[str, str] = {}


class GpuSample(Event, frozen=True, kw_only=True, tag="gpu"):
    index: GpuIndex
    gpu_util_pct: Number | None = None
    """Share of the time in which at least one kernel ran, however small; not the share of the GPU that was busy."""
    gpu_mem_util_pct: Number | None = None
    gpu_mem_used_bytes: Number | None = None
    gpu_mem_total_bytes: Number | None = None
    family_gpu_mem_bytes: Number | None = None
    """Bytes of GPU memory used by the trainer and its descendants."""
    gpu_processes: str | None = None
    """Processes that use the GPU for CUDA: `PID BYTES NAME`, separated by `;` (`engine.log.gpus`)."""
    gpu_power_w: Number | None = None
    gpu_power_limit_w: Number | None = None
    gpu_energy_j: Number | None = None
    """Energy used since the driver was loaded."""
    gpu_temperature_c: Number | None = None
    sm_clock_mhz: Number | None = None
    sm_util_pct: Number | None = None
    """Share of the SMs that were busy."""
    sm_occupancy_pct: Number | None = None
    tensor_util_pct: Number | None = None
    """Share of the time in which the tensor pipes were active, mean over all of them."""
    dram_util_pct: Number | None = None
    clock_event_reasons: str | None = None
    absent: dict[str, str] = {}

    @property
    def slowed(self) -> float | None:
        """1 if heat or a power brake lowers the clocks, 0 if not, None if not known."""
        if self.clock_event_reasons is None:
            return None
        return float(not SLOWED.isdisjoint(self.clock_event_reasons.split(",")))


SLOWED = frozenset({"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake"})
"""Reasons for low clocks that a healthy machine does not have. The power cap is not in the list: a GPU under full
load runs at its power limit."""


class StackDump(Event, frozen=True, kw_only=True, tag="stack_dump"):
    """Summary of what the threads of a silent trainer were doing; the full dump is in the file."""

    path: str
    """Path relative to the run folder."""
    state: str
    """State of the main thread: `computing`, `waiting for a lock`, `stopped by a signal`, ..."""
    summary: str
    python_frame: str
    """Innermost Python line of the main thread: `file:line in function`; empty when not known."""
    native_frame: str
    """Innermost C function of the main thread, or the kernel function in which it waits; empty if not known."""
    python_stack: list[str] = []
    """Frames of the main thread, innermost first."""
    others: list[str] = []
    """The innermost Python line of each other thread, with the thread's name, where py-spy read them."""
    collective: str = ""
    """Collective in which the ranks hang, and the rank that is missing from it; empty if unknown."""
    missing: list[str] = []
    """Stacks that could not be collected, each with its reason."""


class TrainerStarted(Event, frozen=True, kw_only=True, tag="trainer_started"):
    trainer_pid: Pid
    supervisor_pid: Pid


class TrainerExited(Event, frozen=True, kw_only=True, tag="trainer_exited"):
    """The end of the trainer process, as its parent saw it; `sentence` claims only what was proved."""

    trainer_pid: Pid
    returncode: Whole | None
    """Exit status; None if the engine is not the parent process, as for a second training process under `engine
    watch`."""
    state: str
    signal: str | None
    cause: str
    certainty: str
    sentence: str
    rank: Count | None = None
    """The rank that ended a run of several, where the launcher knows it."""


class ProcessFound(Event, frozen=True, kw_only=True, tag="process"):
    """A process that was already running when watching began (`engine watch --pid`), according to /proc at that time.
    It has no probe: its steps and its loss are unknown."""

    pid: Pid
    started_unix_s: UnixTime
    user: str
    executable: str
    processes: Count
    """The process and its descendants."""
    ranks: dict[str, Pid] = {}
    """The descendant processes that train, by the variable RANK of their environment."""
    opens_gpu: bool | None = None
    """Whether one of the processes has a GPU's device file open; None if the permission to read that is missing."""
    no_stacks: str = ""
    """Reason why no Python stack can be read, with advice; empty if it can."""


class LauncherGone(Event, frozen=True, kw_only=True, tag="launcher_gone"):
    """The process that started the run is no longer attached: `how` is `detached`, `hangup` or `killed`. The run
    continues."""

    how: str


class StopForwarded(Event, frozen=True, kw_only=True, tag="stop_forwarded"):
    signal: str


class Notified(Event, frozen=True, kw_only=True, tag="notified"):
    """A message about the run was sent: `ended`, `stalled`, `worse SUSPECT` or `worse WRONG`."""

    message: str
    sent: list[str] = []
    """Names of the receivers that took the message."""
    failed: dict[str, str] = {}
    """The receivers that did not take it: scheme and host, or program, each with the reason."""


Known: TypeAlias = (
    LogOpened
    | RunStarted
    | Watched
    | ScriptEnded
    | Worked
    | Imported
    | Phase
    | DecisionMade
    | DataReady
    | ModelReady
    | MemoryPlanned
    | MemoryMeasured
    | Compiled
    | KernelCounts
    | VocabularyCut
    | Judged
    | StepDone
    | Recorded
    | Evaluated
    | Wrote
    | Logged
    | CheckpointSaved
    | StudentSaved
    | ReceiptWritten
    | StopRequested
    | Note
    | RunFinished
    | FactsRead
    | HostSample
    | GpuSample
    | TrainerStarted
    | ProcessFound
    | TrainerExited
    | LauncherGone
    | StopForwarded
    | Notified
    | StackDump
)
AnyEvent: TypeAlias = Known | Unrecognised

KINDS: dict[str, type[Known]] = {kind.__struct_config__.tag: kind for kind in get_args(Known)}
"""Every event class this version knows, by its `kind` in the log."""


def kind_of(event: Event | Unrecognised) -> str:
    """Return the `kind` of an event in the log."""
    if isinstance(event, Unrecognised):
        return event.kind
    tag = type(event).__struct_config__.tag
    assert isinstance(tag, str)
    return tag
