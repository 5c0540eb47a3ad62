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
    problems = []
    for name in weights.tensors if names is None else names:
        problem = _check(f"{weights.path}, tensor {json.dumps(name)}", name, weights.get(name))
        if problem is not None:
            problems.append(problem)
    return problems


def _check(where: str, name: str, tensor: Tensor | QuantTensor) -> ValueProblem | None:
    total = math.prod(tensor.shape)
    if total < 2:
        return None
    nan = infinite = 0
    low, high = math.inf, -math.inf
    for values_RN in _slices(tensor):
        # Two numbers distinguish the usual slice from one whose values must be counted.
        smallest, largest = (float(bound) for bound in values_RN.aminmax())
        if not (math.isfinite(smallest) and math.isfinite(largest)):
            nan += int(values_RN.isnan().sum())
            infinite += int(values_RN.isinf().sum())
        low, high = min(low, smallest), max(high, largest)
    if nan or infinite:
        counts = [(nan, "NaN"), (infinite, "infinite")]
        text = " and ".join(f"{count / total:.2%} is {kind}" for count, kind in counts if count)
        text += f" ({nan + infinite:,} of {total:,} values)"
        return ValueProblem(tensor=name, text=f"ST14 {where}: {text}", finite=False)
    if low != high:
        return None
    text = f"all {total:,} values are {low:g}"
    return ValueProblem(tensor=name, text=f"ST14 {where}: {text}", finite=True)


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
            values = values_RN[begin : begin + rows]
            if values.is_complex():
                values = torch.view_as_real(values)
            # Not every dtype can be ordered on the CPU; fp64 holds all their values.
            yield values if values.dtype in ordered else values.to(torch.float64)
        return
    blocks_RB = tensor.blocks.reshape(-1, tensor.blocks.shape[-1])
    for begin in range(0, len(blocks_RB), rows):
        values = blocks_RB[begin : begin + rows]
        yield replace(tensor, blocks=values, shape=(len(values), tensor.shape[-1])).dequantize()
