"""What the audit of a step has seen of it, and what the spec, the files and the corpus say of the same step.

Everything is plain tensors, numbers and functions: whoever owns the step fills this in (`engine.train.auditing`).
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

NOT_IN_FILES = (
    "the teacher's outputs are read from a store, and its files are none that another library reads, or too large to "
    "be read at each audit"
)
NOT_WIDENED = "not compared: a copy of the teacher in fp32 beside it would be too large"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPass:
    """One micro-batch, as it was consumed."""

    tokens_BT: Tensor
    documents_BT: Tensor
    labels_BT: Tensor
    row_ids: Sequence[int]
    """The row of the corpus that each is said to be."""
    student_hidden_ND: Tensor
    """As the loss got them."""
    student_gradient_ND: Tensor | None
    """The gradient of the hidden states; None when none arrived."""
    teacher_hidden_NE: Tensor | None
    """None without a teacher, or with targets."""
    targets: Targets | None
    corpus: CorpusRows


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusRows:
    """What the corpus holds where a micro-batch should have been taken from, (B, T) each."""

    row_ids: Sequence[int]
    tokens_BT: Tensor
    documents_BT: Tensor
    predicted_BT: Tensor
    """Whether the token after each position is one that may be predicted."""
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
    """The weights that the step's forward pass was run with."""
    vocabulary: int
    rounding: float
    """Largest relative error of one rounding in its matmuls."""
    parameters: int
    head_name: str
    """The tensor that is its head, which may be the embedding; empty with `reference.LOGITS`."""
    runs: Runs
    """What the step's forward pass is compared with, with the same weights."""
    proved: bool = True
    """Whether `runs` is a forward pass of its own, and not the same module in fp32."""
    files: str = ""
    """The folder or file that says its shape; empty when that was looked at before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedParameter:
    """Some whole rows of a parameter of the student, in fp32."""

    name: str
    rows_R: Tensor
    """Which rows; of a vector, which numbers."""
    before: Tensor
    gradient: Tensor | None
    """As the update found it, before clipping; None when there was none."""
    moments: tuple[Tensor, Tensor] | None
    """None before the first update."""
    updates: int
    """The optimizer's count of those before the step."""
    numbers: int
    """Of the whole parameter."""
    decays: bool
    """Whether it is a matrix, which weight decay is for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatedParameter:
    """The same rows as the update leaves them."""

    after: Tensor
    moments: tuple[Tensor, Tensor] | None
    """None for a parameter that the optimizer does not have."""
    updates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """The record of the step."""

    loss: float
    ce: float
    kd: float | None
    agreement: float | None
    lr: float
    grad_norm: float
    labelled: int
    updates: int
    """Applied before the step."""
    applied: bool
    """Whether there was an update: there is none where a number of the step is not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What spec and corpus say of the step."""

    objective: Objective
    adam: AdamW
    rate: float
    decay: float
    clip_norm: float
    passes: int
    """Micro-batches of all ranks."""
    rows_distinct: bool
    """Whether the rows of the step are of one epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedStep:
    """A step when its gradients are there and its update is not."""

    step: int
    passes: Sequence[ObservedPass]
    student: Model
    teacher: Model | None
    """None without a teacher in the objective, or for the reason in `no_teacher`."""
    teacher_changed: Sequence[str]
    """Tensors of the teacher that the step has changed."""
    student_head: HeadRows
    """As the loss gets it, as is `teacher_head`."""
    teacher_head: HeadRows | None
    logit_rounding: float
    """Largest relative error of one product in the matmul to logits, beyond the rounding of its operands."""
    parameters: Sequence[ObservedParameter]
    gradient_norm: float
    """Of all gradients, summed in float64."""
    wanted: Wanted
    seed: int
    room: int = 0
    """Bytes on a GPU that the step has taken and that are free again."""
    no_teacher: str = NOT_IN_FILES
