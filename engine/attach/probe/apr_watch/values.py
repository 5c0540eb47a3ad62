"""Read the values of tensors without changing what the training stream of a GPU does.

On a CPU a value is read at once. On a GPU that would make the host wait for everything launched so far. There, a value
is copied into a slot on its own stream, followed by an event; once the events of some steps have passed, all slots are
copied to the host together, on another stream. Nothing is pinned (the first pinned allocation synchronises), nothing is
allocated after the first value, and nothing waits for the training stream.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

_SLOTS = 512
"""Maximum number of pending values of one stream; further ones are unknown."""
_STEPS_TOGETHER, _READ_EVERY_S = 8, 0.25
"""Number of steps, or seconds, per copy to the host: a copy costs the host as much as a line."""
_QUERIES = 50
"""Maximum number of polls of a copy's event."""
EXIT_WAIT_S = 2.0
"""Maximum time that the end of a process waits for a GPU, in seconds: one that hangs must not block it."""


class Slots:
    """Pending values of one stream, in float64, which holds each smaller floating-point type exactly."""

    def __init__(self, torch: Any, device: Any) -> None:
        self.numbers = torch.empty(_SLOTS, dtype=torch.float64, device=device)
        self.cells = [self.numbers[at] for at in range(_SLOTS)]
        self.free = list(range(_SLOTS))
        self.host = torch.empty(_SLOTS, dtype=torch.float64, device="cpu")
        self.side = torch.cuda.Stream(device)
        self.copied = torch.cuda.Event()


class PendingValue:
    """A value on a GPU; `number` is None until it has been read."""

    def __init__(self, slots: Slots, index: int) -> None:
        self.slots, self.index = slots, index
        self.number: float | None = None


class Values:
    """Values of one step."""

    def __init__(self) -> None:
        self.events: dict[Slots, Any] = {}
        """Event after the step's last value on each stream."""
        self.pending: list[PendingValue] = []
        """Values that are not on the host yet."""

    def have_passed(self) -> bool:
        """Return whether the GPU has computed them all. Never waits."""
        if self.events and all(event.query() for event in self.events.values()):
            self.events = {}
        return not self.events


class Reader:
    """Reader of the values of all steps."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._streams: dict[Any, Slots] = {}
        self._copying: list[Values] = []
        self._read_s = 0.0

    def keep(self, tensor: Any, values: Values) -> float | PendingValue | None:
        """Return the value of a tensor of one element; None if reading it would slow the run."""
        torch = self._torch
        # A subclass may need a collective to know its value (DTensor), or have none (fake tensors).
        if type(tensor) is not torch.Tensor or tensor.numel() != 1:
            return None
        if not tensor.is_floating_point() or tensor.layout != torch.strided:
            return None
        if tensor.is_cpu:
            number: float = tensor.item()
            return number
        if not tensor.is_cuda or is_capturing(torch):
            return None
        stream = torch.cuda.current_stream(tensor.device)
        slots = self._streams.get(stream)
        if slots is None:
            slots = self._streams[stream] = Slots(torch, tensor.device)
        if not slots.free:
            return None
        pending = PendingValue(slots, slots.free.pop())
        slots.cells[pending.index].copy_(tensor.detach().reshape(()))
        if slots not in values.events:
            values.events[slots] = torch.cuda.Event()
        values.events[slots].record(stream)
        values.pending.append(pending)
        return pending

    @property
    def has_streams(self) -> bool:
        """Whether a value was ever kept on a GPU."""
        return bool(self._streams)

    def drop(self, values: Values) -> None:
        """Free the slots of unused values. A slot may be rewritten at once: its stream keeps the order."""
        for pending in values.pending:
            pending.slots.free.append(pending.index)
        values.pending = []

    def read(self, steps: Iterable[Values], *, at_once: bool = False) -> None:
        """Read the values of the leading steps that have passed. Never waits."""
        if self._copying and not self._take_copy():
            return
        ready = []
        for values in steps:
            if not values.have_passed():
                break
            if values.pending:
                ready.append(values)
        late = at_once or time.monotonic() - self._read_s > _READ_EVERY_S
        if ready and (late or len(ready) >= _STEPS_TOGETHER):
            self._copying = ready
            for slots in {pending.slots for values in ready for pending in values.pending}:
                with self._torch.cuda.stream(slots.side):
                    slots.host.copy_(slots.numbers, non_blocking=True)
                    slots.copied.record(slots.side)
            self._take_copy()

    def _take_copy(self) -> bool:
        """Take the numbers of a finished copy; poll a few times, since it takes microseconds."""
        every = {pending.slots for values in self._copying for pending in values.pending}
        for slots in every:
            if not any(slots.copied.query() for _ in range(_QUERIES)):
                return False
        numbers = {slots: slots.host.tolist() for slots in every}
        for values in self._copying:
            for pending in values.pending:
                pending.number = numbers[pending.slots][pending.index]
            self.drop(values)
        self._copying = []
        self._read_s = time.monotonic()
        return True


class HostCopies:
    """Copies of tensors to the host, begun once their devices have passed the operations launched so far. Never
    waits."""

    def __init__(self, torch: Any, tables: list[dict[Any, Any]]) -> None:
        """`tables` hold the tensors, and their copies on the host once these `are_complete`."""
        self._torch, self._tables = torch, tables
        devices = {one.device for table in tables for one in table.values() if not one.is_cpu}
        self._events = {device: torch.cuda.Event() for device in devices}
        for device, event in self._events.items():
            event.record(torch.cuda.current_stream(device))
        self._copied: list[tuple[Any, list[Any]]] | None = None

    def are_complete(self) -> bool:
        if not all(event.query() for event in self._events.values()):
            return False
        if self._copied is None:
            self._copied = [self._copy(device) for device in self._events]
        return all(event.query() for event, _ in self._copied)

    def _copy(self, device: Any) -> tuple[Any, list[Any]]:
        torch = self._torch
        stream, event = torch.cuda.Stream(device), torch.cuda.Event()
        sources = []
        with torch.no_grad(), torch.cuda.stream(stream):
            for table in self._tables:
                for name, tensor in table.items():
                    if tensor.device == device:
                        # Not pinned: the first pinned allocation synchronises.
                        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                        table[name] = host.copy_(tensor, non_blocking=True)
                        sources.append(tensor)
            event.record(stream)
        # Keep the source tensors alive until the copy is done: their memory belongs to the training's stream.
        return event, sources


def as_number(value: float | PendingValue | None) -> float | None:
    return value.number if isinstance(value, PendingValue) else value


def is_capturing(torch: Any) -> bool:
    """Return whether the current stream captures a CUDA graph, of which further launches would become a part."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
