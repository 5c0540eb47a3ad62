"""Weights per second of quantising and dequantising: `python evidence/quantising/speed.py
[cpu|cuda]`.

Times whole calls on a matrix that is there already, median of seven after two warm-ups; on a GPU
between synchronisations.
"""

import json
import statistics
import sys
import time

import torch

from engine.quant.blocks import BLOCK_TYPES
from engine.quant.quantize import quantize

device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
rows = 18944 if device == "cuda" else 512
values = torch.randn(rows, 3584, device=device, generator=torch.Generator(device).manual_seed(0))


def timed(call) -> float:
    seconds = []
    for repeat in range(9):
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        if repeat >= 2:
            seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


table = {}
for name in ("Q4_K", "Q6_K", "Q8_0", "Q5_0"):
    packed = quantize(values, BLOCK_TYPES[name])
    table[name] = {
        "quantise_weights_per_s": round(
            values.numel() / timed(lambda n=name: quantize(values, BLOCK_TYPES[n]))
        ),
        "dequantise_weights_per_s": round(
            values.numel() / timed(lambda p=packed: p.dequantize(torch.bfloat16))
        ),
    }
where = (
    torch.cuda.get_device_name() if device == "cuda" else f"cpu, {torch.get_num_threads()} threads"
)
print(
    json.dumps(
        {"device": where, "torch": str(torch.__version__), "matrix": [rows, 3584], "types": table},
        indent=1,
    )
)
