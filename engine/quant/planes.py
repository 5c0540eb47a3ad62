"""A quantized matrix in the order in which a GPU reads it fast: same bytes, same bits, other places.

Threads of a GPU load 16 bytes at once, from addresses that are multiples of 16, and those of a warp
load fastest what lies side by side. So blocks are taken apart into planes: all rows' low bits, then
all rows' high bits, and so on. The fields keep their bytes and the order of their bits.

    type   planes, each with the bytes of one block
    Q4_K   low 128              header 16
    Q5_K   low 128   high 32    header 16
    Q6_K   low 128   high 64    scales 16   d 2
    Q8_0   low 32                           d 2
    Q4_0   low 16                           d 2
    Q5_0   low 16    high 4                 d 2
    Q5_1   low 16    high 4                 d 2   second 2

The header is d, dmin and the 6-bit scales. Memory moves in pieces of 32 bytes: beside the low bits,
where blocks have it, half of a piece is fetched with each side of it.

Of a K-quant 16 rows lie together, a group: the first blocks of all of them, then the second, and so on.

    plane   [groups, blocks of a row, rows of a group, bytes of a block]

Kernels for few rows of activations go along rows, with many rows side by side. What they read at
a time is then 2 KB in one piece instead of 16 of 128 bytes, which memory gives a tenth faster, and whole
pieces of 32 bytes of headers. Groups of 8 to 64 were equally fast. Blocks of 32 values are in groups
of one row: there are no such kernels for them.

A plane starts at a multiple of 16 bytes, and its last group is as long as the others: the whole is
longer than the blocks by less than 16 bytes a plane and 16 rows. `unpack(pack(w))` gives w's bytes back,
hence a packed model can be written to a file again.

Float types have no planes; what is stored as floats stays an ordinary tensor. Nothing here needs
triton: this is also the dequantisation on machines that have none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

from engine.quant.blocks import LAYOUTS, BlockType, QuantError, group_rows, row_bytes
from engine.quant.reference import chunk_rows
from engine.quant.tensor import QuantTensor

# Shapes: R rows, S groups, G rows of a group, N blocks of a row, B bytes of a field of a block, E elements
# of one

ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Field:
    """Bytes `start` to `start + count` of each block, which make one plane."""

    name: str
    start: int
    count: int
    dtype: torch.dtype = torch.uint8
    """What a kernel reads the plane as."""


@cache
def _fields(type_: BlockType) -> tuple[Field, ...]:
    layout = type_.in_blocks
    if type_.name in ("Q4_K", "Q5_K"):
        parts = [Field("low", layout.low.start, layout.low.count)]
        if layout.high is not None:
            parts.append(Field("high", layout.high.start, layout.high.count))
        return (*parts, Field("header", 0, 16, torch.int32))
    codes = torch.int8 if layout.low.width == 8 else torch.uint8
    found = [Field("low", layout.low.start, layout.low.count, codes)]
    if layout.high is not None:
        # In blocks of 32 values the high bits are one integer of 32 bits.
        high = torch.int32 if layout.high.count == 4 else torch.uint8
        found.append(Field("high", layout.high.start, layout.high.count, high))
    if layout.scales is not None:
        found.append(Field("scales", *layout.scales, torch.int8))
    found.append(Field("d", layout.d, 2, torch.float16))
    if layout.second is not None:
        found.append(Field("second", layout.second, 2, torch.float16))
    return tuple(found)


def fields(type_: BlockType) -> tuple[Field, ...]:
    """The planes of a type, in order; `QuantError` for a float type."""
    if type_.layout is None:
        known = ", ".join(LAYOUTS)
        raise QuantError.expected("packed matrix", "block type", f"one of {known}", type_.name)
    return _fields(type_)


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A matrix of `rows` x `columns` values, of which `data` holds the planes.

    Raises `QuantError` where the number of bytes is not that of the planes.
    """

    type: BlockType
    rows: int
    columns: int
    data: Tensor = field(repr=False)
    """uint8, one dimension, contiguous; starts at a multiple of 16 bytes."""
    _planes: Mapping[str, Tensor] | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        expected = packed_bytes(self.type, self.rows, self.columns)
        if self.data.dtype != torch.uint8 or tuple(self.data.shape) != (expected,):
            raise QuantError.expected(
                f"packed {self.type.name} matrix",
                f"{self.rows} x {self.columns}",
                f"uint8 bytes of shape ({expected},)",
                f"{self.data.dtype} of shape {tuple(self.data.shape)}",
            )

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
        """Blocks in a row."""
        return self.columns // self.type.block_size

    @property
    def group_rows(self) -> int:
        """Rows that lie together."""
        return group_rows(self.type)

    def planes(self) -> Mapping[str, Tensor]:
        """The planes by name: contiguous views of shape (S, N, G, E), in the dtypes that kernels read."""
        # Views are made once: a GPU needs little longer for a small matrix than Python for them.
        if self._planes is None:
            object.__setattr__(self, "_planes", self._views())
        assert self._planes is not None
        return self._planes

    def _views(self) -> Mapping[str, Tensor]:
        found, start = {}, 0
        groups = _groups(self.type, self.rows)
        for part in fields(self.type):
            count = groups * self.group_rows * self.row_blocks * part.count
            shape = (groups, self.row_blocks, self.group_rows, part.count // part.dtype.itemsize)
            found[part.name] = self.data[start : start + count].view(part.dtype).view(shape)
            start += _aligned(count)
        return MappingProxyType(found)

    def to(self, device: torch.device | str) -> PackedMatrix:
        """The same bytes on `device`."""
        return PackedMatrix(self.type, self.rows, self.columns, self.data.to(device))


def _groups(type_: BlockType, rows: int) -> int:
    return -(-rows // group_rows(type_))


def packed_bytes(type_: BlockType, rows: int, columns: int) -> int:
    """Bytes of a packed matrix; `QuantError` where blocks do not fill a row."""
    row_bytes(type_, columns)  # refuses a row that blocks do not fill
    padded = _groups(type_, rows) * group_rows(type_)
    blocks = padded * (columns // type_.block_size)
    return sum(_aligned(blocks * part.count) for part in fields(type_))


def pack(weight: QuantTensor) -> PackedMatrix:
    """The planes of a matrix in blocks, on the same device, in memory of their own and without
    another temporary."""
    if len(weight.shape) != 2:
        raise QuantError.expected(
            f"packed {weight.type.name} matrix", "shape", "rows x columns", str(weight.shape)
        )
    rows, columns = weight.shape
    count = packed_bytes(weight.type, rows, columns)
    blocks = weight.blocks
    data = torch.zeros(count, dtype=torch.uint8, device=blocks.device)
    packed = PackedMatrix(weight.type, rows, columns, data)
    blocks_RNB = blocks.view(rows, packed.row_blocks, weight.type.block_bytes)
    for part in fields(weight.type):
        _put(packed, part, blocks_RNB[:, :, part.start : part.start + part.count])
    return packed


def unpack(packed: PackedMatrix, first: int = 0, count: int | None = None) -> QuantTensor:
    """Rows `first` to `first + count` (all, unless given) as blocks again, in new memory."""
    count = packed.rows - first if count is None else count
    check_rows(packed, first, count)
    group = packed.group_rows
    shape = (count, packed.row_blocks, packed.type.block_bytes)
    blocks_RNB = torch.empty(shape, dtype=torch.uint8, device=packed.device)
    groups = slice(first // group, -(-(first + count) // group))
    for part in fields(packed.type):
        rows_RNB = _rows(packed, part)[groups].flatten(0, 1)
        from_first = first - groups.start * group
        blocks_RNB[:, :, part.start : part.start + part.count] = rows_RNB[from_first:][:count]
    return QuantTensor(
        blocks=blocks_RNB.flatten(1), type=packed.type, shape=(count, packed.columns)
    )


def take_rows(packed: PackedMatrix, rows: Tensor) -> PackedMatrix:
    """The matrix of the rows numbered in `rows`, integers of shape (R,), in that order; still
    packed. What an embedding looks up."""
    count = packed_bytes(packed.type, len(rows), packed.columns)
    data = torch.empty(count, dtype=torch.uint8, device=packed.device)
    taken = PackedMatrix(packed.type, len(rows), packed.columns, data)
    group, place = rows // packed.group_rows, rows % packed.group_rows
    for part in fields(packed.type):
        _put(taken, part, _rows(packed, part)[group, place])
    return taken


def _rows(packed: PackedMatrix, part: Field) -> Tensor:
    """A plane's bytes with the rows of a group in front: a view of shape (S, G, N, B)."""
    plane_SNGB = packed.planes()[part.name].view(torch.uint8)
    return plane_SNGB.transpose(1, 2)


def _put(packed: PackedMatrix, part: Field, rows_RNB: Tensor) -> None:
    """Writes a field of every row."""
    to_SGNB, group = _rows(packed, part), packed.group_rows
    full = packed.rows // group
    to_SGNB[:full] = rows_RNB[: full * group].view(full, group, *rows_RNB.shape[1:])
    if packed.rows > full * group:
        to_SGNB[full, : packed.rows - full * group] = rows_RNB[full * group :]


def dequantize_rows_reference(
    packed: PackedMatrix, out_RC: Tensor, first: int = 0, count: int | None = None
) -> None:
    """Writes the values of rows `first` to `first + count` into `out_RC` of shape (count, columns):
    the arithmetic of `engine.quant.reference`, on any device, in its chunks."""
    count = packed.rows - first if count is None else count
    check_rows(packed, first, count)
    check_out(packed, out_RC, count)
    step = chunk_rows(packed.columns, packed.device)
    for start in range(0, count, step):
        part_RC = out_RC[start : start + step]
        blocks = unpack(packed, first + start, len(part_RC))
        part_RC.copy_(blocks.dequantize(out_RC.dtype))


def check_rows(packed: PackedMatrix, first: int, count: int) -> None:
    """`QuantError` unless rows `first` to `first + count` are there."""
    if first < 0 or count < 0 or first + count > packed.rows:
        raise QuantError.expected(
            f"packed {packed.type.name} matrix",
            "rows",
            f"some of {packed.rows}",
            f"{count} from {first}",
        )


def check_out(packed: PackedMatrix, out_RC: Tensor, count: int) -> None:
    """`QuantError` unless `count` rows of values fit `out_RC` exactly."""
    if tuple(out_RC.shape) != (count, packed.columns) or out_RC.device != packed.device:
        raise QuantError.expected(
            f"values of a packed {packed.type.name} matrix",
            "out",
            f"shape ({count}, {packed.columns}) on {packed.device}",
            f"{tuple(out_RC.shape)} on {out_RC.device}",
        )


def _aligned(count: int) -> int:
    return math.ceil(count / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
