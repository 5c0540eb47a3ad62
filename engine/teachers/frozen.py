"""A decoder that teaches, with dense weights or in the blocks of its file.

It is frozen by construction: the decoder has no `nn.Parameter` (`engine.models.frozen`), so there is
nothing that an optimizer could be given, and hidden states are made in inference mode, where
autograd does not exist.

A teacher computes in its own precision, inside and outside of autocast, so that what it answers
does not depend on who asks:

    fp32   fp32 products          tf32   fp32 weights, products rounded to 10 bits of mantissa
    bf16   bf16 weights and products, fp32 sums

tf32 is switched on for the teacher's own products and switched back after them: the student, and
the logits that the loss makes of the teacher's hidden states, stay in their own arithmetic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from engine.errors import InternalError
from engine.models.decoder import Decoder
from engine.models.frozen import freeze
from engine.models.head import Head
from engine.models.packed import PackedEmbedding, PackedLinear, head_of

# Shapes: B rows, T tokens, E teacher width


class FrozenDecoder:
    """A `Teacher` of one decoder, which it freezes."""

    def __init__(self, decoder: Decoder, precision: str = "fp32") -> None:
        self.decoder = freeze(decoder)
        self.precision = precision

    @property
    def vocab_size(self) -> int:
        return self.decoder.config.vocab_size

    @torch.inference_mode()
    def hidden(self, tokens_BT: Tensor, documents_BT: Tensor) -> Tensor:
        with torch.autocast(tokens_BT.device.type, enabled=False), products(self.precision):
            return self.decoder.hidden(tokens_BT, documents_BT)

    def head(self) -> Head:
        return head_of(self.decoder)


class DequantizedTeacher(FrozenDecoder):
    """A decoder whose weights are floats, as `load_decoder` makes them: whatever the file held, its matrix
    products are plain dense ones (cuBLAS on a GPU).
    """


# contract: cuda-q4k-frozen-teacher-v1
class QuantizedTeacher(FrozenDecoder):
    """The teacher in the blocks of its file, as `load_packed_decoder` makes them: a third to half of the memory
    of bf16, for some time more.

    The whole forward pass runs where the blocks are. On the way into each product they become floats of the
    teacher's precision, in the one scratch that all layers share; nothing else of the model's size is ever made.
    """

    def __init__(self, decoder: Decoder, precision: str = "fp32") -> None:
        if not any(isinstance(part, PackedLinear | PackedEmbedding) for part in decoder.modules()):
            raise InternalError("quantized teacher: expected weights in blocks, found none")
        super().__init__(decoder, precision)


@contextlib.contextmanager
def products(precision: str) -> Iterator[None]:
    """Matrix products in the arithmetic of `precision`: in tf32 while it lasts, or as they were."""
    if precision != "tf32":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
