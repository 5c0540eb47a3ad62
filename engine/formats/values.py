"""Finds suspicious values in a weight file (ST14) by reading all of them.

    NaN         31.02% of a tensor is NaN: one of them makes every later loss NaN
    infinite    the same for infinity
    zero        every value is 0: a head that was never copied, a layer that was pruned
    constant    every value is the same, and not 0

None of the four makes the file invalid: norms start as all ones and biases as all zeros, so an
untrained model is full of both. The loader decides; it refuses NaN and infinity in a teacher
(`finite` is False for these two).

Memory: one slice of rows at a time, dequantised to float32 if the data is quantised.
"""

# Shapes: R rows in a slice, N values in a row

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.formats.weights import WeightFile

if TYPE_CHECKING:
    from torch import Tensor

    from engine.quant.tensor import QuantTensor

_SLICE_VALUES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueProblem:
    """A tensor whose values are not those of a trained weight."""

    tensor: str
    text: str
    """The finding with its code, as a warning line."""
    finite: bool
    """False if the tensor holds NaN or infinity."""


def check_values(weights: WeightFile, names: Iterable[str] | None = None) -> list[ValueProblem]:
    """Read every value of the named tensors (default: all), and return at most one finding per
    tensor.

    Tensors with fewer than two values are skipped: a single number is always constant.
    """
    found = []
    for name in weights.tensors if names is None else names:
        problem = _check(f"{weights.path}, tensor {json.dumps(name)}", name, weights.get(name))
        if problem is not None:
            found.append(problem)
    return found


def _check(where: str, name: str, tensor: Tensor | QuantTensor) -> ValueProblem | None:
    total = math.prod(tensor.shape)
    if total < 2:
        return None
    nan = infinite = 0
    low, high = math.inf, -math.inf
    for values_RN in _slices(tensor):
        # Two numbers distinguish the usual slice from one whose values must be counted.
        least, most = (float(bound) for bound in values_RN.aminmax())
        if not (math.isfinite(least) and math.isfinite(most)):
            nan += int(values_RN.isnan().sum())
            infinite += int(values_RN.isinf().sum())
        low, high = min(low, least), max(high, most)
    if nan or infinite:
        parts = [(nan, "NaN"), (infinite, "infinite")]
        said = " and ".join(f"{count / total:.2%} is {what}" for count, what in parts if count)
        said += f" ({nan + infinite:,} of {total:,} values)"
        return ValueProblem(tensor=name, text=f"ST14 {where}: {said}", finite=False)
    if low != high:
        return None
    said = f"all {total:,} values are {low:g}"
    return ValueProblem(tensor=name, text=f"ST14 {where}: {said}", finite=True)


def _slices(tensor: Tensor | QuantTensor) -> Iterator[Tensor]:
    """Yield the tensor as floats in slices of about four million values; complex numbers as pairs.

    Yields nothing for 4-bit floats, which torch stores in pairs and cannot convert.
    """
    import torch

    rows = max(1, _SLICE_VALUES // max(1, tensor.shape[-1]))
    if isinstance(tensor, torch.Tensor):
        if tensor.dtype is torch.float4_e2m1fn_x2:
            return
        values_RN = tensor.reshape(-1, tensor.shape[-1])
        ordered = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        for begin in range(0, len(values_RN), rows):
            part = values_RN[begin : begin + rows]
            if part.is_complex():
                part = torch.view_as_real(part)
            # Not every dtype can be ordered on the CPU; fp64 holds all their values.
            yield part if part.dtype in ordered else part.to(torch.float64)
        return
    blocks_RB = tensor.blocks.reshape(-1, tensor.blocks.shape[-1])
    for begin in range(0, len(blocks_RB), rows):
        part = blocks_RB[begin : begin + rows]
        yield replace(tensor, blocks=part, shape=(len(part), tensor.shape[-1])).dequantize()
