"""The output matrix of a model, given out in slices of its rows, so that it need not be there whole.

The head of a 7B model is 1.1 GB in bf16, and 0.45 GB in its blocks. Logits are made a chunk of
tokens at a time anyway, so a head in blocks (`engine.models.packed.PackedHead`) turns one slice of
its rows into floats, has it multiplied, and overwrites it with the next. A dense head is one slice,
the tensor itself.

    for first, weight_RE in head.slices(columns, dtype):
        logits[:, first : first + len(weight_RE)] = hidden @ weight_RE^T

Rows of the head are columns of the logits. Asking for fewer than there are is how a teacher's
vocabulary is cut: the rows beyond are never read. No slice ever requires a gradient.

**The product behind logits**: narrow operands, and every bit of the sum that was made of them. Logits are
summed in fp32 whatever the operands are; rounded to bf16 they would lose more than the losses that are
made of them differ by. On a GPU the product returns its fp32 accumulator. A CPU has no product of narrow
operands that does, so there the operands are widened first, which gives the same: a product of two bf16
numbers is exact in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

# Shapes: N tokens, C tokens of a chunk, W vocabulary, V columns that are wanted, R rows of a slice,
# D and E widths

Slices: TypeAlias = Iterable[tuple[int, Tensor]]
"""Pairs of a slice's first row and the slice (R, E), in order and without gaps; may be walked more
than once. A slice is valid until the next one is asked for: they may share their memory."""


KL_CHUNK = 256
"""Tokens whose logits are there at once, twice: 0.3 GB at 152k ids."""


class Head(Protocol):
    """An output matrix (W, E)."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def width(self) -> int: ...
    def slices(self, columns: int, dtype: torch.dtype) -> Slices:
        """Rows 0 to `columns`, at most `vocab_size`, as `dtype`."""
        ...


class DenseHead:
    """A matrix of floats: one slice, and no copy of it where the dtype is the wanted one."""

    def __init__(self, weight_WE: Tensor) -> None:
        self._weight_WE = weight_WE.detach()

    @property
    def vocab_size(self) -> int:
        return self._weight_WE.shape[0]

    @property
    def width(self) -> int:
        return self._weight_WE.shape[1]

    def slices(self, columns: int, dtype: torch.dtype) -> Slices:
        return ((0, self._weight_WE[:columns].to(dtype)),)


def project(out_NV: Tensor, hidden_NE: Tensor, slices: Slices, *, scale: float = 1.0) -> None:
    """out = scale * hidden @ head^T, slice by slice; see `multiply` for the dtypes."""
    for first, weight_RE in slices:
        multiply(out_NV[:, first : first + len(weight_RE)], hidden_NE, weight_RE.t(), scale=scale)


def logits_of(hidden_NE: Tensor, head: Head, columns: int) -> Tensor:
    """(N, V) in fp32 or wider, of the first `columns` ids."""
    dtype = operand_dtype(hidden_NE)
    out_NV = hidden_NE.new_empty(len(hidden_NE), columns, dtype=sum_dtype(dtype))
    project(out_NV, hidden_NE.to(dtype), head.slices(columns, dtype))
    return out_NV


@torch.no_grad()
def mean_kl(
    p_NE: Tensor, p_head: Head, q_ND: Tensor, q_head: Head, columns: int
) -> tuple[float, float]:
    """Mean KL(p || q) at temperature 1 over the first `columns` ids, in nats, and the share of tokens on which
    both rank the same id first; some tokens at a time."""
    kl = agree = 0.0
    for first in range(0, len(p_NE), KL_CHUNK):
        part = slice(first, first + KL_CHUNK)
        p_CV = logits_of(p_NE[part], p_head, columns).log_softmax(1)
        q_CV = logits_of(q_ND[part], q_head, columns).log_softmax(1)
        agree += int((p_CV.argmax(1) == q_CV.argmax(1)).sum())
        # In place: at 152k ids each of these is as large as all of a layer's weights.
        kl += float(q_CV.neg_().add_(p_CV).mul_(p_CV.exp_()).sum(dtype=torch.float64))
    return kl / len(p_NE), agree / len(p_NE)


def operand_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype for both operands of a logits product: autocast's or the hidden states' on a GPU,
    at least fp32 on a CPU.
    """
    device = hidden.device.type
    if hidden.dtype == torch.float64:
        return torch.float64
    if device == "cpu":
        return torch.float32
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What products of operands of `dtype` are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def multiply(
    out: Tensor, left: Tensor, right: Tensor, *, scale: float = 1.0, add: bool = False
) -> None:
    """out (+)= scale * left @ right, with the accumulator's own fp32 when `out` is wider than the
    operands. `out` may be some columns of a wider matrix: it is written in place.
    """
    beta = 1.0 if add else 0.0
    if out.dtype == left.dtype:
        torch.addmm(out, left, right, beta=beta, alpha=scale, out=out)
    else:
        torch.addmm(out, left, right, out_dtype=out.dtype, beta=beta, alpha=scale, out=out)
