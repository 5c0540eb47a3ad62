"""Linear layers with packed weights, against bf16 weights and the library's matmul.

The arms run a stack of decoder layers in which every matmul has its own weight and bias:

    bf16           F.linear, as a decoder calls it
    bf16 joined    the same with q, k and v as one matmul, and gate and up as one
    packed         packed_linear
    packed joined  packed_linear_many, joined as above
    dequantise     the dequantising part of `packed` alone

Weights are random numbers, quantised as in a Q4_K_M file; the bf16 arms use their dequantised values. A stack
is larger than a GPU's caches.

`ratio` is the speed relative to the faster bf16 arm. With few rows the host is slower than the GPU, so a
stack is replayed as a CUDA graph.

    python -m evidence.kernels.linear [--shape qwen2.5-7b] [--rows N ...] [--out FILE]       on a CUDA GPU
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.dequantize import dequantize_rows
from engine.kernels.linear import Scratch, packed_linear, packed_linear_many
from engine.quant.blocks import BLOCK_TYPES
from engine.quant.planes import PackedMatrix, pack
from engine.runtime.rates import measure_rates
from evidence.bench.random_weights import random_blocks
from evidence.bench.rows import BenchRow, Timing, table
from evidence.bench.shapes import config_named
from evidence.bench.timing import time_arms

# Shapes: M rows of activations, K columns, N rows of W

GRAPH_ROWS = 512
"""With fewer rows, launches take longer than their work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackShape:
    """The linear layers of a decoder; the defaults are those of Qwen2.5-7B."""

    name: str = "Qwen2.5-7B"
    width: int = 3584
    key_width: int = 512
    inner: int = 18944
    layers: int = 4
    """Layers with weights of their own; every second one has v and down in Q6_K, everything else is Q4_K."""
    repeats: int = 7
    """Number of times that a pass goes through these layers: 28 layers in all."""

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of each matrix of a layer."""
        width, key, inner = self.width, self.key_width, self.inner
        return {
            "q": (width, width),
            "k": (key, width),
            "v": (key, width),
            "o": (width, width),
            "gate": (inner, width),
            "up": (inner, width),
            "down": (width, inner),
        }


@dataclass(frozen=True, slots=True)
class _Part:
    """A matmul of a layer: one matrix, or several with the same input."""

    packed: list[PackedMatrix]
    dense_NK: Tensor
    bias_N: Tensor | None


Layer = dict[str, _Part]


def stack_rows(
    device: torch.device, shape: StackShape, rows: int, *, rounds: int = 15
) -> list[BenchRow]:
    """Measure every arm with `rows` rows of activations, in turns; seconds are those of one layer."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layers = [_layer(shape, device, dtype, bool(index % 2 == 0)) for index in range(shape.layers)]
    # Capacity for gate and up together.
    scratch = Scratch(device, dtype, limit_bytes=2 * shape.inner * shape.width * dtype.itemsize)
    scratch.reserve(2 * shape.inner, shape.width)
    scratch.reserve(shape.width, shape.inner)
    x_MK = torch.randn(rows, shape.width, device=device).to(dtype)
    inner_MK = torch.randn(rows, shape.inner, device=device).to(dtype)
    single = [part for layer in layers for part in layer.values()]
    joined = [part for layer in layers for part in _joined(layer)]

    def input_of(part: _Part) -> Tensor:
        return x_MK if part.dense_NK.shape[1] == shape.width else inner_MK

    def dense(parts: list[_Part]) -> None:
        for part in parts:
            F.linear(input_of(part), part.dense_NK, part.bias_N)

    def packed() -> None:
        for part in single:
            packed_linear(input_of(part), part.packed[0], part.bias_N, scratch)

    def packed_joined() -> None:
        for part in joined:
            packed_linear_many(input_of(part), part.packed, part.bias_N, scratch)

    def dequantise() -> None:
        for part in single:
            out_NK = scratch.take(*part.packed[0].shape)
            dequantize_rows(part.packed[0], out_NK, 0, len(out_NK))

    arms: dict[str, Callable[[], object]] = {
        "bf16": partial(dense, single),
        "bf16 joined": partial(dense, joined),
        "packed": packed,
        "packed joined": packed_joined,
        "dequantise": dequantise,
    }
    with torch.no_grad():
        if device.type == "cuda" and rows < GRAPH_ROWS:
            arms = {name: captured(arm) for name, arm in arms.items()}
        times = time_arms(arms, device, rounds=rounds, inner=shape.repeats)
    base = min(times["bf16"], times["bf16 joined"], key=lambda one: one.seconds)
    return [_stack_row(name, times[name], base, shape, layers, rows) for name in arms]


