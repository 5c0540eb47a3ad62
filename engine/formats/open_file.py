"""The bytes of a weight file's tensors, read and not mapped.

A file that is cut short or replaced while it is mapped ends the process with SIGBUS, in the middle of whatever it
does. Read, the same is a `WeightsError` that names the file. What is read is the file whose header was checked: the
same inode, with the same length and time of change, before the first byte and after the last one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from engine.errors import WeightsError
from engine.formats.safetensors_header import identity_of, open_regular

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_PIECE_BYTES = 1 << 28
"""Linux reads at most 2 GiB at once; a signal is answered between two pieces."""


class OpenFile:
    """One weight file, open from the first `read` to `close`. `identity` is of the file whose header was read."""

    def __init__(self, path: Path, what: str, code: str, identity: tuple[int, ...]) -> None:
        self.path, self.what, self.code, self.identity = path, what, code, identity
        self._descriptor = -1

    def read(self, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """`count` bytes from `start` on, as one row of `dtype`, in memory of its own. Raises `WeightsError`."""
        import torch

        found = torch.empty(count // dtype.itemsize, dtype=dtype)
        if not count:
            return found
        view, done = found.view(torch.uint8).numpy().data, 0
        try:
            self._check()
            while done < count:
                got = os.preadv(
                    self._descriptor, [view[done : min(count, done + _PIECE_BYTES)]], start + done
                )
                if not got:
                    break
                done += got
            self._check()
        except OSError as error:
            # A disk that fails under a file that could be opened.
            self._refuse("readable data", error.strerror or str(error))
        if done < count:
            self._refuse(f"{start + count:,} bytes", f"{start + done:,} bytes")
        return found

    def close(self) -> None:
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
