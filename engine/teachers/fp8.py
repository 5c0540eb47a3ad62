"""The fp8 teacher, and the error that fp8 adds, which is measured on real rows before a run may use
it.

Matmuls in fp8 take about 0.6 of the time of bf16, and change the teacher's output. How much is not
a property of the format: it depends on the weights and on the text. So while the teacher is loaded,
layer by layer, the run's own held-out rows pass through the exact layers and through the rounded
ones, and

    KL(p || q) = mean over labelled tokens of sum_v p_v (ln p_v - ln q_v)       p exact, q rounded

is compared with an error that is widely accepted for 4-bit weights: the published mean KL of Q4_K_M
against 16-bit weights (`engine.quant.blocks`). The check `teacher_fp8_within_noise_floor` fails for a
teacher that exceeds it.

The exact side is the same decoder in the dtype of the activations, as precision=bf16 runs it. Not
measured: rows longer than the held-out ones, and other kinds of text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.data.batches import Batch
from engine.models.decoder import AttentionInputs, Decoder, matmul_dtype
from engine.models.fp8 import round_head, round_norms
from engine.models.head import Head, mean_kl
from engine.models.packed import head_of
from engine.quant.blocks import NOISE_FLOORS
from engine.teachers.frozen import FrozenDecoder
from engine.teachers.protocol import Teacher

# Shapes: B rows, T tokens, N labelled tokens, E teacher width, V vocabulary

NOISE_FLOOR_KL = NOISE_FLOORS["q4_k_m"].kl
"""KL of 4-bit weights, which fp8 rounding must not exceed, in nats."""
PROBE_ROWS = 4
"""Maximum number of held-out rows that the rounding error is measured on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """The change of the teacher's output caused by rounding to fp8."""

    kl: float
    """Mean KL(exact || rounded) at temperature 1, in nats; NaN without labelled tokens."""
    agreement: float
    """Fraction of tokens for which both teachers have the same top-1 token."""
    relative_rms: float
    """Relative RMS difference of the last hidden states."""
    tokens: int


class Fp8Teacher(FrozenDecoder):
    """A decoder with layers in fp8, as `load_fp8_decoder` builds it."""

    def __init__(self, decoder: Decoder, rounding: Rounding, kernels: str = "fused") -> None:
        super().__init__(decoder, "fp8", kernels)
        round_norms(decoder)
        self.rounding = rounding


def rounding_of(teacher: Teacher) -> Rounding | None:
    """Return the measured rounding error of the teacher or of the teacher it wraps; None if it is
    not an fp8 teacher.
    """
    inner: Any = teacher
    while inner is not None:
        if isinstance(inner, Fp8Teacher):
            return inner.rounding
        inner = getattr(inner, "inner", None)
    return None


class RoundingProbe:
    """A watcher for `load_fp8_decoder` that runs the same rows through the exact and the rounded
    layers.
    """

    def __init__(self, batch: Batch, device: torch.device, rows: int = PROBE_ROWS) -> None:
        self.tokens_BT, self.documents_BT, self.labels_BT = (
            tensor[:rows] for tensor in batch.to_torch(device)
        )
        self._inputs: list[AttentionInputs] = []
        self._exact_BTE = self._rounded_BTE = torch.empty(0)

    @torch.inference_mode()
    def before(self, decoder: Decoder, layer: nn.Module) -> None:
        if layer is decoder.layers[0]:
            x_BTE = decoder.scaled(decoder.embed(self.tokens_BT))
            self._inputs = decoder.masked_inputs(
                self.tokens_BT, self.documents_BT, matmul_dtype(x_BTE)
            )
            self._exact_BTE = self._rounded_BTE = x_BTE
        self._exact_BTE = layer(self._exact_BTE, self._inputs[0])

    @torch.inference_mode()
    def after(self, decoder: Decoder, layer: nn.Module) -> None:
        self._rounded_BTE = layer(self._rounded_BTE, self._inputs.pop(0))

    @torch.inference_mode()
    def result(self, decoder: Decoder) -> Rounding:
        """Round the head too, once all layers of `decoder` are loaded, and return the rounding error."""
        exact = head_of(decoder)
        round_head(decoder)
        kept_BT = self.labels_BT >= 0
        exact_NE = decoder.norm(self._exact_BTE)[kept_BT]
        rounded_NE = decoder.norm(self._rounded_BTE)[kept_BT]
        return compare(exact_NE, exact, rounded_NE, head_of(decoder))


@torch.inference_mode()
def compare(exact_NE: Tensor, head: Head, rounded_NE: Tensor, rounded_head: Head) -> Rounding:
    """Compare the last hidden states of two teachers, each under its head."""
    count = len(exact_NE)
    if count == 0:
        return Rounding(kl=math.nan, agreement=math.nan, relative_rms=math.nan, tokens=0)
    kl, agreement = mean_kl(exact_NE, head, rounded_NE, rounded_head, head.vocab_size)
    gap_NE = (rounded_NE - exact_NE).float()
    return Rounding(
        kl=kl,
        agreement=agreement,
        relative_rms=float(gap_NE.norm() / exact_NE.float().norm()),
        tokens=count,
    )
