"""Compute a frozen linear layer with a low-rank adapter, y = W x + b + s B A x, in few passes over activations.

    l    = s x A^T                           (N, S), for all layers with this input
    y_i  = base_i(x) + l_i B_i^T             the second matmul adds to the base's output
    g_i  = s dy_i B_i                        (N, S), for all layers
    dx   = sum_i dy_i W_i + g A              summed in the matmuls, in fp32, and rounded after each
    dA   = g^T x,  dB_i = dy_i^T l_i         in fp32, as the tensor cores sum them

Layers i with the same input (q, k, v; gate, up) are one autograd function, with one matmul for all their matrices A.

The base computes its output and its term of the input's gradient. It has one of three forms:

    FrozenLinear    weights as floats
    PackedLinear    weights in quantised blocks, dequantised again in the backward pass
    Fp8Linear       weights as 8-bit floats
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.models.decoder import matmul_dtype
from engine.models.fp8 import Fp8Linear
from engine.models.packed import PackedLinear
from engine.models.trained_linear import matmul
from engine.quant.planes import dequantize_rows_reference

# Shapes: N rows of x, I inputs, O outputs, R rank, S ranks of all layers together


class FrozenLinear(nn.Module):
    """y = x W^T + b with weights that are not trained."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight: Tensor
        self.bias: Tensor | None
        self.register_buffer("weight", linear.weight.detach())
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def add_input_gradient(self, dy_NO: Tensor, dx_NI: Tensor | None) -> Tensor:
        """Return dx + dy W, in the memory of `dx_NI` if there is one."""
        return dy_NO @ self.weight if dx_NI is None else dx_NI.addmm_(dy_NO, self.weight)


FrozenBase: TypeAlias = FrozenLinear | PackedLinear | Fp8Linear


class FrozenLayer(nn.Module):
    """A frozen linear layer without an adapter that passes a gradient to its input."""

    scale = 1.0
    """Factor of the adapter's output."""

    def __init__(self, base: FrozenBase) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return self.together(x, ())[0]

    def together(self, x: Tensor, others: Sequence[nn.Module]) -> Sequence[Tensor]:
        """Return this layer's output and those of `others`, which have the same input."""
        layers = [self, *(other for other in others if type(other) is type(self))]
        if len(layers) <= len(others):
            return [self(x), *(other(x) for other in others)]
        adapters = [parameter for layer in layers for parameter in layer.parameters()]
        x = x.to(matmul_dtype(x))
        with torch.autocast(x.device.type, enabled=False):
            outputs: tuple[Tensor, ...] = _Adapted.apply(layers, x, *adapters)  # type: ignore[no-untyped-call]
        return outputs

    def first_weight(self) -> float:
        """Return the weight in the first row and column, before any rounding to fp8."""
        base = self.base
        if isinstance(base, Fp8Linear):
            assert base.first is not None
            return base.first
        if isinstance(base, FrozenLinear):
            return float(base.weight[0, 0])
        first_1I = torch.empty(1, base.packed.columns, device=base.packed.data.device)
        dequantize_rows_reference(base.packed, first_1I, 0, 1)
        return float(first_1I[0, 0])


class LoraLinear(FrozenLayer):
    """A frozen linear layer with an adapter."""

    def __init__(self, base: FrozenBase, rank: int, scale: float) -> None:
        super().__init__(base)
        if isinstance(base, PackedLinear):
            (out_features, in_features), device = base.packed.shape, base.data.device
        else:
            weight = base.codes if isinstance(base, Fp8Linear) else base.weight
            (out_features, in_features), device = weight.shape, weight.device
        self.lora_A = nn.Parameter(torch.zeros(rank, in_features, device=device))
        self.lora_B = nn.Parameter(torch.zeros(out_features, rank, device=device))
        self.scale = scale


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layers: Sequence[FrozenLayer], x: Tensor, *adapters: Tensor
    ) -> tuple[Tensor, ...]:
        x_NI = x.reshape(-1, x.shape[-1])
        first, *others = (layer.base for layer in layers)
        # Do not join packed layers into one matmul: the next operations would copy slices of its output.
        outputs = (
            first.together(x_NI, others)
            if isinstance(first, Fp8Linear) and others
            else [base(x_NI) for base in (first, *others)]
        )
        ctx.layers, ctx.dtypes = layers, [adapter.dtype for adapter in adapters]
        if adapters:
            A_SI = torch.cat([A_RI.to(x.dtype) for A_RI in adapters[::2]])
            B_OR = [layer_B_OR.to(x.dtype) for layer_B_OR in adapters[1::2]]
            low_NS = (x_NI @ A_SI.t()).mul_(layers[0].scale)
            lows = low_NS.split_with_sizes([layer_B_OR.shape[1] for layer_B_OR in B_OR], dim=1)
            for out_NO, low_NR, layer_B_OR in zip(outputs, lows, B_OR, strict=True):
                out_NO.addmm_(low_NR, layer_B_OR.t())
            ctx.save_for_backward(x, low_NS, A_SI, *B_OR)
        return tuple(out_NO.view(*x.shape[:-1], -1) for out_NO in outputs)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        layers, dtypes = ctx.layers, ctx.dtypes
        dy_NO = [dy_i.reshape(-1, dy_i.shape[-1]) for dy_i in dy]
        dx_NI = None
        if ctx.needs_input_grad[1]:
            for layer_dy_NO, layer in zip(dy_NO, layers, strict=True):
                dx_NI = layer.base.add_input_gradient(layer_dy_NO, dx_NI)
        shape = (*dy[0].shape[:-1], -1)
        if not dtypes:
            return None, None if dx_NI is None else dx_NI.view(shape)
        x, low_NS, A_SI, *B_OR = ctx.saved_tensors
        ranks = [layer_B_OR.shape[1] for layer_B_OR in B_OR]
        dlow_NS = torch.cat(
            [layer_dy_NO @ layer_B_OR for layer_dy_NO, layer_B_OR in zip(dy_NO, B_OR, strict=True)],
            dim=1,
        )
        dlow_NS.mul_(layers[0].scale)
        if dx_NI is not None:
            dx_NI = dx_NI.addmm_(dlow_NS, A_SI).view(shape)
        dA_RI = matmul(dlow_NS.t(), x.reshape(-1, x.shape[-1]), dtypes[0]).split_with_sizes(ranks)
        lows = low_NS.split_with_sizes(ranks, dim=1)
        dB_OR = (
            matmul(layer_dy_NO.t(), low_NR, dtype)
            for layer_dy_NO, low_NR, dtype in zip(dy_NO, lows, dtypes[1::2], strict=True)
        )
        return (
            None,
            dx_NI,
            *(gradient for pair in zip(dA_RI, dB_OR, strict=True) for gradient in pair),
        )
