"""Records of an audited step: what was observed in it, and what the spec, the files and the corpus prescribe for it.

All fields are plain tensors, numbers and functions; `engine.train.auditing` fills them in.
"""

# Shapes: B rows, T tokens, N = B*T, D student width, E teacher width, V vocabulary, R rows of a parameter

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.audit.reference import (
    IGNORED,
    AdamW,
    HeadRows,
    Objective,
    Runs,
    Shape,
    Targets,
    Weight,
    next_tokens,
)

TEACHER_NOT_READABLE = (
    "not compared: the teacher's outputs are read from a store, and its files are missing, in no format that another "
    "library reads, or too large to be read at each audit"
)
TEACHER_TOO_LARGE = "not compared: an fp32 copy of the teacher would be too large"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPass:
    """One micro-batch, as it was consumed."""

    tokens_BT: Tensor
    documents_BT: Tensor
    labels_BT: Tensor
    row_ids: Sequence[int]
    """Corpus row index that the batch gives for each row."""
    student_hidden_ND: Tensor
    """Hidden states that the loss received."""
    student_gradient_ND: Tensor | None
    """Gradient of the hidden states; None when backward produced none."""
    teacher_hidden_NE: Tensor | None
    """None without a teacher, or with targets."""
    targets: Targets | None
    corpus: CorpusRows
    objective: Objective
    """The objective of these rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusRows:
    """The rows that the corpus holds for a micro-batch, (B, T) each."""

    row_ids: Sequence[int]
    tokens_BT: Tensor
    documents_BT: Tensor
    predicted_BT: Tensor
    """Whether the token after each position may be a label."""
    after_B: Tensor
    """The label of each row's last position."""

    @property
    def labels_BT(self) -> Tensor:
        labels_BT = next_tokens(self.tokens_BT, self.documents_BT, self.after_B)
        return torch.where(self.predicted_BT, labels_BT, IGNORED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    shape: Shape
    weight: Weight
    """Weights of the step's forward pass."""
    vocabulary: int
    rounding: float
    """Largest relative error of one rounding in its matmuls."""
    parameters: int
    head_name: str
    """Name of the head's tensor, which may be the embedding; empty with `reference.LOGITS`."""
    runs: Runs
    """Reference forward pass with the same weights."""
    proved: bool = True
    """Whether `runs` is an independent implementation rather than the same module in fp32."""
    files: str = ""
    """Folder or file with the model's configuration; empty when its shape was already compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedParameter:
    """Some whole rows of a parameter of the student, in fp32."""

    name: str
    rows_R: Tensor
    """Indices of the sampled rows; for a vector, of its elements."""
    before: Tensor
    gradient: Tensor | None
    """Gradient of the sampled rows before clipping; None when there was none."""
    moments: tuple[Tensor, Tensor] | None
    """None before the first update."""
    updates: int
    """Number of updates that the optimizer counts before the step."""
    numbers: int
    """Number of elements of the whole parameter."""
    decays: bool
    """Whether weight decay applies to it: it does to matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatedParameter:
    """The same rows after the update."""

    after: Tensor
    moments: tuple[Tensor, Tensor] | None
    """Both moments; None for a parameter that is not in the optimizer."""
    updates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """The logged numbers of the step."""

    loss: float
    ce: float
    kd: float | None
    agreement: float | None
    lr: float
    grad_norm: float
    labelled: int
    updates: int
    """Number of updates applied before the step."""
    applied: bool
    """Whether there was an update: it is skipped where the loss or a gradient is not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The settings of the step, from the spec and the corpus."""

    objective: Objective
    """The objective of the first micro-batch."""
    mixed: bool
    """Whether another micro-batch has another objective, as rows that a model wrote."""
    adam: AdamW
    rate: float
    decay: float
    clip_norm: float
    passes: int
    """Number of micro-batches, over all ranks."""
    rows_distinct: bool
    """Whether all rows of the step belong to one epoch, so that none may repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedStep:
    """A step after its backward passes and before its update."""

    step: int
    passes: Sequence[ObservedPass]
    student: Model
    teacher: Model | None
    """The teacher; None where the objective has none, or for the reason in `no_teacher`."""
    teacher_changed: Sequence[str]
    """Names of the teacher's tensors that the step changed."""
    student_head: HeadRows
    """Head of the student as the loss receives it; `teacher_head` likewise."""
    teacher_head: HeadRows | None
    logit_rounding: float
    """Largest relative error of one product in the matmul to logits, without the rounding of its operands."""
    parameters: Sequence[ObservedParameter]
    gradient_norm: float
    """Global norm of all gradients, summed in float64."""
    wanted: Wanted
    seed: int
    free_bytes: int = 0
    """GPU bytes that the step allocated and freed."""
    no_teacher: str = TEACHER_NOT_READABLE
