"""The chunks of rows in which the loss works: how large they are, what they are computed from, and their sums.

The arithmetic between the matmuls of a chunk has two forms, each for a teacher's hidden states and for sparse
targets (a store of teacher outputs):

    eager.py     plain torch, on any device
    fused.py     our kernels, on a GPU that supports them

The memory budget counts the chunks' buffers with the functions below, so torch is not imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from engine.divergences import DIVERGENCES

if TYPE_CHECKING:
    from torch import Tensor

    from engine.models.head import Slices

# Shapes: M labelled tokens, C tokens of one chunk, G of a group of chunks, V student vocabulary,
# D student width, E teacher width, K target tokens per position

LossKernel: TypeAlias = Literal["eager", "fused"]

# One buffer of fp32 logits per chunk. On a CPU it should stay in the cache during the dozen passes over
# it. On a GPU the chunk must be long enough (about a thousand rows at V = 152k) for the matmuls to run at
# full rate. The eager form has four such buffers alive at once, and half of two more. The fused form has
# two and half of one, so they may be twice as large, which means fewer passes over dW and over a
# quantised head. In addition the fused form keeps as much again of finished dz.
CPU_CHUNK_BYTES = 4 * 2**20
GPU_CHUNK_BYTES = 640 * 2**20
FUSED_CHUNK_BYTES = 1280 * 2**20
SMALLEST_CHUNK_ROWS = 16

FUSED_HELD = 4
"""Chunks whose dz the fused form keeps: for 8192 rows in chunks of 2048, dW takes 3.6 ms in one matmul and
4.0 in four.
"""


def default_chunk_rows(device: str, vocabulary: int, *, fused: bool = False) -> int:
    """Return the rows per chunk on a `cpu` or a `cuda` device."""
    chunk_bytes = GPU_CHUNK_BYTES if device == "cuda" else CPU_CHUNK_BYTES
    if fused:
        chunk_bytes = FUSED_CHUNK_BYTES
    return max(chunk_bytes // (4 * vocabulary), SMALLEST_CHUNK_ROWS)


def logits_buffers(divergence: str | None, *, sparse: bool, fused: bool) -> int:
    """Return how many [C, V] buffers of fp32 or wider a form has; `divergence` is None without a teacher."""
    if fused:
        return 1 if divergence is None or sparse else 2
    if divergence is None:
        return 2
    return 3 if sparse else DIVERGENCES[divergence].buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseTargets:
    """A teacher's output for N positions: K tokens each, over the student's vocabulary."""

    ids_NK: Tensor
    """Token ids, int32 or int64; distinct within a position, except for draws."""
    log_probs_NK: Tensor | None
    """log p of the `top_k` tokens at the loss's temperature, of any float type. None for draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherHidden:
    """The teacher's hidden states and head, from which its logits are computed."""

    hidden_ME: Tensor
    slices: Slices
    """The teacher's head, restricted to the student's V columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Inputs of the chunk loop through which autograd does not differentiate."""

    labels_M: Tensor
    teacher: TeacherHidden | SparseTargets | None
    alpha: float
    """1 without a teacher."""
    temperature: float
    """1 without a teacher."""
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

    @property
    def buffers(self) -> int:
        return logits_buffers(
            None if self.teacher is None else self.divergence,
            sparse=isinstance(self.teacher, SparseTargets),
            fused=self.kernel == "fused",
        )


@dataclass(slots=True, kw_only=True)
class Totals:
    """Sums and extremes over all rows so far, 0-d on the device.

    The sums are in float64, because they are compared by finite differences. They are neither divided by
    the denominator nor multiplied by T^2.
    """

    ce: Tensor
    divergence: Tensor | None = None
    agreeing: Tensor | None = None
    """Number of rows with equal top-1 tokens; None without a teacher, and for draws, which may lack the teacher's."""
    lowest: Tensor | None = None
    """The lowest divergence of a row; None in the same cases as `agreeing`."""
    largest_sum: Tensor | None = None
    """The largest |sum_v dz_v| of a row."""

    def add(self, ce_C: Tensor, divergence_C: Tensor | None, agree_C: Tensor | None) -> None:
        self.ce += ce_C.sum(dtype=self.ce.dtype)
        if divergence_C is None:
            return
        if self.divergence is None:
            self.divergence = self.ce.new_zeros(())
        self.divergence += divergence_C.sum(dtype=self.ce.dtype)
        if agree_C is None:
            return
        if self.agreeing is None:
            self.agreeing = self.ce.new_zeros(())
        self.agreeing += agree_C.sum()
        low = divergence_C.amin()
        self.lowest = low if self.lowest is None else self.lowest.minimum(low)

    def add_gradient(self, dz_sums_C: Tensor) -> None:
        """Record the sum of each row of a finished gradient."""
        largest = dz_sums_C.abs().amax()
        self.largest_sum = (
            largest if self.largest_sum is None else self.largest_sum.maximum(largest)
        )


class Chunks(Protocol):
    """One form of the arithmetic between the matmuls."""

    held: int
    """Number of chunks whose dz is kept."""

    def differentiate(self, h_CD: Tensor, w_VD: Tensor | None, chunk: slice) -> None:
        """Compute dz of a chunk. Chunks come in order, each once. Without `w_VD`, `h_CD` are the logits."""
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
