"""Defects of a step that begin late: the run passes its first minute and goes wrong afterwards.

They act on the steps after LATE, in whatever computes a step.
"""

# Shapes: B rows, T tokens, D width

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from engine.drills.planting import replaced
from engine.train.trainer import Trainer

LATE = 23
SCALE = 4.0


def rows_dropped_later() -> AbstractContextManager[None]:
    """All rows are in the loss, but only the last one of a micro-batch is in the gradient."""

    def make(hidden: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def spoilt(self: Trainer, *given: Any) -> Tensor:
            hidden_BTD = hidden(self, *given)
            if self.step < LATE:
                return hidden_BTD
            return torch.cat([hidden_BTD[:-1].detach(), hidden_BTD[-1:]])

        return spoilt

    return replaced(Trainer, "hidden", make)


def gradient_scaled_later() -> AbstractContextManager[None]:
    """Gradients are multiplied, as by a loss scale, and not divided again."""

    def make(forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        def spoilt(self: Trainer, *given: Any) -> Any:
            found = forward_backward(self, *given)
            if self.step >= LATE:
                for parameter in self.parameters:
                    if parameter.grad is not None:
                        parameter.grad.mul_(SCALE)
            return found

        return spoilt

    return replaced(Trainer, "_forward_backward", make)
