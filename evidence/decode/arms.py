"""A step of generation with each form of its small kernels, in one process and in turns:

    python evidence/decode/arms.py [--rows 1 8] [--out arms.json]       7B shapes, on a GPU
    TRITON_INTERPRET=1 python evidence/decode/arms.py --shape tiny --rows 1 --context 4 --rounds 1 --tokens 2

    arm        separate or fused (`engine/models/decode_step.py`), one launch after the other or early
    step       median microseconds of a replayed step, and its spread
    bound      share of the time that reading weights and caches once takes, at a copy's rate in this run
    tokens     how many steps gave the tokens of the first arm, from the same prompts; where the first
               that differs, by how much of the logits' RMS its two best are apart in the first arm
    kernels    microseconds a step by kernel, from the profiler; of early arms with the waiting

Arms round differently, so a token may differ where two are nearly as good: a gap near 0 says that.
Without a GPU kernels run in Triton's interpreter: tokens are real, times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.bench.decode import _token_bytes, weight_bytes
from engine.bench.random_weights import RandomWeights
from engine.bench.teacher import SHAPES, config_named
from engine.bench.timing import measure_roofline, time_arms
from engine.models.decode import EARLY_CAPABILITY, DecodeSteps, SmallKernels, coverage
from engine.models.decoder import Decoder
from engine.models.freeze import freeze
from engine.models.load_packed import packed_decoder_of

STEPS = 8
"""In one measurement, and under the profiler."""


def arguments_of(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=tuple(SHAPES), default="qwen2.5-7b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="sequences (1 8)")
    parser.add_argument("--context", type=int, default=512, help="tokens of each (512)")
    parser.add_argument("--rounds", type=int, default=10, help="measurements of each arm (10)")
    parser.add_argument("--tokens", type=int, default=32, help="steps that are compared (32)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also keep everything as JSON")
    return parser.parse_args(given)


def arms_of(device: torch.device) -> dict[str, tuple[SmallKernels, bool]]:
    early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= EARLY_CAPABILITY
    kinds: tuple[SmallKernels, ...] = ("separate", "fused")
    return {
        kind + (", early" if begun else ""): (kind, begun)
        for begun in ((False, True) if early else (False,))
        for kind in kinds
    }


def run_of(steps: DecodeSteps, prompts: list[list[int]], count: int) -> tuple[Tensor, Tensor]:
    """Tokens and, relative to the RMS of all logits, the gap of the two best, each (steps, rows)."""
    for row, prompt in enumerate(prompts):
        steps.start(row, prompt).wait()
    tokens, gaps = [], []
    for _ in range(count):
        tokens.append(steps.step().wait())
        logits = steps.logits().float()
        best = logits.topk(2, dim=1).values
        gaps.append((best[:, 0] - best[:, 1]) / logits.square().mean(1).sqrt())
    return torch.tensor(tokens), torch.stack(gaps).cpu()


def compared(tokens: Tensor, first: Tensor, gaps: Tensor) -> tuple[int, list[float]]:
    """Row by row up to where it differs: steps that are equal, and the gaps where rows part."""
    equal, parted = 0, []
    for row in range(tokens.shape[1]):
        differs = (tokens[:, row] != first[:, row]).nonzero().flatten().tolist()
        equal += differs[0] if differs else len(tokens)
        if differs:
            parted.append(float(gaps[differs[0], row]))
    return equal, parted


def kernels_of(steps: DecodeSteps, device: torch.device) -> dict[str, float]:
    """Microseconds of a step by kernel; empty without a GPU."""
    if device.type != "cuda":
        return {}
    cuda = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[cuda]) as profile:
        for _ in range(STEPS):
            steps.step()
        torch.cuda.synchronize(device)
    found: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type.name == "CUDA":
            # A body's name ends with the digest of its key; what is not ours is counted together.
            ours = re.fullmatch(r"(\w+)_[0-9a-f]{16}", event.name)
            found[ours[1] if ours else "other"] += event.time_range.elapsed_us() / STEPS
    return dict(found.most_common())


@torch.inference_mode()
def measured(
    decoder: Decoder, rows: int, given: argparse.Namespace, copy: float
) -> dict[str, dict[str, Any]]:
    device, dtype = decoder.norm.weight.device, decoder.norm.weight.dtype
    generator = torch.Generator().manual_seed(0)
    shape = (rows, given.context)
    prompts = torch.randint(decoder.config.vocab_size, shape, generator=generator).tolist()
    capacity = given.context + max(given.tokens, STEPS * (given.rounds + 5)) + 1
    graph = device.type == "cuda"
    arms = {
        name: DecodeSteps(decoder, rows, capacity, graph=graph, early=early, small_kernels=kind)
        for name, (kind, early) in arms_of(device).items()
    }
    runs = {name: run_of(steps, prompts, given.tokens) for name, steps in arms.items()}
    first, gaps = next(iter(runs.values()))
    for steps in arms.values():
        for row, prompt in enumerate(prompts):
            steps.start(row, prompt).wait()
    inner = STEPS if graph else 1
    calls = {name: steps.step for name, steps in arms.items()}
    times = time_arms(calls, device, rounds=given.rounds, warm_up=min(3, inner), inner=inner)
    middle = given.context + 3 + inner * given.rounds // 2
    read = weight_bytes(decoder) + rows * middle * _token_bytes(decoder.config, dtype)
    found = {}
    for name, steps in arms.items():
        equal, parted = compared(runs[name][0], first, gaps)
        found[name] = {
            "step_us": times[name].seconds * 1e6,
            "spread": times[name].spread,
            "share_of_bound": read / copy / times[name].seconds,
            "equal_steps": equal,
            "gaps_where_tokens_part": parted,
            "kernels_us": kernels_of(steps, device),
        }
    return found


def lines_of(found: dict[str, dict[str, Any]], rows: int, tokens: int) -> list[str]:
    lines = [f"batch {rows}            step us  spread  bound  tokens  gaps where they part"]
    for name, each in found.items():
        gaps = " ".join(f"{gap:.3f}" for gap in each["gaps_where_tokens_part"]) or "-"
        lines.append(
            f"{name:18} {each['step_us']:10.1f} {each['spread']:7.2%} {each['share_of_bound']:6.1%}"
            f" {each['equal_steps']:>3}/{rows * tokens:<3} {gaps}"
        )
    names = list(dict.fromkeys(kernel for each in found.values() for kernel in each["kernels_us"]))
    if names:
        lines.append("us by kernel      " + "".join(f"{name:>18}" for name in found))
    for kernel in names:
        values = (each["kernels_us"].get(kernel) for each in found.values())
        cells = "".join(f"{'-' if value is None else f'{value:.1f}':>18}" for value in values)
        lines.append(f"  {kernel:16}{cells}")
    return lines


def main(given: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = config_named(given.shape)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    copy = measure_roofline(device).copy_bytes_per_s
    with RandomWeights(config, "q4_k_m", device) as weights:
        decoder = freeze(packed_decoder_of(weights, dtype, device))
    kept: dict[str, Any] = {"shape": given.shape, "copy_bytes_per_s": copy, "rows": {}}
    for rows in given.rows:
        if device.type == "cuda" and (why := coverage(decoder, rows)) is not None:
            sys.exit(f"steps of {rows} sequences are not covered: {why}")
        kept["rows"][rows] = found = measured(decoder, rows, given, copy)
        print("\n".join(lines_of(found, rows, given.tokens)), flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(kept, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main(arguments_of())
