"""Quantisation: floats to blocks.

`fit.py` finds the scale of each group of values, `superblock.py` the integers and the half that
stand for the scales of a block of 256, and this file cuts tensors up and packs what comes back.

`effort` buys a smaller error with time:

    0   one candidate. For Q4_0, Q5_0, Q5_1 and Q8_0 the plain range: byte for byte what the `gguf`
        package and llama.cpp write without an importance matrix
    1   nine candidates and two refinements (the default): an error below that of llama.cpp's
        quantizers without an importance matrix, by 0.7 % (Q4_K) to 11 % (Q5_1, Q8_0)
    2   more of both: up to another 0.5 % off, at half the speed

A block's bytes depend on its own values alone: they are the same on every device, and however a
tensor is cut up to bound memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.quant.blocks import BlockType, QuantError, row_bytes
from engine.quant.fit import EFFORTS, exact_quotient, extreme, fit_affine, fit_symmetric, weights
from engine.quant.layout import LAYOUTS, Layout, Parts, pack
from engine.quant.reference import FLOATS, chunk_rows
from engine.quant.superblock import (
    HALF_MAX,
    ratio,
    round_to_half,
    share_affine,
    share_symmetric,
)
from engine.quant.tensor import QuantTensor

# Shapes: R rows, L values of a row, N blocks, E values of a block, K values of a group, G groups

# The candidate ranges: how many steps more than its levels the range of the values is divided into,
# from the fewest to the most. Fewer steps are wider and cut nothing off; found by measuring.
STEPS = {
    "Q4_0": (-2.0, 0.5),
    "Q5_0": (-3.0, 0.5),
    "Q5_1": (-3.0, 0.5),
    "Q8_0": (-5.0, 3.0),
    "Q4_K": (-2.0, 0.5),
    "Q5_K": (-3.0, 0.5),
    "Q6_K": (-5.0, 3.0),
}

# The largest size of a value that fits whatever its sign, with every scale at its largest.
LARGEST = {
    "F32": torch.finfo(torch.float32).max,
    "F16": HALF_MAX,
    "BF16": torch.finfo(torch.bfloat16).max,
    "Q4_0": 7 * HALF_MAX,
    "Q5_0": 15 * HALF_MAX,
    "Q5_1": HALF_MAX,
    "Q8_0": 127 * HALF_MAX,
    "Q4_K": 63 * HALF_MAX,
    "Q5_K": 63 * HALF_MAX,
    "Q6_K": 31 * 127 * HALF_MAX,
}

CHUNK_VALUES = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Values worked on at once; each needs some 45 bytes beside input and output."""


def quantize(
    tensor: Tensor, type_: BlockType, *, effort: int = 1, name: str = "tensor"
) -> QuantTensor:
    """`tensor`, floats of shape (..., row length), in blocks of `type_` on the same device.

    Raises `QuantError`, a ValueError, for NaN, infinity, a value too large for the type, and for
    rows that blocks do not fill, with the type that would (`fallback`). `name` is for its message.
    """
    shape = tuple(tensor.shape)
    where = f"{name} of shape {shape}"
    if not tensor.dtype.is_floating_point or not shape:
        found = f"{tensor.dtype} of {len(shape)} dimensions"
        raise QuantError.expected("quantize", where, "rows of floats", found)
    if not 0 <= effort < len(EFFORTS):
        expected = f"an effort from 0 to {len(EFFORTS) - 1}"
        raise QuantError.expected("quantize", where, expected, str(effort))
    count = row_bytes(type_, shape[-1])
    blocks = torch.empty(*shape[:-1], count, dtype=torch.uint8, device=tensor.device)
    if tensor.numel():
        rows_RL, out_RC = tensor.detach().reshape(-1, shape[-1]), blocks.view(-1, count)
        step = chunk_rows(shape[-1], tensor.device, CHUNK_VALUES)
        for first in range(0, len(rows_RL), step):
            x_RL = rows_RL[first : first + step].to(torch.float32).contiguous()
            _refuse_unfit(x_RL, type_, where, first)
            if type_.name in FLOATS:
                part = x_RL.to(FLOATS[type_.name]).view(torch.uint8)
            else:
                parts = _quantize_blocks(x_RL.view(-1, type_.block_size), type_, effort)
                part = pack(parts, type_).view(-1, count)
            out_RC[first : first + step] = part
    return QuantTensor(blocks=blocks, type=type_, shape=shape)


def _refuse_unfit(x_RL: Tensor, type_: BlockType, where: str, first_row: int) -> None:
    low, high = (bound.item() for bound in torch.aminmax(x_RL))  # a sync; NaN passes through
    largest = LARGEST[type_.name]
    if -largest <= low <= high <= largest:
        return
    row, column = (~(x_RL.abs() <= largest)).nonzero()[0].tolist()
    raise QuantError.expected(
        f"quantize to {type_.name}",
        where,
        f"finite values of size up to {largest:g}",
        f"{x_RL[row, column].item():g} in row {first_row + row}, column {column}",
    )


