"""The teacher in the blocks of its file: a third to half of the memory of bf16, for some time more.

The whole forward pass runs where the blocks are. On the way into each product they become floats of
the teacher's precision, in the one scratch that all layers share; nothing else of the model's size
is ever made.
"""

from __future__ import annotations

from engine.errors import InternalError
from engine.models.decoder import Decoder
from engine.models.packed import PackedEmbedding, PackedLinear
from engine.teachers.frozen import FrozenDecoder


# contract: cuda-q4k-frozen-teacher-v1
class QuantizedTeacher(FrozenDecoder):
    """A decoder with blocks in it, as `load_packed_decoder` makes them."""

    def __init__(self, decoder: Decoder, precision: str = "fp32") -> None:
        if not any(isinstance(part, PackedLinear | PackedEmbedding) for part in decoder.modules()):
            raise InternalError("quantized teacher: expected weights in blocks, found none")
        super().__init__(decoder, precision)
