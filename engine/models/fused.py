"""Run the operations between the matmuls of a decoder's layers in the engine's kernels, on a GPU with Triton.

    frozen      in place if no other operation reads the value
    trained     with gradients (`engine.kernels.layer_functions`)

A kernel reads and writes each value once; torch makes several passes over it. For a teacher of Qwen2.5-7B's shape and
8 x 1024 tokens on one H200 this takes 156 ms instead of 175. The kernels round where torch's operations round. These
norms stay in torch: norms of queries and keys, norms that multiply with 1 + w, and all norms of layers that also
normalise the outputs of attention and mlp.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from engine.kernels.dequantize import has_triton
from engine.models.attention import MIN_CAPABILITY
from engine.models.config import ModelConfig
from engine.models.decoder import (
    ACTIVATIONS,
    Decoder,
    FeedForward,
    Layer,
    RMSNorm,
    rotate,
)
from engine.models.trained_linear import train_in_few_passes

if TYPE_CHECKING:
    from engine.kernels.compiler import Variant

# Shapes: B rows, T tokens, D model width, H heads, E width of a head, R pairs of it that RoPE rotates, X = B with
# documents and 1 without, F feed-forward width

ALIGNMENT_BYTES = 16
"""Alignment that the kernels require of a tensor, in bytes."""


def has_kernels(device: torch.device) -> bool:
    """Return whether our kernels run on `device`."""
    if device.type != "cuda" or not has_triton():
        return False
    return torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def use_kernels(decoder: Decoder, *, frozen: bool) -> None:
    """Run the operations between the matmuls of a native decoder in our kernels, where its device has them."""
    if not decoder.config.native or not has_kernels(decoder.norm.weight.device):
        return
    from engine.kernels.layer_functions import gated, rotated

    activation = decoder.config.kind.activation
    for layer in decoder.layers:
        if not isinstance(layer, Layer):
            continue
        if not frozen:
            train_in_few_passes(layer)
        if _norms_fit(decoder.config):
            layer.normed = normed
        layer.attention.rotate = rotated_in_place if frozen else rotated
        if isinstance(layer.mlp, FeedForward):
            layer.mlp.gated = partial(gated_in_place if frozen else gated, activation)
            layer.mlp.adds = frozen and type(layer.mlp.down) is nn.Linear


def _norms_fit(config: ModelConfig) -> bool:
    kind = config.kind
    return kind.has_pre_norms and not kind.has_post_norms and not kind.norm_offset


def normed(
    y_BTD: Tensor | None, x_BTD: Tensor, norm: RMSNorm, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return x + y in the dtype of x, and its norm in `dtype`."""
    from engine.kernels.layer_functions import normed as run

    return run(y_BTD, x_BTD, norm.weight, norm.eps, dtype)


def rotated_in_place(x_BTHE: Tensor, cos_XT1R: Tensor, sin_XT1R: Tensor) -> Tensor:
    """Compute what `engine.models.decoder.rotate` computes, and overwrite its input."""
    if x_BTHE.data_ptr() % ALIGNMENT_BYTES:
        return rotate(x_BTHE, cos_XT1R, sin_XT1R)
    from engine.kernels.layer_parts import rotate_into

    x_MHE, pairs = x_BTHE.flatten(0, 1), cos_XT1R.shape[-1]
    rotate_into(x_MHE, cos_XT1R.view(-1, pairs), sin_XT1R.view(-1, pairs), x_MHE)
    return x_BTHE


def gated_in_place(activation: str, gate_BTF: Tensor, up_BTF: Tensor) -> Tensor:
    """Return activation(gate) * up in the memory of `gate_BTF`."""
    if up_BTF.data_ptr() % ALIGNMENT_BYTES:
        return ACTIVATIONS[activation](gate_BTF).mul_(up_BTF)
    from engine.kernels.layer_parts import gate

    gate_MF = gate_BTF.flatten(0, -2)
    gate(gate_MF, up_BTF.flatten(0, -2), activation, gate_MF)
    return gate_BTF


def kernels_of(decoder: Decoder, dtype: torch.dtype, *, frozen: bool) -> list[Variant]:
    """Return every kernel that the layers launch after `use_kernels` for activations in `dtype`, by running the layers
    on meta tensors.
    """
    if not decoder.config.native or not has_kernels(decoder.norm.weight.device):
        return []
    from engine.kernels import layer_functions
    from engine.kernels.registry import REGISTRY

    config, weight_D = decoder.config, decoder.norm.weight
    heads, kv_heads, width = (
        *(config.num_attention_heads, config.num_key_value_heads),
        config.head_dim,
    )

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=not frozen)

    def run_backward(*outputs: Tensor) -> None:
        if not frozen:
            torch.autograd.backward([output.sum() for output in outputs])

    with REGISTRY.noting() as noted:
        if _norms_fit(config):
            norm_D = empty(config.hidden_size, dtype=weight_D.dtype).detach()
            norm_D.requires_grad = weight_D.requires_grad
            for y_BTD in (None, empty(1, 2, config.hidden_size)):
                x_BTD = empty(1, 2, config.hidden_size, dtype=weight_D.dtype)
                run_backward(*layer_functions.normed(y_BTD, x_BTD, norm_D, 1e-6, dtype))
        angles = [torch.empty(1, 2, 1, config.rotary_dim // 2, dtype=dtype, device="meta")] * 2
        inner, activation = config.intermediate_size, config.kind.activation
        if frozen:
            # Whether or not matmuls with the same input are joined.
            for row in (heads, kv_heads):
                for joined in (row, heads + 2 * kv_heads):
                    rotated_in_place(empty(1, 2, joined, width)[:, :, :row], *angles)
            for joined in (1, 2):
                gate_BTF = empty(1, 2, joined * inner)[..., :inner]
                gated_in_place(activation, gate_BTF, gate_BTF)
        else:
            for count in (heads, kv_heads):
                run_backward(layer_functions.rotated(empty(1, 2, count, width), *angles))
            run_backward(layer_functions.gated(activation, empty(1, 2, inner), empty(1, 2, inner)))
    return list(dict.fromkeys(noted))
