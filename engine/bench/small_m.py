"""Few rows of activations times packed weights: what generating text and short batches wait for.

    arm          what it does
    bf16         F.linear with bf16 weights
    dequantise   into a scratch, then F.linear
    fused        engine.kernels.small_m

One matrix at a time. Each arm is a CUDA graph of calls that go round copies of the weights, which
together are larger than the L2 cache: with one copy it would be the cache that is measured, and
without a graph the host. `ratio` is the speed relative to `bf16`, `bytes` are those of the weights as
the arm has them, and of inputs and outputs.
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
"""Of Qwen2.5-7B as Q4_K_M: name, type, rows and columns."""
ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64)
CACHE_BYTES = 200 << 20
"""Several times the L2 cache of any GPU."""


def small_m_rows(
    device: torch.device,
    *,
    matrices: Sequence[tuple[str, str, int, int]] = MATRICES,
    row_counts: Sequence[int] = ROW_COUNTS,
    rounds: int = 15,
) -> list[BenchRow]:
    """Every arm for each matrix and number of rows, arms in turns. Needs a CUDA device."""
    if device.type != "cuda":
        raise BadInput.expected("benchmark of few rows", "device", "a CUDA GPU", device.type)
    out = []
    for name, type_, rows, columns in matrices:
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
    packs = [packed, *(_copy(packed) for _ in range(CACHE_BYTES // packed.nbytes))]
    denses = [dense_NK, *(dense_NK.clone() for _ in range(CACHE_BYTES // dense_NK.nbytes))]
    calls: dict[str, list[Callable[[], Tensor]]] = {
        "bf16": [partial(F.linear, x_MK, dense) for dense in denses],
        "dequantise": [
            partial(packed_linear, x_MK, one, None, scratch, kernel="dequantize") for one in packs
        ],
        "fused": [partial(fused_linear, x_MK, one, None) for one in packs],
    }
    replays = {arm: captured(partial(_call_all, each)) for arm, each in calls.items()}
    times = time_arms(replays, x_MK.device, rounds=rounds)
    per_call = {arm: times[arm].seconds / len(each) for arm, each in calls.items()}
    rest = (x_MK.numel() + m * packed.rows) * x_MK.element_size()
    return [
        BenchRow(
            arm=arm,
            shape=label,
            rows=m,
            seconds=seconds,
            spread=times[arm].spread,
            flop=2.0 * m * packed.rows * columns,
            bytes=float(rest + (dense_NK.nbytes if arm == "bf16" else packed.nbytes)),
            ratio=None if arm == "bf16" else per_call["bf16"] / seconds,
        )
        for arm, seconds in per_call.items()
    ]


def _copy(packed: PackedMatrix) -> PackedMatrix:
    return PackedMatrix(packed.type, packed.rows, packed.columns, packed.data.clone())


def _call_all(calls: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
    return [call() for call in calls]
