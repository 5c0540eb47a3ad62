"""Types that the forms of the loss share: their inputs and results, and the checks of the settings.

The loss works in chunks of rows (`objective.py`); the arithmetic between the matmuls of a chunk has four
forms:

            teacher's hidden states and head    sparse targets (a store of teacher outputs)
eager       dense.py                            sparse.py                on any device
fused       fused.py                            fused.py                 our kernels, on a GPU that supports them
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from engine.divergences import DIVERGENCES
from engine.models.head import Slices

# Shapes: M labelled tokens, C tokens of one chunk, G of a group of chunks, V student vocabulary,
# D student width, E teacher width, K target tokens per position

IGNORE_LABEL = -100
LossKernel: TypeAlias = Literal["eager", "fused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseTargets:
    """A teacher's output for N positions: K tokens each, over the student's vocabulary."""

    ids_NK: Tensor
    """Token ids, int32 or int64; distinct within a position, except for draws."""
    log_probs_NK: Tensor | None
    """log p of the `top_k` tokens at the loss's temperature, of any float type. None for draws."""
    kind: Literal["top_k", "sampled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Teaching:
    """The teacher's hidden states and head, from which its logits are computed."""

    hidden_ME: Tensor
    slices: Slices
    """The teacher's head, restricted to the student's V columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything that the chunk loop needs and autograd need not see."""

    labels_M: Tensor
    teacher: Teaching | SparseTargets | None
    alpha: float
    temperature: float
    divergence: str
    beta: float
    """The teacher's weight in the mixture of `jsd`."""
    kernel: LossKernel
    chunk_rows: int
    wants_hidden: bool
    wants_head: bool
    divisor: float | Tensor = 1.0
    """The divisor of the loss."""
    finished: bool = False
    """Whether nothing will multiply the loss, so that the gradients can be divided when they are
    computed; the divisor is then a number on the host.
    """


@dataclass(slots=True, kw_only=True)
class Totals:
    """Sums and extremes over all rows so far, 0-d on the device.

    The sums are in float64, because they are compared by finite differences. They are neither divided by
    the denominator nor multiplied by T^2.
    """

    ce: Tensor
    divergence: Tensor | None = None
    agreeing: Tensor | None = None
    """None without a teacher, and for draws, which do not tell the teacher's most probable token."""
    lowest: Tensor | None = None
    """The lowest divergence of a row; None in the same cases as `agreeing`."""
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
        """Record the sum of each row of a finished gradient."""
        most = dz_CV.sum(dim=1).abs().amax()
        self.largest_sum = (
            most if self.largest_sum is None else torch.maximum(self.largest_sum, most)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """The contribution of one call to an optimizer step.

    All are 0-d tensors on the device of the hidden states; reading one is a sync, made by the caller.
    Each is a sum over this call's labelled rows divided by the step's denominator, so the parts of an
    accumulated step add up to the step's mean, and `loss = alpha * ce + (1 - alpha) * kd`.
    """

    loss: Tensor
    """The objective, nats; the only term that carries a gradient."""
    ce: Tensor
    """Cross entropy, nats, at temperature 1."""
    kd: Tensor | None
    """T^2 * KL(teacher || student), or the divergence in its place, with both sides at temperature T;
    None when no teacher was used (alpha = 1).
    """
    agreement: Tensor | None
    """Share of the step's labelled rows, counted in this call, on which teacher and student have the same
    most probable token. None without a teacher, and for draws.
    """
    labelled: Tensor
    """Labelled rows of this call, int64: a count, not divided by the denominator."""
    lowest_kl: Tensor | None = None
    """The lowest divergence of a labelled row, nats, without T^2: at least `LOWEST_DIVERGENCE`. None
    without a teacher in the objective, without a labelled row, and for draws.
    """
    largest_dz_sum: Tensor | None = None
    """The largest |sum_v dz_v| of a labelled row, before dividing by the denominator: at most
    `LARGEST_DZ_SUM`. None without a labelled row.
    """


class Chunks(Protocol):
    """One form of the arithmetic between the matmuls."""

    held: int
    """Number of chunks whose dz is kept."""

    def differentiate(self, h_CD: Tensor, w_VD: Tensor, chunk: slice) -> None:
        """Compute dz of a chunk. Chunks come in order, each once."""
        ...

    def gradient(self, group: slice) -> Tensor:
        """Return dz of all chunks since the last call, at most `held`: (G, V) in the dtype of the
        matmuls.

        It is valid until the next chunk.
        """
        ...

    def totals(self) -> Totals:
        """Return the totals over all chunks, of which there is at least one."""
        ...


def check_objective(
    alpha: float, temperature: float, has_teacher: bool, divergence: str, beta: float
) -> None:
    """Raise ValueError for settings that do not fit together."""
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
        # At either end the mixture equals one of the two, and the divergence is always 0.
        raise ValueError(f"beta: expected a weight between 0 and 1, found {beta}")


def check_widths(student_vocabulary: int, teacher_vocabulary: int) -> None:
    if teacher_vocabulary < student_vocabulary:
        raise ValueError(
            "vocabulary: expected a teacher at least as wide as the student's"
            f" {student_vocabulary} ids, found {teacher_vocabulary}"
        )
