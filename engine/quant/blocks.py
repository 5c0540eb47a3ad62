"""The block types of a weight file: how many values share a block, and in how many bytes.

A row of a quantized matrix is a sequence of whole blocks; a block holds `block_size` neighbouring
values of the row and is decoded without looking at any other:

    name   id  values  bytes  bits/weight  a value is
    F32     0     1      4      32          itself
    F16     1     1      2      16          itself
    Q4_0    2    32     18       4.5        d (q - 8)
    Q5_0    6    32     22       5.5        d (q - 16)
    Q5_1    7    32     24       6          d q + m
    Q8_0    8    32     34       8.5        d q                 q signed
    Q4_K   12   256    144       4.5        d sc q - dmin mn    sc, mn: 6 bits for each 32 values
    Q5_K   13   256    176       5.5        d sc q - dmin mn    as Q4_K, q of 5 bits
    Q6_K   14   256    210       6.5625     d sc (q - 32)       sc: int8 for each 16 values
    BF16   30     1      2      16          itself

The ids are those of GGUF files. What lies at which byte of a block is in `layout.py`.

Names and sizes only, without torch, so that a file can be listed and its sizes checked without it.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import WeightsError


class QuantError(WeightsError, ValueError):
    """Values that cannot be put into blocks, or bytes that are no blocks of their type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockType:
    name: str
    ggml_id: int
    block_size: int
    """Values in a block; 1 for the float types."""
    block_bytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.block_bytes / self.block_size


BLOCK_TYPES: dict[str, BlockType] = {
    name: BlockType(name=name, ggml_id=ggml_id, block_size=size, block_bytes=count)
    for name, ggml_id, size, count in (
        ("F32", 0, 1, 4),
        ("F16", 1, 1, 2),
        ("Q4_0", 2, 32, 18),
        ("Q5_0", 6, 32, 22),
        ("Q5_1", 7, 32, 24),
        ("Q8_0", 8, 32, 34),
        ("Q4_K", 12, 256, 144),
        ("Q5_K", 13, 256, 176),
        ("Q6_K", 14, 256, 210),
        ("BF16", 30, 1, 2),
    )
}

# What a quantizer of whole files writes where rows are no multiple of 256 values.
_SMALLER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def by_ggml_id(ggml_id: int) -> BlockType:
    """The type with this id in a GGUF file; `QuantError` for one that is not read here."""
    for type_ in BLOCK_TYPES.values():
        if type_.ggml_id == ggml_id:
            return type_
    known = ", ".join(f"{t.ggml_id} {t.name}" for t in BLOCK_TYPES.values())
    raise QuantError.expected("block type", "ggml id", f"one of {known}", str(ggml_id))


GROUP_ROWS = 16
"""Of a K-quant, that lie together on a device (`engine.quant.planes`)."""


def group_rows(type_: BlockType) -> int:
    """Rows that lie together on a device, in a group that is filled up."""
    return GROUP_ROWS if type_.block_size == 256 else 1


def row_bytes(type_: BlockType, values: int) -> int:
    """Bytes of a row of `values` values; `QuantError`, naming the fallback, where blocks do not
    fill the row."""
    if values < 0 or values % type_.block_size:
        raise QuantError.expected(
            f"{type_.name} row",
            "row length",
            f"a multiple of {type_.block_size} values",
            f"{values:,}",
            hint=f"{fallback(type_, values).name} fits this row" if values > 0 else None,
        )
    return values // type_.block_size * type_.block_bytes


def fallback(type_: BlockType, values: int) -> BlockType:
    """The type to use for rows of `values` values where `type_` is wanted: itself if its blocks
    fill the row, else the type with blocks of 32 that has at least as many bits (Q4_K: Q5_0,
    Q5_K: Q5_1, Q6_K: Q8_0), else F16. The same choice as llama.cpp's."""
    for name in (type_.name, _SMALLER.get(type_.name)):
        if name is not None and values % BLOCK_TYPES[name].block_size == 0:
            return BLOCK_TYPES[name]
    return BLOCK_TYPES["F16"]
