"""Measure the phases of a step on the GPU: record an event on the training's stream at each boundary of a phase, and
read them once the GPU has passed the last event. Nothing waits, and events are reused.

The time between two events includes idle time of the GPU: `data` is how long the GPU idled because of the loader, 0 if
the host fetched ahead.
"""

from __future__ import annotations

from typing import Any

from .values import is_capturing

_MAX_MARKS = 1024
"""Maximum number of phase boundaries in a step; the phases of a step with more are unknown."""


class Lap:
    """Events of one step. `seconds` is empty until the events have been read, and if the phases are unknown."""

    def __init__(self, begin: Any, marks: list[tuple[Any, str]], is_whole: bool) -> None:
        self.begin, self.marks, self.is_whole = begin, marks, is_whole
        self.seconds: dict[str, float] = {}
        self.is_read = False


class DeviceClock:
    """Recorder of phase boundaries; called by the training thread."""

    def __init__(self, torch: Any, phases: tuple[str, ...]) -> None:
        self._torch, self._phases = torch, phases
        self._free: list[Any] = []
        self._begin: Any = None
        self._stream: Any = None
        self._marks: list[tuple[Any, str]] = []
        self._is_whole = self._is_at_mark = True
        """`_is_whole`: all boundaries of this step have an event. `_is_at_mark`: the last boundary has one."""

    def mark(self, phase: str) -> None:
        """Record the end or interruption of a phase."""
        cuda = self._torch.cuda
        if not cuda.is_initialized() or len(self._marks) >= _MAX_MARKS or is_capturing(self._torch):
            self._is_at_mark = self._is_whole = False
            return
        self._is_at_mark = True
        stream = cuda.current_stream()
        if self._stream is not None and stream != self._stream:
            # The time between events on two different streams measures no phase.
            self._is_whole = False
        self._stream = stream
        event = self._free.pop() if self._free else cuda.Event(enable_timing=True)
        event.record(stream)
        if self._begin is None:
            self._begin = event
        else:
            self._marks.append((event, phase))

    def forget(self) -> None:
        """Mark the seconds of this step as unknown: they include time before it."""
        self._is_whole = False

    def lap(self, device: Any) -> Lap:
        """End the step at the last mark, which is the begin of the next step. `device`: device of its tensors."""
        known = self._is_whole and bool(self._marks) and self._stream.device == device
        lap = Lap(self._begin, self._marks, known)
        self._begin = self._marks[-1][0] if self._marks and self._is_at_mark else None
        self._marks, self._is_whole = [], self._begin is not None
        return lap

    def has_passed(self, lap: Lap) -> bool:
        """Return whether the GPU has finished the step, and read its seconds. Call for laps in order."""
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
        # The last event is also the first event of the next step.
        if lap.begin is not None:
            self._free.append(lap.begin)
        self._free += [event for event, _ in lap.marks[:-1]]
        return True
