"""Quantise floats to blocks.

`fit_affine` and `fit_symmetric` find the scale of each group of values. `quantize` splits tensors into blocks and packs
the results.

The search tries nine ranges and refines the best twice: its error is below that of llama.cpp's quantisers
without an importance matrix, by 0.03 % (Q4_K) to 12 % (Q8_0).

A block's bytes depend only on its own values: they are the same on every device, and however a
tensor is chunked to bound memory.

**The scale of a group of values.** K values x with weights w are stored as integers q with one
scale s, and in some types a minimum m, so as to minimise

    E = sum w (s q + m - x)^2,     w = |x| + 2 mean|x|.

The weights let large values, which influence an output most, count a few times as much as small
ones. For given q, the best s and m solve a linear least-squares problem of five sums; for given s
and m, the best q is the nearest integer. Neither step alone gives the joint optimum. So each of a
few candidate ranges (the whole range of x, and slightly narrower and wider ones) is rounded, solved
and scored, and the two steps then alternate from the best one. E never increases.

Scores omit the constant part of E, sum w x^2. x is first shifted by its minimum, so that the
float32 sums do not cancel.

Values are in the first dimension, (K, G): each sum then adds whole rows, which is fast on vector
units and GPUs. Every operation is rounded once and in a fixed order, so that a CPU and a GPU choose
the same candidate. A group that no candidate fits (all zero, or too small for float32) keeps the
scale of its range: comparisons with NaN are false.

**The second level of a block of 256**: the scales of sub-blocks are small integers times one fp16
number.

    Q4_K   s_j = d sc_j, m_j = -dmin mn_j    sc, mn in 0..63, 8 sub-blocks of 32
    Q6_K   s_j = d sc_j                      sc in -128..127, 16 sub-blocks of 16

d and dmin are the largest scale and minimum over the largest integer, in fp16; scales, minima and codes are the
nearest ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.quant.blocks import HALF_MAX, WRITTEN, BlockType, Layout, QuantError, row_bytes
from engine.quant.reference import FLOATS, Parts, chunk_rows, pack
from engine.quant.tensor import QuantTensor

# Shapes: R rows, L values of a row, N blocks, E values of a block, S sub-blocks of a block, K values of
# a group or sub-block, G groups

CHUNK_VALUES = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Number of values processed at once; each needs about 45 bytes besides input and output."""
CANDIDATES = 9
"""Number of ranges that are tried for a group."""
POLISH = 2
"""Alternations of rounding and solving after the candidates."""


def quantize(tensor: Tensor, type_: BlockType, *, name: str = "tensor") -> QuantTensor:
    """Quantise `tensor`, floats of shape (..., row length), to blocks of `type_` on the same
    device.

    Raises `QuantError`, a ValueError: for a type that is only read; for NaN, infinity or a value too
    large for the type; and for rows whose length is not a multiple of the block size, with a type
    that fits (`fallback`). `name` is the tensor's name in the message.
    """
    shape = tuple(tensor.shape)
    where = f"{name} of shape {shape}"
    if not tensor.dtype.is_floating_point or not shape:
        found = f"{tensor.dtype} of {len(shape)} dimensions"
        raise QuantError.expected("quantize", where, "rows of floats", found)
    if type_.largest is None:
        expected = f"one of {', '.join(WRITTEN)}"
        raise QuantError.expected("quantize", where, expected, f"{type_.name}, which is only read")
    count = row_bytes(type_, shape[-1])
    blocks = torch.empty(*shape[:-1], count, dtype=torch.uint8, device=tensor.device)
    if tensor.numel():
        rows_RL, out_RC = tensor.detach().reshape(-1, shape[-1]), blocks.view(-1, count)
        step = chunk_rows(shape[-1], tensor.device, CHUNK_VALUES)
        for start in range(0, len(rows_RL), step):
            x_RL = rows_RL[start : start + step].to(torch.float32).contiguous()
            _refuse_unfit(x_RL, type_, type_.largest, where, start)
            if type_.name in FLOATS:
                blocks_of_rows = x_RL.to(FLOATS[type_.name]).view(torch.uint8)
            else:
                parts = _quantize_blocks(x_RL.view(-1, type_.block_size), type_)
                blocks_of_rows = pack(parts, type_).view(-1, count)
            out_RC[start : start + step] = blocks_of_rows
    return QuantTensor(blocks=blocks, type=type_, shape=shape)


