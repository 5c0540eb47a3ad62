"""The phases of a step by a GPU's own clock: an event on the training's stream at each boundary of a phase, read once
the GPU has passed the last of them. Nothing is waited for, and the events are used again.

The seconds of a phase are those between two events, so they hold the GPU's waiting too: `data` is how long it had
nothing to do because of the loader, and 0 where the host had fetched ahead.
"""

from __future__ import annotations

import time
from typing import Any

from .values import is_capturing

_MOST_MARKS = 1024
"""Of one step; the phases of one with more are unknown."""
_EXIT_WAIT_S = 0.5


class Lap:
    """The events of one step; `seconds` are empty until they have been read, and where they are not known."""

    def __init__(self, begin: Any, marks: list[tuple[Any, str]], is_whole: bool) -> None:
        self.begin, self.marks, self.is_whole = begin, marks, is_whole
        self.seconds: dict[str, float] = {}
        self.is_read = False


class DeviceClock:
    """Told of each boundary, by the thread that trains."""

    def __init__(self, torch: Any, phases: tuple[str, ...]) -> None:
        self._torch, self._phases = torch, phases
        self._free: list[Any] = []
        self._begin: Any = None
        self._stream: Any = None
        self._marks: list[tuple[Any, str]] = []
        self._is_whole = self._is_at_mark = True
        """Whether each boundary of this step has an event; whether the last one has."""

    def mark(self, phase: str) -> None:
        """The phase ends here, or is interrupted by another."""
        cuda = self._torch.cuda
        self._is_at_mark = (
            cuda.is_initialized()
            and len(self._marks) < _MOST_MARKS
            and not is_capturing(self._torch)
        )
        if not self._is_at_mark:
            self._is_whole = False
            return
        stream = cuda.current_stream()
        if self._stream is not None and stream != self._stream:
            # Between events of two streams lies no phase.
            self._is_whole = False
        self._stream = stream
        event = self._free.pop() if self._free else cuda.Event(enable_timing=True)
        event.record(stream)
        if self._begin is None:
            self._begin = event
        else:
            self._marks.append((event, phase))

    def forget(self) -> None:
        """What this step has so far is not the step's alone: its seconds are unknown."""
        self._is_whole = False

    def lap(self, device: Any) -> Lap:
        """End the step with the last mark, which begins the next one. Its tensors are on `device`."""
        known = self._is_whole and bool(self._marks) and self._stream.device == device
        lap = Lap(self._begin, self._marks, known)
        self._begin = self._marks[-1][0] if self._marks and self._is_at_mark else None
        self._marks, self._is_whole = [], self._begin is not None
        return lap

    def has_passed(self, lap: Lap) -> bool:
        """Whether the GPU is behind the step; then its seconds are known. Laps are asked in their order."""
        if lap.is_read:
            return True
        if lap.marks and not lap.marks[-1][0].query():
            return False
        if lap.is_whole:
            seconds, before = dict.fromkeys(self._phases, 0.0), lap.begin
            for event, phase in lap.marks:
                seconds[phase] += before.elapsed_time(event) / 1e3
                before = event
            lap.seconds = seconds
        lap.is_read = True
        # The last event is the next step's first.
        if lap.begin is not None:
            self._free.append(lap.begin)
        self._free += [event for event, _ in lap.marks[:-1]]
        return True

    def wait_for(self, laps: list[Lap]) -> None:
        """At the end of the process: give a GPU that still works a moment to finish."""
        deadline = time.monotonic() + _EXIT_WAIT_S
        for lap in laps:
            while not self.has_passed(lap) and time.monotonic() < deadline:
                time.sleep(0.001)
