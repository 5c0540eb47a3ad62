"""Unpack and dequantise blocks in plain torch: the slow, exact reference that every faster
implementation is compared with.

`unpack` reads a block as its row of `engine.quant.blocks` describes. The 12 scale bytes S of Q4_K
and Q5_K (a width of 6) hold eight 6-bit scales sc and eight 6-bit minima mn:

    S[0..3]           : low 6 bits are sc[0..3], top 2 bits are the top 2 bits of sc[4..7]
    S[4..7]           : low 6 bits are mn[0..3], top 2 bits are the top 2 bits of mn[4..7]
    S[8..11]          : low nibbles are the low 4 bits of sc[4..7], high nibbles the low 4 bits of mn[4..7]

`pack(unpack(b)) == b` for every block: no bit is unused.

The arithmetic is float32, in an order that determines the last bit:

    Q2_K, Q4_K, Q5_K   (d * sc) * q - (dmin * mn)      each product and the difference rounded once
    Q3_K, Q6_K         (d * (sc - 32)) * (q - 4),  (d * sc) * (q - 32)
    Q4_1, Q5_1         d * q + m
    Q4_0, Q5_0         d * (q - 8),  d * (q - 16)
    Q8_0               d * q
    IQ4_NL             d * book[q]
    IQ4_XS             (d * (sc - 32)) * book[q]

A fused multiply-add would round once instead of twice and could change the last bit, so multiplications
and additions are separate operations here. For any other dtype the float32 result is rounded once.

NaN and infinity are not treated specially: a block whose d is NaN dequantises to NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.quant.blocks import BLOCK_TYPES, Bits, BlockType, Layout

# Shapes: R rows, C bytes of a row, L values of a row, N blocks, B bytes of a block or of a part of it,
# E values of a block, S sub-blocks of a block, K values of a sub-block

FLOATS: dict[str, torch.dtype] = {
    row.name: getattr(torch, row.float_dtype) for row in BLOCK_TYPES.values() if row.float_dtype
}

CHUNK_VALUES = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Number of values processed at once: few enough for a CPU's cache, and enough to keep a GPU busy.
Memory in addition to input and output is limited to about 12 bytes for each of these values.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """Fields of N unpacked blocks; None for fields that the type lacks."""

    d_N: Tensor
    """float16"""
    second_N: Tensor | None
    """float16: dmin, or the m of Q4_1 and Q5_1"""
    scale_NS: Tensor | None
    """uint8 as stored, int8 in Q6_K"""
    min_NS: Tensor | None
    """uint8"""
    code_NE: Tensor
    """uint8, int8 in Q8_0"""


# contract: block-formats-v1
def unpack(blocks_NB: Tensor, type_: BlockType) -> Parts:
    """Unpack blocks of a type that is not a float type; uint8 of shape (N, block_bytes)."""
    layout = type_.in_blocks
    scale_NS = min_NS = None
    if layout.scales is not None:
        scale_NS = _read(blocks_NB, layout.scales, layout.scales_high)
        if layout.second is not None:
            scale_NS, min_NS = scale_NS.chunk(2, dim=1)
        elif layout.scales.width == 8:
            scale_NS = scale_NS.view(torch.int8)
    code_NE = _read(blocks_NB, layout.low, layout.high)
    return Parts(
        d_N=_half(blocks_NB, layout.d),
        second_N=None if layout.second is None else _half(blocks_NB, layout.second),
        scale_NS=scale_NS,
        min_NS=min_NS,
        code_NE=code_NE.view(torch.int8) if layout.low.width == 8 else code_NE,
    )


# contract: block-formats-v1
def pack(parts: Parts, type_: BlockType) -> Tensor:
    """Pack parts into blocks, the inverse of `unpack`: uint8 of shape (N, block_bytes)."""
    layout = type_.in_blocks
    code_NE = parts.code_NE.view(torch.uint8)
    blocks_NB = torch.empty(
        len(code_NE), type_.block_bytes, dtype=torch.uint8, device=code_NE.device
    )
    blocks_NB[:, layout.d : layout.d + 2] = parts.d_N[:, None].view(torch.uint8)
    if layout.second is not None:
        assert parts.second_N is not None
        blocks_NB[:, layout.second : layout.second + 2] = parts.second_N[:, None].view(torch.uint8)
    if layout.scales is not None:
        assert parts.scale_NS is not None
        scales = parts.scale_NS.view(torch.uint8)
        if parts.min_NS is not None:
            scales = torch.cat([scales, parts.min_NS], dim=1)
        _write(blocks_NB, layout.scales, layout.scales_high, scales)
    _write(blocks_NB, layout.low, layout.high, code_NE)
    return blocks_NB


def _half(blocks_NB: Tensor, start: int) -> Tensor:
    # A copy, because a view as fp16 requires an even byte offset.
    part_N2 = blocks_NB[:, start : start + 2].clone(memory_format=torch.contiguous_format)
    return part_N2.view(torch.float16)[:, 0]


def _shifts(bits: Bits, device: torch.device) -> Tensor:
    return torch.arange(0, 8, bits.width, dtype=torch.uint8, device=device)[:, None]


def _read(blocks_NB: Tensor, low: Bits, high: Bits | None) -> Tensor:
    """Return the numbers in the bit field `low`, with their upper bits from `high` if it is given: uint8."""
    if high is not None:
        top_NE = _read(blocks_NB, high, None)
        return _read(blocks_NB, low, None).bitwise_or_(top_NE << low.width)
    part_NB = blocks_NB[:, low.start : low.start + low.count]
    if low.width == 8:
        return part_NB.contiguous()
    if low.width == 6:
        return torch.cat(_six_bits(part_NB), dim=1)
    runs = part_NB.reshape(len(part_NB), -1, 1, low.run)
    values: Tensor = runs >> _shifts(low, blocks_NB.device)
    return values.bitwise_and_((1 << low.width) - 1).flatten(1)


def _write(blocks_NB: Tensor, low: Bits, high: Bits | None, values_NE: Tensor) -> None:
    """Write numbers into a bit field, the inverse of `_read`."""
    if high is not None:
        _write(blocks_NB, high, None, values_NE >> low.width)
        values_NE = values_NE & ((1 << low.width) - 1)
    if low.width == 6:
        part_NB = _twelve_bytes(*values_NE.chunk(2, dim=1))
    else:
        runs = values_NE.reshape(len(values_NE), -1, 8 // low.width, low.run)
        # The fields of a byte do not overlap, so their sum equals their bitwise or.
        part_NB = (runs << _shifts(low, blocks_NB.device)).sum(2, dtype=torch.uint8).flatten(1)
    blocks_NB[:, low.start : low.start + low.count] = part_NB


def _six_bits(bytes_NB: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8 scales and 8 minima in the 12 bytes of Q4_K and Q5_K."""
    first, middle, last = torch.split(bytes_NB, 4, dim=1)
    scale_NS = torch.cat([first & 63, (last & 15) | (first >> 6 << 4)], dim=1)
    min_NS = torch.cat([middle & 63, (last >> 4) | (middle >> 6 << 4)], dim=1)
    return scale_NS, min_NS


