"""Freeze a decoder by turning its weights into buffers, and run layers with the same input as one
matmul.

`requires_grad_(False)` can be reverted, and `parameters()` would still pass the weights to an
optimizer. A buffer is not a parameter, and `requires_grad_()` of the module does not affect it.

**Joined layers**: q, k and v; gate and up. A matmul with few output columns uses a GPU badly (k and
v of a 7B model have 512 each), and each matmul reads its input again. The joined matrix exists
once: the layers hold views of its rows, under their own names, so that code that reads weights sees
the same model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.models.decoder import Decoder
from engine.models.names import TOGETHER

# Shapes: N rows of all joined weights, K columns


def freeze(decoder: Decoder) -> Decoder:
    """Freeze a decoder in place: set evaluation mode and turn every parameter into a buffer of the
    same name.
    """
    decoder.eval()
    for module in decoder.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            set_buffer(module, name, parameter.detach())
    return decoder


def set_buffer(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace the parameter or buffer `name` by `tensor`, as a buffer."""
    delattr(module, name)
    module.register_buffer(name, tensor)


class JoinedLinear(nn.Module):
    """The first of several frozen layers with the same input; it runs one matmul for all of them."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        weights = [_tensor(layer, "weight") for layer in layers]
        biases = [layer.bias for layer in layers]
        present = [bias for bias in biases if isinstance(bias, Tensor)]
        self.rows = [len(weight) for weight in weights]
        # Not buffers: the layers' own views are the ones that are hashed and counted.
        self.weight_NK = torch.cat(weights)
        self.bias_N = torch.cat(present) if present else None
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
    """Join the layers of a frozen decoder that have the same input, in place, except packed layers. While a
    group is joined, its weights are in memory twice.
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
