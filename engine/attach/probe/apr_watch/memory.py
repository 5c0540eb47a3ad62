"""Write the memory that torch's allocator holds on the GPU to a small file, which is overwritten, as the engine's own
trainer does (`engine/log/held.py`). The observer adds it to its readings.
"""

from __future__ import annotations

import os
import struct
import time
from typing import Any

SPACING_S = 1.0
NAME = "memory.held"
_HELD = struct.Struct("<QQddd")
_OF_ALLOCATOR = 0
"""Index of torch's allocator in SOURCES of `engine/log/held.py`."""


class HeldMemory:
    """Writer of the allocator's counters, at most once every SPACING_S. The counters are on the host: nothing waits."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._next_s = 0.0

    def record(self, folder: str, step: int, device: Any, at_once: bool = False) -> None:
        if device.type != "cuda" or not (at_once or time.monotonic() >= self._next_s):
            return
        counters = getattr(self._torch.cuda, "memory_stats_as_nested_dict", None)
        if counters is None:
            return
        self._next_s = time.monotonic() + SPACING_S
        counts = counters(device)
        allocated, reserved = (
            counts.get(f"{kind}_bytes", {}).get("all") for kind in ("allocated", "reserved")
        )
        if not allocated or not reserved:
            return  # an allocator without counters
        record = _HELD.pack(
            step, _OF_ALLOCATOR, allocated["current"], reserved["current"], allocated["peak"]
        )
        # A full disk may lose a reading. Open the file each time: the script may close descriptors.
        try:
            fd = os.open(os.path.join(folder, NAME), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            return
        try:
            os.pwrite(fd, record, 0)
        except OSError:
            pass
        finally:
            os.close(fd)
