"""Measure the progress of the training: the steps left by a framework's plan, else the batch of the current epoch."""

from __future__ import annotations

import math
import weakref
from typing import Any

from .data import length_of


class Progress:
    """Known progress of the training, for the lines of its steps."""

    def __init__(self) -> None:
        self._total_steps: int | None = None
        self._iterator: Any = None
        self._batches: int | None = None
        self._fetched: dict[str, int] = {}
        self._trained_on: dict[str, int] = {}

    def of_step(self) -> dict[str, int]:
        total = {} if self._total_steps is None else {"total_steps": self._total_steps}
        return {**total, **self._trained_on}

    def planned(self, step: int, left: int | None) -> None:
        """Record that a framework will do `left` steps after step `step`; None if unknown."""
        self._total_steps = None if left is None or left < 0 else step + left

    def begin(self, done: int) -> None:
        """Begin a training after `done` steps of the previous one; the planned steps count from here."""
        left = None if self._total_steps is None else self._total_steps - done
        self._total_steps = left if left is not None and left > 0 else None

    def batch_fetched(self, iterator: Any) -> None:
        """Record a yielded batch."""
        if self._iterator is None or self._iterator() is not iterator:
            self._iterator = weakref.ref(iterator)
            self._batches = length_of(iterator)
        at = getattr(iterator, "_num_yielded", None)
        known = isinstance(at, int) and self._batches is not None and at <= self._batches
        self._fetched = {"batch": at, "batches": self._batches} if known else {}  # type: ignore[dict-item]

    def trained_on(self) -> None:
        """Record the begin of a backward pass: the last batch belongs to the training."""
        self._trained_on = self._fetched


def left_of_trainer(state: Any) -> int | None:
    """Return the steps left of a transformers Trainer, from its state between two steps; None if unknown."""
    most, done = getattr(state, "max_steps", None), getattr(state, "global_step", None)
    return most - done if isinstance(most, int) and isinstance(done, int) and most > 0 else None


def left_of_lightning(trainer: Any) -> int | None:
    """Return the steps left of a Lightning Trainer, from its attributes before a batch: to `max_steps` or the end of
    `max_epochs`, whichever comes first; None if unknown."""
    module = getattr(trainer, "lightning_module", None)
    done = getattr(trainer, "global_step", None)
    # With manual optimization, `global_step` counts the steps of each optimizer.
    if not getattr(module, "automatic_optimization", False) or not isinstance(done, int):
        return None
    ends = []
    most, epochs = getattr(trainer, "max_steps", None), getattr(trainer, "max_epochs", None)
    if isinstance(most, int) and most >= 0:
        ends.append(most)
    batches = getattr(trainer, "num_training_batches", math.inf)
    each = getattr(trainer, "accumulate_grad_batches", None)
    if isinstance(epochs, int) and epochs >= 0 and isinstance(batches, int) and each:
        ends.append(epochs * math.ceil(batches / each))
    return min(ends) - done if ends else None
