"""Time that training waits for something beside it: rows that are gathered too slowly while the next step's batch is
fetched ahead, something that is called after every step, a log on a slow disk, and evaluations between the steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from engine.data.batches import Batch, Batches
from engine.drills.planting import replaced
from engine.log.events import StepDone
from engine.log.write import LogWriter
from engine.train import loop
from engine.train.step import StepObserver
from engine.train.trainer import Trainer

EVALUATED_S = 3.0
"""Of each evaluation."""
WAIT_S = 0.75
"""Seconds of each step, of which the short run of a drill has some tenths of its own."""


def rows_slow_ahead() -> AbstractContextManager[None]:
    """Every batch but the first is fetched ahead, behind the backward pass of the step before."""

    def make(take: Callable[..., Batch]) -> Callable[..., Batch]:
        def spoilt(self: Batches, position: int, rows: int) -> Batch:
            if position:
                time.sleep(WAIT_S)
            return take(self, position, rows)

        return spoilt

    return replaced(Batches, "take", make)


class _Slow(StepObserver):
    def updated(self, step: int) -> None:
        time.sleep(WAIT_S)


def observer_slow() -> AbstractContextManager[None]:
    def make(begin: Callable[..., None]) -> Callable[..., None]:
        def spoilt(self: Trainer, **parts: Any) -> None:
            begin(self, **parts)
            self.observers = (*self.observers, _Slow())

        return spoilt

    return replaced(Trainer, "__init__", make)


def log_slow() -> AbstractContextManager[None]:
    def make(write: Callable[..., Any]) -> Callable[..., Any]:
        def spoilt(self: LogWriter, event: Any) -> Any:
            if isinstance(event, StepDone):
                time.sleep(WAIT_S)
            return write(self, event)

        return spoilt

    return replaced(LogWriter, "write", make)


def evaluation_slow() -> AbstractContextManager[None]:
    def make(evaluate: Callable[..., Any]) -> Callable[..., Any]:
        def spoilt(*given: Any, **named: Any) -> Any:
            time.sleep(EVALUATED_S)
            return evaluate(*given, **named)

        return spoilt

    return replaced(loop, "heldout_loss", make)
