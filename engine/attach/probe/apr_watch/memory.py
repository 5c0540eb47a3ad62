"""What torch's allocator holds on the GPU: a small file that is written over, as for the engine's own trainer
(`engine/log/held.py`). The process that looks at the run from outside adds it to its readings.
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
"""The place of torch's allocator in SOURCES of `engine/log/held.py`."""


class HeldMemory:
    """Written at the end of a step, at most once in SPACING_S. The counters are the host's: nothing is waited for."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._next_s = 0.0

    def look(self, folder: str, step: int, device: Any, now: bool = False) -> None:
        counters = getattr(self._torch.cuda, "memory_stats_as_nested_dict", None)
        time_s = time.monotonic()
        if device.type != "cuda" or counters is None or not (now or time_s >= self._next_s):
            return
        self._next_s = time_s + SPACING_S
        counts = counters(device)
        held, kept = (
            counts.get(f"{what}_bytes", {}).get("all") for what in ("allocated", "reserved")
        )
        if not held or not kept:
            return  # another allocator, which does not count
        record = _HELD.pack(step, _OF_ALLOCATOR, held["current"], kept["current"], held["peak"])
        # A full disk may lose a reading. Opened each time: no descriptor of ours that the script could close.
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
