"""Run a decode step of a dense model on a GPU in few kernels: eight per layer, four of them matmuls.

    norm | q k v | place | attend | o | add, norm | gate up | gate | down | add, norm ...

A step of `Decoder` launches about thirty kernels per layer, and with a small model most of the time passes between
kernels. q, k and v are one matmul, and so are gate and up: their matrices are adjacent in memory.

`JoinedWeights` holds the joined matrices. A model in the same 16-bit dtype is not copied: its parameters become views
of the joined matrices. The weights of a model in fp32 are copied, and `refresh` copies them again after an update.

Covered: models for which `coverage` returns None. All others run in `engine.generation.forward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.generation.forward import NativeForward, device_of
from engine.generation.pages import PagedCache
from engine.generation.size import PAGE
from engine.kernels import layer_parts, paged_attention
from engine.models.config import ModelConfig
from engine.models.decoder import Attention, Decoder, FeedForward, Layer, RMSNorm, frequencies
from engine.models.frozen import JoinedLinear, set_buffer
from engine.models.fused import has_kernels
from engine.models.head import DenseHead, logits_of

# Shapes: B slots, D model width, V vocabulary, N columns of joined matmuls, K key/value heads, E width of a head

DTYPES = (torch.bfloat16, torch.float16)


def coverage(decoder: Decoder, dtype: torch.dtype | None = None) -> str | None:
    """Return why a step of this decoder in `dtype` cannot be run by `FusedForward`; None if it can."""
    config, dtype = decoder.config, dtype or decoder.dtype
    if not has_kernels(device_of(decoder)):
        return "the model is not on a GPU with Triton"
    if dtype not in DTYPES:
        return f"the model computes in {str(dtype).removeprefix('torch.')}"
    dense = (nn.Linear, JoinedLinear)
    if not all(
        isinstance(matrix, dense) for layer in decoder.layers for matrix in _matrices(layer)
    ):
        return "its matrices are not dense"
    if not isinstance(decoder.embed, nn.Embedding) or not isinstance(
        decoder.head, nn.Linear | None
    ):
        return "its embedding or its head is not dense"
    return why_not(config)


def why_not(config: ModelConfig) -> str | None:
    """Return why the kernels do not support models of this configuration; None if they do."""
    if config.kind.has_post_norms:
        return "it normalises the outputs of attention and mlp"
    if config.kind.norm_offset or config.kind.embeddings_scaled:
        return "its norms multiply with 1 + w, or its embeddings are scaled"
    if config.qk_norm and config.kind.qk_norm_whole:
        return "its q and k are normalised as a whole"
    if config.intermediate_size % 8:
        return "its feed-forward width is not a multiple of 8"
    if config.long_rope is not None:
        return "its RoPE has other factors in long sequences"
    return None


def _matrices(layer: nn.Module) -> tuple[nn.Module, ...]:
    assert isinstance(layer, Layer)
    attention, mlp = layer.attention, layer.mlp
    return (
        *(attention.q, attention.k, attention.v, attention.o),
        *(mlp.gate, mlp.up, mlp.down),
    )


class _Joined(NamedTuple):
    """A matrix and a bias of one or several layers with the same input."""

    weight_ND: Tensor
    bias_N: Tensor | None

    def __call__(self, x_BD: Tensor) -> Tensor:
        return F.linear(x_BD, self.weight_ND, self.bias_N)


class _LayerWeights(NamedTuple):
    attention_norm: RMSNorm
    qkv: _Joined
    o: _Joined
    mlp_norm: RMSNorm
    gate_up: _Joined
    down: _Joined


class JoinedWeights:
    """The weights of a decoder as a step reads them, in `dtype`."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype) -> None:
        self._dtype = dtype
        # Leave inference mode: a parameter that becomes a view may still be trained.
        with torch.inference_mode(False), torch.no_grad():
            self._join_all(decoder)

    def _join_all(self, decoder: Decoder) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []
        """Pairs of a slice of a joined matrix and the parameter that is copied to it."""
        self.layers = [self._layer(layer) for layer in decoder.layers]
        owner = decoder.embed if decoder.head is None else decoder.head
        self.head_VD = self._join([owner]).weight_ND

    def refresh(self) -> None:
        """Copy the model's weights again into the copies."""
        if self._copies:
            copies, originals = zip(*self._copies, strict=True)
            torch._foreach_copy_(list(copies), list(originals))

    def _layer(self, layer: nn.Module) -> _LayerWeights:
        assert isinstance(layer, Layer)
        attention, mlp = layer.attention, layer.mlp
        assert isinstance(attention, Attention) and isinstance(mlp, FeedForward)
        assert layer.attention_norm is not None and layer.mlp_norm is not None
        return _LayerWeights(
            layer.attention_norm,
            self._join([attention.q, attention.k, attention.v]),
            self._join([attention.o]),
            layer.mlp_norm,
            self._join([mlp.gate, mlp.up]),
            self._join([mlp.down]),
        )

    def _join(self, modules: Sequence[nn.Module]) -> _Joined:
        first = modules[0]
        if isinstance(first, JoinedLinear):
            return _Joined(first.weight_NK, first.bias_N)
        weight = self._join_tensors(modules, "weight")
        assert weight is not None
        return _Joined(weight, self._join_tensors(modules, "bias"))

    def _join_tensors(self, modules: Sequence[nn.Module], name: str) -> Tensor | None:
        """Return the tensors `name` of all modules, concatenated."""
        parts = [getattr(module, name, None) for module in modules]
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if not tensors:
            return None
        same_dtype = tensors[0].dtype == self._dtype
        if same_dtype and len(modules) == 1:
            return tensors[0].detach()
        # A module without a bias adds zeros if another has one.
        rows = [int(_weight(module).shape[0]) for module in modules]
        joined = tensors[0].new_zeros(sum(rows), *tensors[0].shape[1:], dtype=self._dtype)
        for module, part, view in zip(modules, parts, torch.split(joined, rows), strict=True):
            if not isinstance(part, Tensor):
                continue
            view.copy_(part)
            if not same_dtype:
                self._copies.append((view, part.detach()))
            elif isinstance(part, nn.Parameter):
                part.data = view
            else:
                set_buffer(module, name, view)
        return joined


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


