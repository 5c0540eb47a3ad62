"""Records of an audited step: the observed tensors and numbers, and the settings that the spec prescribes for it.

All fields are plain tensors, numbers and functions; `engine.train.auditing` fills them in.
"""

# Shapes: B rows, T tokens, N = B*T, D student width, E teacher width, V vocabulary, R rows of a parameter

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from engine.audit.reference import AdamW, HeadRows, Objective, PlainDecoder, Shape, Targets, Weight


@dataclass(slots=True, kw_only=True)
class ObservedPass:
    """One micro-batch: its rows on the host, and the tensors that the step computed from them."""

    tokens_BT: Tensor
    documents_BT: Tensor
    labels_BT: Tensor
    student_hidden_ND: Tensor
    """Hidden states that the loss received as input."""
    student_gradient_ND: Tensor | None = None
    """Gradient of the hidden states; None if the backward pass produced none."""
    teacher_hidden_NE: Tensor | None
    """Hidden states of the teacher; None without a teacher, or with stored targets."""
    targets: Targets | None
    objective: Objective
    """The objective of these rows."""

    def to(self, device: torch.device) -> ObservedPass:
        tensors: dict[str, Any] = {
            field.name: value.to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        if (targets := self.targets) is not None:
            log_probs_NK = targets.log_probs_NK
            targets = Targets(
                ids_NK=targets.ids_NK.to(device),
                log_probs_NK=None if log_probs_NK is None else log_probs_NK.to(device),
            )
        return replace(self, **tensors, targets=targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    shape: Shape
    weight: Weight
    """Weights of the step's forward pass."""
    vocabulary: int
    rounding: float
    """Maximum relative error of one rounding in the model's matmuls."""
    parameters: int
    head_name: str
    """Name of the head's tensor, which may be the embedding; empty with `reference.LOGITS`."""
    runs: PlainDecoder | None
    """Reference with the same weights; None for a model that transformers runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedParameter:
    """Sampled rows of a parameter of the student, in fp32."""

    name: str
    rows_R: Tensor
    """Indices of the sampled rows; for a vector, of its elements."""
    before: Tensor
    gradient: Tensor | None
    """Gradient of the sampled rows before clipping; None if there was none."""
    moments: tuple[Tensor, Tensor] | None
    """AdamW's moments of the sampled rows; None before the first update."""
    updates: int
    """Number of updates before the step, as the optimizer counts them."""
    numbers: int
    """Number of elements of the whole parameter."""
    decays: bool
    """Whether weight decay applies to the parameter, as it does to matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatedParameter:
    """The sampled rows of a parameter after the update."""

    after: Tensor
    moments: tuple[Tensor, Tensor] | None
    """Both moments; None for a parameter that is not in the optimizer."""
    updates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedStep:
    """A step after its backward passes and before its update."""

    step: int
    passes: Sequence[ObservedPass]
    student: Model
    teacher: Model | None
    """The teacher; None if the objective has none, or for the reason in `no_teacher`."""
    no_teacher: str
    stored: bool
    """Whether the teacher's outputs are read from a store."""
    student_head: HeadRows
    """Head of the student, as the loss receives it; `teacher_head` is the teacher's."""
    teacher_head: HeadRows | None
    logit_rounding: float
    """Maximum relative error of one product in the matmul to logits, without the rounding of its operands."""
    parameters: Sequence[ObservedParameter]
    gradient_norm: float
    """Global norm of all gradients, summed in float64."""
    adam: AdamW
    decay: float
    """Weight decay of matrices."""
    clip_norm: float
    free_bytes: int = 0
    """GPU bytes that the step allocated and freed, which the audit may use."""