def _refuse_unfit(
    x_RL: Tensor, type_: BlockType, largest: float, where: str, first_row: int
) -> None:
    low, high = (bound.item() for bound in torch.aminmax(x_RL))  # a sync; NaN passes through
    if -largest <= low <= high <= largest:
        return
    row, column = (~(x_RL.abs() <= largest)).nonzero()[0].tolist()
    raise QuantError.expected(
        f"quantize to {type_.name}",
        where,
        f"finite values of size up to {largest:g}",
        f"{x_RL[row, column].item():g} in row {first_row + row}, column {column}",
    )


def _quantize_blocks(x_NE: Tensor, type_: BlockType) -> Parts:
    layout = type_.in_blocks
    fewest, most = layout.steps
    step = (most - fewest) / (CANDIDATES - 1)
    extra = [fewest + index * step for index in range(CANDIDATES)]
    x_NSK = x_NE.view(len(x_NE), -1, layout.sub_block)
    x_KSN = x_NSK.permute(2, 1, 0).contiguous()
    x_KG = x_KSN.flatten(1)
    w_KG = weights(x_KG)
    if layout.scales is None:
        return _single(x_KG, w_KG, layout, extra)
    if layout.second is not None:
        scale_G, low_G = fit_affine(x_KG, w_KG, layout.levels, extra)
        scale_SN, low_SN = scale_G.view(x_KSN.shape[1:]), low_G.view(x_KSN.shape[1:])
        d_N, dmin_N = _unit(scale_SN.amax(0), 63), _unit(-low_SN.amin(0), 63)
        sc_SN = ratio(scale_SN, d_N).round_().clamp_(0, 63)
        mn_SN = ratio(-low_SN, dmin_N).round_().clamp_(0, 63)
        code_KSN = ratio(x_KSN + dmin_N * mn_SN, d_N * sc_SN).round_().clamp_(0, layout.levels)
        second_N, min_NS = dmin_N.half(), mn_SN.t().to(torch.uint8)
    else:
        scale_SN = fit_symmetric(x_KG, w_KG, layout.zero, extra).view(x_KSN.shape[1:])
        # The scale of largest magnitude becomes -128: its sign is free, and 127 would be a coarser fit.
        d_N = _unit(extreme(scale_SN), -128)
        sc_SN = ratio(scale_SN, d_N).round_().clamp_(-128, 127)
        q_KSN = ratio(x_KSN, d_N * sc_SN).round_().clamp_(-layout.zero, layout.zero - 1)
        code_KSN, second_N, min_NS = q_KSN.add_(layout.zero), None, None
    return Parts(
        d_N=d_N.half(),
        second_N=second_N,
        scale_NS=sc_SN.t().to(torch.int8 if min_NS is None else torch.uint8).contiguous(),
        min_NS=min_NS,
        code_NE=code_KSN.to(torch.uint8).permute(2, 1, 0).flatten(1),
    )


def _single(x_KN: Tensor, w_KN: Tensor, layout: Layout, extra: list[float]) -> Parts:
    """Quantise blocks of 32 with one scale: codes are the nearest ones for d as stored in fp16."""
    steps = layout.zero or 128
    d_N = round_to_half(fit_symmetric(x_KN, w_KN, steps, extra))
    q_KN = ratio(x_KN, d_N).round_().clamp_(-steps, steps - 1).add_(layout.zero)
    signed = layout.low.width == 8
    return Parts(
        d_N=d_N.half(),
        second_N=None,
        scale_NS=None,
        min_NS=None,
        code_NE=q_KN.t().to(torch.int8 if signed else torch.uint8).contiguous(),
    )


def weights(x_KG: Tensor) -> Tensor:
    """Return how much an error of each value counts: |x| + 2 mean|x|."""
    size_KG = x_KG.abs()
    # The mean instead of the root mean square, because torch's square roots differ between devices.
    return size_KG + total(size_KG) * (2 / len(x_KG))


def total(x: Tensor) -> Tensor:
    """Return the sum over the first dimension, whose length is a power of two, by repeatedly adding
    its halves.

    Every device adds in this order, which `sum` does not promise.
    """
    half = len(x) // 2
    x = x[:half] + x[half:]
    while half > 1:
        half //= 2
        x = x[:half].add_(x[half:])
    return x[0]


def exact_quotient(x: Tensor, count: int) -> Tensor:
    # Division by a tensor: on a GPU, torch replaces division by a scalar with multiplication by its
    # rounded inverse.
    return x / torch.full((), float(count), device=x.device)


