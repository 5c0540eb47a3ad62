"""One optimizer step: as it is given to the device, while it is under way, and as the log, the checks
and the view know it.

Where the time of a step goes, by the device's own clock.

    data | teacher | student | loss | backward | optimizer        each from its mark to the next

Marks are events on the stream: the device notes the time when it gets there, and nobody waits. They are
read when the step is known to be over, which is one step later where the next one was begun meanwhile.
The phases of a step then add up to the time from its first mark to its last; what lay between the end of
the step before and this one's first mark is `idle`: the device had nothing to do. That is known only of
a step that was begun while the one before was under way; after a pause it would be the pause.

What a teacher computes on a stream of its own is no phase: `teacher` is how long the step's own stream
waited for it. On a CPU marks are the host's clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.data.batches import Batch
from engine.log.events import StepDone
from engine.loss.objective import LARGEST_DZ_SUM, LOWEST_DIVERGENCE

PHASES = ("data", "teacher", "student", "loss", "backward", "optimizer")


class Ledger:
    """The marks of one step, from its beginning on."""

    def __init__(self, device: torch.device, before: Ledger | None) -> None:
        """`before` is the step before, when it was still under way."""
        self._cuda = device.type == "cuda"
        self._before = None if before is None else before._marks[-1][1]
        self._marks: list[tuple[str, Any]] = []

    def mark(self, phase: str) -> None:
        """What the device is given from now on belongs to `phase`."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append((phase, event))
        else:
            self._marks.append((phase, time.perf_counter()))

    def end(self) -> None:
        """The last mark of the step."""
        self.mark("")

    def wait(self) -> None:
        """Until the device is past the last mark: nothing that was given to it later is waited for."""
        if self._cuda:
            self._marks[-1][1].synchronize()

    def seconds(self) -> dict[str, float]:
        """Of each phase, and `idle` where it is known. Only after `wait`."""
        found: dict[str, float] = {}
        for (phase, begun), (_, ended) in zip(self._marks, self._marks[1:], strict=False):
            found[phase] = found.get(phase, 0.0) + self._between(begun, ended)
        if self._before is not None:
            found["idle"] = self._between(self._before, self._marks[0][1])
        return found

    def _between(self, begun: Any, ended: Any) -> float:
        if self._cuda:
            return float(begun.elapsed_time(ended)) / 1e3
        return float(ended - begun)


# Shapes: B rows, T tokens


class Given(NamedTuple):
    """A micro-batch on the device, and the position where it was taken."""

    batch: Batch
    position: int
    tokens_BT: Tensor
    documents_BT: Tensor


class UnderWay(NamedTuple):
    """A step that was launched."""

    ledger: Ledger
    numbers: Tensor
    """loss, ce, kd, agreement, how many ranks were asked to stop, gradient norm, lowest KL, largest
    sum of dz: there once the ledger's last mark is passed."""
    facts: dict[str, Any]
    """What the host knows of the Step already."""
    begun: float


class Step(StepDone, frozen=True, kw_only=True, tag="step"):
    """One optimizer step as it is logged, where every number is there. `kd`, `agreement` and `teacher_s` are None
    without a teacher in the objective.
    """

    loss: float
    ce: float
    lr: float
    grad_norm: float
    step_s: float
    data_s: float
    largest_dz_sum: float

    @property
    def updated(self) -> bool:
        """False when a non-finite number kept the weights as they were."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def broken_invariants(self, temperature: float) -> Iterator[str]:
        """What the loss says of this step that cannot be true, in words."""
        most = LARGEST_DZ_SUM * max(1.0, temperature)
        if self.lowest_kl is not None and self.lowest_kl < LOWEST_DIVERGENCE:
            yield (
                f"step {self.step}: a row's divergence is {self.lowest_kl:.2e} nats: "
                f"expected at least {LOWEST_DIVERGENCE:.0e}, which is rounding"
            )
        if self.largest_dz_sum > most:
            yield (
                f"step {self.step}: the gradients of a row's logits sum to {self.largest_dz_sum:.2e}: "
                f"expected at most {most:.0e}, which is rounding"
            )

    def non_finite(self) -> Iterator[tuple[str, float]]:
        """The fields of this step that are NaN or infinite."""
        for name in ("loss", "ce", "kd", "grad_norm"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                yield name, value
