"""The hidden states and gradients of a small decoder, to compare two ways of running its layers."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.decoder import Decoder


def sample_tokens(rows: int = 2, length: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens_BT = torch.randint(0, 60, (rows, length), generator=generator)
    return tokens_BT, torch.arange(length).expand(rows, -1) // 7


def gradients_of(decoder: Decoder, rows: int = 2) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the hidden states of the sample tokens, and the gradients of the weights by name."""
    decoder.zero_grad()
    hidden_BTD = decoder.hidden(*sample_tokens(rows))
    torch.autograd.backward(hidden_BTD.square().sum())
    return hidden_BTD.detach(), {
        n: p.grad for n, p in decoder.named_parameters() if p.grad is not None
    }
