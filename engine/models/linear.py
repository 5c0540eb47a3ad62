"""The one seam between backends: how the decoder makes its linear layers.

Every teacher and student runs the same `Decoder`; a backend that keeps its weights quantized hands
over its own `MakeLinear` and changes nothing else. A second forward pass would be a second model to
get wrong.
"""

from __future__ import annotations

from typing import Protocol

from torch import nn


class MakeLinear(Protocol):
    """Makes one layer y = x W^T + b from (..., in_features) to (..., out_features)."""

    def __call__(self, in_features: int, out_features: int, bias: bool) -> nn.Module: ...


def dense_linear(in_features: int, out_features: int, bias: bool) -> nn.Module:
    """Weights as plain floats: what is trained, and what a dequantized teacher runs."""
    return nn.Linear(in_features, out_features, bias=bias)
