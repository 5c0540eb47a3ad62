"""One optimizer step: as it is given to the device, while it is under way, and as the log, the checks
and the view know it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from engine.data.batches import Batch
from engine.loss.objective import LARGEST_DZ_SUM, LOWEST_DIVERGENCE
from engine.train.phases import Ledger

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step; losses in nats per labelled token. `kd` and `agreement` are None
    without a teacher in the objective.
    """

    step: int
    loss: float
    ce: float
    kd: float | None
    agreement: float | None
    lr: float
    grad_norm: float
    rows: int
    tokens: int
    labelled: int
    step_s: float
    data_s: float
    teacher_s: float | None
    position: int
    updated: bool
    """False when a non-finite number kept the weights as they were."""
    lowest_kl: float | None
    """Of any labelled row, nats: below 0 by more than rounding, the loss is not what it says."""
    largest_dz_sum: float
    """Of any labelled row, without sign: the gradient of a softmax sums to 0."""
    phases: Mapping[str, float]
    """Seconds of each phase by the device's clock (`engine.train.phases`)."""
    stop_asked: bool = False
    """Whether any rank was asked to stop, of several before the step before this one ended: all stop
    after the same one."""

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
