"""The one seam between backends: the decoder's linear layers.

Every teacher and student runs the same `Decoder`. A backend may make other layers for it, or put
others in their place once a file says what it holds (`engine.models.load_packed`); it changes
nothing else. A second forward pass would be a second model to get wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn


class MakeLinear(Protocol):
    """Makes one layer y = x W^T + b from (..., in_features) to (..., out_features)."""

    def __call__(self, in_features: int, out_features: int, bias: bool) -> nn.Module: ...


def project(x: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
    """The outputs of layers that have the same input. A backend that does them as one product gives
    its first layer a method `together`.
    """
    together: Any = getattr(layers[0], "together", None)
    if together is not None:
        outputs: Sequence[Tensor] = together(x, layers[1:])
        return outputs
    return [layer(x) for layer in layers]


def dense_linear(in_features: int, out_features: int, bias: bool) -> nn.Module:
    """Weights as plain floats: what is trained, and what a dequantized teacher runs."""
    return nn.Linear(in_features, out_features, bias=bias)
