"""AdamW, and an update that a non-finite number cannot reach, decided where the number is.

A fused AdamW takes two numbers from the device, which were made for scaled losses and serve here:

    grad_scale     gradients are divided by it in the optimizer's own pass over them: clipping without
                   a pass of its own, by max(1, norm / clip_norm)
    found_inf      1 makes the pass change nothing, neither weights nor moments nor their count

So the host need not know whether a step is finite before it launches the next one.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.spec import TrainSection


def build_optimizer(
    student: nn.Module, train: TrainSection, device: torch.device
) -> torch.optim.AdamW:
    """AdamW with decay on matrices only; norms and biases are scales and offsets, which decay
    would bias towards 0.
    """
    matrices = [p for p in student.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in student.parameters() if p.requires_grad and p.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": train.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        fused=True,
    )


def update_if_finite(
    optimizer: torch.optim.Optimizer, loss: Tensor, norm: Tensor, *, clip_norm: float
) -> None:
    """One update with gradients of global norm `norm`, clipped to `clip_norm` (0 never clips), when
    loss and norm, both 0-d, are finite. Waits for nothing.
    """
    told = cast(Any, optimizer)
    told.grad_scale = ((norm + 1e-6) / clip_norm).clamp(min=1.0) if clip_norm > 0 else None
    told.found_inf = (~(torch.isfinite(loss) & torch.isfinite(norm))).float()
    optimizer.step()
