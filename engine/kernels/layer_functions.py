"""Define the operations between a decoder layer's matmuls as functions with gradients (`engine.kernels.layer_parts`).

    normed      x, y -> x + y, RMS norm of it
    gated       gate, up -> activation(gate) * up
    rotated     x, angles -> x rotated

They keep for the backward pass their inputs, which the matmuls around them keep too, the sum x + y, and one number per
row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.kernels import layer_parts
from engine.kernels.layer_parts import PARTS

# Shapes: B rows, T tokens, D model width, F feed-forward width, H heads, E width of a head, R pairs of it that RoPE
# rotates, X = B with documents and 1 without, P parts


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y_BTD: Tensor | None,
        x_BTD: Tensor,
        weight_D: Tensor,
        eps: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        x_BTD = x_BTD.contiguous()
        kept_BTD = x_BTD if y_BTD is None else torch.empty_like(x_BTD)
        out_BTD = torch.empty_like(x_BTD, dtype=dtype)
        rstd_M = x_BTD.new_empty(x_BTD.shape[:-1].numel(), dtype=torch.float32)
        y_MD = None if y_BTD is None else _rows(y_BTD)
        layer_parts.add_norm(
            y_MD, _rows(x_BTD), weight_D, eps, _rows(kept_BTD), _rows(out_BTD), rstd_M
        )
        ctx.save_for_backward(kept_BTD, weight_D, rstd_M)
        ctx.y_dtype = None if y_BTD is None else y_BTD.dtype
        ctx.set_materialize_grads(False)
        return kept_BTD, out_BTD

    @staticmethod
    def backward(ctx: Any, dkept_BTD: Tensor | None, dout_BTD: Tensor | None) -> Any:
        kept_BTD, weight_D, rstd_M = ctx.saved_tensors
        if dout_BTD is None:
            dy_BTD = None if ctx.y_dtype is None or dkept_BTD is None else dkept_BTD.to(ctx.y_dtype)
            return dy_BTD, dkept_BTD, None, None, None
        dx_BTD = torch.empty_like(kept_BTD)
        dy_BTD = None if ctx.y_dtype is None else torch.empty_like(kept_BTD, dtype=ctx.y_dtype)
        dweight_PD = None
        if ctx.needs_input_grad[2]:
            dweight_PD = rstd_M.new_empty(PARTS, len(weight_D))
        layer_parts.add_norm_backward(
            _rows(dout_BTD),
            None if dkept_BTD is None else _rows(dkept_BTD),
            _rows(kept_BTD),
            weight_D,
            rstd_M,
            _rows(dx_BTD),
            None if dy_BTD is None else _rows(dy_BTD),
            dweight_PD,
        )
        dweight_D = None if dweight_PD is None else dweight_PD.sum(0).to(weight_D.dtype)
        return dy_BTD, dx_BTD, dweight_D, None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_BTF: Tensor, up_BTF: Tensor, activation: str) -> Tensor:
        gate_BTF, up_BTF = gate_BTF.contiguous(), up_BTF.contiguous()
        ctx.save_for_backward(gate_BTF, up_BTF)
        ctx.activation = activation
        out_BTF = torch.empty_like(gate_BTF)
        layer_parts.gate(_rows(gate_BTF), _rows(up_BTF), activation, _rows(out_BTF))
        return out_BTF

    @staticmethod
    def backward(ctx: Any, dout_BTF: Tensor) -> Any:
        gate_BTF, up_BTF = ctx.saved_tensors
        found = layer_parts.gate_backward(
            _rows(gate_BTF), _rows(up_BTF), _rows(dout_BTF), ctx.activation
        )
        return *(each_MF.view(gate_BTF.shape) for each_MF in found), None


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTHE: Tensor, cos_XT1R: Tensor, sin_XT1R: Tensor) -> Tensor:
        ctx.save_for_backward(cos_XT1R, sin_XT1R)
        return _rotated(x_BTHE, cos_XT1R, sin_XT1R, back=False)

    @staticmethod
    def backward(ctx: Any, dout_BTHE: Tensor) -> Any:
        return _rotated(dout_BTHE, *ctx.saved_tensors, back=True), None, None


def _rotated(x_BTHE: Tensor, cos_XT1R: Tensor, sin_XT1R: Tensor, *, back: bool) -> Tensor:
    x_BTHE, pairs = x_BTHE.contiguous(), cos_XT1R.shape[-1]
    whole = 2 * pairs == x_BTHE.shape[-1]
    out_BTHE = torch.empty_like(x_BTHE) if whole else x_BTHE.clone()
    cos_PR, sin_PR = (each.reshape(-1, pairs) for each in (cos_XT1R, sin_XT1R))
    layer_parts.rotate_into(x_BTHE.flatten(0, 1), cos_PR, sin_PR, out_BTHE.flatten(0, 1), back=back)
    return out_BTHE


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def normed(
    y_BTD: Tensor | None, x_BTD: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return x + y in the dtype of x, and its RMS norm in `dtype`. Without y, the sum is x itself."""
    found: tuple[Tensor, Tensor] = _Normed.apply(y_BTD, x_BTD, weight_D, eps, dtype)  # type: ignore[no-untyped-call]
    return found


def gated(activation: str, gate_BTF: Tensor, up_BTF: Tensor) -> Tensor:
    """Return activation(gate) * up."""
    out_BTF: Tensor = _Gated.apply(gate_BTF, up_BTF, activation)  # type: ignore[no-untyped-call]
    return out_BTF


def rotated(x_BTHE: Tensor, cos_XT1R: Tensor, sin_XT1R: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + R]) of the first 2 R numbers of a head by its angle."""
    out_BTHE: Tensor = _Rotated.apply(x_BTHE, cos_XT1R, sin_XT1R)  # type: ignore[no-untyped-call]
    return out_BTHE
