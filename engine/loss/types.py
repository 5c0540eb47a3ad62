"""What the forms of the loss share: what they are given, what they give back, and what is refused.

The loss works in chunks of rows (`objective.py`); the arithmetic between the matrix products of a chunk has
four forms:

            teacher's hidden states and head    some ids of each token (a store of teacher outputs)
eager       dense.py                            sparse.py                anywhere
fused       fused.py                            fused.py                 our kernels, on a GPU that can run them
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from engine.models.head import Slices
from engine.spec.divergences import DIVERGENCES

# Shapes: M labelled tokens, C tokens of one chunk, G of a group of chunks, V student vocabulary,
# D student width, E teacher width, K ids of a token

IGNORE_LABEL = -100
LossKernel: TypeAlias = Literal["eager", "fused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseTargets:
    """What a teacher says of N tokens, of K ids each, over the student's vocabulary."""

    ids_NK: Tensor
    """int32 or int64. Those of one token differ, unless they were drawn."""
    log_probs_NK: Tensor | None
    """Of `top_k`: log p at the loss's temperature, of any float type. None for draws."""
    kind: Literal["top_k", "sampled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Teaching:
    """The teacher's side: what its logits are made of."""

    hidden_ME: Tensor
    slices: Slices
    """Of its head, the student's V columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything the chunk loop needs that autograd need not see."""

    labels_M: Tensor
    teacher: Teaching | SparseTargets | None
    alpha: float
    temperature: float
    divergence: str
    beta: float
    """Of `jsd`: the teacher's weight in the mixture."""
    kernel: LossKernel
    chunk_rows: int
    wants_hidden: bool
    wants_head: bool
    divisor: float | Tensor = 1.0
    """Of the loss."""
    finished: bool = False
    """Whether nothing will multiply the loss, so that its gradients can be divided on the way; the
    divisor is a number of the host then."""


@dataclass(slots=True, kw_only=True)
class Totals:
    """Over all rows so far; 0-d, on the device. Sums are not divided by anything, nor multiplied by T^2,
    and in float64: they are read against finite differences of each other.
    """

    ce: Tensor
    divergence: Tensor | None = None
    agreeing: Tensor | None = None
    """None without a teacher, and for drawn targets, which do not say what the teacher ranks first."""
    lowest: Tensor | None = None
    """The lowest divergence of a row; None as `agreeing`."""
    largest_sum: Tensor | None = None
    """The largest |sum_v dz_v| of a row."""

    @classmethod
    def none(cls, device: torch.device) -> Totals:
        return cls(ce=torch.zeros((), dtype=torch.float64, device=device))

    def add(self, ce_C: Tensor, divergence_C: Tensor | None, agree_C: Tensor | None) -> None:
        self.ce += ce_C.sum(dtype=torch.float64)
        if divergence_C is not None:
            if self.divergence is None:
                self.divergence = torch.zeros_like(self.ce)
            self.divergence += divergence_C.sum(dtype=torch.float64)
        if divergence_C is not None and agree_C is not None:
            if self.agreeing is None:
                self.agreeing = torch.zeros_like(self.ce)
            self.agreeing += agree_C.sum()
            low = divergence_C.amin()
            self.lowest = low if self.lowest is None else torch.minimum(self.lowest, low)

    def add_gradient(self, dz_CV: Tensor) -> None:
        """Looks at the sum of each row of a finished gradient."""
        most = dz_CV.sum(dim=1).abs().amax()
        self.largest_sum = (
            most if self.largest_sum is None else torch.maximum(self.largest_sum, most)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """What one call adds to an optimizer step. 0-d tensors on the device of the hidden states;
    reading one is the caller's sync.

    Each is a sum over this call's labelled rows divided by the step's denominator, so the pieces of
    an accumulated step add up to the step's mean, and `loss = alpha * ce + (1 - alpha) * kd`.
    """

    loss: Tensor
    """The objective, nats. The only term that carries a gradient."""
    ce: Tensor
    """Cross entropy, nats, at temperature 1."""
    kd: Tensor | None
    """T^2 * KL(teacher || student), or the divergence that stands in its place, with both sides at
    temperature T; None when no teacher took part (alpha = 1).
    """
    agreement: Tensor | None
    """Share of the step's labelled rows, counted here, on which teacher and student rank the same
    id first. None without a teacher, and for drawn targets.
    """
    labelled: Tensor
    """Labelled rows of this call, int64: a plain count, not divided by the denominator."""
    lowest_kl: Tensor | None = None
    """The lowest divergence of a labelled row, nats, without T^2: at least `LOWEST_DIVERGENCE`. None
    without a teacher in the objective, without a row, and for drawn targets.
    """
    largest_dz_sum: Tensor | None = None
    """The largest |sum_v dz_v| of a labelled row, dz not divided by the denominator: at most
    `LARGEST_DZ_SUM`. None without a row.
    """


class Chunks(Protocol):
    """One form of the arithmetic between the products."""

    held: int
    """How many chunks it holds dz of."""

    def differentiate(self, h_CD: Tensor, w_VD: Tensor, chunk: slice) -> None:
        """Makes dz of a chunk. Chunks come in order, each once."""
        ...

    def gradient(self, group: slice) -> Tensor:
        """dz of all chunks since the last call, at most `held`, of shape (G, V) in the dtype of the
        products; valid until the next chunk."""
        ...

    def totals(self) -> Totals:
        """Of all chunks, of which there was at least one."""
        ...


def check_objective(
    alpha: float, temperature: float, has_teacher: bool, divergence: str, beta: float
) -> None:
    """Raises ValueError for settings that have no meaning together."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha: expected 0 to 1, found {alpha}")
    if not (0 < temperature < math.inf):
        raise ValueError(f"temperature: expected a finite number above 0, found {temperature}")
    if not has_teacher and alpha != 1:
        raise ValueError(f"no teacher: expected alpha 1, cross entropy alone, found {alpha}")
    if divergence not in DIVERGENCES:
        known = ", ".join(DIVERGENCES)
        raise ValueError(f"divergence: expected one of {known}, found {divergence}")
    if DIVERGENCES[divergence].mixture and not 0 < beta < 1:
        # At either end the mixture is one of the two, and the divergence is 0 whatever they are.
        raise ValueError(f"beta: expected a weight between 0 and 1, found {beta}")


def check_widths(student_vocabulary: int, teacher_vocabulary: int) -> None:
    if teacher_vocabulary < student_vocabulary:
        raise ValueError(
            "vocabulary: expected a teacher at least as wide as the student's"
            f" {student_vocabulary} ids, found {teacher_vocabulary}"
        )
