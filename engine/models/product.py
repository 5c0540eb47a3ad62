"""The matrix product behind logits: narrow operands, and every bit of the sum that was made of them.

Logits are summed in fp32 whatever the operands are; rounded to bf16 they would lose more than the
losses that are made of them differ by. On a GPU the product returns its fp32 accumulator. A CPU has
no product of narrow operands that does, so there the operands are widened first, which gives the
same: a product of two bf16 numbers is exact in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
