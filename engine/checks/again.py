"""When the checks of a running run are asked again: a defect need not be there from the first step.

    checks.every = N    after every N-th step
    checks.every = 0    on a CPU as soon as the time that went by makes their cost at most SHARE of it; never on a
                        GPU, where asking stops the device and leaves nothing launched ahead
    checks.every = -1   never

It is decided one step ahead and then holds, because a step that is launched early would be looked at in the
weights of another. Never with several GPUs: what a check asks of a student that is shared out would be a
collective, and ranks need not ask after the same step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.spec import RunSpec

SHARE = 0.005
"""Of the time since the first step, at most, that asking again takes where nobody says how often."""


class Again:
    """After which step to ask."""

    def __init__(
        self, spec: RunSpec, device: str, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`device` is a type of torch's; `clock` is in seconds."""
        alone = spec.compute.gpus == 1
        self._every = spec.checks.every if alone else -1
        if self._every == 0 and device != "cpu":
            self._every = -1
        self._clock = clock
        self._begun_s: float | None = None
        self._spent_s = 0.0
        self._next_s = 0.0
        self.after: int | None = None
        """The step after which they are asked; None while that is not decided."""

    def expects(self, cost_s: float) -> None:
        """What asking all of them takes, by the last time they were asked."""
        self._next_s = cost_s

    def spent(self, cost_s: float) -> None:
        """They were asked, and that took so long."""
        self.after = None
        self._spent_s += cost_s
        self._next_s = cost_s

    def decide(self, done: int) -> None:
        """After step `done`: whether to ask after the next."""
        now_s = self._clock()
        if self._begun_s is None:
            self._begun_s = now_s
        if self._every > 0:
            due = (done + 1) % self._every == 0
        else:
            spent_s = self._spent_s + self._next_s
            due = self._every == 0 and spent_s <= SHARE * (now_s - self._begun_s)
        if due:
            self.after = done + 1
