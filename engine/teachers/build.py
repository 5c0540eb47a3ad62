"""Build a teacher: a decoder from a file, in a backend, with its vocabulary cut to the student's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from engine.data.batches import Batch
from engine.formats.open import open_weights
from engine.models.decoder import Decoder
from engine.models.frozen import join_layer
from engine.models.fused import has_kernels
from engine.models.load import layer_wise_decoder_of, load_decoder, load_packed_decoder
from engine.models.load_fp8 import load_fp8_decoder
from engine.models.read_config import AUTO
from engine.spec.sections import ModelSection
from engine.teachers.fp8 import Fp8Teacher, RoundingProbe
from engine.teachers.frozen import DequantizedTeacher, FrozenDecoder, QuantizedTeacher
from engine.teachers.in_context import TeacherInContext
from engine.teachers.protocol import Teacher
from engine.teachers.sharded import ShardedLayers
from engine.teachers.truncating import TruncatingTeacher

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
}
"""Dtype of the activations and weights for each teacher precision. In fp8 it is the dtype of
everything except the matrices of the layers.
"""


class BuiltTeacher(NamedTuple):
    teacher: Teacher
    decoder: Decoder
    """The frozen decoder inside the teacher, for its hash and its size."""


def build_teacher(
    path: str | Path,
    *,
    backend: str,
    precision: str,
    device: torch.device,
    student_vocab: int,
    probe: Batch | None = None,
    shards: ShardedLayers | None = None,
    kernels: str = "fused",
    how: ModelSection = AUTO,
    context: Sequence[int] = (),
) -> BuiltTeacher:
    """Load the teacher in `path` and cut its vocabulary to the student's.

    An fp8 teacher is measured while it is loaded, on rows of `probe`, which it requires.

    `backend` is the result of `choose_backend`: `dequantized` or `quantized`. With `shards`,
    every rank keeps only its part of each layer; `kernels` is the result of `choose_layer_kernels`.
    With a `context`, the teacher reads these tokens before each document.

    Raises `WeightsError`, and `BadInput` for a student with a larger vocabulary than the teacher.
    """
    dtype = DTYPES[precision]
    frozen: FrozenDecoder
    loaded = None if shards is None else partial(_keep_shard, shards, kernels)
    if precision == "fp8":
        assert probe is not None, "an fp8 teacher is measured on rows"
        watcher = RoundingProbe(probe, device)
        decoder = load_fp8_decoder(path, dtype, device, watcher=watcher, loaded=loaded)
        frozen = Fp8Teacher(decoder, watcher.result(decoder), kernels)
    elif backend == "quantized":
        decoder = load_packed_decoder(path, dtype=dtype, device=device, loaded=loaded)
        frozen = QuantizedTeacher(decoder, precision, kernels)
    elif loaded is not None:
        with open_weights(Path(path)) as weights:
            decoder = layer_wise_decoder_of(weights, dtype, device, loaded)
        frozen = DequantizedTeacher(decoder, precision, kernels)
    else:
        frozen = DequantizedTeacher(load_decoder(path, dtype, device, how), precision, kernels)
    if shards is not None:
        shards.install(frozen.decoder)
    teacher: Teacher = TeacherInContext(frozen, context) if context else frozen
    if student_vocab != frozen.vocab_size:
        teacher = TruncatingTeacher(teacher, student_vocab)
    return BuiltTeacher(teacher, frozen.decoder)


def _keep_shard(shards: ShardedLayers, kernels: str, decoder: Decoder, layer: nn.Module) -> None:
    if kernels == "fused" and has_kernels(decoder.norm.weight.device):
        join_layer(layer)
    shards.take(layer)
