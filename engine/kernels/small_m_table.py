"""Launch configurations of the kernels for few rows, and the row counts up to which they are
faster.

Measured on one H200 (sm_90) with bf16 inputs, by replaying CUDA graphs over copies of the weights
that together exceed the L2 cache. Other GPUs get the same configurations, which fit them, and a limit
published for similar kernels (bitsandbytes 0.50); neither was measured here.

This module imports neither torch nor triton, so that choices can be explained anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.quant.blocks import BlockType

MAX_ROWS = 64
"""Maximum number of rows of x."""
CODES_ROWS = 8
"""Number of rows of x up to which x is converted to integers."""


@dataclass(frozen=True, slots=True)
class Config:
    family: Literal["codes", "tiles"]
    padded: int
    """Number of rows of x, padded to a power of two."""
    rows: int
    """Rows of W per program."""
    warps: int
    stages: int
    """Blocks of a row in flight, including the one being processed."""
    splits: int = 1
    """Maximum number of programs that share the sums of a row of W."""


# For each padded number of rows of x: rows of W, warps and stages of a program, first for matrices
# that occupy a GPU of 132 multiprocessors without splitting, then for others. Up to 8 rows of x a
# program takes a part of a tile, so that no sum depends on its number of rows.
_Shape = tuple[int, int, int]
_LAUNCHES: dict[str, dict[int, tuple[_Shape, _Shape]]] = {
    "Q4_K": {
        1: ((64, 4, 3), (32, 2, 3)),
        2: ((64, 4, 3), (64, 4, 3)),
        4: ((64, 4, 2), (64, 4, 2)),
        8: ((64, 2, 3), (64, 2, 3)),
        16: ((32, 2, 3), (32, 2, 3)),
        32: ((32, 2, 3), (32, 2, 2)),
        64: ((128, 4, 2), (64, 4, 2)),
    },
    "Q5_K": {
        1: ((32, 2, 2), (32, 2, 2)),
        2: ((32, 2, 2), (32, 2, 2)),
        4: ((32, 2, 2), (32, 2, 2)),
        8: ((64, 2, 2), (64, 2, 2)),
        16: ((32, 2, 2), (32, 2, 2)),
        32: ((32, 2, 3), (32, 2, 2)),
        64: ((64, 4, 2), (64, 4, 2)),
    },
    "Q6_K": {
        1: ((64, 4, 4), (32, 2, 2)),
        2: ((64, 4, 2), (64, 4, 2)),
        4: ((64, 4, 2), (64, 4, 2)),
        8: ((64, 4, 3), (64, 4, 3)),
        16: ((32, 2, 2), (32, 2, 2)),
        32: ((64, 2, 2), (32, 2, 2)),
        64: ((128, 4, 2), (64, 4, 2)),
    },
}
TILE = 64
"""Maximum number of rows of W in a tile of `codes`. The summation order of a row is that of its
tile.
"""
TILE_WARPS = 4
MULTIPROCESSORS = 132
"""Number on the measured GPU. On others the tiles are still correct, but less evenly distributed.
"""
TILES_AT_ONCE = 7
"""Number of tiles that fit on a multiprocessor at once."""
_FULL_ROWS = 28672
"""Rows of W, or rows of W times splits, that occupy the GPU."""
_FEW_WARPS = 528
"""One warp for each scheduler of the GPU; with fewer, splits may be as short as a block."""


def config_for(type_: BlockType, rows: int, columns: int, m: int, arch: int) -> Config:
    """Return the launch configuration for `m` rows of x times a matrix, on compute capability
    `arch`.
    """
    padded = 1 << (m - 1).bit_length()
    blocks = columns // type_.block_size
    shape = _LAUNCHES[type_.name][padded][0 if rows >= _FULL_ROWS else 1]
    if m <= CODES_ROWS:
        family: Literal["codes", "tiles"] = "codes"
        programs, warps = -(-rows // TILE), TILE_WARPS
        splits = -(-_FULL_ROWS // TILE // programs)
    else:
        family = "tiles"
        programs, warps = -(-rows // shape[0]), shape[1]
        splits = max(1, _FULL_ROWS // shape[0] // programs)
    if splits > blocks // 2:
        splits = max(1, blocks // 2)
        if programs * warps * splits < _FEW_WARPS:
            splits = blocks
    stages = max(2, min(shape[2], -(-blocks // splits)))
    return Config(family, padded, shape[0], shape[1], stages, splits)


def tiles_of(rows: Sequence[int], splits: int) -> list[int]:
    """Return into how many tiles to cut each of several matrices that are multiplied together.

    Tiles have at most TILE rows. If sums are not split and all tiles run at once, the number is
    chosen so that every multiprocessor gets the same number of tiles: with 4 on some and 5 on
    others, half of the GPU would wait for the rest.
    """
    least = [-(-count // TILE) for count in rows]
    programs = sum(least)
    rounds = -(-programs // MULTIPROCESSORS)
    if splits > 1 or not 1 < rounds <= TILES_AT_ONCE:
        return least
    return [rounds * MULTIPROCESSORS * few // programs for few in least]


_PUBLISHED = {80: 64, 86: 64, 89: 64, 100: 8, 103: 8, 120: 64, 121: 64}
"""bitsandbytes' limits for its kernel against dequantisation and a matmul, for the smallest
matrices, and at most MAX_ROWS.
"""
_UNKNOWN = 16


def crossover_rows(type_: BlockType, rows: int, columns: int, arch: int) -> int:
    """Return up to how many rows of x the kernels are faster than dequantisation and a matmul; 0
    for unsupported types.

    On sm_90 they were faster for every matrix of a 7B model and all supported row counts: with 64
    rows dequantisation takes 1.7 times as long for gate and up (Q4_K), 1.3 times for down and 1.7
    for the output head (Q6_K), and 1.0 times for a matrix of 3584 x 3584.
    """
    if type_.name not in _LAUNCHES:
        return 0
    return MAX_ROWS if arch == 90 else _PUBLISHED.get(arch, _UNKNOWN)
