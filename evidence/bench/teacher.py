"""A whole teacher: hidden states of a batch of packed documents, in every form that a run may use:
../distill/teacher.json and ../cuda-engine/teacher.json.

    python -m evidence.bench.teacher [--shape qwen2.5-7b] [--rows 8] [--seq-len 1024] [--rounds 15] [--out FILE]

    arm             weights             between the matmuls
    torch           dense bf16          torch's operations
    dequantized     the same            the engine's kernels, q|k|v and gate|up joined
    quantized       quantised blocks    the engine's kernels
    fp8             fp8                 the engine's kernels

All are the same decoder of the same blocks on the same tokens. So the report also shows how far each arm's
hidden states are from those of the arm `torch`. With random weights that distance says little about a
trained teacher; the error of fp8 is measured where it is used (`engine.teachers.fp8`).

The column "of bound" compares every arm with the least time of the dense arm, its matmuls at the bf16 rate.
The rate of fp8 alone is given below the table. Memory is what the allocator holds after loading and at the peak of a
forward pass. A CPU has none of the kernels, and fp8 is left out there because its matmuls are a slow oracle.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.models.attention import record_documents
from engine.models.decoder import Decoder
from engine.models.fp8 import DTYPE, matmul
from engine.models.frozen import freeze, join
from engine.models.fused import use_kernels
from engine.models.load import load_decoder, load_packed_decoder
from engine.models.load_fp8 import load_fp8_decoder
from engine.models.packed_size import packed_size
from engine.runtime.rates import measure_rates
from evidence.bench.random_weights import RandomWeights
from evidence.bench.rows import BenchRow, Measured, table
from evidence.bench.shapes import SHAPES, config_named
from evidence.bench.timing import time_arms

DOCUMENTS = 3
"""Documents in each row."""
BASE = "torch"
"""The arm that others are compared with."""


def bench_teacher(
    weights: RandomWeights,
    device: torch.device,
    *,
    rows: int,
    seq_len: int,
    rounds: int = 5,
) -> Measured:
    """Measure every arm on `rows` x `seq_len` random tokens; `ratio` is the speed relative to `torch`. Also returned
    are

        packed_bytes      the file's block-quantised tensors, with the remaining floats as bf16
        resident_bytes    what the allocator holds after loading; None on a CPU
        peak_bytes        at the peak of a forward pass, including what other arms hold; None on a CPU
        relative_rms      distance of each arm's hidden states from those of `torch`, relative to their norm
        first_s           seconds of the first forward pass, including compilation
        fp8_flop_per_s    the rate of one large fp8 matmul in the same run
    """
    cuda, config = device.type == "cuda", weights.config
    dtype = torch.bfloat16 if cuda else torch.float32
    packed_bytes = packed_size(config, weights).weight_bytes(dtype.itemsize)
    fp8_flop_per_s = _fp8_rate(device) if cuda else None
    resident: dict[str, int | None] = {}
    peaks: dict[str, int | None] = {}
    relative_rms: dict[str, float] = {}
    first_s: dict[str, float] = {}
    tokens_BT = torch.randint(0, config.vocab_size, (rows, seq_len), device=device)
    place_T = torch.arange(seq_len, device=device)
    documents_BT = (place_T * DOCUMENTS // seq_len).expand(rows, -1).contiguous()
    makes: dict[str, Callable[..., Decoder]] = {
        BASE: load_decoder,
        "dequantized": load_decoder,
        "quantized": load_packed_decoder,
    }
    if cuda:
        makes = {**makes, "fp8": load_fp8_decoder}
        record_documents(documents_BT, documents_BT.cpu().numpy())
    arms: dict[str, Callable[[], Tensor]] = {}
    linears = 0
    for name, make in makes.items():
        before = _held(device)
        weights.generator.manual_seed(0)
        decoder = freeze(make(weights, dtype, device))
        after = _held(device)
        resident[name] = None if before is None or after is None else after - before
        decoder.packed = cuda
        if name == BASE:
            linears = sum(b.numel() for b in decoder.layers.buffers() if b.ndim == 2)
        elif cuda:
            join(decoder)
            use_kernels(decoder, frozen=True)
        arms[name] = partial(_forward, decoder, tokens_BT, documents_BT)
    wanted_BTE = arms[BASE]().float()
    for name, arm in arms.items():
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        begun = time.perf_counter()
        gap_BTE = arm().float() - wanted_BTE
        relative_rms[name] = float(gap_BTE.norm() / wanted_BTE.norm())
        first_s[name] = time.perf_counter() - begun
        peaks[name] = torch.cuda.max_memory_allocated(device) if cuda else None
    del wanted_BTE, gap_BTE
    times = time_arms(arms, device, rounds=rounds)
    measured = []
    for name in sorted(times):
        sizes = {"quantized": packed_bytes, "fp8": linears}
        measured.append(
            BenchRow.of(
                name,
                times[name],
                shape=f"{linears / 1e9:.2f}G linear weights",
                rows=rows * seq_len,
                flop=2.0 * linears * rows * seq_len,
                bytes=sizes.get(name, linears * dtype.itemsize),
                base=times[BASE],
            )
        )
    return measured, {
        "packed_bytes": packed_bytes,
        "resident_bytes": resident,
        "peak_bytes": peaks,
        "relative_rms": relative_rms,
        "first_s": first_s,
        "fp8_flop_per_s": fp8_flop_per_s,
    }


@torch.inference_mode()
def _forward(decoder: Decoder, tokens_BT: Tensor, documents_BT: Tensor) -> Tensor:
    return decoder.hidden(tokens_BT, documents_BT)


def _fp8_rate(device: torch.device) -> float | None:
    """Measure the FLOP/s of a matmul of two random 8192 x 8192 matrices; None when the GPU has no fp8."""
    if torch.cuda.get_device_capability(device) < (8, 9):
        return None
    side = 8192
    left, right = (torch.randn(side, side, device=device).to(DTYPE) for _ in range(2))
    scale_M1 = torch.ones(side, 1, device=device)
    timing = time_arms(
        {"fp8": lambda: matmul(left, scale_M1, right, scale_M1[:, 0], None, torch.bfloat16)},
        device,
        rounds=10,
    )["fp8"]
    return 2 * side**3 / timing.seconds


def _held(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def main() -> None:
    parser = argparse.ArgumentParser(description="A teacher in every form, beside the roofline.")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15, help="repetitions of each arm")
    parser.add_argument("--out", type=Path, help="also keep the result as JSON here")
    given = parser.parse_args()
    device = torch.device(given.device)
    roof = measure_rates(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    weights = RandomWeights(config_named(given.shape), "q4_k_m", device)
    rows, extra = bench_teacher(
        weights, device, rows=given.rows, seq_len=given.seq_len, rounds=given.rounds
    )
    print("\n".join([*table(rows, roof), *(f"{name}: {value}" for name, value in extra.items())]))
    if given.out is not None:
        result = {
            "bench": "teacher",
            "shape": given.shape,
            "torch": torch.__version__,
            "roofline": {"copy_bytes_per_s": roof.bytes, "matmul_flop_per_s": roof.flops},
            "rows": [row.as_dict(roof) for row in rows],
            **extra,
        }
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
