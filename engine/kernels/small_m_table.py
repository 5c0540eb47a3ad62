"""How the kernels for few rows are launched, and up to how many rows they are the faster way: data.

Measured on one H200 (sm_90), CUDA graphs replayed over copies of the weights that have more bytes
than the L2 cache holds, bf16 inputs: `small_m_rows` of `engine/bench/small_m.py` times what is chosen
here. Other GPUs get the same launches, which fit them, and a limit that others have published for
kernels of this kind (bitsandbytes 0.50); neither was measured here.

No torch and no triton, so that choices can be explained anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.quant.blocks import BlockType

MAX_ROWS = 64
"""Of x."""
CODES_ROWS = 8
"""Of x, up to which it becomes whole numbers."""


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
# 132 multiprocessors without being split, and for others. From 1 to 8 rows of x, the kernels of codes,
# rows of W are the same: the order of a sum depends on them.
_Shape = tuple[int, int, int]
_LAUNCHES: dict[str, dict[int, tuple[_Shape, _Shape]]] = {
    "Q4_K": {
        1: ((64, 4, 3), (32, 2, 2)),
        2: ((64, 4, 3), (32, 2, 2)),
        4: ((64, 4, 3), (32, 2, 2)),
        8: ((64, 4, 3), (32, 2, 2)),
        16: ((32, 2, 3), (32, 2, 3)),
        32: ((32, 2, 3), (32, 2, 2)),
        64: ((128, 4, 2), (64, 4, 2)),
    },
    "Q5_K": {
        1: ((64, 4, 2), (32, 2, 2)),
        2: ((64, 4, 2), (32, 2, 2)),
        4: ((64, 4, 2), (32, 2, 2)),
        8: ((64, 4, 2), (32, 2, 2)),
        16: ((32, 2, 2), (32, 2, 2)),
        32: ((32, 2, 3), (32, 2, 2)),
        64: ((64, 4, 2), (64, 4, 2)),
    },
    "Q6_K": {
        1: ((64, 4, 2), (32, 2, 2)),
        2: ((64, 4, 2), (32, 2, 2)),
        4: ((64, 4, 2), (32, 2, 2)),
        8: ((64, 4, 2), (32, 2, 2)),
        16: ((32, 2, 2), (32, 2, 2)),
        32: ((64, 2, 2), (32, 2, 2)),
        64: ((128, 4, 2), (64, 4, 2)),
    },
}
_FULL_ROWS = 28672
"""Rows of W, or of W times splits, that occupy the GPU."""
_FEW_WARPS = 528
"""One for each scheduler of the GPU: below that, splits may be as short as a block."""


def config_for(type_: BlockType, rows: int, columns: int, m: int, arch: int) -> Config:
    """How to launch `m` rows of x times a matrix, on compute capability `arch`."""
    family: Literal["codes", "tiles"] = "codes" if m <= CODES_ROWS else "tiles"
    padded = 1 << (m - 1).bit_length()
    blocks = columns // type_.block_size
    shape = _LAUNCHES[type_.name][padded][0 if rows >= _FULL_ROWS else 1]
    programs = -(-rows // shape[0])
    splits = max(1, _FULL_ROWS // shape[0] // programs)
    if splits > blocks // 2:
        splits = max(1, blocks // 2)
        if programs * shape[1] * splits < _FEW_WARPS:
            splits = blocks
    stages = max(2, min(shape[2], -(-blocks // splits)))
    return Config(family, padded, shape[0], shape[1], stages, splits)


_PUBLISHED = {80: 64, 86: 64, 89: 64, 100: 8, 103: 8, 120: 64, 121: 64}
"""bitsandbytes' limits for its kernel against dequantisation and a product, for the smallest
matrices, and at most MAX_ROWS."""
_UNKNOWN = 16


def crossover_rows(type_: BlockType, rows: int, columns: int, arch: int) -> int:
    """Up to how many rows of x the kernels are faster than dequantising and a matrix product: 0 for
    types they do not take.

    On sm_90 that was so for each matrix of a 7B model and all rows they take: with 64 rows
    dequantising takes 1.7 times as long for gate and up (Q4_K), 1.3 times for down and 1.7 for the
    output head (Q6_K), and 1.0 times for a matrix of 3584 x 3584.
    """
    if type_.name not in _LAUNCHES:
        return 0
    return MAX_ROWS if arch == 90 else _PUBLISHED.get(arch, _UNKNOWN)
