"""One row of x times packed weights: two forms of the product side by side on one GPU, in under two minutes:
`python evidence/kernels/one_row.py [--out FILE] [--seconds 110]`.

    codes    `engine.kernels.small_m_codes`, through the matrix unit; what `fused_linear` launches
    lanes    `engine.kernels.small_m_lanes`, each thread on its own, in every launch of `CANDIDATES`

Every launch first has to give the right numbers on matrices of awkward shapes, in a process of its own, so
that one which faults or hangs costs itself and nothing else. Then, matrix by matrix at the shapes of
Qwen2.5-7B as Q4_K_M, all that passed are captured as CUDA graphs over copies of the weights that have
more bytes than the L2 cache, checked against the form `codes` and against the dequantised product, and
timed in turns. The best goes on: with the launch that rounds the inputs and the one that adds parts,
against `fused_linear` and bf16 `F.linear`; and with 2, 5 and 8 rows.

Whatever fails is named at the end. Where the time is up, what is left is named as not measured.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from triton import knobs

sys.path.insert(0, str(Path(__file__).parents[2]))

from engine.bench.random_weights import random_blocks
from engine.bench.timing import Timing, time_arms
from engine.kernels import small_m
from engine.kernels.dequantize import dequantize_rows
from engine.kernels.key import Variant
from engine.kernels.registry import REGISTRY, current_arch, launch
from engine.kernels.small_m_inputs import Inputs, whole_numbers
from engine.kernels.small_m_lanes import Lanes, product_by_lanes, variant
from engine.quant.blocks import BLOCK_TYPES
from engine.quant.planes import PackedMatrix, dequantize_rows_reference, pack

# Shapes: M rows of x, K columns, N rows of W, S parts of a sum

MATRICES = (
    ("gate_up", "Q4_K", 37888, 3584),
    ("qkv", "Q4_K", 4608, 3584),
    ("o", "Q4_K", 3584, 3584),
    ("down", "Q4_K", 3584, 18944),
    ("down", "Q6_K", 3584, 18944),
    ("lm_head", "Q6_K", 152064, 3584),
)
AWKWARD = ((37, 1280), (130, 2304))
"""Rows and columns: rows that fill no program, and an odd number of blocks."""
CACHE_BYTES = 200 << 20
CANDIDATES = tuple(
    Lanes(turns=turns, blocks=blocks, warps=warps, stages=stages)
    for stages, turns, blocks, warps in (
        *((1, t, b, 4) for t in (2, 4) for b in (1, 2)),
        (1, 4, 4, 4),
        *((2, t, b, 4) for t in (1, 2) for b in (1, 2, 4)),
        *((2, 2, b, 1) for b in (1, 4)),
        *((2, 2, b, 4) for b in (8, 16)),
        *((3, 4, b, 1) for b in (1, 2)),
    )
)
WARPS_WANTED = 132 * 16
"""16 for each multiprocessor: below that, sums are split."""
ROW_COUNTS = [2, 5, 8]
LIMIT = 3e-3
"""Of the relative error against the dequantised product, with inputs rounded to 13 bits."""
SAME = 1e-5
"""Of the relative difference between the forms, which is one of float32 additions in another order."""


def split(lanes: Lanes, rows: int, columns: int) -> list[Lanes]:
    """`lanes` for a matrix: with sums not split, and split so that there are enough warps."""
    programs = -(-rows // lanes.rows)
    steps = columns // 256 // lanes.blocks
    wanted = min(-(-WARPS_WANTED // (programs * lanes.warps)), max(1, steps // 2))
    return [dataclasses.replace(lanes, splits=count) for count in sorted({1, max(1, wanted)})]


def label(lanes: Lanes) -> str:
    return (
        f"turns {lanes.turns} blocks {lanes.blocks} warps {lanes.warps} stages {lanes.stages} "
        f"splits {lanes.splits}"
    )


def weights_of(type_: str, rows: int, columns: int, device: torch.device) -> PackedMatrix:
    generator = torch.Generator(device=device).manual_seed(rows)
    return pack(random_blocks(BLOCK_TYPES[type_], (rows, columns), generator))


def expected_of(x_MK: Tensor, weight: PackedMatrix) -> Tensor:
    """The product with exact weights in float64, some rows of W at a time."""
    out = []
    for first in range(0, weight.rows, 16384):
        count = min(16384, weight.rows - first)
        dense = torch.empty(count, weight.columns, dtype=torch.float32, device=x_MK.device)
        dequantize_rows_reference(weight, dense, first, count)
        out.append(x_MK.double() @ dense.double().t())
    return torch.cat(out, 1)


def error(y: Tensor, expected: Tensor) -> float:
    return float((y.double() - expected.double()).norm() / expected.double().norm())


def lanes_product(
    x: Inputs, weight: PackedMatrix, lanes: Lanes, y: Tensor, early: bool = False
) -> Tensor:
    product_by_lanes(x, weight, y, lanes, early=early)
    return y


def parts(lanes: Lanes, weight: PackedMatrix) -> int:
    return -(-weight.row_blocks // -(-weight.row_blocks // lanes.splits))


def empty_parts(count: int, m: int, weight: PackedMatrix, dtype: torch.dtype) -> Tensor:
    """Not a number anywhere: what is not written shows."""
    return torch.full((count, m, weight.rows), torch.nan, dtype=dtype, device=weight.device)


def prove(numbers: Sequence[int], device: torch.device) -> None:
    """Prints a line of JSON for each candidate: `began`, then whether its numbers are right."""
    compiled(
        variant(BLOCK_TYPES[type_], CANDIDATES[number], 1, torch.float32, None)
        for number in numbers
        for type_ in ("Q4_K", "Q6_K")
    )
    for number in numbers:
        print(json.dumps({"number": number, "began": True}), flush=True)
        found = "right"
        try:
            for type_ in ("Q4_K", "Q6_K"):
                for rows, columns in AWKWARD:
                    weight = weights_of(type_, rows, columns, device)
                    for lanes in split(CANDIDATES[number], rows, columns):
                        x_MK = torch.randn(1, columns, device=device)
                        y = empty_parts(parts(lanes, weight), 1, weight, torch.float32)
                        lanes_product(whole_numbers(x_MK), weight, lanes, y)
                        off = error(y.sum(0), expected_of(x_MK, weight))
                        if not off < 1e-3:
                            found = f"{type_} {rows} x {columns}: relative error {off:.2g}"
            if device.type == "cuda":
                torch.cuda.synchronize()
        except Exception as problem:  # noqa: BLE001 - whatever a launch raises
            print(
                json.dumps(
                    {"number": number, "found": f"{type(problem).__name__}: {problem}"[:200]}
                )
            )
            return  # after a fault, nothing of this process can be believed
        print(json.dumps({"number": number, "found": found}), flush=True)


def proved(seconds: float) -> dict[int, str]:
    """What became of each candidate in a process that may fault or hang; the next begins after it."""
    found: dict[int, str] = {}
    end = time.monotonic() + seconds
    while left := [number for number in range(len(CANDIDATES)) if number not in found]:
        command = [sys.executable, __file__, "--prove", ",".join(map(str, left))]
        began = None
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=max(1.0, end - time.monotonic()),
            )
            said, why = (
                done.stdout,
                f"the process ended with {done.returncode}: {done.stderr[-200:]}",
            )
        except subprocess.TimeoutExpired as late:
            output = late.stdout or b""
            said = output.decode() if isinstance(output, bytes) else output
            why = "did not end in time"
        for line in said.splitlines():
            told = json.loads(line)
            if "found" in told:
                found[told["number"]] = told["found"]
            else:
                began = told["number"]
        if began is not None and began not in found:
            found[began] = why
        if began is None or time.monotonic() > end:
            found |= {number: "not reached" for number in left if number not in found}
    return found


def captured(calls: Sequence[Callable[[], object]], device: torch.device) -> Callable[[], object]:
    """One graph of all calls; on a CPU the calls."""
    if device.type != "cuda":
        return lambda: [call() for call in calls]
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]

    def replay() -> object:
        graph.replay()
        return calls, results

    return replay


class Matrix:
    """One matrix with its copies, and what is measured of it."""

    def __init__(
        self, name: str, type_: str, rows: int, columns: int, device: torch.device
    ) -> None:
        self.label = f"{name} {rows} x {columns} {type_}"
        self.device = device
        weight = weights_of(type_, rows, columns, device)
        copies = CACHE_BYTES // weight.nbytes if device.type == "cuda" else 0
        self.weights = [weight] + [
            PackedMatrix(weight.type, rows, columns, weight.data.clone()) for _ in range(copies)
        ]
        self.failed: dict[str, str] = {}

    @property
    def weight(self) -> PackedMatrix:
        return self.weights[0]

    def arm(
        self, name: str, call: Callable[[PackedMatrix], Tensor], wanted: Tensor, limit: float
    ) -> Any:
        """Calls over all copies, captured; None, and why, where they fail or are wrong."""
        try:
            y = call(self.weight)
            off = error(y.sum(0) if y.ndim == 3 else y, wanted)
            if not off < limit:
                raise ArithmeticError(f"relative error {off:.2g}, allowed {limit:g}")
            return captured([partial(call, weight) for weight in self.weights], self.device)
        except Exception as problem:  # noqa: BLE001 - whatever a launch raises
            self.failed[name] = f"{type(problem).__name__}: {str(problem)[:200]}"
            return None

    def times(self, arms: dict[str, Any], rounds: int) -> dict[str, Timing]:
        there = {name: arm for name, arm in arms.items() if arm is not None}
        found = time_arms(there, self.device, rounds=rounds)
        return {
            name: Timing(seconds=one.seconds / self.count(name), spread=one.spread)
            for name, one in found.items()
        }

    def count(self, name: str) -> int:
        return self.dense_count if name == "bf16" else len(self.weights)

    dense_count = 1


def measure(matrix: Matrix, candidates: Sequence[Lanes]) -> dict[str, Any]:
    """All products of one row alone; the best of them whole, and with more rows."""
    device, weight = matrix.device, matrix.weight
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x_MK = torch.randn(8, weight.columns, device=device).to(dtype)
    expected = expected_of(x_MK, weight)
    arch = 0 if knobs.runtime.interpret else current_arch(x_MK.get_device())
    config = small_m.config_for(weight.type, weight.rows, weight.columns, 1, arch)
    one, x = x_MK[:1].contiguous(), whole_numbers(x_MK[:1].contiguous())
    blocks = weight.row_blocks
    count = -(-blocks // -(-blocks // config.splits))
    y_codes = empty_parts(count, 1, weight, torch.float32)

    def codes(packed: PackedMatrix) -> Tensor:
        small_m.products(x, [packed], y_codes, config)
        return y_codes

    kept = {"codes": matrix.arm("codes", codes, expected[:1], LIMIT)}
    exact = codes(weight).sum(0).clone()
    chosen: dict[str, Lanes] = {}
    for each in candidates:
        for lanes in split(each, weight.rows, weight.columns):
            y = empty_parts(parts(lanes, weight), 1, weight, torch.float32)
            call = partial(lanes_at, x, lanes, y)
            kept[label(lanes)] = matrix.arm(label(lanes), call, exact, SAME)
            chosen[label(lanes)] = lanes
    alone = matrix.times(kept, rounds=9)
    order = sorted((name for name in alone if name in chosen), key=lambda name: alone[name].seconds)
    found: dict[str, Any] = {"matrix": matrix.label, "bytes": weight.nbytes}
    found["alone_us"] = {name: timing.seconds * 1e6 for name, timing in alone.items()}
    del kept
    dense = torch.empty(weight.rows, weight.columns, dtype=dtype, device=device)
    dequantize_rows(weight, dense, 0, weight.rows)
    denses = [dense] + [dense.clone() for _ in range(CACHE_BYTES // dense.nbytes if arch else 0)]
    matrix.dense_count = len(denses)
    whole: dict[str, Any] = {
        "bf16": captured([partial(F.linear, one, each) for each in denses], device),
        "codes": matrix.arm(
            "codes, whole",
            partial(codes_whole, one),
            expected[:1],
            LIMIT,
        ),
    }
    best = order[:2]
    compiled(
        variant(weight.type, chosen[name], m, out, None, early=early)
        for name in best
        for out in (dtype if parts(chosen[name], weight) == 1 else torch.float32,)
        for m, early in (
            (1, False),
            *(((1, True),) if arch >= 90 else ()),
            *((m, False) for m in ROW_COUNTS),
        )
    )
    for name in best:
        for early in (False, True) if arch >= 90 else (False,):
            key = f"{name}{' early' if early else ''}"
            call = partial(lanes_whole, one, chosen[name], early)
            whole[key] = matrix.arm(f"{key}, whole", call, expected[:1], LIMIT)
    found["whole_us"] = {k: v.seconds * 1e6 for k, v in matrix.times(whole, rounds=15).items()}
    del whole
    found["rows_us"] = {}
    for m in ROW_COUNTS:
        some = x_MK[:m].contiguous()
        whole = {
            "bf16": captured([partial(F.linear, some, each) for each in denses], device),
            "codes": matrix.arm(
                f"codes, {m} rows",
                partial(codes_whole, some),
                expected[:m],
                LIMIT,
            ),
        }
        for name in best:
            call = partial(lanes_whole, some, chosen[name], False)
            whole[name] = matrix.arm(f"{name}, {m} rows", call, expected[:m], LIMIT)
        times = matrix.times(whole, rounds=7)
        found["rows_us"][m] = {k: v.seconds * 1e6 for k, v in times.items()}
    found["failed"] = matrix.failed
    return found


def lanes_at(x: Inputs, lanes: Lanes, y: Tensor, packed: PackedMatrix) -> Tensor:
    return lanes_product(x, packed, lanes, y)


def codes_whole(x_MK: Tensor, packed: PackedMatrix) -> Tensor:
    return small_m.fused_linear(x_MK, packed, None)


def lanes_whole(x_MK: Tensor, lanes: Lanes, early: bool, packed: PackedMatrix) -> Tensor:
    """What `fused_linear` does, with the other product."""
    m, count = len(x_MK), parts(lanes, packed)
    out_MN = x_MK.new_empty(m, packed.rows)
    y = out_MN[None]
    if count > 1:
        y = torch.empty(count, m, packed.rows, dtype=torch.float32, device=x_MK.device)
    lanes_product(whole_numbers(x_MK), packed, lanes, y, early)
    if count > 1:
        adding = small_m._adding(x_MK.dtype, None)
        grid = (-(-packed.rows // small_m._ADD_SIZE), m)
        launch(adding, grid, y, x_MK, out_MN, count, packed.rows, m)
    return out_MN


def compiled(variants: Iterable[Variant]) -> None:
    """Compiles many at once. One that does not compile is met again, and named, where it is launched."""

    def quietly(one: Variant) -> None:
        try:
            REGISTRY.warm(one)
        except Exception as problem:  # noqa: BLE001 - whatever the compiler raises
            print(f"does not compile: {one}: {problem}"[:300], file=sys.stderr, flush=True)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(quietly, dict.fromkeys(variants)))


def lines(found: dict[str, Any]) -> Iterator[str]:
    """A matrix as a short table."""
    alone, whole = found["alone_us"], found["whole_us"]
    best = sorted((name for name in alone if name != "codes"), key=alone.__getitem__)
    yield f"{found['matrix']}   bf16 F.linear {whole['bf16']:.1f} us"
    yield "  product alone, us       GB/s   x bf16"
    for name in ["codes", *best[:5], *best[-1:]]:
        if name in alone:
            rate = found["bytes"] / alone[name] / 1e3
            yield f"  {alone[name]:8.2f}  {rate:12.0f} {whole['bf16'] / alone[name]:8.2f}   {name}"
    yield "  with rounding and adding"
    for name, us in whole.items():
        if name != "bf16":
            yield f"  {us:8.2f}  {found['bytes'] / us / 1e3:12.0f} {whole['bf16'] / us:8.2f}   {name}"
    for m, times in found["rows_us"].items():
        yield f"  {m} rows: " + ", ".join(f"{name} {us:.1f}" for name, us in times.items())
    for name, why in found["failed"].items():
        yield f"  FAILED {name}: {why}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a file for all numbers, as JSON")
    parser.add_argument("--seconds", type=float, default=110.0, help="begin no matrix after these")
    parser.add_argument("--prove", help=argparse.SUPPRESS)
    parser.add_argument("--rehearse", action="store_true", help="tiny, on a CPU, interpreted")
    arguments = parser.parse_args()
    begun = time.monotonic()
    device = torch.device("cpu" if knobs.runtime.interpret else "cuda")
    if arguments.prove:
        prove([int(number) for number in arguments.prove.split(",")], device)
        return 0
    matrices: Sequence[tuple[str, str, int, int]] = MATRICES
    candidates, failed = list(CANDIDATES), {}
    if arguments.rehearse:
        matrices = (("tiny", "Q4_K", 4, 256), ("tiny", "Q6_K", 4, 256))
        ROW_COUNTS[:] = [2]
        candidates = [CANDIDATES[2], CANDIDATES[8]]
    else:
        told = proved(seconds=arguments.seconds * 0.5)
        kept = [n for n in sorted(told) if told[n] in ("right", "not reached")]
        failed = {label(CANDIDATES[n]): why for n, why in told.items() if n not in kept}
        candidates = [CANDIDATES[n] for n in kept]
        right = sum(why == "right" for why in told.values())
        print(f"{right} of {len(CANDIDATES)} launches are right, {len(kept) - right} not reached")
        compiled(
            variant(BLOCK_TYPES[type_], lanes, 1, torch.float32, None)
            for type_ in ("Q4_K", "Q6_K")
            for lanes in candidates
        )
    print(f"compiled after {time.monotonic() - begun:.0f} s", flush=True)
    results = []
    for name, type_, rows, columns in matrices:
        if time.monotonic() - begun > arguments.seconds:
            print(f"{name} {type_}: not measured, the time is up")
            continue
        try:
            results.append(measure(Matrix(name, type_, rows, columns, device), candidates))
            print("\n".join(lines(results[-1])), flush=True)
        except Exception as problem:  # noqa: BLE001 - the other matrices are measured
            failed[f"{name} {type_}"] = f"{type(problem).__name__}: {problem}"
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if arguments.out:
            document: dict[str, Any] = {
                "command": "python evidence/kernels/one_row.py",
                "torch": torch.__version__,
            }
            if device.type == "cuda":
                document["machine"] = torch.cuda.get_device_name()
            document |= {"results": results, "failed": failed}
            arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    for name, why in failed.items():
        print(f"FAILED {name}: {why}")
    print(f"{time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
