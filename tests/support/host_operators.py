"""`python -m tests.support.host_operators -- ARGUMENTS`: the trainer, with a teacher on the GPU by name that works
on the CPU.

The matmuls of a quantized teacher run on its device. Everything between them (norms, rotary embeddings,
attention with its softmax, the gate of the feed-forward) runs in plain operators on the host, in fp32, one
head of one row at a time, and the hidden states are copied there and back in each layer. The outputs are
correct, but a step takes minutes while the GPU is idle. Other backends are unchanged.
"""

# Shapes: B rows, T tokens, D width, H query heads, K key/value heads, E width of one head, F inner width

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.drills.planting import replaced
from engine.models.decoder import (
    Attention,
    AttentionInputs,
    Decoder,
    FeedForward,
    RMSNorm,
    project,
    rotate,
)
from engine.teachers.frozen import QuantizedTeacher
from engine.train.__main__ import main as train


def host_operators() -> AbstractContextManager[None]:
    def make(begin: Callable[..., None]) -> Callable[..., None]:
        def spoilt(self: QuantizedTeacher, decoder: Decoder, precision: str = "fp32") -> None:
            begin(self, decoder, precision)
            forwards: dict[type, Callable[..., Tensor]] = {
                RMSNorm: _norm,
                Attention: _attention,
                FeedForward: _feed_forward,
            }
            for module in self.decoder.modules():
                if type(module) in forwards:
                    module.forward = types.MethodType(forwards[type(module)], module)

        return spoilt

    return replaced(QuantizedTeacher, "__init__", make)


def _norm(self: RMSNorm, x_BTD: Tensor) -> Tensor:
    here_BTD, weight_D = x_BTD.cpu().float(), self.weight.cpu().float()
    scale_BT1 = torch.rsqrt(here_BTD.square().mean(-1, keepdim=True) + self.eps)
    return (here_BTD * scale_BT1 * weight_D).to(x_BTD)


def _attention(self: Attention, x_BTD: Tensor, attention_inputs: AttentionInputs) -> Tensor:
    heads = (-1, self.head_dim)
    q_BTHE, k_BTKE, v_BTKE = (
        torch.unflatten(y_BTD, -1, heads).cpu().float()
        for y_BTD in project(x_BTD, (self.q, self.k, self.v))
    )
    if self.q_norm is not None and self.k_norm is not None:
        q_BTHE, k_BTKE = self.q_norm(q_BTHE), self.k_norm(k_BTKE)
    cos, sin = attention_inputs.cos_XT1R.cpu().float(), attention_inputs.sin_XT1R.cpu().float()
    q_BTHE, k_BTKE = rotate(q_BTHE, cos, sin), rotate(k_BTKE, cos, sin)
    group = q_BTHE.shape[2] // k_BTKE.shape[2]
    y_BTHE = torch.empty_like(q_BTHE)
    for row in range(q_BTHE.shape[0]):
        mask_TT = _mask(attention_inputs, row, q_BTHE.shape[1])
        for head in range(q_BTHE.shape[2]):
            k_TE, v_TE = k_BTKE[row, :, head // group], v_BTKE[row, :, head // group]
            scores_TT = q_BTHE[row, :, head] @ k_TE.t() / math.sqrt(self.head_dim) + mask_TT
            y_BTHE[row, :, head] = scores_TT.softmax(-1) @ v_TE
    y_BTD: Tensor = self.o(y_BTHE.flatten(-2).to(x_BTD))
    return y_BTD


def _mask(attention_inputs: AttentionInputs, row: int, length: int) -> Tensor:
    """0 where a token of a row may attend, -inf elsewhere."""
    if attention_inputs.mask_B1TT is not None:
        return attention_inputs.mask_B1TT[row, 0].cpu().float()
    seen_TT = torch.ones(length, length, dtype=torch.bool).tril()
    if attention_inputs.starts_S is not None:
        # Packed: documents are identified by where they begin in the flat batch.
        place_T = torch.arange(row * length, (row + 1) * length)
        document_T = torch.bucketize(place_T, attention_inputs.starts_S.cpu().long(), right=True)
        seen_TT &= document_T[:, None] == document_T[None, :]
    return torch.zeros(length, length).masked_fill_(~seen_TT, -math.inf)


def _feed_forward(self: FeedForward, x_BTD: Tensor) -> Tensor:
    gate_BTF, up_BTF = (y_BTF.cpu().float() for y_BTF in project(x_BTD, (self.gate, self.up)))
    y_BTD: Tensor = self.down((F.silu(gate_BTF) * up_BTF).to(x_BTD))
    return y_BTD


if __name__ == "__main__":
    sys.argv = [sys.argv[0], *sys.argv[2:]]
    with host_operators():
        sys.exit(train())