def _twelve_bytes(scale_NS: Tensor, min_NS: Tensor) -> Tensor:
    (sc, sc_late), (mn, mn_late) = torch.split(scale_NS, 4, dim=1), torch.split(min_NS, 4, dim=1)
    return torch.cat(
        [sc | (sc_late >> 4 << 6), mn | (mn_late >> 4 << 6), (sc_late & 15) | (mn_late << 4)],
        dim=1,
    )


def chunk_rows(values: int, device: torch.device, sizes: dict[str, int] = CHUNK_VALUES) -> int:
    """Return how many rows of `values` values to process at once; at least one."""
    return max(1, sizes.get(device.type, sizes["cuda"]) // max(1, values))


# contract: block-formats-v1
def dequantize(
    blocks_u8: Tensor, type_: BlockType, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the values in `blocks_u8`, uint8 of shape (..., row bytes), as `dtype` of shape (...,
    row length). The result is a new tensor on the same device, also for the float types.
    """
    assert blocks_u8.dtype == torch.uint8 and blocks_u8.ndim, (blocks_u8.dtype, blocks_u8.shape)
    *lead, count = blocks_u8.shape
    assert count % type_.block_bytes == 0, f"{count} bytes are not whole blocks of {type_.name}"
    values = count // type_.block_bytes * type_.block_size
    out = torch.empty(*lead, values, dtype=dtype, device=blocks_u8.device)
    if out.numel() == 0:
        return out
    rows_RC, out_RL = blocks_u8.reshape(-1, count), out.view(-1, values)
    step = chunk_rows(values, out.device)
    for start in range(0, len(rows_RC), step):
        part_RC = rows_RC[start : start + step]
        if type_.name in FLOATS:
            # A copy, because its address is aligned for any dtype.
            part_RL = part_RC.clone(memory_format=torch.contiguous_format).view(FLOATS[type_.name])
        else:
            blocks_NB = part_RC.reshape(-1, type_.block_bytes)
            part_RL = _dequantize_blocks(blocks_NB, type_).view(-1, values)
        out_RL[start : start + step] = part_RL
    return out


def _dequantize_blocks(blocks_NB: Tensor, type_: BlockType) -> Tensor:
    layout = type_.in_blocks
    parts = unpack(blocks_NB, type_)
    value_NE = _code_values(parts.code_NE, layout)
    d_N = parts.d_N.to(torch.float32)
    value_NSK = value_NE.view(len(value_NE), -1, layout.sub_block)
    if parts.scale_NS is None:
        value_NSK.mul_(d_N[:, None, None])
    else:
        scale_NS = parts.scale_NS.to(torch.float32)
        if layout.scale_zero:
            scale_NS.sub_(layout.scale_zero)
        value_NSK.mul_((d_N[:, None] * scale_NS)[:, :, None])
    if parts.second_N is not None:
        second_N = parts.second_N.to(torch.float32)
        if parts.min_NS is None:
            value_NSK.add_(second_N[:, None, None])
        else:
            value_NSK.sub_((second_N[:, None] * parts.min_NS)[:, :, None])
    return value_NE


def _code_values(code_NE: Tensor, layout: Layout) -> Tensor:
    """Return the number that each code represents, before any scale: float32, a new tensor."""
    if layout.codebook is not None:
        book = torch.tensor(layout.codebook, dtype=torch.float32, device=code_NE.device)
        return book.index_select(0, code_NE.flatten().int()).view(code_NE.shape)
    value_NE = code_NE.to(torch.float32)
    return value_NE.sub_(layout.zero) if layout.zero else value_NE
