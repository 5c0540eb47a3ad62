"""The settings of a run: one frozen dataclass per section of the TOML file, each field with its
default, its documentation and its range.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engine.divergences import DIVERGENCES
from engine.limits import SPEC_PROMPT

LONGEST_WAIT_S = 30 * 86400
SWITCH = ("auto", "off", "on")


def setting(
    default: Any,
    doc: str,
    *,
    allowed: tuple[str, ...] | None = None,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    most: float | None = None,
    path: bool = False,
    changes_results: bool = False,
) -> Any:
    """Declare a field with its documentation and its range: [low, high], or greater than `above`.

    `changes_results` marks a setting that is meant to change what is learnt or how it is evaluated: the objective,
    the data, the models, the schedule. Every other setting only affects how the same numbers are computed, stored
    or watched: changing it must leave the losses unchanged.

    A number without `high` has `most`, a limit far above real use that catches slips which would take the
    machine down, such as a batch that fits in no memory.
    """
    metadata = dict(doc=doc, allowed=allowed, low=low, high=high, above=above, most=most, path=path)
    metadata["changes_results"] = changes_results
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    name: str = setting("", "Name of the run folder; empty means the spec's name and the time.")
    out: str = setting(
        "runs", "Folder that holds the run folders; relative to the current directory."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    engine: str = setting(
        "auto",
        "What runs teacher and student: this engine's decoder (native), the models' classes in transformers "
        "(transformers), or this decoder for the model whose family it supports and transformers for the other "
        "(by_family). auto is native where that is possible, then by_family, then transformers.",
        allowed=("auto", "by_family", "native", "transformers"),
    )
    remote_code: bool = setting(
        False,
        "Whether Python code in a model's folder may run, for a model that transformers has no class for.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSection:
    path: str = setting(
        "",
        "Folder of the teacher (config.json, safetensors, tokenizer.json), GGUF or .apr file, or the name of a model "
        "in the Hugging Face cache: ORG/NAME or ORG/NAME@REVISION; empty means no teacher.",
        path=True,
        changes_results=True,
    )
    backend: str = setting(
        "auto",
        "Where the teacher's outputs come from: a teacher with dense weights (dequantized), a teacher whose weights "
        "stay quantized (quantized), or teacher.cache (cached); none is no teacher. auto is cached where "
        "teacher.cache is set, else dequantized where that fits in memory.",
        allowed=("auto", "dequantized", "quantized", "cached", "none"),
    )
    precision: str = setting(
        "auto",
        "Arithmetic of the teacher: auto is bf16 on a GPU that has it, else fp32. tf32 is fp32 with TF32 matmuls; "
        "fp8 is bf16 with FP8 matmuls, which is checked on held-out rows.",
        allowed=("auto", "fp32", "tf32", "bf16", "fp8"),
    )
    shard: str = setting(
        "auto",
        "With several GPUs: whether each GPU stores a shard of every teacher layer and gathers a layer to run it "
        "(on), or stores the whole teacher (off). auto is on only where the run does not fit otherwise.",
        allowed=SWITCH,
    )
    cache: str = setting(
        "",
        "Folder of stored teacher outputs, made by `engine prepare`; empty means that the teacher is run.",
        path=True,
    )
    cache_miss: str = setting(
        "online",
        "What to do when a batch is not in teacher.cache: load and run the teacher (online), or end the "
        "run (refuse).",
        allowed=("online", "refuse"),
    )
    attention: str = setting(
        "auto",
        "Attention over packed documents: variable-length kernels (packed), or a mask (masked). auto is packed where "
        "the GPU has it.",
        allowed=("auto", "masked", "packed"),
    )
    context: str = setting(
        "",
        "Text that the teacher alone reads before each document, such as a system prompt with its special tokens: the "
        "student learns to do without it. Empty means none.",
        most=SPEC_PROMPT.most,
        changes_results=True,
    )
    allow_identical: bool = setting(
        False, "Whether a student equal to its teacher may be trained; it has nothing to learn."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentSection:
    path: str = setting(
        "",
        "Folder, file or name of a student to start from, as in teacher.path; empty means fresh weights of the shape "
        "in student.config.",
        path=True,
        changes_results=True,
    )
    config: str = setting(
        "",
        "A config.json with the shape of a fresh student, or the name of a model that has this shape.",
        path=True,
        changes_results=True,
    )
    precision: str = setting(
        "auto",
        "Arithmetic of the student; its master weights are always fp32.",
        allowed=("auto", "fp32", "bf16"),
    )
    graphs: str = setting(
        "auto",
        "Whether the student's layers are launched as CUDA graphs instead of kernel by kernel. Graphs keep the "
        "layers' activations and gradients in memory. auto is on where memory allows, for adapters and for steps "
        "of few tokens, in which the GPU waits for the host; elsewhere graphs save less than a percent of a step.",
        allowed=SWITCH,
    )
    attention: str = setting(
        "auto",
        "Attention over packed documents: variable-length kernels (packed), or a mask (masked). auto is packed where "
        "the GPU has it.",
        allowed=("auto", "masked", "packed"),
    )
    checkpointing: str = setting(
        "auto",
        "Whether activations are recomputed in the backward pass instead of kept (gradient checkpointing). auto "
        "is on only where the "
        "run does not fit without it.",
        allowed=SWITCH,
    )
    reshard: str = setting(
        "auto",
        "With several GPUs: whether each layer's weights are gathered for its forward pass and again for its backward "
        "pass (on), or kept in between (off). auto keeps them where they fit.",
        allowed=SWITCH,
    )
    adapter: str = setting(
        "none",
        "Train low-rank adapters of a frozen student (lora) instead of its weights (none). The student that is saved "
        "is the adapter, as peft saves it.",
        allowed=("none", "lora"),
        changes_results=True,
    )
    adapter_rank: int = setting(16, "Rank of the adapters.", low=1, most=4096, changes_results=True)
    adapter_alpha: float = setting(
        32.0,
        "An adapter's output is multiplied by adapter_alpha / adapter_rank.",
        above=0.0,
        most=1e6,
        changes_results=True,
    )
    adapter_rslora: bool = setting(
        False,
        "Divide adapter_alpha by the root of the rank instead of the rank.",
        changes_results=True,
    )
    adapter_base: str = setting(
        "blocks",
        "How the frozen weights under adapters are stored: in the quantised blocks of their file, if it has any "
        "(blocks), as floats, or with the layers' matrices rounded to 8-bit floats (fp8): half the memory of bf16, and "
        "forward matmuls up to twice as fast.",
        allowed=("blocks", "floats", "fp8"),
        changes_results=True,
    )
    adapter_targets: str = setting(
        "all",
        "Matrices of the layers that get adapters: all, attention, or names such as q_proj,v_proj.",
        changes_results=True,
    )
    save_as: str = setting(
        "fp32",
        "Number format of the saved student; checkpoints are always fp32.",
        allowed=("fp32", "bf16"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabSection:
    align: str = setting(
        "truncate",
        "What to do when the teacher's vocabulary is larger than the student's: drop the extra logits before the "
        "softmax (truncate), or refuse the run (refuse).",
        allowed=("truncate", "refuse"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    corpus: str = setting(
        "python-stdlib",
        "python-stdlib (this interpreter's own library), a text file, a file of records (.jsonl, .json, .parquet; "
        "the first two also as .gz and .zst), a folder of such files, or a glob. A record has a text or a "
        "conversation: messages, conversations, or prompt and completion.",
        changes_results=True,
    )
    tokenizer: str = setting(
        "",
        "Folder or file of the tokenizer, or the name of a model; empty means the teacher's, else the student's.",
        path=True,
        changes_results=True,
    )
    seq_len: int = setting(
        256,
        "Tokens in a row. Documents in a row never attend to each other.",
        low=2,
        most=1 << 20,
        changes_results=True,
    )
    heldout_fraction: float = setting(
        0.08,
        "Share of the documents, chosen by name, that is never trained on.",
        above=0.0,
        high=0.5,
        changes_results=True,
    )
    include_tests: bool = setting(
        False, "Whether python-stdlib includes the library's own test files.", changes_results=True
    )
    max_bytes: int = setting(
        0,
        "Maximum size of the training text in bytes; 0 means all.",
        low=0,
        most=1 << 53,
        changes_results=True,
    )
    packing: str = setting(
        "stream",
        "How documents are packed into rows: stream puts one after the other "
        "and cuts them at the end of a row; documents puts as many whole "
        "documents as fit into a row; off gives each document its own row. The last two fill rows with padding.",
        allowed=("stream", "documents", "off"),
        changes_results=True,
    )
    columns: str = setting(
        "",
        "Columns of the records, if they have other names: two, as in question,answer, for prompt and completion, "
        "or one for the text or the messages. Empty means that they are detected.",
        changes_results=True,
    )
    turns: str = setting(
        "all",
        "Which turns of the assistant in a conversation have labels: all, or the last.",
        allowed=("all", "last"),
        changes_results=True,
    )
    skip_at_most: float = setting(
        0.05,
        "Maximum share of invalid records, such as truncated JSON or an answer of null. They "
        "are left out and counted; more than this share and more than 20 records are an error.",
        low=0.0,
        high=1.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSection:
    alpha: float = setting(
        0.3,
        "Weight of the cross entropy; 1 - alpha is the weight of T^2 * KL(teacher || student).",
        low=0.0,
        high=1.0,
        changes_results=True,
    )
    temperature: float = setting(
        2.0,
        "T: both models' logits are divided by it inside the KL.",
        above=0.0,
        most=1e6,
        changes_results=True,
    )
    divergence: str = setting(
        "forward_kl",
        "Divergence between teacher and student: "
        + "; ".join(f"{name}, {row.doc}" for name, row in DIVERGENCES.items())
        + ".",
        allowed=tuple(DIVERGENCES),
        changes_results=True,
    )
    beta: float = setting(
        0.5,
        "The teacher's weight in the mixture of loss.divergence="
        + " or ".join(name for name, row in DIVERGENCES.items() if row.mixture)
        + ".",
        low=0.01,
        high=0.99,
        changes_results=True,
    )
    kernel: str = setting(
        "auto",
        "How the loss is computed between its matmuls: in one kernel (fused), or in plain torch (eager). auto is "
        "fused where a GPU can run it.",
        allowed=("auto", "eager", "fused"),
    )
    chunk_rows: int = setting(
        0, "Tokens whose logits are in memory at a time; 0 is automatic.", low=0, most=1 << 26
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSection:
    share: float = setting(
        0.0,
        "Share of the forward passes whose rows a model generates in that step, instead of reading them from the "
        "corpus (on-policy distillation); 0 trains on the corpus alone, 1 on generated rows alone. Generated rows have "
        "no cross entropy.",
        low=0.0,
        high=1.0,
        changes_results=True,
    )
    by: str = setting(
        "student",
        "Which model generates the rows: the student as of that step, or the teacher (sequence-level distillation).",
        allowed=("student", "teacher"),
        changes_results=True,
    )
    divergence: str = setting(
        "reverse_kl",
        "Divergence between teacher and student on generated rows; loss.beta is the weight in jsd.",
        allowed=tuple(DIVERGENCES),
        changes_results=True,
    )
    prompt_tokens: int = setting(
        32,
        "Tokens of a document that a model continues, at most half of those in the row. In a conversation the "
        "prompt is what comes before a turn of the assistant.",
        low=1,
        most=1 << 20,
        changes_results=True,
    )
    max_new_tokens: int = setting(
        128,
        "Maximum number of generated tokens; data.seq_len must hold the prompt and these.",
        low=1,
        most=1 << 20,
        changes_results=True,
    )
    temperature: float = setting(
        1.0,
        "Temperature at which tokens are drawn; 0 takes the most probable.",
        low=0.0,
        most=1e6,
        changes_results=True,
    )
    top_p: float = setting(
        1.0,
        "Tokens are drawn from the most probable ones whose total probability reaches this (top-p).",
        above=0.0,
        high=1.0,
        changes_results=True,
    )
    top_k: int = setting(
        0,
        "Tokens are drawn from this many of the most probable ones (top-k); 0 means all.",
        low=0,
        most=1 << 24,
        changes_results=True,
    )
    min_p: float = setting(
        0.0,
        "Tokens are drawn from those whose probability is at least this share of the most probable one's (min-p).",
        low=0.0,
        high=1.0,
        changes_results=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSection:
    steps: int = setting(
        1000, "Optimizer steps of the whole run.", low=1, most=10**9, changes_results=True
    )
    stop_after: int = setting(
        0,
        "Steps after which a session saves and stops cleanly; 0 trains to the end.",
        low=0,
        most=10**9,
    )
    rows: int = setting(8, "Rows in one forward pass.", low=1, most=1 << 22, changes_results=True)
    accumulation: int = setting(
        1, "Forward passes in one optimizer step.", low=1, most=1 << 20, changes_results=True
    )
    lr: float = setting(3e-4, "Peak learning rate.", above=0.0, most=1e38, changes_results=True)
    warmup_steps: int = setting(
        -1,
        "Steps of linear warm-up; -1 is a tenth of train.steps, at most 20, or 2 % of them if that is more.",
        low=-1,
        most=10**9,
        changes_results=True,
    )
    schedule: str = setting(
        "cosine",
        "Learning rate after warm-up.",
        allowed=("cosine", "constant"),
        changes_results=True,
    )
    final_lr_ratio: float = setting(
        0.1,
        "Final learning rate of cosine, as a share of the peak.",
        low=0.0,
        high=1.0,
        changes_results=True,
    )
    weight_decay: float = setting(
        0.1, "AdamW's decay, of matrices only.", low=0.0, most=1e6, changes_results=True
    )
    beta1: float = setting(0.9, "AdamW's first moment.", low=0.0, high=0.9999, changes_results=True)
    beta2: float = setting(
        0.95, "AdamW's second moment.", low=0.0, high=0.99999, changes_results=True
    )
    eps: float = setting(1e-8, "AdamW's epsilon.", above=0.0, most=1e6, changes_results=True)
    clip_norm: float = setting(
        1.0,
        "Global gradient norm is clipped to this; 0 does not clip.",
        low=0.0,
        most=1e38,
        changes_results=True,
    )
    update: str = setting(
        "auto",
        "What computes an optimizer step, with the gradient norm and clipping: our kernels, which read and write each "
        "number once (fused), or torch's operations (torch). auto is fused on one GPU.",
        allowed=("auto", "torch", "fused"),
    )
    seed: int = setting(
        0,
        "Seeds fresh weights and the order of the rows.",
        low=0,
        most=(1 << 63) - 1,
        changes_results=True,
    )
    on_non_finite: str = setting(
        "stop",
        "What to do at a NaN or infinite loss or gradient: stop, or skip that update.",
        allowed=("stop", "skip"),
        changes_results=True,
    )

    @property
    def warmup(self) -> int:
        """Steps of linear warm-up: those that are set, else a share of the steps."""
        if self.warmup_steps != -1:
            return self.warmup_steps
        return max(min(20, self.steps // 10), self.steps // 50)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSection:
    every: int = setting(
        50, "Steps between held-out evaluations; 0 means only before and after.", low=0, most=10**9
    )
    rows: int = setting(
        64, "Held-out rows in each evaluation.", low=1, most=1 << 20, changes_results=True
    )
    sample_tokens: int = setting(
        16,
        "Tokens by which each evaluation continues one held-out prompt, as a sample to read; 0 generates none.",
        low=0,
        most=256,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    every: int = setting(
        200, "Steps between checkpoints; 0 means only at the end.", low=0, most=10**9
    )
    keep_last: int = setting(
        2, "Number of newest checkpoints to keep, in addition to the best.", low=1, most=10**6
    )
    at_end: bool = setting(
        True,
        "Save a checkpoint and the student at the end; a benchmark run needs neither.",
    )
    sharded: str = setting(
        "auto",
        "With several GPUs: whether every rank writes its own part of a checkpoint (on), or the first writes all of "
        "it (off). auto is on for large students. Both can be resumed on any number of GPUs.",
        allowed=SWITCH,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSection:
    device: str = setting(
        "auto",
        "Where to train: auto is the first GPU, else the CPU.",
        allowed=("auto", "cpu", "cuda"),
    )
    gpus: int = setting(
        1,
        "GPUs that train together, one process each (on a CPU: processes). train.rows is per GPU.",
        low=1,
        high=1024,
        changes_results=True,
    )
    collective_timeout_s: int = setting(
        600,
        "Seconds after which a rank gives up waiting for another that hangs.",
        low=10,
        most=LONGEST_WAIT_S,
    )
    threads: int = setting(
        0, "CPU threads of torch; 0 means the CPUs this process may use.", low=0, most=4096
    )
    thread_wait: str = setting(
        "auto",
        "How idle CPU threads wait: passive sleeps, active spins.",
        allowed=("auto", "passive", "active"),
    )
    slow_by: float = setting(
        0.0,
        "Share by which a sleep lengthens each step: the positive control of an experiment.",
        low=0.0,
        high=10.0,
    )
    deterministic: bool = setting(
        False,
        "Refuse operations without a deterministic form; the CPU path has only deterministic ones.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySection:
    allocator: str = setting(
        "auto",
        "Where weights live: device memory (native) or CUDA managed memory (managed). auto is managed where "
        "the GPU shares the host's memory.",
        allowed=("auto", "native", "managed"),
    )
    budget: str = setting(
        "enforce",
        "What to do with a run that is predicted to need more memory than is available: refuse it before anything is "
        "uploaded (enforce), or only warn (report).",
        allowed=("enforce", "report"),
    )
    limit_gib: float = setting(
        0.0,
        "Limit in GiB of the device memory the process may use, CUDA's context included; 0 is all that is free. "
        "If memory is short, the loss takes smaller chunks, then the teacher stays quantized, then activations are "
        "recomputed.",
        low=0.0,
        most=1 << 20,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsSection:
    prewarm: bool = setting(
        True,
        "Compile every kernel of the run before its first step, so that no step waits for a compiler.",
    )
    layers: str = setting(
        "auto",
        "What computes the operations between the matmuls of layers: our kernels (fused) or torch's operations "
        "(torch). auto is fused on a GPU that runs our kernels.",
        allowed=("auto", "fused", "torch"),
    )
    attention: str = setting(
        "auto",
        "What computes packed attention: cuDNN, or torch's flash attention. auto is cudnn on a GPU of compute "
        "capability 9.0 or later, where `nvidia-cudnn-frontend` is installed; flash with compute.deterministic.",
        allowed=("auto", "cudnn", "flash"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSection:
    stall_seconds: int = setting(
        0,
        "Seconds without a step after which the run counts as stalled; 0 derives it from the median step.",
        low=0,
        most=LONGEST_WAIT_S,
    )
    on_stall: str = setting(
        "report",
        "What to do with a stalled run: report it with its stacks, or report and stop it.",
        allowed=("report", "stop"),
    )
    on_thrash: str = setting(
        "stop",
        "What to do when the machine runs out of memory and all its processes wait for it: stop the run, which "
        "saves, before the machine stops responding (stop), or only report it.",
        allowed=("report", "stop"),
    )
    sample_seconds: float = setting(
        1.0,
        "Seconds between two readings of the GPU and the host, made longer where reading costs more than 0.5 % of "
        "the time; 0 takes none, to measure the cost of watching.",
        low=0,
        most=86400,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifySection:
    to: str = setting(
        "all",
        "Who gets a message when the run ends, its verdict gets worse or it stalls: all receivers of notify.toml, "
        "comma-separated names of receivers ($VARIABLE for one whose URL is in the environment), or none.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksSection:
    enabled: bool = setting(
        True, "Check in the first minute that the run does what its spec says; costs are shown."
    )
    skip: str = setting("", "Comma-separated ids of checks to leave out (`engine checks --list`).")
    on_fail: str = setting(
        "stop",
        "What to do when a check fails that makes the run worthless: stop, or report it and continue.",
        allowed=("stop", "report"),
    )
    every: int = setting(
        0,
        "Steps between audited steps, in addition to the first two of a session and the last of a run; 0 audits no "
        "others, and -1 leaves out the second too.",
        low=-1,
        most=10**9,
    )
    record: str = setting(
        "some",
        "Steps of which a few numbers are logged for `engine verify`: the first 32 of a session and then one a second "
        "(some), all, or none (off).",
        allowed=("some", "all", "off"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSection:
    smoke_steps: int = setting(
        20,
        "Steps on one batch of the run's own rows after which its loss has to be lower.",
        low=2,
        most=10**6,
    )
    cache_cosine: float = setting(
        0.999,
        "Minimum cosine between a token's hidden state in teacher.cache and the teacher's own.",
        low=0.0,
        high=1.0,
    )
    heldout_loss: float = setting(
        0.0,
        "Maximum held-out loss of the student in nats per token; 0 sets no target.",
        low=0.0,
        most=1e6,
    )
    heldout_share: float = setting(
        0.0,
        "Minimum share of the way from the untrained student's held-out loss to the teacher's; at 0 the "
        "student has to be better than untrained.",
        low=0.0,
        high=1.0,
    )
    pass_at_1: float = setting(
        0.0,
        "Minimum of the lower end of the 95 % interval of pass@1 (HumanEval, MBPP); 0 disables it.",
        low=0.0,
        high=1.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    run: RunSection = dataclasses.field(default_factory=RunSection)
    model: ModelSection = dataclasses.field(default_factory=ModelSection)
    teacher: TeacherSection = dataclasses.field(default_factory=TeacherSection)
    student: StudentSection = dataclasses.field(default_factory=StudentSection)
    vocab: VocabSection = dataclasses.field(default_factory=VocabSection)
    data: DataSection = dataclasses.field(default_factory=DataSection)
    loss: LossSection = dataclasses.field(default_factory=LossSection)
    rollout: RolloutSection = dataclasses.field(default_factory=RolloutSection)
    train: TrainSection = dataclasses.field(default_factory=TrainSection)
    eval: EvalSection = dataclasses.field(default_factory=EvalSection)
    checkpoint: CheckpointSection = dataclasses.field(default_factory=CheckpointSection)
    compute: ComputeSection = dataclasses.field(default_factory=ComputeSection)
    memory: MemorySection = dataclasses.field(default_factory=MemorySection)
    kernels: KernelsSection = dataclasses.field(default_factory=KernelsSection)
    checks: ChecksSection = dataclasses.field(default_factory=ChecksSection)
    watch: WatchSection = dataclasses.field(default_factory=WatchSection)
    notify: NotifySection = dataclasses.field(default_factory=NotifySection)
    gate: GateSection = dataclasses.field(default_factory=GateSection)

    def value(self, key: str) -> Any:
        """Return the value of a setting by its dotted key."""
        section, name = key.split(".")
        return getattr(getattr(self, section), name)

    def with_values(self, values: Mapping[str, Any]) -> RunSpec:
        """Return the spec with other values, by dotted key; a number may be given as text."""
        tree: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            section, name = key.split(".")
            tree.setdefault(section, {})[name] = type(self.value(key))(value)
        changed = {
            section: dataclasses.replace(getattr(self, section), **tree[section])
            for section in tree
        }
        return dataclasses.replace(self, **changed)

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimizer step, on all GPUs together."""
        return self.train.rows * self.train.accumulation * self.compute.gpus

    def to_dict(self) -> dict[str, dict[str, Any]]:
        return dataclasses.asdict(self)

    @property
    def sha256(self) -> str:
        """Hash of every setting that affects the run: equal hashes mean the same experiment."""
        return settings_sha256(self.to_dict())

    @property
    def without_receivers(self) -> RunSpec:
        """The spec without receivers of notifications, for a run that a command starts for its own use."""
        return self.with_values({"notify.to": "none"})

    @property
    def taught(self) -> bool:
        """Whether the objective uses the teacher."""
        return self.has_teacher and (self.loss.alpha < 1 or self.rollout.share > 0)

    @property
    def has_teacher(self) -> bool:
        return self.teacher.backend != "none" and bool(self.teacher.path)


