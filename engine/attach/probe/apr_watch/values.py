"""Read the values of tensors without changing what the training stream of a GPU does.

On a CPU a value is read at once. On a GPU that would make the host wait for everything launched so far, so the value
is cloned on its own stream, an event is recorded behind it, and the number is copied on another stream once the event
has passed. Nothing is pinned and nothing is synchronised.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

_EXIT_WAIT_S = 2.0
"""How long the end of a process waits for values: a GPU that hangs must not keep the process."""


class Kept:
    """A value on a GPU. `events` holds one event for each stream, shared by all values of one step."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.host: Any = None
        self.number: float | None = None


class Values:
    """The values of one step, and where they can be read."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._events: dict[Any, Any] = {}
        self._kept: list[Kept] = []
        self._copied: list[Any] = []

    def keep(self, tensor: Any) -> float | Kept | None:
        """The value of a tensor of one element; None if it cannot be read without a cost to the run."""
        torch = self._torch
        # A subclass may need a collective to know its value (DTensor), or have none (fake tensors).
        if type(tensor) is not torch.Tensor or tensor.numel() != 1:
            return None
        if not tensor.is_floating_point() or tensor.layout != torch.strided:
            return None
        if tensor.is_cpu:
            return float(tensor.detach().item())
        if not tensor.is_cuda or is_capturing(torch):
            return None
        kept = Kept(tensor.detach().clone())
        stream = torch.cuda.current_stream(tensor.device)
        if stream not in self._events:
            self._events[stream] = torch.cuda.Event()
        self._events[stream].record(stream)
        self._kept.append(kept)
        return kept

    def are_read(self, side_streams: dict[Any, Any]) -> bool:
        """Whether all values are numbers now. Never waits: a copy is started once the events have passed."""
        if not self._kept:
            return True
        torch = self._torch
        if not self._copied:
            if not all(event.query() for event in self._events.values()):
                return False
            for device in {kept.tensor.device for kept in self._kept}:
                if device not in side_streams:
                    side_streams[device] = torch.cuda.Stream(device)
                with torch.cuda.stream(side_streams[device]):
                    for kept in self._kept:
                        if kept.tensor.device == device:
                            # Pageable memory: the first pinned allocation would synchronise.
                            kept.host = torch.empty((), dtype=kept.tensor.dtype, device="cpu")
                            kept.host.copy_(kept.tensor.reshape(()), non_blocking=True)
                    copied = torch.cuda.Event()
                    copied.record(side_streams[device])
                    self._copied.append(copied)
        if not all(event.query() for event in self._copied):
            return False
        for kept in self._kept:
            kept.number = float(kept.host.item())
        self._kept = []
        return True


def wait_for(all_values: Iterable[Values], side_streams: dict[Any, Any]) -> None:
    """At the end of the process: give a GPU that still works a moment to finish."""
    deadline = time.monotonic() + _EXIT_WAIT_S
    for values in all_values:
        while not values.are_read(side_streams) and time.monotonic() < deadline:
            time.sleep(0.001)


def as_number(value: float | Kept | None) -> float | None:
    return value.number if isinstance(value, Kept) else value


def is_capturing(torch: Any) -> bool:
    """Whether the current stream records a CUDA graph: what is launched now would become part of it."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
