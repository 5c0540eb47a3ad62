"""Log NaN and infinite numbers of a run, and end a run that they make useless.

A step whose loss or gradient is not finite changes no weight (`engine.train.optimizer`), and ends the run unless
train.on_non_finite is skip. Weights with which a loss or norm is not finite are never saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NoReturn

from engine.errors import TrainingFailed
from engine.log.events import FAIL, NUMBER, Judged, StepDone, name_of_non_finite
from engine.train.to_events import Log


def non_finite(step: StepDone) -> Iterator[Judged]:
    """Yield an event for each number of a step that is NaN or infinite."""
    for name in ("loss", "ce", "kd", "grad_norm"):
        value = getattr(step, name)
        if value is not None and not math.isfinite(value):
            yield _non_finite_event(step.step, name, name_of_non_finite(value))


def _non_finite_event(step: int, name: str, value: str) -> Judged:
    return Judged(by=NUMBER, id=name, level=FAIL, text=value, step=step)


def stop_unless_finite(step: StepDone) -> None:
    """Raise TrainingFailed for a step that changed no weight because its loss or gradient is not finite."""
    if step.updated:
        return
    names = ", ".join(f"{event.id} is {event.text}" for event in non_finite(step))
    raise TrainingFailed(
        f"{names} at step {step.step}; the step did not change the weights",
        hint="check the steps before it; train.on_non_finite=skip would continue after it",
    )


def stop_for_weights(log: Log, step: int, name: str, value: float) -> NoReturn:
    """End a run in which `name` is not finite because of the weights, before a checkpoint of them is written."""
    shown = name_of_non_finite(value)
    log(_non_finite_event(step, name, shown))
    raise TrainingFailed(
        f"{name} is {shown} at step {step}: the weights are no longer usable, and no checkpoint holds them",
        hint="resume from the last checkpoint with a lower learning rate in a new run",
    )
