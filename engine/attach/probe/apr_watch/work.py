"""Batches and loop counters of each step of a script, in a run of an experiment.

Both runs of a pair write it, and a step that one of them leaves out is seen by it (`engine.log.work`). Other runs do
not. A batch is its number in the pass over its loader and a digest of the samples that the sampler asked for.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterable
from types import CodeType, FrameType, TracebackType
from typing import Any

from .places import Places, visible
from .settings import SEED_BY

_COUNTERS, _FRAMES = 256, 64
_LARGEST = 1 << 53
"""Bound of a counter: larger integers are hashes."""


class Work:
    """Batches and counters of one process, until the next step."""

    def __init__(self, places: Places) -> None:
        self._is_on = SEED_BY in os.environ
        self._places = places
        self._is_script: dict[CodeType, bool] = {}

    def batch(self, iterator: Any, index: Any, *, fetched: bool = True) -> str:
        """Return the name of the batch that a loader hands out, or was to hand out; empty in other runs. `index`: what
        its sampler gave."""
        if not self._is_on:
            return ""
        number = int(getattr(iterator, "_num_yielded", 0)) - fetched
        return f"{number}:{zlib.crc32(repr(index).encode()):08x}"

    def done(self, batches: Iterable[str]) -> dict[str, Any] | None:
        """Return what the step that has just been done worked on; None in other runs."""
        if not self._is_on:
            return None
        frame: FrameType | None = sys._getframe(1)
        frames: list[FrameType] = []
        while frame is not None and len(frames) < _FRAMES:
            frames.append(frame)
            frame = frame.f_back
        return self._said(batches, frames)

    def failed(self, batches: Iterable[str], trace: TracebackType | None) -> dict[str, Any] | None:
        """Return what the step worked on in which the script failed."""
        if not self._is_on:
            return None
        frames: list[FrameType] = []
        while trace is not None and len(frames) < _FRAMES:
            frames.append(trace.tb_frame)
            trace = trace.tb_next
        return {**self._said(batches, frames), "failed": True}

    def _said(self, batches: Iterable[str], frames: list[FrameType]) -> dict[str, Any]:
        counters: dict[str, int] = {}
        for frame in frames:
            code = frame.f_code
            if code not in self._is_script:
                self._is_script[code] = self._places.is_of_script(code)
            if self._is_script[code]:
                for name, value in visible(frame):
                    if len(counters) < _COUNTERS and type(value) is int and abs(value) < _LARGEST:
                        counters[f"{code.co_name}.{name}"] = value
        return {"batches": [one for one in batches if one], "counters": counters}
