"""How far the training is: the steps that are left where a framework says so, else the batch of the running pass
over the data.
"""

from __future__ import annotations

import math
import weakref
from typing import Any


class Progress:
    """What a step's line says of it: only what is known."""

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
        """A framework is going to do so many steps after step `step`."""
        self._total_steps = None if left is None or left < 0 else step + left

    def begin(self, done: int) -> None:
        """A training begins after `done` steps of the one before: what was planned is counted from here."""
        left = None if self._total_steps is None else self._total_steps - done
        self._total_steps = left if left is not None and left > 0 else None

    def batch_fetched(self, iterator: Any) -> None:
        """A data loader has handed out a batch of its pass."""
        if self._iterator is None or self._iterator() is not iterator:
            self._iterator = weakref.ref(iterator)
            self._batches = _length(iterator)
        at = getattr(iterator, "_num_yielded", None)
        known = isinstance(at, int) and self._batches is not None and at <= self._batches
        self._fetched = {"batch": at, "batches": self._batches} if known else {}  # type: ignore[dict-item]

    def trained_on(self) -> None:
        """A backward pass begins: the pass of the last batch is one of the training's."""
        self._trained_on = self._fetched


def _length(iterator: Any) -> int | None:
    """Batches of a pass; None where the data does not know its length."""
    try:
        return len(iterator)
    except Exception:  # noqa: BLE001  a stream has no length, and a length may be a function of the script's
        return None


def left_of_trainer(state: Any) -> int | None:
    """Steps that a Trainer of transformers is going to do, from its state between two steps."""
    most, done = getattr(state, "max_steps", None), getattr(state, "global_step", None)
    return most - done if isinstance(most, int) and isinstance(done, int) and most > 0 else None


def left_of_lightning(trainer: Any) -> int | None:
    """Steps that a Trainer of Lightning is going to do, from its attributes in front of a batch: to `max_steps` or to
    the end of `max_epochs`, whichever comes first."""
    module = getattr(trainer, "lightning_module", None)
    done = getattr(trainer, "global_step", None)
    # Where the script steps its optimizers itself, each of them is counted.
    if not getattr(module, "automatic_optimization", False) or not isinstance(done, int):
        return None
    ends = []
    most, passes = getattr(trainer, "max_steps", None), getattr(trainer, "max_epochs", None)
    if isinstance(most, int) and most >= 0:
        ends.append(most)
    batches = getattr(trainer, "num_training_batches", math.inf)
    each = getattr(trainer, "accumulate_grad_batches", None)
    if isinstance(passes, int) and passes >= 0 and isinstance(batches, int) and each:
        ends.append(passes * math.ceil(batches / each))
    return min(ends) - done if ends else None
