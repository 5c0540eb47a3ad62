"""Compute the remaining steps of a training from a framework's plan."""

from __future__ import annotations

import math
from typing import Any


def steps_left_of_trainer(state: Any) -> int | None:
    """Return the remaining steps of a transformers Trainer from its state between two steps; None if unknown."""
    max_steps, done = getattr(state, "max_steps", None), getattr(state, "global_step", None)
    return (
        max_steps - done
        if isinstance(max_steps, int) and isinstance(done, int) and max_steps > 0
        else None
    )


def steps_left_of_lightning(trainer: Any) -> int | None:
    """Return the remaining steps of a Lightning Trainer from its attributes before a batch: until `max_steps` or until
    the end of `max_epochs`, whichever is first; None if unknown."""
    module = getattr(trainer, "lightning_module", None)
    done = getattr(trainer, "global_step", None)
    # With manual optimization, `global_step` counts the steps of each optimizer.
    if not getattr(module, "automatic_optimization", False) or not isinstance(done, int):
        return None
    ends = []
    max_steps, epochs = getattr(trainer, "max_steps", None), getattr(trainer, "max_epochs", None)
    if isinstance(max_steps, int) and max_steps >= 0:
        ends.append(max_steps)
    batches = getattr(trainer, "num_training_batches", math.inf)
    batches_per_step = getattr(trainer, "accumulate_grad_batches", None)
    if isinstance(epochs, int) and epochs >= 0 and isinstance(batches, int) and batches_per_step:
        ends.append(epochs * math.ceil(batches / batches_per_step))
    return min(ends) - done if ends else None
