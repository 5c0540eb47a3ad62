"""A plain forward pass of Qwen2, Qwen3 and Llama, written for readability: the oracle of
`forward_is_the_model`.

It shares no code with `engine.models.decoder`: each document attends by itself, so that only the future
is masked; rotary positions are products of complex numbers; key/value heads are repeated; softmax is
written out; everything is fp32. It is slow, and only meant for some dozens of tokens. Each matrix is
converted to fp32 for its one matmul, so only one such copy exists at a time.

    a pair (x[i], x[i + E/2]) of a head is the complex number z = x[i] + i x[i + E/2], and position p
    rotates it by its angle:  z e^{i p theta^(-2i/E)}

Covered: the three families, grouped-query attention, biases, norms of q and k, Llama's scaled rotary
frequencies.
"""

# Shapes: B rows, N all tokens, T tokens of a row or of a document, D model width, H query heads,
# K key/value heads, E width of a head, R = E/2, V vocabulary

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.checks.weights import held, rows_of, whole
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder

HEAD_ROWS = 8192


@torch.no_grad()
def reference_logits(decoder: Decoder, tokens_BT: Tensor, documents_BT: Tensor) -> Tensor:
    """Return the logits (B, T, V) in fp32.

    The tokens of a document must be contiguous, and no two rows may share a document.
    """
    config = decoder.config
    lengths = [
        length
        for documents_T in documents_BT
        for length in torch.unique_consecutive(documents_T, return_counts=True)[1].tolist()
    ]
    turns = [_turns(config, length, tokens_BT.device) for length in lengths]
    embedding = held(decoder, "embed.weight")
    x_ND = torch.cat([rows_of(embedding, int(token), 1) for token in tokens_BT.flatten()])
    for index in range(config.num_hidden_layers):
        at = f"layers.{index}"
        normed_ND = _norm(decoder, f"{at}.attention_norm.weight", x_ND)
        x_ND = x_ND + _attention(decoder, f"{at}.attention", normed_ND, turns)
        normed_ND = _norm(decoder, f"{at}.mlp_norm.weight", x_ND)
        gate = normed_ND @ whole(decoder, f"{at}.mlp.gate.weight").T
        up = normed_ND @ whole(decoder, f"{at}.mlp.up.weight").T
        x_ND = x_ND + (gate * torch.sigmoid(gate) * up) @ whole(decoder, f"{at}.mlp.down.weight").T
    x_ND = _norm(decoder, "norm.weight", x_ND)
    head = held(decoder, "head.weight")
    count = head.shape[0]
    logits_NV = torch.cat(
        [
            x_ND @ rows_of(head, first, min(HEAD_ROWS, count - first)).T
            for first in range(0, count, HEAD_ROWS)
        ],
        dim=1,
    )
    return logits_NV.view(*tokens_BT.shape, count)


def _norm(decoder: Decoder, name: str, x: Tensor) -> Tensor:
    mean_square = (x * x).mean(dim=-1, keepdim=True)
    return x / (mean_square + decoder.config.rms_norm_eps).sqrt() * whole(decoder, name)


def _attention(decoder: Decoder, at: str, x_ND: Tensor, turns: list[Tensor]) -> Tensor:
    """Attention over documents that follow each other; `turns` has one table (T, R) for each."""
    config = decoder.config

    def project(name: str) -> Tensor:
        """(N, heads, E)."""
        y = x_ND @ whole(decoder, f"{at}.{name}.weight").T
        if config.attention_bias:
            y = y + whole(decoder, f"{at}.{name}.bias")
        return y.reshape(len(x_ND), -1, config.head_dim)

    q_NHE, k_NKE, v_NKE = project("q"), project("k"), project("v")
    if config.qk_norm:
        q_NHE = _norm(decoder, f"{at}.q_norm.weight", q_NHE)
        k_NKE = _norm(decoder, f"{at}.k_norm.weight", k_NKE)
    answers, first = [], 0
    for turns_TR in turns:
        document = slice(first, first + len(turns_TR))
        first += len(turns_TR)
        q_THE, k_TKE = _turned(q_NHE[document], turns_TR), _turned(k_NKE[document], turns_TR)
        answers.append(_answers(config, q_THE, k_TKE, v_NKE[document]))
    return torch.cat(answers) @ whole(decoder, f"{at}.o.weight").T


def _answers(config: ModelConfig, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor) -> Tensor:
    """Return the attention output of each token of one document, heads concatenated."""
    heads = []
    for head in range(config.num_attention_heads):
        shared = head * config.num_key_value_heads // config.num_attention_heads
        scores_TT = q_THE[:, head] @ k_TKE[:, shared].T / math.sqrt(config.head_dim)
        seen_TT = torch.ones_like(scores_TT, dtype=torch.bool).tril()
        # Masked before the maximum is taken: that of a later token may be larger by any amount.
        scores_TT = scores_TT.masked_fill(~seen_TT, -math.inf)
        weights_TT = torch.exp(scores_TT - scores_TT.amax(dim=1, keepdim=True))
        weights_TT = weights_TT / weights_TT.sum(dim=1, keepdim=True)
        heads.append(weights_TT @ v_TKE[:, shared])
    return torch.cat(heads, dim=1)


def _turned(x_THE: Tensor, turns_TR: Tensor) -> Tensor:
    half = x_THE.shape[-1] // 2
    z_THR = torch.complex(x_THE[..., :half], x_THE[..., half:]) * turns_TR[:, None]
    return torch.cat([z_THR.real, z_THR.imag], dim=-1)


def _turns(config: ModelConfig, length: int, device: torch.device) -> Tensor:
    """Return e^{i p f} for each position and pair."""
    frequencies = []
    for pair in range(config.head_dim // 2):
        f = config.rope_theta ** (-2 * pair / config.head_dim)
        frequencies.append(_stretched(f, config))
    angles_TR = torch.arange(length, device=device)[:, None] * torch.tensor(
        frequencies, dtype=torch.float64, device=device
    )
    return torch.polar(torch.ones_like(angles_TR), angles_TR).to(torch.complex64)


def _stretched(frequency: float, config: ModelConfig) -> float:
    """Scale a rotary frequency as Llama 3.1 does: low ones are divided, high ones kept, those between
    interpolated.
    """
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    wavelength = 2 * math.pi / frequency
    original = scaling.original_max_position_embeddings
    if wavelength < original / scaling.high_freq_factor:
        return frequency
    if wavelength > original / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = (original / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency
