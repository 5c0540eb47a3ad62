"""Defects of the models: of the forward pass, and of a teacher's weights.

Those of the forward pass are in the functions that every decoder runs, so teacher and student both have them.
"""

# Shapes: B rows, T tokens, D width, E width of a head, H heads, V vocabulary

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.drills.planting import replaced
from engine.models import decoder
from engine.models.decoder import Attention, AttentionInputs, Decoder, RMSNorm
from engine.teachers.frozen import FrozenDecoder
from engine.train.trainer import Trainer

# The forward pass


def rotary_neighbours() -> AbstractContextManager[None]:
    def neighbours(x_BTHE: Tensor, cos_XT1R: Tensor, sin_XT1R: Tensor) -> Tensor:
        even, odd = x_BTHE[..., 0::2], x_BTHE[..., 1::2]
        turned = (even * cos_XT1R - odd * sin_XT1R, odd * cos_XT1R + even * sin_XT1R)
        return torch.stack(turned, dim=-1).flatten(-2)

    return replaced(decoder, "rotate", lambda _: neighbours)


def rotary_missing() -> AbstractContextManager[None]:
    return replaced(decoder, "rotate", lambda _: lambda x_BTHE, cos, sin: x_BTHE)


def causal_mask_missing() -> AbstractContextManager[None]:
    return _mask(lambda documents_BT: documents_BT[:, :, None] == documents_BT[:, None, :])


def document_mask_missing() -> AbstractContextManager[None]:
    def plain(documents_BT: Tensor) -> Tensor:
        length = documents_BT.shape[1]
        return torch.ones_like(documents_BT[:, :, None].expand(-1, -1, length)).bool().tril()

    return _mask(plain)


@contextlib.contextmanager
def _mask(seen: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Attention uses the mask that `seen` returns, (B, T, T), masked or packed; positions are unchanged."""
    masked_attention_inputs = decoder.masked_attention_inputs

    def spoilt(
        config: Any,
        tokens_BT: Tensor,
        documents_BT: Tensor | None,
        dtype: torch.dtype,
        windowed: bool = True,
    ) -> AttentionInputs:
        if documents_BT is None:
            documents_BT = torch.zeros_like(tokens_BT)
        attention_inputs = masked_attention_inputs(config, tokens_BT, documents_BT, dtype, windowed)
        mask_BTT = torch.zeros(
            *tokens_BT.shape, tokens_BT.shape[1], dtype=dtype, device=tokens_BT.device
        )
        mask_BTT.masked_fill_(~seen(documents_BT), -math.inf)
        return attention_inputs._replace(mask_B1TT=mask_BTT[:, None])

    def spoilt_packed(
        config: Any, documents_BT: Tensor, dtype: torch.dtype, windowed: bool = True
    ) -> AttentionInputs:
        return spoilt(config, documents_BT, documents_BT, dtype, windowed)

    with (
        replaced(decoder, "masked_attention_inputs", lambda _: spoilt),
        replaced(decoder, "packed_attention_inputs", lambda _: spoilt_packed),
    ):
        yield


def norm_eps_fixed() -> AbstractContextManager[None]:
    def spoilt(self: RMSNorm, x_BTD: Tensor) -> Tensor:
        return F.rms_norm(x_BTD, self.weight.shape, self.weight.to(x_BTD.dtype), 1e-5)

    return replaced(RMSNorm, "forward", lambda _: spoilt)


def qkv_bias_missing() -> AbstractContextManager[None]:
    def make(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def spoilt(self: Attention, x_BTD: Tensor, attention_inputs: AttentionInputs) -> Tensor:
            layers: list[Any] = [self.q, self.k, self.v]
            handles = [
                layer.register_forward_hook(lambda module, _, output: output - module.bias)
                for layer in layers
                if layer.bias is not None
            ]
            try:
                return forward(self, x_BTD, attention_inputs)
            finally:
                for handle in handles:
                    handle.remove()

        return spoilt

    return replaced(Attention, "forward", make)


# Weights


def _teacher(spoil: Callable[[Decoder], None]) -> AbstractContextManager[None]:
    def make(begin: Callable[..., None]) -> Callable[..., None]:
        def spoilt(self: FrozenDecoder, weights: Decoder, precision: str = "fp32") -> None:
            with torch.no_grad():
                spoil(weights)
            begin(self, weights, precision)

        return spoilt

    return replaced(FrozenDecoder, "__init__", make)


def random_teacher() -> AbstractContextManager[None]:
    return _teacher(lambda weights: weights.init_weights(torch.Generator().manual_seed(99)))


def zero_teacher() -> AbstractContextManager[None]:
    def zero(weights: Decoder) -> None:
        for parameter in weights.parameters():
            if parameter.ndim >= 2:
                parameter.zero_()

    return _teacher(zero)


def teacher_ids_differ() -> AbstractContextManager[None]:
    """The teacher's token ids mean other tokens, as if it came with another tokenizer of the same size."""

    def exchange(weights: Decoder) -> None:
        count = weights.config.vocab_size
        order_V = torch.randperm(count, generator=torch.Generator().manual_seed(3))
        weights.embed.weight.copy_(weights.embed.weight[order_V.to(weights.embed.weight.device)])
        head = weights.head_weight
        if weights.head is not None and head is not None:
            head.copy_(head[order_V.to(head.device)])

    return _teacher(exchange)


def identical_teacher() -> AbstractContextManager[None]:
    def make(begin: Callable[..., None]) -> Callable[..., None]:
        def spoilt(self: Trainer, **parts: Any) -> None:
            source = getattr(parts["teacher"], "decoder", None)
            if isinstance(source, Decoder):
                parts["student"].load_state_dict(source.state_dict())
            begin(self, **parts)

        return spoilt

    return replaced(Trainer, "__init__", make)
