"""Keeping the packs of a run's logs while they are written, for whoever looks at the run later.

The supervisor asks for it at each tick. A chunk that was written whole is packed, one at a time, and the next one waits
until that cost is no more than SHARE of a core, however fast the log grows. A log that grows faster is packed in part,
and the first viewer that may does the rest. What goes wrong is told to nobody: a run needs none of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.log.folder import RunFolder
from engine.log.pack_files import PackFiles, bounds
from engine.log.shares import make_chunk

SHARE = 0.003


class Keeper:
    """Keeps the packs of the logs of one run. Used from one thread."""

    def __init__(
        self,
        run: RunFolder,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        processor: Callable[[], float] = time.thread_time,
    ) -> None:
        self._monotonic, self._processor = monotonic, processor
        self._files = [PackFiles(log) for log in (run.events, run.device)]
        self._numbers = [0 for _ in self._files]
        self._next_s = monotonic()
        for files in self._files:
            files.sweep()

    def tick(self) -> None:
        """Have one chunk more, when there is one and it is time. Raises nothing."""
        if self._monotonic() < self._next_s:
            return
        before_s = self._processor()
        for place, files in enumerate(self._files):
            if self._advance(files, self._numbers[place]):
                self._numbers[place] += 1
                break
        self._next_s = self._monotonic() + (self._processor() - before_s) / SHARE

    def _advance(self, files: PackFiles, number: int) -> bool:
        """Have the packs of a chunk; False where that is not written whole yet, or cannot be kept."""
        begin, end = bounds(number)
        try:
            if files.log.stat().st_size < end:
                return False
            if files.load(number) is not None:
                return True
            return make_chunk(files.log, begin, end, number).is_whole
        except OSError:
            return False
