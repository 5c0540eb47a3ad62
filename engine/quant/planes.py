"""Rearrange the bytes of quantised matrices in the order that a GPU reads fastest.

GPU threads load 16 bytes at a time, from addresses that are multiples of 16, and a warp loads
adjacent addresses fastest. So blocks are split into planes: the low bits of all rows, then the high
bits of all rows, and so on. The fields keep their bytes and bit order.

    type     planes, each with its bytes per block
    Q2_K     low 64               scales 16   d 2   second 2
    Q3_K     low 64    high 32    scales 12   d 2
    Q4_K     low 128              header 16
    Q5_K     low 128   high 32    header 16
    Q6_K     low 128   high 64    scales 16   d 2
    IQ4_XS   low 128              header 8
    Q8_0     low 32                           d 2
    Q4_0     low 16                           d 2
    Q4_1     low 16                           d 2   second 2
    Q5_0     low 16    high 4                 d 2
    Q5_1     low 16    high 4                 d 2   second 2
    IQ4_NL   low 16                           d 2

The header is d, dmin if the type has it, and the 6-bit scales. It has its own plane because memory is fetched in
sectors of 32 bytes: next to the low bits, as in a block, reading either would also fetch half a sector of
the other.

In types with blocks of 256 values, groups of 16 rows are interleaved: the first blocks of all 16 rows, then the second
blocks, and so on.

    plane   [groups, blocks of a row, rows of a group, bytes of a block]

A kernel program that processes 16 rows then reads 2 KB contiguously instead of 16 separate runs of 128
bytes, and whole sectors of headers. Types with blocks of 32 values have groups of one row.

A plane starts at a multiple of 16 bytes, and its last group is padded: the total exceeds the blocks
by less than 16 bytes per plane plus 16 rows. `unpack(pack(w))` returns w's bytes, so a packed model
can be written to a file again.

Float types have no planes; weights stored as floats stay ordinary tensors. This module does not
need triton: it is also the dequantisation on machines without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

from engine.quant.blocks import BlockType, group_rows, row_bytes
from engine.quant.reference import chunk_rows
from engine.quant.tensor import QuantTensor

# Shapes: R rows, S groups, G rows of a group, N blocks of a row, B bytes of a field of a block, E elements
# of one

ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Field:
    """Bytes `start` to `start + count` of each block, which form one plane."""

    name: str
    start: int
    count: int
    dtype: torch.dtype = torch.uint8
    """Dtype as which kernels read the plane."""


@cache
def fields(type_: BlockType) -> tuple[Field, ...]:
    """Return the planes of a type that has a layout, in order."""
    layout = type_.in_blocks
    if layout.scales is not None and layout.d == 0:
        planes_256 = [Field("low", layout.low.start, layout.low.count)]
        if layout.high is not None:
            planes_256.append(Field("high", layout.high.start, layout.high.count))
        return (
            *planes_256,
            Field("header", 0, min(plane.start for plane in planes_256), torch.int32),
        )
    codes = torch.int8 if layout.low.width == 8 else torch.uint8
    planes = [Field("low", layout.low.start, layout.low.count, codes)]
    if layout.high is not None:
        # In blocks of 32 values the high bits are one 32-bit integer.
        high = torch.int32 if layout.high.count == 4 else torch.uint8
        planes.append(Field("high", layout.high.start, layout.high.count, high))
    if layout.scales is not None:
        start, count = layout.scales.start, layout.scales.count
        scales = torch.int8 if layout.scales.width == 8 else torch.uint8
        if layout.scales_high is not None:  # which follows
            count, scales = count + layout.scales_high.count, torch.int32
        planes.append(Field("scales", start, count, scales))
    planes.append(Field("d", layout.d, 2, torch.float16))
    if layout.second is not None:
        planes.append(Field("second", layout.second, 2, torch.float16))
    return tuple(planes)


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A matrix of `rows` x `columns` values whose planes are in `data`."""

    type: BlockType
    rows: int
    columns: int
    data: Tensor = field(repr=False)
    """uint8, one-dimensional, contiguous; starts at a multiple of 16 bytes."""
    _planes: Mapping[str, Tensor] | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        expected = packed_bytes(self.type, self.rows, self.columns)
        assert self.data.dtype == torch.uint8 and self.data.shape == (expected,), self.data.shape

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def row_blocks(self) -> int:
        """Number of blocks in a row."""
        return self.columns // self.type.block_size

    @property
    def group_rows(self) -> int:
        """Number of rows that are stored together."""
        return group_rows(self.type)

    def planes(self) -> Mapping[str, Tensor]:
        """Return the planes by name: contiguous views of shape (S, N, G, E), in the dtypes that
        kernels read.
        """
        # The views are cached: creating them in Python takes nearly as long as a small matrix on a
        # GPU.
        if self._planes is None:
            object.__setattr__(self, "_planes", self._views())
        assert self._planes is not None
        return self._planes

    def _views(self) -> Mapping[str, Tensor]:
        views, start = {}, 0
        groups = _groups(self.type, self.rows)
        for plane in fields(self.type):
            count = groups * self.group_rows * self.row_blocks * plane.count
            shape = (groups, self.row_blocks, self.group_rows, plane.count // plane.dtype.itemsize)
            views[plane.name] = self.data[start : start + count].view(plane.dtype).view(shape)
            start += _aligned(count)
        return MappingProxyType(views)

    def to(self, device: torch.device | str) -> PackedMatrix:
        """Return a copy with the same bytes on `device`."""
        return PackedMatrix(self.type, self.rows, self.columns, self.data.to(device))


def _groups(type_: BlockType, rows: int) -> int:
    return -(-rows // group_rows(type_))


def packed_bytes(type_: BlockType, rows: int, columns: int) -> int:
    """Return the size of a packed matrix in bytes. Raises `QuantError` if blocks do not fill a row."""
    row_bytes(type_, columns)  # refuses a row that blocks do not fill
    padded = _groups(type_, rows) * group_rows(type_)
    blocks = padded * (columns // type_.block_size)
    return sum(_aligned(blocks * plane.count) for plane in fields(type_))


def pack(weight: QuantTensor) -> PackedMatrix:
    """Return a block-quantised matrix as planes, in new memory on the same device. No other memory is
    allocated.
    """
    rows, columns = weight.shape
    count = packed_bytes(weight.type, rows, columns)
    blocks = weight.blocks
    data = torch.zeros(count, dtype=torch.uint8, device=blocks.device)
    packed = PackedMatrix(weight.type, rows, columns, data)
    blocks_RNB = blocks.view(rows, packed.row_blocks, weight.type.block_bytes)
    for plane in fields(weight.type):
        _put(packed, plane, blocks_RNB[:, :, plane.start : plane.start + plane.count])
    return packed


def unpack(packed: PackedMatrix, first: int = 0, count: int | None = None) -> QuantTensor:
    """Return rows `first` to `first + count` (default: all) as blocks again, in new memory."""
    count = packed.rows - first if count is None else count
    check_rows(packed, first, count)
    group = packed.group_rows
    shape = (count, packed.row_blocks, packed.type.block_bytes)
    blocks_RNB = torch.empty(shape, dtype=torch.uint8, device=packed.device)
    groups = slice(first // group, -(-(first + count) // group))
    for plane in fields(packed.type):
        rows_RNB = _rows(packed, plane)[groups].flatten(0, 1)
        from_first = first - groups.start * group
        blocks_RNB[:, :, plane.start : plane.start + plane.count] = rows_RNB[from_first:][:count]
    return QuantTensor(
        blocks=blocks_RNB.flatten(1), type=packed.type, shape=(count, packed.columns)
    )


def take_rows(packed: PackedMatrix, rows: Tensor) -> PackedMatrix:
    """Return the rows numbered in `rows` (integers of shape (R,)), in that order, as a packed
    matrix. This is an embedding lookup.
    """
    count = packed_bytes(packed.type, len(rows), packed.columns)
    data = torch.empty(count, dtype=torch.uint8, device=packed.device)
    taken = PackedMatrix(packed.type, len(rows), packed.columns, data)
    group, row = rows // packed.group_rows, rows % packed.group_rows
    for plane in fields(packed.type):
        _put(taken, plane, _rows(packed, plane)[group, row])
    return taken


def _rows(packed: PackedMatrix, plane: Field) -> Tensor:
    """Return a plane's bytes with the rows of a group first: a view of shape (S, G, N, B)."""
    plane_SNGB = packed.planes()[plane.name].view(torch.uint8)
    return plane_SNGB.transpose(1, 2)


def _put(packed: PackedMatrix, plane: Field, rows_RNB: Tensor) -> None:
    """Write a field of every row."""
    to_SGNB, group = _rows(packed, plane), packed.group_rows
    full_groups = packed.rows // group
    to_SGNB[:full_groups] = rows_RNB[: full_groups * group].view(
        full_groups, group, *rows_RNB.shape[1:]
    )
    if packed.rows > full_groups * group:
        to_SGNB[full_groups, : packed.rows - full_groups * group] = rows_RNB[full_groups * group :]


def dequantize_rows_reference(
    packed: PackedMatrix, out_RC: Tensor, first: int = 0, count: int | None = None
) -> None:
    """Write the values of rows `first` to `first + count` into `out_RC` of shape (count, columns),
    with the arithmetic and the chunking of `engine.quant.reference`, on any device.
    """
    count = packed.rows - first if count is None else count
    check_rows(packed, first, count)
    check_out(packed, out_RC, count)
    step = chunk_rows(packed.columns, packed.device)
    for start in range(0, count, step):
        part_RC = out_RC[start : start + step]
        blocks = unpack(packed, first + start, len(part_RC))
        part_RC.copy_(blocks.dequantize(out_RC.dtype))


def check_rows(packed: PackedMatrix, first: int, count: int) -> None:
    """Assert that rows `first` to `first + count` exist."""
    assert first >= 0 and count >= 0 and first + count <= packed.rows, (first, count, packed.rows)


def check_out(packed: PackedMatrix, out_RC: Tensor, count: int) -> None:
    """Assert that `count` rows of values fit `out_RC` exactly."""
    assert out_RC.shape == (count, packed.columns) and out_RC.device == packed.device, out_RC.shape


def _aligned(count: int) -> int:
    return math.ceil(count / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
