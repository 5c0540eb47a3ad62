"""Layers in blocks as one operation each, so that torch.compile can go around them.

A `PackedLinear` launches kernels of ours and writes into a scratch that all layers share; a compiler
that traced into it would find pointers and Python state. As an operation of torch's library it has a
shape and nothing else: what is between two of them (norms, rotations, silu(gate) * up, residuals)
becomes a few kernels. What it computes is `engine.kernels.linear`, unchanged.

The codes travel as tensors, so that one compilation serves all layers whose matrices have the same
types: a Q4_K_M file has two kinds of layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.kernels.dequantize import dequantize_rows
from engine.kernels.linear import Scratch, packed_linear
from engine.models.decoder import Decoder
from engine.models.packed import PackedLinear
from engine.quant.blocks import BLOCK_TYPES
from engine.quant.planes import PackedMatrix

# Shapes: M rows of activations, N rows of all weights together

_SCRATCHES: dict[int, Scratch] = {}
"""By a number, which is what an operation can be given. One a device and dtype."""


@torch.library.custom_op("apr::packed_products", mutates_args=())
def packed_products(
    x: Tensor,
    data: Sequence[Tensor],
    types: str,
    rows: Sequence[int],
    bias: Tensor | None,
    scratch: int,
    kernel: str,
) -> Tensor:
    """x (..., K) times each matrix, its outputs side by side; `types` are names with commas."""
    room, columns = _SCRATCHES[scratch], x.shape[-1]
    weights = [
        PackedMatrix(BLOCK_TYPES[name], count, columns, part)
        for name, count, part in zip(types.split(","), rows, data, strict=True)
    ]
    together = sum(rows)
    if len(weights) > 1 and room.fitting(together, columns) == together and kernel != "fused":
        joined_NK = room.take(together, columns)
        for weight, part_NK in zip(weights, torch.split(joined_NK, list(rows)), strict=True):
            dequantize_rows(weight, part_NK, 0, weight.rows)
        return F.linear(x, joined_NK, bias)
    biases = [None] * len(weights) if bias is None else torch.split(bias, list(rows))
    outputs = [
        packed_linear(x, weight, part, room, kernel=kernel)  # type: ignore[arg-type]
        for weight, part in zip(weights, biases, strict=True)
    ]
    return torch.cat(outputs, dim=-1)


@packed_products.register_fake
def _shape(
    x: Tensor,
    data: Sequence[Tensor],
    types: str,
    rows: Sequence[int],
    bias: Tensor | None,
    scratch: int,
    kernel: str,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(rows))


class OpaqueLinear(PackedLinear):
    """A `PackedLinear` that a compiler sees as one operation."""

    def __init__(self, layer: PackedLinear) -> None:
        super().__init__(layer.packed, layer.scratch, kernel=layer.kernel)
        self.register_buffer("bias", layer.bias)
        self.number = id(layer.scratch)
        _SCRATCHES[self.number] = layer.scratch
        self.type_name = layer.packed.type.name
        self.rows = layer.packed.rows

    def forward(self, x: Tensor) -> Tensor:
        return _products(x, [self], self.bias)

    def together(self, x: Tensor, others: Sequence[nn.Module]) -> Sequence[Tensor]:
        layers = [self, *(layer for layer in others if isinstance(layer, OpaqueLinear))]
        known = [layer.bias for layer in layers if layer.bias is not None]
        if len(layers) <= len(others) or len(known) not in (0, len(layers)):
            return [self(x), *(layer(x) for layer in others)]
        out = _products(x, layers, torch.cat(known) if known else None)
        return torch.split(out, [layer.rows for layer in layers], dim=-1)


def _products(x: Tensor, layers: Sequence[OpaqueLinear], bias: Tensor | None) -> Tensor:
    first = layers[0]
    out: Tensor = packed_products(
        x,
        [layer.data for layer in layers],
        ",".join(layer.type_name for layer in layers),
        [layer.rows for layer in layers],
        bias,
        first.number,
        first.kernel,
    )
    return out


def make_opaque(decoder: Decoder) -> None:
    """Puts an `OpaqueLinear` in the place of each `PackedLinear` of the layers."""
    for name, layer in list(decoder.layers.named_modules()):
        if isinstance(layer, PackedLinear):
            decoder.layers.set_submodule(name, OpaqueLinear(layer))
