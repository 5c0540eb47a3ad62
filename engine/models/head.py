"""Read the output matrix of a model in slices of its rows, so that the whole matrix need not exist as floats.

The head of a 7B model is 1.1 GB in bf16 and 0.45 GB block-quantised. Logits are computed for a
chunk of tokens at a time anyway, so a `PackedHead` dequantises one slice of its rows, lets the
caller multiply with it, and overwrites it with the next slice. A `DenseHead` has one slice: the
whole tensor.

    for first, weight_RE in head.slices(columns, dtype):
        logits[:, first : first + len(weight_RE)] = hidden @ weight_RE^T

Rows of the head are columns of the logits. A teacher's vocabulary is cut by requesting fewer rows
than the head has: further rows are never read. No slice requires a gradient.

**The logits matmul** takes narrow operands and keeps the full fp32 accumulator. Logits are
accumulated in fp32 whatever the operands are; rounding them to bf16 would lose more than the
differences between the losses computed from them. On a GPU the matmul returns its fp32 accumulator.
A CPU has no such matmul for narrow operands, so there the operands are widened first, which gives
the same: a product of two bf16 numbers is exact in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from engine.kernels.dequantize import dequantize_rows
from engine.kernels.linear import Scratch
from engine.quant.planes import PackedMatrix

# Shapes: N tokens, C tokens of a chunk, W vocabulary, V columns that are wanted, R rows of a slice,
# D and E widths

Slices: TypeAlias = Iterable[tuple[int, Tensor]]
"""Pairs of a slice's first row and the slice (R, E), in order and without gaps; `()` if hidden states are
logits (`LogitsHead`). The slices can be iterated more than once. A slice is valid until the next one is requested,
because slices may share memory.
"""


KL_CHUNK = 256
"""Number of tokens processed at a time; their two sets of logits take 0.3 GB at a vocabulary of 152k."""


class Head(Protocol):
    """An output matrix (W, E)."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def width(self) -> int: ...
    def slices(self, columns: int, dtype: torch.dtype, *, first: int = 0) -> Slices:
        """Return rows `first` to `columns`, at most `vocab_size`, as `dtype`."""
        ...


@runtime_checkable
class OwnMatmul(Protocol):
    """Slices with a separate matmul, in 8 bits."""

    def project(self, out_NV: Tensor, hidden_NE: Tensor, scale: float) -> None:
        """Compute the same as the function `project`."""
        ...

    def operand(self, hidden_NE: Tensor) -> Tensor:
        """Return the hidden states rounded as the matmul reads them."""
        ...


class DenseHead:
    """A head with a dense matrix: one slice, not copied if it already has the requested dtype."""

    def __init__(self, weight_WE: Tensor) -> None:
        self._weight_WE = weight_WE.detach()

    @property
    def vocab_size(self) -> int:
        return self._weight_WE.shape[0]

    @property
    def width(self) -> int:
        return self._weight_WE.shape[1]

    def slices(self, columns: int, dtype: torch.dtype, *, first: int = 0) -> Slices:
        return ((first, self._weight_WE[first:columns].to(dtype)),)


class LogitsHead:
    """The head of a model that returns logits instead of hidden states: the identity, without slices."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def width(self) -> int:
        return self._vocab_size

    def slices(self, columns: int, dtype: torch.dtype, *, first: int = 0) -> Slices:
        return ()


class PackedHead:
    """A block-quantised `Head`. Its values are rounded to the scratch's dtype first, as in the
    model, whatever dtype a slice is requested in.
    """

    def __init__(self, weight: PackedMatrix, scratch: Scratch) -> None:
        self._weight, self._scratch = weight, scratch

    @property
    def vocab_size(self) -> int:
        return self._weight.rows

    @property
    def width(self) -> int:
        return self._weight.columns

    def slices(self, columns: int, dtype: torch.dtype, *, first: int = 0) -> Slices:
        return _PackedSlices(self._weight, self._scratch, first, columns, dtype)


@dataclass(frozen=True, slots=True)
class _PackedSlices:
    """Every iteration dequantises again."""

    weight: PackedMatrix
    scratch: Scratch
    first: int
    columns: int
    dtype: torch.dtype

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        step = self.scratch.fitting(self.columns, self.weight.columns)
        for first in range(self.first, self.columns, step):
            count = min(step, self.columns - first)
            slice_RE = self.scratch.take(count, self.weight.columns)
            dequantize_rows(self.weight, slice_RE, first, count)
            yield first, slice_RE.to(self.dtype)


def project(out_NV: Tensor, hidden_NE: Tensor, slices: Slices, *, scale: float = 1.0) -> None:
    """Compute out = scale * hidden @ head^T, slice by slice; see `multiply` for the dtypes. If there are no slices,
    the hidden states are already logits.
    """
    if isinstance(slices, OwnMatmul):
        slices.project(out_NV, hidden_NE, scale)
        return
    if not slices:
        torch.mul(hidden_NE[:, : out_NV.shape[1]].to(out_NV.dtype), scale, out=out_NV)
    for first, weight_RE in slices:
        multiply(out_NV[:, first : first + len(weight_RE)], hidden_NE, weight_RE.t(), scale=scale)


def logits_of(hidden_NE: Tensor, head: Head, columns: int) -> Tensor:
    """Return the logits (N, V) of the first `columns` ids, in fp32 or wider."""
    dtype = operand_dtype(hidden_NE)
    out_NV = hidden_NE.new_empty(len(hidden_NE), columns, dtype=sum_dtype(dtype))
    project(out_NV, hidden_NE.to(dtype), head.slices(columns, dtype))
    return out_NV


@torch.no_grad()
def mean_kl(
    p_NE: Tensor, p_head: Head, q_ND: Tensor, q_head: Head, columns: int
) -> tuple[float, float]:
    """Return the mean KL(p || q) at temperature 1 over the first `columns` ids, in nats, and the
    fraction of tokens for which p and q have the same top-1 token. Computed in chunks of tokens.
    """
    kl = agree = 0.0
    for first in range(0, len(p_NE), KL_CHUNK):
        part = slice(first, first + KL_CHUNK)
        p_CV = logits_of(p_NE[part], p_head, columns).log_softmax(1)
        q_CV = logits_of(q_ND[part], q_head, columns).log_softmax(1)
        agree += int((p_CV.argmax(1) == q_CV.argmax(1)).sum())
        # In place: at a vocabulary of 152k each of these tensors is as large as all weights of a layer.
        kl += float(q_CV.neg_().add_(p_CV).mul_(p_CV.exp_()).sum(dtype=torch.float64))
    return kl / len(p_NE), agree / len(p_NE)


def operand_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype for both operands of a logits matmul: autocast's or the hidden states' on a
    GPU, at least fp32 on a CPU.
    """
    device = hidden.device.type
    if hidden.dtype == torch.float64:
        return torch.float64
    if device == "cpu":
        return torch.float32
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the accumulation dtype of matmuls with operands of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def multiply(
    out: Tensor, left: Tensor, right: Tensor, *, scale: float = 1.0, add: bool = False
) -> None:
    """Compute out = scale * left @ right, or add to `out`, in place. If `out` is wider than the operands, it gets
    the fp32 accumulator. `out` may be a range of columns of a wider matrix.
    """
    beta = 1.0 if add else 0.0
    if out.dtype == left.dtype:
        torch.addmm(out, left, right, beta=beta, alpha=scale, out=out)
    else:
        torch.addmm(out, left, right, out_dtype=out.dtype, beta=beta, alpha=scale, out=out)
