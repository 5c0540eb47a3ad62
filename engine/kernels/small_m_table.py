"""Launch configurations of the kernels for few rows.

Measured on one H200 (sm_90) with bf16 inputs, by replaying CUDA graphs over copies of the weights
that together exceed the L2 cache. Other GPUs get the same configurations, which fit them;
they were not measured there.

This module imports neither torch nor triton, so that choices can be explained anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.quant.blocks import BlockType

MAX_ROWS = 8
"""Maximum number of rows of x."""


@dataclass(frozen=True, slots=True)
class Config:
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
# that occupy a GPU of 132 multiprocessors without splitting, then for others. A program
# takes a part of a tile, so that no sum depends on its number of rows.
_Shape = tuple[int, int, int]
_LAUNCHES: dict[str, dict[int, tuple[_Shape, _Shape]]] = {
    "Q4_K": {
        1: ((64, 4, 3), (32, 2, 3)),
        2: ((64, 4, 3), (64, 4, 3)),
        4: ((64, 4, 2), (64, 4, 2)),
        8: ((64, 2, 3), (64, 2, 3)),
    },
    "Q5_K": {
        1: ((32, 2, 2), (32, 2, 2)),
        2: ((32, 2, 2), (32, 2, 2)),
        4: ((32, 2, 2), (32, 2, 2)),
        8: ((64, 2, 2), (64, 2, 2)),
    },
    "Q6_K": {
        1: ((64, 4, 4), (32, 2, 2)),
        2: ((64, 4, 2), (64, 4, 2)),
        4: ((64, 4, 2), (64, 4, 2)),
        8: ((64, 4, 3), (64, 4, 3)),
    },
}
TILE = 64
"""Maximum number of rows of W in a tile. The summation order of a row is that of its
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
    programs = -(-rows // TILE)
    splits = -(-_FULL_ROWS // TILE // programs)
    if splits > blocks // 2:
        splits = max(1, blocks // 2)
        if programs * TILE_WARPS * splits < _FEW_WARPS:
            splits = blocks
    stages = max(2, min(shape[2], -(-blocks // splits)))
    return Config(padded, shape[0], shape[1], stages, splits)


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