def fit_affine(
    x_KG: Tensor, w_KG: Tensor, levels: int, extra: list[float]
) -> tuple[Tensor, Tensor]:
    """Return (s, m) for x = s q + m with q in 0..levels, s >= 0 and m <= 0."""
    low_G, high_G = torch.aminmax(x_KG, dim=0)
    low_G.clamp_(max=0)
    y_KG = x_KG - low_G
    span_G = high_G - low_G
    w_G, y_G = total(w_KG), total(w_KG * y_KG)
    scale_G, shift_G = exact_quotient(span_G, levels), torch.zeros_like(low_G)
    score_G = torch.full_like(low_G, torch.inf)
    for step in range(len(extra) + POLISH):
        q_KG = (
            y_KG * ((levels + extra[step]) / span_G)
            if step < len(extra)
            else (y_KG - shift_G).div_(scale_G)
        )
        q_KG.round_().clamp_(0, levels)
        wq_KG = q_KG * w_KG
        q_G, q2_G, qy_G = total(wq_KG), total(wq_KG * q_KG), total(wq_KG * y_KG)
        determinant_G = w_G * q2_G - q_G * q_G
        # If the codes are nearly equal they do not determine the minimum, which is then not
        # shifted.
        solved = determinant_G > 1e-5 * w_G * q2_G
        m_G = torch.where(solved, (q2_G * y_G - q_G * qy_G) / determinant_G, 0.0)
        m_G = torch.minimum(m_G, -low_G)
        s_G = (qy_G - m_G * q_G) / q2_G
        new_G = s_G * (s_G * q2_G + 2 * (m_G * q_G - qy_G)) + m_G * (m_G * w_G - 2 * y_G)
        better = (new_G < score_G) & (s_G > 0)
        score_G = torch.where(better, new_G, score_G)
        scale_G = torch.where(better, s_G, scale_G)
        shift_G = torch.where(better, m_G, shift_G)
    return scale_G, low_G + shift_G


def fit_symmetric(x_KG: Tensor, w_KG: Tensor, levels: int, extra: list[float]) -> Tensor:
    """Return s, of either sign, for x = s q with q in -levels..levels-1.

    The value of largest magnitude becomes -levels, which has no positive counterpart: its sign is
    that of -s.
    """
    extreme_G = extreme(x_KG)
    scale_G = exact_quotient(extreme_G, -levels)
    score_G = torch.zeros_like(extreme_G)
    for step in range(len(extra) + POLISH):
        inverse_G = (levels + extra[step]) / -extreme_G if step < len(extra) else 1 / scale_G
        q_KG = (x_KG * inverse_G).round_().clamp_(-levels, levels - 1)
        wq_KG = q_KG * w_KG
        q2_G, qx_G = total(wq_KG * q_KG), total(wq_KG * x_KG)
        s_G = qx_G / q2_G
        new_G = s_G * qx_G  # the reduction of sum w x^2 by the fit
        better = new_G > score_G
        score_G = torch.where(better, new_G, score_G)
        scale_G = torch.where(better, s_G, scale_G)
    return scale_G


def extreme(x_KG: Tensor) -> Tensor:
    """Return the first value of largest magnitude, with its sign."""
    return x_KG.gather(0, x_KG.abs().argmax(0, keepdim=True))[0]


def round_to_half(x: Tensor) -> Tensor:
    """Round to the nearest fp16 number; never -0, which would turn zeros into -0."""
    return x.clamp(-HALF_MAX, HALF_MAX).half().float() + 0.0


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return a / b, and 0 where b is 0."""
    return torch.where(b != 0, a / b, 0.0)


def _unit(largest_N: Tensor, count: int) -> Tensor:
    """Return largest / count in fp16. Below 6e-5, where fp16 is coarse, its magnitude is rounded
    up, so that `largest` is not clipped.
    """
    unit_N = exact_quotient(largest_N, count).clamp(-HALF_MAX, HALF_MAX).half()
    short_N = (unit_N.float() * count).abs() < largest_N.abs() * (1 - 2**-10)
    # The next larger magnitude in fp16 has the next bit pattern, whatever the sign.
    next_N = (unit_N.view(torch.int16) + 1).view(torch.float16)
    return torch.where(short_N & (unit_N.abs() < HALF_MAX), next_N, unit_N).float() + 0.0
