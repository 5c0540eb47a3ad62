"""Read the values of tensors without synchronising with the training stream of a GPU.

On a CPU a value is read immediately. On a GPU that would make the host wait for all launched kernels. Instead, a value
is copied on the stream that computes it. The copies of several steps are copied to the host together on another stream,
once the device has finished them. No memory is pinned, since the first pinned allocation synchronises.
"""

from __future__ import annotations

import time
from typing import Any

_MAX_PENDING = 512
"""Maximum number of pending values; further values are unknown."""
_TOGETHER, _READ_EVERY_S = 16, 0.25
"""Number of values, or seconds, after which pending values are copied to the host. One copy takes the host as long as
one line of the log."""
EXIT_WAIT_S = 2.0
"""Maximum time to wait for a GPU at the end of a process, in seconds: a GPU that hangs must not block the exit."""


class PendingValue:
    """A value on a GPU; `number` is None until it has been read."""

    number: float | None = None


class Reader:
    """Reader of values of all steps."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._new: dict[Any, list[tuple[PendingValue, Any]]] = {}
        """Values whose copy to the host has not begun, by stream, each with its copy on the device."""
        self._copying: list[tuple[list[PendingValue], dict[Any, Any], HostCopies]] = []
        self.pending = 0
        """Number of values that are not on the host yet."""
        self._read_s = 0.0

    def keep(self, tensor: Any) -> float | PendingValue | None:
        """Return the value of a tensor of one element, perhaps as pending; None if it cannot be read without slowing
        the run."""
        torch = self._torch
        # A subclass may need a collective to compute its value (DTensor), or have no value (fake tensors).
        if type(tensor) is not torch.Tensor or tensor.numel() != 1:
            return None
        if not tensor.is_floating_point() or tensor.layout != torch.strided:
            return None
        if tensor.is_cpu:
            number: float = tensor.item()
            return number
        if not tensor.is_cuda or self.pending >= _MAX_PENDING or is_capturing(torch):
            return None
        pending = PendingValue()
        # float64 holds each smaller floating-point type exactly.
        copy = tensor.detach().reshape(()).to(torch.float64, copy=True)
        stream = torch.cuda.current_stream(tensor.device)
        self._new.setdefault(stream, []).append((pending, copy))
        self.pending += 1
        return pending

    def read(self, *, at_once: bool = False) -> None:
        """Read the values that the device has computed, without waiting. `at_once`: begin the copy to the host now."""
        torch = self._torch
        while self._copying and self._copying[0][2].are_complete():
            values, table, _ = self._copying.pop(0)
            for pending, number in zip(values, table[0].tolist(), strict=True):
                pending.number = number
            self.pending -= len(values)
        is_late = at_once or time.monotonic() - self._read_s > _READ_EVERY_S
        for stream, pairs in list(self._new.items()):
            if (is_late or len(pairs) >= _TOGETHER) and not is_capturing(torch):
                with torch.no_grad(), torch.cuda.stream(stream):
                    table = {0: torch.stack([copy for _, copy in pairs])}
                    copies = HostCopies(torch, [table])
                self._copying.append(([pending for pending, _ in pairs], table, copies))
                del self._new[stream]
                self._read_s = time.monotonic()


class HostCopies:
    """Copies of tensors to the host that begin once their devices have finished the operations launched so far. Never
    waits."""

    def __init__(self, torch: Any, tables: list[dict[Any, Any]]) -> None:
        """`tables`: dicts of the tensors. Once `are_complete` returns True they hold the copies on the host."""
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
                        # Do not pin memory: the first pinned allocation synchronises.
                        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                        table[name] = host.copy_(tensor, non_blocking=True)
                        sources.append(tensor)
            event.record(stream)
        # Keep the source tensors alive until the copy is done: their memory belongs to the training's stream.
        return event, sources


def is_pending(value: Any) -> bool:
    """Return whether a value is not on the host yet."""
    return isinstance(value, PendingValue) and value.number is None


def as_number(value: float | PendingValue | None) -> float | None:
    return value.number if isinstance(value, PendingValue) else value


def is_capturing(torch: Any) -> bool:
    """Return whether the current stream captures a CUDA graph: launches of the probe would become part of it."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
