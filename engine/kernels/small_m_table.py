"""How the kernels for few rows are launched, and up to how many rows they are the faster way: data.

Measured on one H200 (sm_90), CUDA graphs replayed over copies of the weights that have more bytes
than the L2 cache holds, bf16 inputs: `small_m_rows` of `engine/bench/small_m.py` times what is chosen
here. Other GPUs get the same launches, which fit them, and a limit that others have published for
kernels of this kind (bitsandbytes 0.50); neither was measured here.

No torch and no triton, so that choices can be explained anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.quant.blocks import BlockType

MAX_ROWS = 64
"""Of x."""
CODES_ROWS = 8
"""Of x, up to which it becomes integers."""


@dataclass(frozen=True, slots=True)
class Config:
    family: Literal["codes", "tiles"]
    padded: int
    """Rows of x that there is room for."""
    rows: int
    """Rows of W of one program."""
    warps: int
    stages: int
    """Blocks of a row in flight, counting the one being worked on."""
    splits: int = 1
    """Programs that share the sums of a row of W, at most."""


# For padded rows of x: rows of W, warps and stages of a program, for matrices that occupy a GPU of
# 132 multiprocessors without being split, and for others. Up to 8 rows of x those rows are a part of a
# tile, so that no sum depends on them.
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
"""Rows of W of a tile of codes, at most. The order of a row's sums is that of its tile."""
TILE_WARPS = 4
MULTIPROCESSORS = 132
"""Of the GPU that was measured. On others tiles are as right, and not as even."""
TILES_AT_ONCE = 7
"""That a multiprocessor has room for."""
_FULL_ROWS = 28672
"""Rows of W, or of W times splits, that occupy the GPU."""
_FEW_WARPS = 528
"""One for each scheduler of the GPU: below that, splits may be as short as a block."""


def config_for(type_: BlockType, rows: int, columns: int, m: int, arch: int) -> Config:
    """How to launch `m` rows of x times a matrix, on compute capability `arch`."""
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
    """How many tiles to cut each of some matrices into that are multiplied together: of at most TILE rows and,
    where sums are not split and a GPU has all at once, so many that each of its multiprocessors has the same
    number: with 4 on some and 5 on others, half of the GPU waits for the rest."""
    least = [-(-count // TILE) for count in rows]
    programs = sum(least)
    rounds = -(-programs // MULTIPROCESSORS)
    if splits > 1 or not 1 < rounds <= TILES_AT_ONCE:
        return least
    return [rounds * MULTIPROCESSORS * few // programs for few in least]


_PUBLISHED = {80: 64, 86: 64, 89: 64, 100: 8, 103: 8, 120: 64, 121: 64}
"""bitsandbytes' limits for its kernel against dequantisation and a matmul, for the smallest
matrices, and at most MAX_ROWS."""
_UNKNOWN = 16


def crossover_rows(type_: BlockType, rows: int, columns: int, arch: int) -> int:
    """Up to how many rows of x the kernels are faster than dequantising and a matmul: 0 for
    types they do not take.

    On sm_90 that was so for each matrix of a 7B model and all rows they take: with 64 rows
    dequantising takes 1.7 times as long for gate and up (Q4_K), 1.3 times for down and 1.7 for the
    output head (Q6_K), and 1.0 times for a matrix of 3584 x 3584.
    """
    if type_.name not in _LAUNCHES:
        return 0
    return MAX_ROWS if arch == 90 else _PUBLISHED.get(arch, _UNKNOWN)