def _quantize_blocks(x_NE: Tensor, type_: BlockType, level: int) -> Parts:
    layout, effort = LAYOUTS[type_.name], EFFORTS[level]
    if layout.scales is None and level == 0:
        return _plain(x_NE, layout)
    extra = effort.extra_steps(*STEPS[type_.name])
    x_NSK = x_NE.view(len(x_NE), -1, layout.sub_block)
    x_KSN = x_NSK.permute(2, 1, 0).contiguous()
    x_KG = x_KSN.flatten(1)
    w_KG = weights(x_KG)
    if layout.scales is None:
        return _single(x_KG, w_KG, layout, extra, effort.polish)
    w_KSN = w_KG.view(x_KSN.shape)
    if layout.second is not None:
        scale_G, low_G = fit_affine(
            x_KG, w_KG, layout.levels, extra, effort.polish, low_below_zero=True
        )
        scale_SN, low_SN = scale_G.view(x_KSN.shape[1:]), low_G.view(x_KSN.shape[1:])
        best = share_affine(x_KSN, w_KSN, scale_SN, low_SN, layout.levels, effort.rounds)
    else:
        scale_G = fit_symmetric(x_KG, w_KG, layout.zero, extra, effort.polish)
        scale_SN = scale_G.view(x_KSN.shape[1:])
        best = share_symmetric(x_KSN, w_KSN, scale_SN, layout.zero, effort.rounds)
    code_KSN = (best.q_KSN + layout.zero).to(torch.uint8)
    scale_NS = best.scale_SN.t()
    return Parts(
        d_N=best.d_N.half(),
        second_N=None if best.dmin_N is None else best.dmin_N.half(),
        scale_NS=scale_NS.to(torch.int8 if best.min_SN is None else torch.uint8).contiguous(),
        min_NS=None if best.min_SN is None else best.min_SN.t().to(torch.uint8),
        code_NE=code_KSN.permute(2, 1, 0).flatten(1),
    )


def _single(x_KN: Tensor, w_KN: Tensor, layout: Layout, extra: list[float], polish: int) -> Parts:
    """Blocks of 32 with one scale: codes are the nearest ones for d and m as stored, in half."""
    m_N = None
    if layout.second is not None:
        scale_N, low_N = fit_affine(x_KN, w_KN, layout.levels, extra, polish, low_below_zero=False)
        d_N, m_N = round_to_half(scale_N), round_to_half(low_N)
        q_KN = ratio(x_KN - m_N, d_N).round_().clamp_(0, layout.levels)
    else:
        steps = layout.zero or 128
        d_N = round_to_half(fit_symmetric(x_KN, w_KN, steps, extra, polish))
        q_KN = ratio(x_KN, d_N).round_().clamp_(-steps, steps - 1).add_(layout.zero)
    return _parts(d_N, m_N, q_KN.t(), layout)


def _plain(x_NE: Tensor, layout: Layout) -> Parts:
    """Blocks of 32 whose scale is their range; operations in the order that fixes each byte."""
    m_N = None
    if layout.second is not None:
        m_N, high_N = torch.aminmax(x_NE, dim=1)
        d_N = exact_quotient(high_N - m_N, layout.levels)
        q_NE = (x_NE - m_N[:, None]) * _inverse(d_N)[:, None] + 0.5
        q_NE.floor_().clamp_(0, layout.levels)
    elif layout.zero:
        d_N = exact_quotient(extreme(x_NE.t()), -layout.zero)
        q_NE = x_NE * _inverse(d_N)[:, None]
        q_NE = (q_NE + (layout.zero + 0.5)).floor_().clamp_(0, layout.levels)
    else:
        d_N = exact_quotient(x_NE.abs().amax(1), layout.levels)
        q_NE = x_NE * _inverse(d_N)[:, None]
        whole_NE = q_NE.trunc()
        # Halves away from zero, exactly: adding 0.5 first would round 0.49999997 up.
        q_NE = whole_NE + ((q_NE - whole_NE) * 2).trunc_()
    return _parts(d_N, m_N, q_NE, layout)


def _inverse(d_N: Tensor) -> Tensor:
    # Finite also for a subnormal d, whose inverse is none: 0 times it has to stay 0.
    largest = torch.finfo(torch.float32).max
    return ratio(torch.ones_like(d_N), d_N).clamp_(-largest, largest)


def _parts(d_N: Tensor, m_N: Tensor | None, q_NE: Tensor, layout: Layout) -> Parts:
    signed = layout.low.width == 8
    return Parts(
        d_N=d_N.half(),
        second_N=None if m_N is None else m_N.half(),
        scale_NS=None,
        min_NS=None,
        code_NE=q_NE.to(torch.int8 if signed else torch.uint8).contiguous(),
    )
