"""What lies at which byte of a block, as one table, and the way there and back.

    type   bytes   d        second   scales          low bits           high bits
    Q4_0     18    0..1                              2..17   16 x 4
    Q5_0     22    0..1                              6..21   16 x 4     2..5      1 x 1
    Q5_1     24    0..1     m 2..3                   8..23   16 x 4     4..7      1 x 1
    Q8_0     34    0..1                              2..33   int8
    Q4_K    144    0..1     dmin 2..3   4..15        16..143 32 x 4
    Q5_K    176    0..1     dmin 2..3   4..15        48..175 32 x 4     16..47   32 x 1
    Q6_K    210  208..209            192..207 int8    0..127 64 x 4    128..191  32 x 2

d, m and dmin are little-endian halves. `R x W` is a run of R bytes in which each byte holds 8 / W
values of W bits: the run's first R values are the lowest W bits of its R bytes, its next R values
are the next W bits, and so on. So `32 x 4` is 32 low nibbles, then the same bytes' 32 high ones,
and `1 x 1` is the bits of a little-endian integer in order. A code is its low bits plus its high
bits shifted left by 4.

The 12 scale bytes S of Q4_K and Q5_K hold eight 6-bit scales sc and eight 6-bit minima mn:

    S[0..3]    mmmm.. : low 6 bits sc[0..3], top 2 bits the top of sc[4..7]
    S[4..7]           : low 6 bits mn[0..3], top 2 bits the top of mn[4..7]
    S[8..11]          : low nibble the rest of sc[4..7], high nibble the rest of mn[4..7]

`pack(unpack(b)) == b` for every block: no bit is unused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.quant.blocks import BlockType

# Shapes: N blocks, B bytes of a block or of a part of it, E values of a block, S sub-blocks of a
# block


@dataclass(frozen=True, slots=True, kw_only=True)
class Bits:
    """A part of a block: `count` bytes in runs of `run`, `width` bits for each value."""

    start: int
    count: int
    run: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    d: int
    second: int | None = None
    """Byte of dmin (types of 256) or m (Q5_1)."""
    scales: tuple[int, int] | None = None
    """First byte and number of bytes of the scales of sub-blocks."""
    sub_block: int = 32
    """Values that share a scale."""
    low: Bits
    high: Bits | None = None
    zero: int = 0
    """The code of the value 0, in types without a minimum."""
    levels: int
    """Codes run from 0 to this one; Q8_0's from -128 to it."""


LAYOUTS: dict[str, Layout] = {
    "Q4_0": Layout(d=0, low=Bits(start=2, count=16, run=16, width=4), zero=8, levels=15),
    "Q5_0": Layout(
        d=0,
        low=Bits(start=6, count=16, run=16, width=4),
        high=Bits(start=2, count=4, run=1, width=1),
        zero=16,
        levels=31,
    ),
    "Q5_1": Layout(
        d=0,
        second=2,
        low=Bits(start=8, count=16, run=16, width=4),
        high=Bits(start=4, count=4, run=1, width=1),
        levels=31,
    ),
    "Q8_0": Layout(d=0, low=Bits(start=2, count=32, run=32, width=8), levels=127),
    "Q4_K": Layout(
        d=0, second=2, scales=(4, 12), low=Bits(start=16, count=128, run=32, width=4), levels=15
    ),
    "Q5_K": Layout(
        d=0,
        second=2,
        scales=(4, 12),
        low=Bits(start=48, count=128, run=32, width=4),
        high=Bits(start=16, count=32, run=32, width=1),
        levels=31,
    ),
    "Q6_K": Layout(
        d=208,
        scales=(192, 16),
        sub_block=16,
        low=Bits(start=0, count=128, run=64, width=4),
        high=Bits(start=128, count=64, run=32, width=2),
        zero=32,
        levels=63,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """N blocks taken apart; what a type does not have is None."""

    d_N: Tensor
    """float16"""
    second_N: Tensor | None
    """float16: dmin, or Q5_1's m"""
    scale_NS: Tensor | None
    """uint8, int8 in Q6_K"""
    min_NS: Tensor | None
    """uint8"""
    code_NE: Tensor
    """uint8, int8 in Q8_0"""


# contract: block-formats-v1
def unpack(blocks_NB: Tensor, type_: BlockType) -> Parts:
    """Takes apart blocks of one of the types in `LAYOUTS`; uint8 of shape (N, block_bytes)."""
    layout = LAYOUTS[type_.name]
    code_NE = _read(blocks_NB, layout.low)
    if layout.high is not None:
        code_NE |= _read(blocks_NB, layout.high) << 4
    scale_NS = min_NS = None
    if layout.scales is not None:
        start, count = layout.scales
        scale_NS = blocks_NB[:, start : start + count]
        if layout.second is None:
            scale_NS = scale_NS.contiguous().view(torch.int8)
        else:
            scale_NS, min_NS = _six_bits(scale_NS)
    return Parts(
        d_N=_half(blocks_NB, layout.d),
        second_N=None if layout.second is None else _half(blocks_NB, layout.second),
        scale_NS=scale_NS,
        min_NS=min_NS,
        code_NE=code_NE.view(torch.int8) if layout.low.width == 8 else code_NE,
    )


# contract: block-formats-v1
def pack(parts: Parts, type_: BlockType) -> Tensor:
    """The blocks that `unpack` takes apart: uint8 of shape (N, block_bytes)."""
    layout = LAYOUTS[type_.name]
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
        start, count = layout.scales
        scales = parts.scale_NS.view(torch.uint8)
        if parts.min_NS is not None:
            scales = _twelve_bytes(scales, parts.min_NS)
        blocks_NB[:, start : start + count] = scales
    if layout.high is None:
        _write(blocks_NB, layout.low, code_NE)
    else:
        _write(blocks_NB, layout.low, code_NE & 15)
        _write(blocks_NB, layout.high, code_NE >> 4)
    return blocks_NB


def _half(blocks_NB: Tensor, start: int) -> Tensor:
    # A copy: halves may be viewed only where the first byte is even.
    return (
        blocks_NB[:, start : start + 2]
        .clone(memory_format=torch.contiguous_format)
        .view(torch.float16)[:, 0]
    )


def _shifts(bits: Bits, device: torch.device) -> Tensor:
    return torch.arange(0, 8, bits.width, dtype=torch.uint8, device=device)[:, None]


def _read(blocks_NB: Tensor, bits: Bits) -> Tensor:
    part_NB = blocks_NB[:, bits.start : bits.start + bits.count]
    if bits.width == 8:
        return part_NB.contiguous()
    runs = part_NB.reshape(len(part_NB), -1, 1, bits.run)
    values: Tensor = runs >> _shifts(bits, blocks_NB.device)
    return values.bitwise_and_((1 << bits.width) - 1).flatten(1)


def _write(blocks_NB: Tensor, bits: Bits, values_NE: Tensor) -> None:
    runs = values_NE.reshape(len(values_NE), -1, 8 // bits.width, bits.run)
    # The fields of a byte do not overlap, so that their sum is their union.
    joined = (runs << _shifts(bits, blocks_NB.device)).sum(2, dtype=torch.uint8)
    blocks_NB[:, bits.start : bits.start + bits.count] = joined.flatten(1)


def _six_bits(bytes_NB: Tensor) -> tuple[Tensor, Tensor]:
    """The 8 scales and 8 minima in the 12 bytes of Q4_K and Q5_K."""
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