def settings_sha256(settings: Mapping[str, Any]) -> str:
    """Hash settings in the form of `to_dict`, without the sections `run` (where the run is kept), `gate`
    (what its result must reach) and `notify` (who gets messages about it). For stored settings it
    is the hash that they had when they were stored, even if settings were added since."""
    excluded = ("run", "gate", "notify")
    kept = {name: section for name, section in settings.items() if name not in excluded}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One setting, for help texts and checks."""

    key: str
    type_name: str
    default: Any
    doc: str
    allowed: tuple[str, ...] | None
    low: float | None
    high: float | None
    above: float | None
    most: float | None
    """Limit far above real use of a number without `high`; maximum length of a text in bytes."""
    path: bool
    """Whether the setting names a file or folder that must exist before the run."""
    changes_results: bool
    """Whether the setting is meant to change what is learnt or how it is evaluated."""


def options() -> Iterator[Option]:
    """Yield every setting of a RunSpec, in the order of the file."""
    for section in dataclasses.fields(RunSpec):
        kind = section_type(section.name)
        types_by_name = typing.get_type_hints(kind)
        for item in dataclasses.fields(kind):
            yield Option(
                key=f"{section.name}.{item.name}",
                type_name=types_by_name[item.name].__name__,
                default=item.default,
                **item.metadata,
            )


@functools.cache
def section_type(name: str) -> Any:
    return typing.get_type_hints(RunSpec)[name]


KEYS = tuple(option.key for option in options())
CHANGE_RESULTS = frozenset(option.key for option in options() if option.changes_results)
"""Settings that are meant to change the losses; see `setting`."""
