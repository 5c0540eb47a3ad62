"""One optimizer step: its inputs on the device, the step in flight, and the record of a finished one.

`Ledger` measures where the time of a step goes, by the device's own clock:

    data | teacher | student | loss | backward | optimizer        each from its mark to the next

Marks are CUDA events, recorded on the stream without waiting. They are read once the step is known to be
over, which is one step later when the next step was launched meanwhile. The phases add up to the time
from the first mark to the last. The time between the previous step's end and this step's first mark is
`idle`: the device had no work. It is known only when this step was launched while the previous one was in
flight; otherwise it would measure the pause between the two.

Work of the teacher on a stream of its own is no phase: `teacher` is how long the step's stream waited for
it. On a CPU, marks are times of the host's clock.
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
    """The time marks of one step."""

    def __init__(self, device: torch.device, before: Ledger | None) -> None:
        """`before` is the ledger of the previous step when that step was still in flight."""
        self._cuda = device.type == "cuda"
        self._before = None if before is None else before._marks[-1][1]
        self._marks: list[tuple[str, Any]] = []

    def mark(self, phase: str) -> None:
        """Count the work launched from now on as `phase`."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append((phase, event))
        else:
            self._marks.append((phase, time.perf_counter()))

    def end(self) -> None:
        """Record the last mark of the step."""
        self.mark("")

    def wait(self) -> None:
        """Wait until the device has passed the last mark, and not for work launched after it."""
        if self._cuda:
            self._marks[-1][1].synchronize()

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase, and `idle` where it is known. Call `wait` first."""
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
    """A micro-batch on the device, and its position in the data."""

    batch: Batch
    position: int
    tokens_BT: Tensor
    documents_BT: Tensor


class UnderWay(NamedTuple):
    """A step that was launched and may still be running on the device."""

    ledger: Ledger
    numbers: Tensor
    """loss, ce, kd, agreement, number of ranks asked to stop, gradient norm, lowest KL, largest sum of
    dz. Valid once the ledger's last mark has passed.
    """
    facts: dict[str, Any]
    """The fields of the Step that the host already knows."""
    begun: float


class Step(StepDone, frozen=True, kw_only=True, tag="step"):
    """One finished optimizer step as it is logged, with every number present.

    `kd`, `agreement` and `teacher_s` are None without a teacher in the objective.
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
        """False when a non-finite number kept the update from being applied."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def broken_invariants(self, temperature: float) -> Iterator[str]:
        """Describe the numbers of this step's loss that are mathematically impossible."""
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
        """Yield the fields of this step that are NaN or infinite, with their values."""
        for name in ("loss", "ce", "kd", "grad_norm"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                yield name, value
