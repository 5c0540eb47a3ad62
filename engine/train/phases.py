"""Where the time of a step goes, by the device's own clock.

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

import time
from typing import Any

import torch

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
