"""What a frozen decoder is: its weights are buffers, and layers with one input may be one product.

`requires_grad_(False)` is a switch, and can be switched back; `parameters()` still hands the weights
to an optimizer. A buffer is neither a parameter nor reached by `requires_grad_()` on the module.

**Joined layers**: q, k and v; gate and up. A matrix product of few columns fills a GPU badly (k and v of
a 7B model have 512 each), and each product reads its input again. The joined matrix exists once: the
layers hold views of its rows, under their own names, so that whatever looks at weights sees the same
model.
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
    """The same decoder, in place: in evaluation mode, and every parameter a buffer of its name."""
    decoder.eval()
    for module in decoder.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            hold(module, name, parameter.detach())
    return decoder


def hold(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Puts `tensor` in the place of the parameter or buffer `name`, as a buffer."""
    delattr(module, name)
    module.register_buffer(name, tensor)


class JoinedLinear(nn.Module):
    """The first of several frozen layers with one input; multiplies for all of them."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        weights = [_tensor(layer, "weight") for layer in layers]
        biases = [layer.bias for layer in layers]
        known = [bias for bias in biases if isinstance(bias, Tensor)]
        self.rows = [len(weight) for weight in weights]
        # Not buffers: what is hashed and counted are the layers' own parts.
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
        """This layer's output and those of `others`."""
        return torch.split(F.linear(x, self.weight_NK, self.bias_N), self.rows, dim=-1)


def _tensor(layer: nn.Module, name: str) -> Tensor:
    tensor = getattr(layer, name)
    assert isinstance(tensor, Tensor)
    return tensor


@torch.no_grad()
def join(decoder: Decoder) -> Decoder:
    """Joins the layers of a frozen decoder that have one input, in place; packed ones stay as they
    are. Holds one group twice for a moment.
    """
    for layer in decoder.layers:
        join_layer(layer)
    return decoder


@torch.no_grad()
def join_layer(layer: nn.Module) -> None:
    """The same of one layer."""
    for group in TOGETHER:
        parts = [layer.get_submodule(name) for name in group]
        if all(type(part) is nn.Linear for part in parts):
            layer.set_submodule(group[0], JoinedLinear(parts))
