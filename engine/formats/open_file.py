"""The bytes of a weight file's tensors, read and not mapped.

A file that is cut short or replaced while it is mapped ends the process with SIGBUS, in the middle of whatever it
does. Read, the same is a `WeightsError` that names the file. What is read is the file whose header was checked: the
same inode, with the same length and time of change, before the first byte and after the last one.

Most tensors are copied to where they are needed at once and are gone before the next is read. Memory that the
process touches for the first time costs several times what reading into it costs, so `Scratch` reads each tensor
into the memory of the last one, unless somebody kept that.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from engine.errors import WeightsError
from engine.formats.safetensors_header import identity_of, open_regular

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

_PIECE_BYTES = 1 << 28
"""Linux reads at most 2 GiB at once; a signal is answered between two pieces."""
_READERS = 4
"""Threads that read one large tensor: what is in the page cache is copied as fast as memory allows."""
_READER_BYTES = 4 << 20
"""A thread is begun for so much."""


_OWNERS_WHEN_FREE = 2
"""References to an array that nothing but `Scratch` has: its attribute, and the argument of `getrefcount`."""


class Scratch:
    """Memory that one tensor after the other is read into, for the files of one model.

    As soon as a tensor is kept, those after it are made in memory of their own: a small one must not hold the
    memory of a large one.
    """

    def __init__(self) -> None:
        self._bytes: np.ndarray | None = None
        self._kept = False

    def take(self, count: int) -> np.ndarray:
        """`count` bytes, which nothing else uses as long as the array or a tensor of it lives."""
        import numpy as np

        if self._bytes is not None and sys.getrefcount(self._bytes) > _OWNERS_WHEN_FREE:
            self._kept, self._bytes = True, None
        if self._kept:
            return np.empty(count, dtype=np.uint8)
        if self._bytes is None or len(self._bytes) < count:
            self._bytes = None  # before the larger one is made
            self._bytes = np.empty(count, dtype=np.uint8)
        return self._bytes[:count]

    def release(self) -> None:
        self._bytes = None


class OpenFile:
    """One weight file, open from the first `read` to `close`. `identity` is of the file whose header was read."""

    def __init__(
        self, path: Path, what: str, code: str, identity: tuple[int, ...], scratch: Scratch
    ) -> None:
        self.path, self.what, self.code, self.identity = path, what, code, identity
        self._scratch = scratch
        self._descriptor = -1

    def read(self, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """`count` bytes from `start` on, as one row of `dtype`, in memory of its own. Raises `WeightsError`."""
        import torch

        if not count:
            return torch.empty(0, dtype=dtype)
        taken = self._scratch.take(count)
        try:
            self._check()
            done = _fill(self._descriptor, taken.data, start)
            self._check()
        except OSError as error:
            # A disk that fails under a file that could be opened.
            self._refuse("readable data", error.strerror or str(error))
        if done < count:
            self._refuse(f"{start + count:,} bytes", f"{start + done:,} bytes")
        return torch.from_numpy(taken).view(dtype)

    def close(self) -> None:
        self._scratch.release()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def __del__(self) -> None:
        self.close()

    def _check(self) -> None:
        if self._descriptor < 0:
            with open_regular(self.path, self.what) as file:
                self._descriptor = os.dup(file.fileno())
        now = identity_of(self._descriptor)
        if now == self.identity:
            return
        if now[:2] == self.identity[:2] and now[2] != self.identity[2]:
            self._refuse(f"{self.identity[2]:,} bytes, as when it was opened", f"{now[2]:,} bytes")
        self._refuse("the file that was opened", "another, or one that was written to since")

    def _refuse(self, expected: str, found: str) -> NoReturn:
        raise WeightsError.expected(
            f"{self.code} {self.what}".strip(),
            self.path,
            expected,
            found,
            hint="it changed while it was used: open it again once nothing writes to it",
        )


def _fill(descriptor: int, view: memoryview, start: int) -> int:
    """Reads from `start` on until `view` is full or the file ends; how many bytes came in one row. Raises OSError."""
    count = len(view)
    parts = max(1, min(_READERS, os.cpu_count() or 1, count // _READER_BYTES))
    bounds = [count * part // parts for part in range(parts + 1)]
    came = [0] * parts
    failures: list[OSError] = []

    def fill(part: int) -> None:
        done, end = bounds[part], bounds[part + 1]
        try:
            while done < end:
                piece = view[done : min(end, done + _PIECE_BYTES)]
                got = os.preadv(descriptor, [piece], start + done)
                if not got:
                    break
                done += got
        except OSError as error:
            failures.append(error)
        came[part] = done - bounds[part]

    threads = [threading.Thread(target=fill, args=(part,)) for part in range(1, parts)]
    for thread in threads:
        thread.start()
    fill(0)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    for part in range(parts):
        if came[part] < bounds[part + 1] - bounds[part]:
            return bounds[part] + came[part]
    return count
