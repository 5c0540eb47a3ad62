"""Freezes a decoder by making its weights buffers, and joins layers with the same input into one
matmul.

`requires_grad_(False)` can be switched back, and `parameters()` still hands the weights to an
optimizer. A buffer is not a parameter, and `requires_grad_()` on the module does not reach it.

**Joined layers**: q, k and v; gate and up. A matmul with few output columns uses a GPU badly (k and
v of a 7B model have 512 each), and each matmul reads its input again. The joined matrix exists
once: the layers hold views of its rows, under their own names, so that code that reads weights sees
the same model.

**Kernels** between the matmuls: a frozen layer needs no intermediate values for gradients, so on a GPU with
Triton what torch computes in several kernels runs in one (`engine.kernels.layer_parts`), which rounds where they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.kernels.dequantize import has_triton
from engine.models.attention import LEAST_CAPABILITY
from engine.models.decoder import ACTIVATIONS, Attention, Decoder, FeedForward, rotate
from engine.models.names import TOGETHER

if TYPE_CHECKING:
    from engine.kernels.compiler import Variant

# Shapes: N rows of all joined weights, K columns, B rows, T tokens, H heads, E width of a head, R pairs of it that RoPE
# rotates, X = B with documents and 1 without, F feed-forward width

ALIGNMENT_BYTES = 16
"""Alignment of a tensor that a kernel takes."""


def freeze(decoder: Decoder) -> Decoder:
    """Freeze a decoder in place: set evaluation mode and turn every parameter into a buffer of the
    same name.
    """
    decoder.eval()
    for module in decoder.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            hold(module, name, parameter.detach())
    return decoder


def hold(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace the parameter or buffer `name` by `tensor`, as a buffer."""
    delattr(module, name)
    module.register_buffer(name, tensor)


class JoinedLinear(nn.Module):
    """The first of several frozen layers with the same input; it multiplies for all of them."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        weights = [_tensor(layer, "weight") for layer in layers]
        biases = [layer.bias for layer in layers]
        known = [bias for bias in biases if isinstance(bias, Tensor)]
        self.rows = [len(weight) for weight in weights]
        # Not buffers: the layers' own views are the ones that are hashed and counted.
        self.weight_NK = torch.cat(weights)
        self.bias_N = torch.cat(known) if known else None
        for layer, part_NK in zip(layers, torch.split(self.weight_NK, self.rows), strict=True):
            layer.register_buffer("weight", part_NK)
        if self.bias_N is not None:
            for layer, part_N in zip(layers, torch.split(self.bias_N, self.rows), strict=True):
                layer.register_buffer("bias", part_N)
        self.weight: Tensor
        self.bias: Tensor | None
        self.register_buffer("weight", self.weight_NK[: self.rows[0]])
        first_N = None if self.bias_N is None else self.bias_N[: self.rows[0]]
        self.register_buffer("bias", first_N)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def together(self, x: Tensor, others: Sequence[nn.Module]) -> Sequence[Tensor]:
        """Return this layer's output and those of `others`."""
        return torch.split(F.linear(x, self.weight_NK, self.bias_N), self.rows, dim=-1)


def _tensor(layer: nn.Module, name: str) -> Tensor:
    tensor = getattr(layer, name)
    assert isinstance(tensor, Tensor)
    return tensor


@torch.no_grad()
def join(decoder: Decoder) -> Decoder:
    """Join the layers of a frozen decoder that have the same input, in place; packed ones are left
    as they are. Holds one group twice while it is joined.
    """
    for layer in decoder.layers:
        join_layer(layer)
    return decoder


@torch.no_grad()
def join_layer(layer: nn.Module) -> None:
    """Join the layers with the same input in one decoder layer."""
    for group in TOGETHER:
        parts = [layer.get_submodule(name) for name in group]
        if all(type(part) is nn.Linear for part in parts):
            layer.set_submodule(group[0], JoinedLinear(parts))


def has_kernels(device: torch.device) -> bool:
    """Whether our kernels run on `device`."""
    if device.type != "cuda" or not has_triton():
        return False
    return torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def use_kernels(decoder: Decoder) -> None:
    """Join the layers of a frozen decoder and run what is between their matmuls in our kernels, in place, where its
    device has them.
    """
    if not has_kernels(decoder.norm.weight.device):
        return
    join(decoder)
    for layer in decoder.layers:
        attention, mlp = layer.attention, layer.mlp
        if isinstance(attention, Attention):
            attention.rotate = rotate_in_place
        if isinstance(mlp, FeedForward):
            mlp.open = partial(gate_in_place, decoder.config.kind.activation)


def kernels_of(decoder: Decoder) -> list[Variant]:
    """Return every kernel that `use_kernels` has the layers launch, whether or not their matmuls are joined."""
    if not has_kernels(decoder.norm.weight.device):
        return []
    from engine.kernels.layer_parts import gate_variant, turn_variant

    config, dtype = decoder.config, decoder.dtype
    heads, shared, width = (
        *(config.num_attention_heads, config.num_key_value_heads),
        config.head_dim,
    )
    found = [
        turn_variant(row * width, count, width, config.rotary_dim // 2, dtype)
        for count in (heads, shared)
        for row in (count, heads + 2 * shared)
    ]
    inner = config.intermediate_size
    return found + [
        gate_variant(inner, row, row, dtype, config.kind.activation) for row in (inner, 2 * inner)
    ]


def rotate_in_place(x_BTHE: Tensor, cos_XT1R: Tensor, sin_XT1R: Tensor) -> Tensor:
    """Compute what `engine.models.decoder.rotate` computes, and overwrite its input."""
    if x_BTHE.data_ptr() % ALIGNMENT_BYTES:
        return rotate(x_BTHE, cos_XT1R, sin_XT1R)
    from engine.kernels.layer_parts import turn

    pairs = cos_XT1R.shape[-1]
    turn(x_BTHE.flatten(0, 1), cos_XT1R.view(-1, pairs), sin_XT1R.view(-1, pairs))
    return x_BTHE


def gate_in_place(activation: str, gate_BTF: Tensor, up_BTF: Tensor) -> Tensor:
    """Return activation(gate) * up in the memory of `gate_BTF`."""
    if up_BTF.data_ptr() % ALIGNMENT_BYTES:
        return ACTIVATIONS[activation](gate_BTF).mul_(up_BTF)
    from engine.kernels.layer_parts import gate

    gate_MF = gate_BTF.flatten(0, -2)
    gate(gate_MF, up_BTF.flatten(0, -2), activation, gate_MF)
    return gate_BTF
