"""Compute y = x W^T + b with block-quantised W.

W is dequantised into a scratch buffer of the dtype of x, and the library's matmul does the rest. The
matmul's work grows with the rows M of x, and dequantisation does not: on an H200 it adds a fraction
of about 250 / M to the matmul's time. A fused kernel would instead unpack each code once for every
tile of rows.

The scratch is one tensor for all layers, as large as the largest weight or its limit. A larger
weight is processed in ranges of rows, and each range's matmul writes its columns of y. The scratch
is never reallocated, so a captured CUDA graph may hold its address.

A packed weight is frozen, and inputs that require a gradient are refused. Adapters of a frozen student compute the
gradient of their input themselves (`add_input_gradient`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.errors import InternalError
from engine.kernels.dequantize import dequantize_rows
from engine.quant.planes import PackedMatrix

# Shapes: M rows of x, K columns, N rows of W, C rows of W in the scratch

LIMIT_BYTES = 260 << 20
"""Maximum size of the scratch: gate and up of a 7B model together (259 MiB in bf16). Larger weights are processed in
ranges of rows of this size, at little cost. Ranges that fit in a GPU's L2 cache would cost more in the
matmul than they save.
"""
ROWS = 16
"""Multiple of rows at which each range begins, so that every plane is aligned there."""


class Scratch:
    """The buffer that weights are dequantised into, one per device and dtype.

    `reserve` is called for each weight when a model is built; the memory is allocated at the first
    use.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, *, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self.device = device
        self.dtype = dtype
        self._limit = limit_bytes // dtype.itemsize
        self._values = 0
        self._arena: Tensor | None = None
        self._taken: dict[tuple[int, int], Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes, allocated or not."""
        return self._values * self.dtype.itemsize

    def reserve(self, rows: int, columns: int) -> None:
        """Reserve space for a matrix, or for as many of its rows as the limit allows (at least 16)."""
        least = min(rows, ROWS) * columns
        values = max(least, min(rows * columns, self._limit))
        assert self._arena is None or values <= self._arena.numel(), (
            "it cannot grow once it is used"
        )
        self._values = max(self._values, values)

    def fitting(self, rows: int, columns: int) -> int:
        """Return how many rows of a matrix to dequantise at once."""
        fits = self._values // columns
        if fits >= rows:
            return rows
        assert fits >= ROWS, f"{rows} x {columns} was not reserved"
        # Ranges of equal length, so that the last matmul is not a small one.
        ranges = -(-rows // (fits // ROWS * ROWS))
        return -(-rows // ranges // ROWS) * ROWS

    def take(self, rows: int, columns: int) -> Tensor:
        """Return the first rows x columns values, contiguous. The next call overwrites them."""
        view_RC = self._taken.get((rows, columns))
        if view_RC is None:
            if self._arena is None:
                # A tensor created in inference mode could not be written outside of it.
                with torch.inference_mode(False):
                    self._arena = torch.empty(self._values, dtype=self.dtype, device=self.device)
            with torch.inference_mode(False):
                view_RC = self._arena[: rows * columns].view(rows, columns)
            self._taken[rows, columns] = view_RC
        return view_RC


def packed_linear(
    x: Tensor,
    weight: PackedMatrix,
    bias: Tensor | None,
    scratch: Scratch,
) -> Tensor:
    """Map x of shape (..., K) to (..., N), in the dtype of x, which must be the scratch's. Raises `InternalError` for
    an input that requires a gradient.
    """
    x_MK = _input(x, weight.columns, scratch)
    out_MN = _dequantized(x_MK, weight, bias, scratch)
    return out_MN.view(*x.shape[:-1], weight.rows)


def packed_linear_many(
    x: Tensor,
    weights: Sequence[PackedMatrix],
    bias: Tensor | None,
    scratch: Scratch,
) -> tuple[Tensor, ...]:
    """Apply `packed_linear` to one input with several weights; `bias`: their biases,
    concatenated.

    If all weights fit in the scratch together, one matmul is run and the results are views of its output.
    """
    x_MK = _input(x, weights[0].columns, scratch)
    rows = [weight.rows for weight in weights]
    together = sum(rows)
    if scratch.fitting(together, x_MK.shape[1]) < together:
        biases = [None] * len(rows) if bias is None else torch.split(bias, rows)
        return tuple(
            packed_linear(x, weight, part, scratch)
            for weight, part in zip(weights, biases, strict=True)
        )
    joined_NK = scratch.take(together, x_MK.shape[1])
    for weight, part_NK in zip(weights, torch.split(joined_NK, rows), strict=True):
        dequantize_rows(weight, part_NK, 0, weight.rows)
    return torch.split(F.linear(x, joined_NK, bias), rows, dim=-1)


def add_input_gradient(
    dy_MN: Tensor, weight: PackedMatrix, scratch: Scratch, dx_MK: Tensor | None
) -> Tensor:
    """Return dx + dy W, in the memory of `dx_MK` if there is one. The weight is dequantised in slices of as many rows
    as the scratch holds."""
    step = scratch.fitting(weight.rows, weight.columns)
    for first in range(0, weight.rows, step):
        count = min(step, weight.rows - first)
        weight_CK = scratch.take(count, weight.columns)
        dequantize_rows(weight, weight_CK, first, count)
        dy_MC = dy_MN[:, first : first + count]
        dx_MK = dy_MC @ weight_CK if dx_MK is None else dx_MK.addmm_(dy_MC, weight_CK)
    assert dx_MK is not None, "no matrix is without rows"
    return dx_MK


def _input(x: Tensor, columns: int, scratch: Scratch) -> Tensor:
    """Check x and return it as a matrix."""
    if x.requires_grad and torch.is_grad_enabled():
        raise InternalError("packed linear: expected inputs without gradient, found requires_grad")
    assert x.shape[-1] == columns and x.dtype == scratch.dtype, (x.shape, x.dtype)
    return x.reshape(-1, columns)


def _dequantized(
    x_MK: Tensor, weight: PackedMatrix, bias: Tensor | None, scratch: Scratch
) -> Tensor:
    step = scratch.fitting(weight.rows, weight.columns)
    if step == weight.rows:
        weight_NK = scratch.take(weight.rows, weight.columns)
        dequantize_rows(weight, weight_NK, 0, weight.rows)
        return F.linear(x_MK, weight_NK, bias)
    out_MN = x_MK.new_empty(len(x_MK), weight.rows)
    for first in range(0, weight.rows, step):
        count = min(step, weight.rows - first)
        weight_CK = scratch.take(count, weight.columns)
        dequantize_rows(weight, weight_CK, first, count)
        out_MC = out_MN[:, first : first + count]
        if bias is None:
            torch.mm(x_MK, weight_CK.t(), out=out_MC)
        else:
            torch.addmm(bias[first : first + count], x_MK, weight_CK.t(), out=out_MC)
    return out_MN
