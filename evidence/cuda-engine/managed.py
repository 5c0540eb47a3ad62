"""Measure whether weights in managed memory are as fast as in torch's own: pairs A B B A in one process.

    python3 evidence/cuda-engine/managed.py > evidence/cuda-engine/managed.json

Each pair has the same bytes in both memories, read once by every kernel before it is timed. An
interval is that of the median of the ratios managed / native, by order statistics (95 %).
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.dequantize import dequantize_rows
from engine.quant.blocks import BLOCK_TYPES
from engine.quant.planes import PackedMatrix, pack
from engine.runtime.managed import managed_pool

sys.path.insert(0, str(Path(__file__).parents[2]))

from evidence.bench.random_weights import random_blocks

ROWS, COLUMNS, M = 18944, 3584, 8192
LIMIT_BYTES = 2 << 30
PAIRS = 100


def seconds(work: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def compared(native: Callable[[], object], managed: Callable[[], object]) -> dict[str, object]:
    for work in (native, managed) * 5:
        work()
    ratios, times, again = [], [], []
    for _ in range(PAIRS):
        first, second, third, fourth = (seconds(w) for w in (native, managed, managed, native))
        ratios.append((second + third) / (first + fourth))
        times.append((first + fourth) / 2)
        again.append(first / fourth)
    ratios.sort()
    # The k-th of n from each end, with a chance of 2.5 % that the median lies beyond it.
    k = math.floor(PAIRS / 2 - 1.96 * math.sqrt(PAIRS) / 2)
    return {
        "native_seconds": statistics.median(times),
        "managed_over_native": statistics.median(ratios),
        "interval_95": [ratios[k - 1], ratios[PAIRS - k]],
        "native_over_native": statistics.median(again),
        "pairs": PAIRS,
    }


def main() -> None:
    device = torch.device("cuda", 0)
    generator = torch.Generator(device=device).manual_seed(0)
    x_MK = torch.randn(M, COLUMNS, generator=generator, device=device).bfloat16()
    packed = pack(random_blocks(BLOCK_TYPES["Q4_K"], (ROWS, COLUMNS), generator))
    dense_NK = torch.randn(ROWS, COLUMNS, generator=generator, device=device).bfloat16()
    scratch_NK = torch.empty_like(dense_NK)
    out_MN = torch.empty(M, ROWS, dtype=torch.bfloat16, device=device)
    pool = managed_pool(device, limit_bytes=LIMIT_BYTES)
    with pool.use():
        managed_NK, data = torch.empty_like(dense_NK), torch.empty_like(packed.data)
    managed_NK.copy_(dense_NK)
    data.copy_(packed.data)
    managed = PackedMatrix(packed.type, ROWS, COLUMNS, data)

    def product(weight_NK: Tensor) -> Callable[[], object]:
        return lambda: torch.mm(x_MK, weight_NK.t(), out=out_MN)

    def from_blocks(weight: PackedMatrix) -> Callable[[], object]:
        def work() -> None:
            dequantize_rows(weight, scratch_NK, 0, ROWS)
            torch.mm(x_MK, scratch_NK.t(), out=out_MN)

        return work

    def dequantised(weight: PackedMatrix) -> Callable[[], object]:
        return lambda: dequantize_rows(weight, scratch_NK, 0, ROWS)

    equal = torch.equal(F.linear(x_MK, dense_NK), F.linear(x_MK, managed_NK))
    found = {
        "bf16 product": compared(product(dense_NK), product(managed_NK)),
        "dequantise and product": compared(from_blocks(packed), from_blocks(managed)),
        "dequantise alone": compared(dequantised(packed), dequantised(managed)),
    }
    print(
        json.dumps(
            {
                "machine": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "shape": f"{M} rows times {ROWS} x {COLUMNS}",
                "managed_bytes": pool.bytes(),
                "bit_equal": equal,
                **found,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
