"""A frozen decoder used as a teacher, with dense or block-quantised weights.

It is frozen by construction: the decoder has no `nn.Parameter` (`engine.models.frozen`), so an
optimizer finds nothing to train, and hidden states are computed in inference mode,
without autograd.

A teacher computes in its own precision, inside and outside of autocast, so that its output does not
depend on the caller:

    fp32   fp32 matmuls           tf32   fp32 weights, matmul operands rounded to 10 bits of mantissa
    bf16   bf16 weights and matmuls, fp32 accumulation

tf32 is enabled for the teacher's own matmuls and restored after them. The student, and the logits
that the loss computes from the teacher's hidden states, keep their own precision.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from engine.models.decoder import Decoder
from engine.models.frozen import freeze, join
from engine.models.fused import has_kernels, use_kernels
from engine.models.head import Head
from engine.models.packed import head_of

# Shapes: B rows, T tokens, E teacher width


class FrozenDecoder:
    """A `Teacher` that freezes and runs one decoder; `kernels` as in `kernels.layers`."""

    def __init__(self, decoder: Decoder, precision: str = "fp32", kernels: str = "fused") -> None:
        self.decoder = freeze(decoder)
        if kernels == "fused" and decoder.config.native and has_kernels(decoder.norm.weight.device):
            join(decoder)
            use_kernels(decoder, frozen=True)
        self.precision = precision

    @property
    def vocab_size(self) -> int:
        return self.decoder.config.vocab_size

    @torch.inference_mode()
    def hidden(self, tokens_BT: Tensor, documents_BT: Tensor) -> Tensor:
        with torch.autocast(tokens_BT.device.type, enabled=False), matmul_precision(self.precision):
            return self.decoder.hidden(tokens_BT, documents_BT)

    def head(self) -> Head:
        return head_of(self.decoder)


class DequantizedTeacher(FrozenDecoder):
    """A decoder with dense floating-point weights, as `load_decoder` builds it. Whatever format the
    file has, its matmuls are plain dense ones (cuBLAS on a GPU).
    """


# contract: cuda-q4k-frozen-teacher-v1
class QuantizedTeacher(FrozenDecoder):
    """A teacher whose weights stay in the quantised blocks of its file, as `load_packed_decoder`
    builds it. It needs a third to half of the memory of bf16 and is slower.

    The whole forward pass runs on the device that holds the blocks. Each matmul first dequantises
    its blocks to the teacher's precision, into one scratch buffer that all layers share; no
    full-size dequantised copy of the model is ever made.
    """


@contextlib.contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Run matmuls in the arithmetic of `precision`: enable tf32 within the context if it is `tf32`, else
    change nothing.
    """
    if precision != "tf32":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
