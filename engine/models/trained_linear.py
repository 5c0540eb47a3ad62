"""Train dense layers with fewer passes over memory than torch: y_i = x W_i^T + b_i, with x in 16 bits and W in fp32.

    dx    = sum_i dy_i W_i      each matmul adds to the sum in fp32 and rounds it
    dW_i  = dy_i^T x            the fp32 accumulator of the tensor cores

Under autocast torch rounds each dW to 16 bits, and another pass converts it to fp32. Torch also writes the dx of each
layer, and another pass adds them. The forward pass is bit-identical to torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.models.decoder import matmul_dtype

# Shapes: M rows of all dimensions but the last, K columns, N rows of a weight


class _Matmuls(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights_and_biases: Tensor | None) -> tuple[Tensor, ...]:
        pairs = list(zip(weights_and_biases[::2], weights_and_biases[1::2], strict=True))
        weights = [weight.to(x.dtype) for weight, _ in pairs if weight is not None]
        biases = [None if bias is None else bias.to(x.dtype) for _, bias in pairs]
        ctx.save_for_backward(x, *weights)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in weights_and_biases]
        return tuple(F.linear(x, *pair) for pair in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        x_MK, dx_MK = x.reshape(-1, x.shape[-1]), None
        gradients: list[Tensor | None] = []
        for index, (weight_NK, dy_i) in enumerate(zip(weights, dy, strict=True)):
            dy_MN = dy_i.reshape(-1, dy_i.shape[-1])
            needs_gradient, dtype = ctx.needs_input_grad[1 + 2 * index :], ctx.dtypes[2 * index]
            if ctx.needs_input_grad[0]:
                dx_MK = dy_MN @ weight_NK if dx_MK is None else dx_MK.addmm_(dy_MN, weight_NK)
            gradients.append(matmul(dy_MN.t(), x_MK, dtype) if needs_gradient[0] else None)
            gradients.append(
                dy_MN.sum(0, dtype=ctx.dtypes[2 * index + 1]) if needs_gradient[1] else None
            )
        return None if dx_MK is None else dx_MK.view(x.shape), *gradients


def matmul(left_NM: Tensor, right_MK: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matmul in `dtype`. If `dtype` is wider than the operands', the result is the unrounded accumulator."""
    if left_NM.dtype == dtype or not left_NM.is_cuda:
        return (left_NM @ right_MK).to(dtype)
    return torch.mm(left_NM, right_MK, out_dtype=dtype)


class TrainedLinear(nn.Linear):
    """An `nn.Linear` whose class was replaced (`train_in_few_passes`)."""

    def forward(self, x: Tensor) -> Tensor:
        return self.together(x, ())[0]

    def together(self, x: Tensor, others: Sequence[nn.Module]) -> Sequence[Tensor]:
        """Return this layer's output and those of `others`, which have the same input."""
        tensors: list[Tensor | None] = []
        for layer in (self, *others):
            if not isinstance(layer, TrainedLinear):
                return [self(x), *(other(x) for other in others)]
            tensors += [layer.weight, layer.bias]
        x = x.to(matmul_dtype(x))
        with torch.autocast(x.device.type, enabled=False):
            outputs: tuple[Tensor, ...] = _Matmuls.apply(x, *tensors)  # type: ignore[no-untyped-call]
        return outputs


def train_in_few_passes(layer: nn.Module) -> None:
    """Make each `nn.Linear` inside `layer` a `TrainedLinear`; subclasses, such as adapters, are left unchanged."""
    for module in layer.modules():
        if type(module) is nn.Linear:
            module.__class__ = TrainedLinear
