"""Teachers, put together: the decoder in a file, a backend around it, and the cut of its vocabulary
around that.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, cast

import torch

from engine.data.batches import Batch
from engine.errors import InternalError
from engine.kernels.linear import Kernel
from engine.models.decoder import Decoder
from engine.models.fp8_load import load_fp8_decoder
from engine.models.load import load_decoder
from engine.models.load_packed import load_packed_decoder
from engine.teachers.dequantized import DequantizedTeacher
from engine.teachers.fp8 import Fp8Teacher, RoundingProbe
from engine.teachers.frozen import FrozenDecoder
from engine.teachers.protocol import Teacher
from engine.teachers.quantized import QuantizedTeacher
from engine.teachers.truncating import TruncatingTeacher

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
}
"""What activations are held in, by the teacher's precision, and weights; in fp8, those that are not in a
layer's matrices."""


class BuiltTeacher(NamedTuple):
    teacher: Teacher
    decoder: Decoder
    """What computes, frozen: for its hash and its size."""


def build_teacher(
    path: str | Path,
    *,
    backend: str,
    precision: str,
    kernel: str,
    device: torch.device,
    student_vocab: int,
    probe: Batch | None = None,
) -> BuiltTeacher:
    """The teacher in `path`, with as many ids as its student.

    A teacher in fp8 is measured while it is loaded, on rows of `probe`, which it needs.

    `backend` is what `choose_backend` chose: `dequantized` or `quantized`; `kernel` says how the
    latter multiplies (`engine.kernels.linear`). Raises `WeightsError`, and `BadInput` for a student
    with more ids than the teacher.
    """
    dtype = DTYPES[precision]
    frozen: FrozenDecoder
    if precision == "fp8":
        if probe is None:
            raise InternalError("fp8 teacher: expected rows to measure it on, found none")
        watcher = RoundingProbe(probe, device)
        decoder = load_fp8_decoder(path, dtype, device, watcher=watcher)
        frozen = Fp8Teacher(decoder, watcher.result(decoder))
    elif backend == "quantized":
        decoder = load_packed_decoder(path, dtype=dtype, device=device, kernel=cast(Kernel, kernel))
        frozen = QuantizedTeacher(decoder, precision)
    else:
        frozen = DequantizedTeacher(load_decoder(path, dtype=dtype, device=device), precision)
    teacher: Teacher = frozen
    if student_vocab != frozen.vocab_size:
        teacher = TruncatingTeacher(frozen, student_vocab)
    return BuiltTeacher(teacher, frozen.decoder)
