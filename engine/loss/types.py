"""What the chunk loop of the loss works on, and what each of its forms gives back.

form        file                when
eager       eager_chunks.py     anywhere
fused       fused_chunks.py     our kernel, on a GPU that can run it
sparse      sparse_targets.py   the teacher gives some ids a token, not hidden states; fused_sparse.py: by a kernel
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from engine.models.head import Slices

# Shapes: M labelled tokens, C tokens of one chunk, V student vocabulary, D student width,
# E teacher width, K ids of a token

Divergence: TypeAlias = Literal["forward_kl", "reverse_kl", "jsd"]
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
    divergence: Divergence
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Over all rows; 0-d, on the device. Sums are not divided by anything, nor multiplied by T^2."""

    ce: Tensor
    divergence: Tensor | None
    agreeing: Tensor | None
    lowest: Tensor | None
    """The lowest divergence of a row."""
    largest_sum: Tensor
    """The largest |sum_v dz_v| of a row."""


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

    @property
    def held(self) -> int:
        """How many chunks it holds dz of."""
        ...

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


class Tally:
    """Running totals, in float64: the sums are read against finite differences of each other, and a
    0-d addition costs nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.ce, self.divergence, self.agreeing = (
            torch.zeros((), dtype=torch.float64, device=device) for _ in range(3)
        )
        self.lowest: Tensor | None = None
        self.largest: Tensor | None = None

    def add(self, ce_C: Tensor, divergence_C: Tensor | None, agree_C: Tensor | None) -> None:
        self.ce += ce_C.sum(dtype=torch.float64)
        if agree_C is not None:
            self.agreeing += agree_C.sum()
        if divergence_C is not None:
            self.divergence += divergence_C.sum(dtype=torch.float64)
            low = divergence_C.amin()
            self.lowest = low if self.lowest is None else torch.minimum(self.lowest, low)

    def see(self, dz_CV: Tensor) -> None:
        """Looks at the sum of each row of a finished gradient."""
        most = dz_CV.sum(dim=1).abs().amax()
        self.largest = most if self.largest is None else torch.maximum(self.largest, most)

    def totals(self, *, teaching: bool, agreeing: bool, lowest: bool) -> Totals:
        assert self.largest is not None
        return Totals(
            ce=self.ce,
            divergence=self.divergence if teaching else None,
            agreeing=self.agreeing if agreeing else None,
            lowest=self.lowest if lowest else None,
            largest_sum=self.largest,
        )
