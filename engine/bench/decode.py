"""Decoding: one token for each of 1, 8 or 64 sequences, compared with the time to read the weights.

    arm               weights              a step (`engine.generation`)
    bf16              dense                each kernel launched
    bf16 graph        dense                the same, as a CUDA graph
    Q4_K_M ...        quantised blocks     the same two; each matrix is dequantised at each step

Weights are random, of a real shape. The bound is one read of everything that a step needs: all matrices in
their stored form, only one row of the embedding, and the keys and values of every sequence. Its rate is that
of a copy in the same run. Each arm decodes sequences of `context` tokens, which grow while it is measured;
the bound is that of the middle. `ratio` is the speed relative to the arm without a graph, with the same weights
and sequences. `tokens_per_s` sums over all sequences.

On a CPU there are no graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from engine.bench.random_weights import RandomWeights
from engine.bench.rows import BenchRow, Measured
from engine.bench.timing import time_arms
from engine.generation.sampling import GREEDY
from engine.generation.size import PAGE, pages_for
from engine.generation.slots import Admitted, Slots, choose_cuda_graph
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.frozen import freeze
from engine.models.load import load_decoder, load_packed_decoder
from engine.models.packed import PackedEmbedding

ROW_COUNTS = (1, 8, 64)
CONTEXT = 512
"""Tokens of each sequence before the first step."""
STEPS = 8
"""Decoding steps of a graph arm in one measurement."""


class _Arm(NamedTuple):
    run: Callable[[], object]
    steps: int


@torch.inference_mode()
def bench_decode(
    config: ModelConfig,
    device: torch.device,
    *,
    shape: str,
    row_counts: tuple[int, ...] = ROW_COUNTS,
    context: int = CONTEXT,
    rounds: int = 15,
) -> Measured:
    """Measure every arm; arms with the same weights and number of sequences take turns.

    Also returned are `tokens_per_s`, by arm and number of sequences, and `weight_bytes`, the bytes of weights
    that a step reads.
    """
    measured: list[BenchRow] = []
    tokens_per_s: dict[str, float] = {}
    step_bytes: dict[str, int] = {}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    width = config.num_key_value_heads * config.head_dim
    token_bytes = 2 * config.num_hidden_layers * width * dtype.itemsize
    for name, load in (("bf16", load_decoder), ("Q4_K_M", load_packed_decoder)):
        with RandomWeights(config, "q4_k_m", device) as weights:
            decoder = freeze(load(weights, dtype, device))
        step_bytes[name] = weight_bytes(decoder)
        for rows in row_counts:
            arms = _arms(name, decoder, rows, context, rounds)
            times = time_arms(
                {arm: graph_arm.run for arm, graph_arm in arms.items()}, device, rounds=rounds
            )
            base = times[name].each(arms[name].steps)
            for arm, graph_arm in arms.items():
                timing = times[arm].each(graph_arm.steps)
                middle = context + graph_arm.steps * (rounds + 3) // 2
                measured.append(
                    BenchRow.of(
                        arm,
                        timing,
                        shape=shape,
                        rows=rows,
                        flop=2.0 * rows * _values(config),
                        # Keys and values of every token, in addition to the weights.
                        bytes=step_bytes[name] + rows * middle * token_bytes,
                        base=base,
                    )
                )
                tokens_per_s[f"{arm}, {rows}"] = rows / timing.seconds
        del decoder, arms
    return measured, {"tokens_per_s": tokens_per_s, "weight_bytes": step_bytes}


def weight_bytes(decoder: Decoder) -> int:
    """Return the bytes of everything that a step reads in full: all but an embedding that is not tied to the head."""
    tied = decoder.head is None
    skipped = {id(decoder.embed)} if not tied else set()
    total, seen = 0, set()
    for module in decoder.modules():
        if id(module) in skipped or (isinstance(module, PackedEmbedding) and not tied):
            continue
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                total += tensor.nbytes
    return total


def _arms(name: str, decoder: Decoder, rows: int, context: int, rounds: int) -> dict[str, _Arm]:
    tokens = context + STEPS * (rounds + 4) + 1
    need = pages_for(tokens)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(decoder.config.vocab_size, (rows, context), generator=generator)

    def make_arm(graph: bool) -> _Arm:
        slots = Slots(
            decoder,
            slots=rows,
            capacity=need * PAGE,
            pages=rows * need + 1,
            sampling=GREEDY,
            ends=(),
            graph=graph,
        )
        slots.begin(
            [
                Admitted(
                    row, prompt, 0, tokens, list(range(1 + row * need, 1 + (row + 1) * need)), None
                )
                for row, prompt in enumerate(prompts.tolist())
            ]
        )
        count = STEPS if graph else 1
        return _Arm(lambda: [slots.step() for _ in range(count)], count)

    arms = {name: make_arm(graph=False)}
    if choose_cuda_graph(decoder).choice == "on":
        arms[f"{name} graph"] = make_arm(graph=True)
    return arms


def _values(config: ModelConfig) -> int:
    """Return the number of weights that each token is multiplied with."""
    with torch.device("meta"):
        decoder = Decoder(config)
    linear = [module for module in decoder.modules() if isinstance(module, nn.Linear)]
    head = 0 if decoder.head is not None else decoder.embed.weight.numel()
    return sum(module.weight.numel() for module in linear) + head
