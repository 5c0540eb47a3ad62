"""Few rows of activations times packed weights, which dominates decoding and short batches.

    arm          what it does
    bf16         F.linear with bf16 weights
    dequantise   into a scratch, then F.linear
    fused        engine.kernels.small_m

One matrix is measured at a time. Each arm is a CUDA graph of calls that cycle through copies of the weights,
which together are larger than the L2 cache: with one copy the cache would be measured, and without a graph
the host. `ratio` is the speed relative to `bf16`; `bytes` are those of the weights as the arm stores them,
and of inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.bench.random_weights import random_blocks
from engine.bench.rows import BenchRow
from engine.bench.timing import captured, time_arms
from engine.errors import BadInput
from engine.kernels.linear import Scratch, packed_linear
from engine.kernels.small_m import fused_linear
from engine.quant.blocks import BLOCK_TYPES
from engine.quant.planes import PackedMatrix, pack

# Shapes: M rows of activations, K columns, N rows of W

MATRICES = (
    ("q, o", "Q4_K", 3584, 3584),
    ("k", "Q4_K", 512, 3584),
    ("v", "Q6_K", 512, 3584),
    ("gate_up", "Q4_K", 37888, 3584),
    ("down", "Q4_K", 3584, 18944),
    ("down", "Q6_K", 3584, 18944),
    ("lm_head", "Q6_K", 152064, 3584),
)
"""The matrices of Qwen2.5-7B in Q4_K_M: name, type, rows and columns."""
ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64)
CACHE_BYTES = 200 << 20
"""Several times the size of any GPU's L2 cache."""


def small_m_rows(
    device: torch.device,
    *,
    row_counts: Sequence[int] = ROW_COUNTS,
    rounds: int = 15,
) -> list[BenchRow]:
    """Measure every arm for each matrix and number of rows, arms in turns. Needs a CUDA device."""
    if device.type != "cuda":
        raise BadInput.expected("benchmark of few rows", "device", "a CUDA GPU", device.type)
    out = []
    for name, type_, rows, columns in MATRICES:
        generator = torch.Generator(device=device).manual_seed(0)
        weight = random_blocks(BLOCK_TYPES[type_], (rows, columns), generator)
        dense_NK = weight.dequantize(torch.bfloat16)
        packed = pack(weight)
        for m in row_counts:
            x_MK = torch.randn(m, columns, generator=generator, device=device).bfloat16()
            label = f"{name} {rows} x {columns} {type_}"
            out += _rows(label, x_MK, packed, dense_NK, rounds)
    return out


def _rows(
    label: str, x_MK: Tensor, packed: PackedMatrix, dense_NK: Tensor, rounds: int
) -> list[BenchRow]:
    m, columns = x_MK.shape
    scratch = Scratch(x_MK.device, x_MK.dtype, limit_bytes=dense_NK.nbytes)
    scratch.reserve(packed.rows, columns)
    copies = (packed.data.clone() for _ in range(CACHE_BYTES // packed.nbytes))
    packs = [packed, *(PackedMatrix(packed.type, *packed.shape, data) for data in copies)]
    denses = [dense_NK, *(dense_NK.clone() for _ in range(CACHE_BYTES // dense_NK.nbytes))]
    calls: dict[str, list[Callable[[], Tensor]]] = {
        "bf16": [partial(F.linear, x_MK, dense) for dense in denses],
        "dequantise": [
            partial(packed_linear, x_MK, one, None, scratch, kernel="dequantize") for one in packs
        ],
        "fused": [partial(fused_linear, x_MK, one, None) for one in packs],
    }

    def all_of(arm: str) -> list[Tensor]:
        return [call() for call in calls[arm]]

    replays = {arm: captured(partial(all_of, arm)) for arm in calls}
    times = time_arms(replays, x_MK.device, rounds=rounds)
    each = {arm: times[arm].each(len(calls[arm])) for arm in calls}
    rest = (x_MK.numel() + m * packed.rows) * x_MK.element_size()
    return [
        BenchRow.of(
            arm,
            timing,
            shape=label,
            rows=m,
            flop=2.0 * m * packed.rows * columns,
            bytes=rest + (dense_NK.nbytes if arm == "bf16" else packed.nbytes),
            base=None if arm == "bf16" else each["bf16"],
        )
        for arm, timing in each.items()
    ]
