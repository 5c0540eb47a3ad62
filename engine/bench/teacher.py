"""A whole teacher: hidden states of a batch, with dense weights and with weights in blocks.

    arm                  weights
    dequantized          dense bf16, made from the same blocks
    quantized            in their blocks; the product is chosen by the number of rows

Both are the same decoder on the same tokens, so beside the times stands how far the hidden states are
from each other. Memory is what the allocator holds after loading and at the peak of a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.bench.random_weights import RandomWeights
from engine.bench.rows import BenchRow
from engine.bench.timing import Timing, time_arms
from engine.formats.weights import WeightFile
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.freeze import freeze
from engine.models.load import decoder_of
from engine.models.load_packed import packed_decoder_of
from engine.models.packed_size import packed_size

SHAPES = {
    "qwen2.5-0.5b": dict(
        hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        intermediate_size=4864, vocab_size=151936, tie_word_embeddings=True,
    ),
    "qwen2.5-1.5b": dict(
        hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
        intermediate_size=8960, vocab_size=151936, tie_word_embeddings=True,
    ),
    "qwen2.5-7b": dict(
        hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        intermediate_size=18944, vocab_size=152064, tie_word_embeddings=False,
    ),
    "tiny": dict(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=512, vocab_size=4096, tie_word_embeddings=False,
    ),
}  # fmt: skip
"""Published shapes, by name."""


def config_named(name: str) -> ModelConfig:
    """The configuration of one of `SHAPES`."""
    common = dict(
        model_type="qwen2",
        max_position_embeddings=32768,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        hidden_act="silu",
    )
    return ModelConfig.from_dict({**common, **SHAPES[name]}, f"the shape {name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherBench:
    rows: list[BenchRow]
    packed_bytes: int
    """Of the file's tensors in blocks, with what stays in floats as bf16."""
    resident_bytes: dict[str, int | None]
    """What the allocator holds after loading; None on a CPU."""
    peak_bytes: dict[str, int | None]
    relative_rms: float
    """Distance of the two arms' hidden states by their size."""


def bench_teacher(
    weights: WeightFile, config: ModelConfig, device: torch.device, *, rows: int, seq_len: int,
    rounds: int = 5,
) -> TeacherBench:  # fmt: skip
    """Both backends on `rows` x `seq_len` random tokens; `ratio` is the speed relative to the dense
    one."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    resident: dict[str, int | None] = {}
    decoders: dict[str, Decoder] = {}
    for name, make in (("quantized", packed_decoder_of), ("dequantized", decoder_of)):
        before = _held(device)
        if isinstance(weights, RandomWeights):
            weights.generator.manual_seed(0)
        decoders[name] = freeze(make(weights, dtype, device))
        after = _held(device)
        resident[name] = None if before is None or after is None else after - before
    tokens_BT = torch.randint(0, config.vocab_size, (rows, seq_len), device=device)
    peaks: dict[str, int | None] = {}
    answers = {}
    with torch.inference_mode():
        for name, decoder in decoders.items():
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            answers[name] = decoder.hidden(tokens_BT).float()
            peaks[name] = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        gap = answers["quantized"] - answers["dequantized"]
        relative = float(gap.norm() / answers["dequantized"].norm())
        del answers, gap
        times = time_arms(
            {name: _forward(decoder, tokens_BT) for name, decoder in decoders.items()},
            device,
            rounds=rounds,
        )
    size = packed_size(config, weights)
    packed = size.weight_bytes(dtype.itemsize)
    linears = sum(
        p.numel() for name, p in decoders["dequantized"].named_buffers() if p.ndim == 2
    ) - config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return TeacherBench(
        rows=[
            _row(name, timing, times["dequantized"], linears, packed, rows * seq_len, dtype)
            for name, timing in times.items()
        ],
        packed_bytes=packed,
        resident_bytes=resident,
        peak_bytes=peaks,
        relative_rms=relative,
    )


def _forward(decoder: Decoder, tokens_BT: Tensor) -> Callable[[], Tensor]:
    return lambda: decoder.hidden(tokens_BT)


def _held(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def _row(
    arm: str,
    timing: Timing,
    base: Timing,
    linears: int,
    packed: int,
    tokens: int,
    dtype: torch.dtype,
) -> BenchRow:
    return BenchRow(
        arm=arm,
        shape=f"{linears / 1e9:.2f}G linear weights",
        rows=tokens,
        seconds=timing.seconds,
        spread=timing.spread,
        flop=2.0 * linears * tokens,
        bytes=float(packed if arm == "quantized" else linears * dtype.itemsize),
        ratio=base.seconds / timing.seconds,
    )