class FusedForward(NativeForward):
    """Our decoder with a paged cache, whose steps are run in few kernels. Prompts are run by `Decoder`."""

    def __init__(self, decoder: Decoder, cache: PagedCache) -> None:
        super().__init__(decoder, cache)
        config = decoder.config
        self.weights = JoinedWeights(decoder, cache.pages_L2PKTE.dtype)
        positions = cache.table_BS.shape[1] * PAGE
        self._cos_sin_S2R = {
            windowed: self._cos_sin(config, positions, windowed)
            for windowed in {config.has_window(index) for index in range(len(decoder.layers))}
        }

    def _cos_sin(self, config: ModelConfig, positions: int, windowed: bool) -> Tensor:
        """Return the cosines and sines of each position, (S, 2, R)."""
        frequency_R = frequencies(config, self._device, windowed)
        angle_SR = torch.arange(positions, device=self._device)[:, None].float() * frequency_R
        cos_sin_S2R = torch.stack([angle_SR.cos(), angle_SR.sin()], dim=1)
        return cos_sin_S2R.to(self._cache.pages_L2PKTE.dtype)

    def refresh(self) -> None:
        self.weights.refresh()

    def step(self, token_B: Tensor, position_B: Tensor) -> Tensor:
        decoder, config = self._decoder, self._decoder.config
        dtype = self._cache.pages_L2PKTE.dtype
        residual_BD = F.embedding(token_B, decoder.embed.weight)
        x_BD = torch.empty_like(residual_BD, dtype=dtype)
        heads = (config.num_attention_heads, config.head_dim)
        y_BHE = torch.zeros(len(token_B), *heads, dtype=dtype, device=self._device)
        y_BD: Tensor | None = None
        for index, (layer, weights) in enumerate(
            zip(decoder.layers, self.weights.layers, strict=True)
        ):
            assert isinstance(layer, Layer)
            attention = layer.attention
            norm = weights.attention_norm
            layer_parts.add_norm(y_BD, residual_BD, norm.weight, norm.eps, residual_BD, x_BD)
            qkv_BN = weights.qkv(x_BD)
            norms, eps = None, 0.0
            if attention.q_norm is not None and attention.k_norm is not None:
                norms, eps = (
                    (attention.q_norm.weight, attention.k_norm.weight),
                    attention.q_norm.eps,
                )
            cos_sin_S2R = self._cos_sin_S2R[config.has_window(index)] if attention.rotates else None
            cache = (*self._cache.layer(index), self._cache.table_BS, position_B)
            paged_attention.place(qkv_BN, norms, eps, cos_sin_S2R, *cache)
            paged_attention.attend(
                qkv_BN, *cache, y_BHE, scale=attention.scale, window=attention.window
            )
            y_BD = weights.o(y_BHE.flatten(1))
            norm = weights.mlp_norm
            layer_parts.add_norm(y_BD, residual_BD, norm.weight, norm.eps, residual_BD, x_BD)
            gate_up_BN = weights.gate_up(x_BD)
            gate_BN, up_BN = gate_up_BN.chunk(2, dim=1)
            gated_BN = gate_up_BN.new_empty(gate_BN.shape)
            layer_parts.gate(gate_BN, up_BN, config.kind.activation, gated_BN)
            y_BD = weights.down(gated_BN)
        layer_parts.add_norm(
            y_BD, residual_BD, decoder.norm.weight, decoder.norm.eps, residual_BD, x_BD
        )
        return logits_of(x_BD, DenseHead(self.weights.head_VD), config.vocab_size)