def _layer(shape: StackShape, device: torch.device, dtype: torch.dtype, better: bool) -> Layer:
    layer = {}
    for name, (count, columns) in shape.matrices().items():
        type_ = "Q6_K" if better and name in ("v", "down") else "Q4_K"
        packed = _random_packed(type_, count, columns, device)
        dense_NK = torch.empty(count, columns, dtype=dtype, device=device)
        dequantize_rows(packed, dense_NK, 0, count)
        bias_N = torch.randn(count, device=device).to(dtype) if name in ("q", "k", "v") else None
        layer[name] = _Part([packed], dense_NK, bias_N)
    return layer


def _random_packed(type_: str, rows: int, columns: int, device: torch.device) -> PackedMatrix:
    generator = torch.Generator(device=device).manual_seed(0)
    return pack(random_blocks(BLOCK_TYPES[type_], (rows, columns), generator))


def _joined(layer: Layer) -> list[_Part]:
    out = []
    for names in (("q", "k", "v"), ("o",), ("gate", "up"), ("down",)):
        parts = [layer[name] for name in names]
        biases = [part.bias_N for part in parts if part.bias_N is not None]
        out.append(
            _Part(
                [part.packed[0] for part in parts],
                torch.cat([part.dense_NK for part in parts]),
                torch.cat(biases) if biases else None,
            )
        )
    return out


def _stack_row(
    arm: str, timing: Timing, base: Timing, shape: StackShape, layers: list[Layer], rows: int
) -> BenchRow:
    values = sum(count * columns for count, columns in shape.matrices().values())
    element = layers[0]["q"].dense_NK.element_size()
    packed_bytes = sum(part.packed[0].nbytes for layer in layers for part in layer.values())
    packed_bytes //= len(layers)
    activations = sum(rows * (count + columns) for count, columns in shape.matrices().values())
    moved = {
        "packed": packed_bytes + activations * element,
        "packed joined": packed_bytes + activations * element,
        "dequantise": packed_bytes + values * element,
    }.get(arm, (values + activations) * element)
    return BenchRow.of(
        arm,
        timing.each(len(layers)),
        shape=f"{shape.name} layer, Q4_K_M",
        rows=rows,
        flop=0.0 if arm == "dequantise" else 2.0 * rows * values,
        bytes=moved,
        base=None if arm == "dequantise" else base.each(len(layers)),
    )


def captured(arm: Callable[[], object]) -> Callable[[], object]:
    """Capture `arm` as a CUDA graph and return its replay, which keeps alive what it reads and writes."""
    arm()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = arm()

    def replay() -> object:
        graph.replay()
        return arm, results

    return replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="qwen2.5-7b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 2048, 8192, 16384])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    config, device = config_named(given.shape), torch.device("cuda")
    stack = StackShape(
        name=given.shape,
        width=config.hidden_size,
        key_width=config.num_key_value_heads * config.head_dim,
        inner=config.intermediate_size,
    )
    rows = [
        row for count in given.rows for row in stack_rows(device, stack, count, rounds=given.rounds)
    ]
    rates = measure_rates(device, torch.bfloat16)
    print("\n".join(table(rows, rates)))
    if given.out is not None:
        given.out.write_text(json.dumps([row.as_dict(rates) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
