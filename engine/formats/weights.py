"""Define the common interface of all weight files, and read their bytes.

When a weight file is opened, its metadata and the names, shapes and dtypes of its tensors are read. Data
is read on request. If a file changes after it was opened, it is refused; the process does not
crash. Three formats implement the interface, and `engine.formats.open.open_weights` selects the format
by the file's first bytes:

    format        convention   configuration                 tokenizer
    safetensors   hf           config.json in the folder     tokenizer.json in the folder
    gguf          gguf         from the file's metadata      from the file's metadata
    apr           apr          from the file's metadata      from the file's metadata

`convention` is the naming scheme of the tensors. Shapes are torch's everywhere, (rows, columns)
with row-major data, so a linear weight is (out, in). A block-quantised tensor is not dequantised:
`get` returns a `QuantTensor`, and the caller decides.

Nothing in a weight file is ever executed.

**Bytes are read, not memory-mapped** (`OpenFile`). If a mapped file is truncated or replaced, the process
dies with SIGBUS. With reads, a `WeightsError` names the file instead. Before and after every read the file is
compared with the file whose header was checked: same inode, length and modification time.

Most tensors are copied to their destination and freed before the next one is read. Touching new memory for the first
time costs several times as much as reading into it, so `Scratch` reuses the memory of the previous tensor, unless that
tensor is still in use.
"""

from __future__ import annotations

import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NoReturn, Self

from engine import files
from engine.errors import WeightsError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from engine.quant.tensor import QuantTensor

Format = Literal["safetensors", "gguf", "apr"]
Convention = Literal["hf", "gguf", "apr"]

CUT_SHORT = "the file may be cut short; compare its size with the source"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a file, before its data is read."""

    name: str
    dtype: str
    """Name of the dtype: F32, BF16, Q4_K, ..."""
    shape: tuple[int, ...]
    file: Path
    start: int
    """Offset of the data from the beginning of the file."""
    bytes: int


class WeightFile(ABC):
    """An open weight file, or a folder of shards. Every refusal is a `WeightsError`."""

    path: Path
    format: Format
    convention: Convention
    tensors: Mapping[str, TensorInfo]
    """Every tensor of the model by its name in the file; optimizer state is left out."""
    metadata: Mapping[str, Any]
    warnings: tuple[str, ...]
    """Warnings about the file, one line each."""
    _files: Mapping[Path, OpenFile]
    """The files that hold the tensors."""

    @abstractmethod
    def get(self, name: str) -> Tensor | QuantTensor:
        """Return the tensor on the CPU, in its own memory: writes never reach the file."""

    @abstractmethod
    def config_dict(self) -> dict[str, Any]:
        """Return the content of a Hugging Face `config.json` of this model."""

    @abstractmethod
    def tokenizer_json(self) -> bytes | None:
        """Return a `tokenizer.json` of the tokenizers library; None, with the reason in `warnings`,
        if the file has none.
        """

    @property
    def folder(self) -> Path:
        """The folder of the files that belong to the weights."""
        return self.path if os.path.isdir(self.path) else self.path.parent

    def read(self, info: TensorInfo, dtype: torch.dtype) -> Tensor:
        """Return the bytes of a tensor as a one-dimensional tensor of `dtype`."""
        return self._files[info.file].read(info.start, info.bytes, dtype)

    def close(self) -> None:
        """Close the files; tensors returned by `get` stay valid."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def open_regular(path: Path, what: str) -> BinaryIO:
    """Open a file for reading; a folder, a pipe or a missing file is refused with its kind."""
    return files.open_regular(path, what, error=WeightsError)


def identity_of(descriptor: int) -> tuple[int, ...]:
    """Return what changes if a file is replaced or modified: device, inode, size and mtime."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


_PIECE_BYTES = 1 << 28
"""Maximum size of one read, in bytes. Linux reads at most 2 GiB at once; signals are handled between two reads."""
_READERS = 4
"""Number of threads that read one large tensor, so that the page cache is copied at memory speed."""
_READER_BYTES = 4 << 20
"""Minimum number of bytes per thread."""


_OWNERS_WHEN_FREE = 2
"""Value of `sys.getrefcount` for an array that only `Scratch` holds: its attribute, and the argument of the call.
"""


class Scratch:
    """Memory into which the tensors of one model are read, one after the other.

    Once a caller keeps a tensor, all later tensors get new memory: a small tensor must not
    keep the memory of a large one alive.
    """

    def __init__(self) -> None:
        self._bytes: np.ndarray | None = None
        self._kept = False

    def take(self, count: int) -> np.ndarray:
        """Return `count` bytes. Nothing else uses them while the array, or a tensor that views it, is
        alive.
        """
        import numpy as np

        if self._bytes is not None and sys.getrefcount(self._bytes) > _OWNERS_WHEN_FREE:
            self._kept, self._bytes = True, None
        if self._kept:
            return np.empty(count, dtype=np.uint8)
        if self._bytes is None or len(self._bytes) < count:
            self._bytes = None  # freed before a larger array is allocated
            self._bytes = np.empty(count, dtype=np.uint8)
        return self._bytes[:count]

    def release(self) -> None:
        self._bytes = None


class OpenFile:
    """One weight file, open from the first `read` to `close`. `identity`: identity of the file whose
    header was read.
    """

    def __init__(
        self, path: Path, what: str, code: str, identity: tuple[int, ...], scratch: Scratch
    ) -> None:
        self.path, self.what, self.code, self.identity = path, what, code, identity
        self._scratch = scratch
        self._descriptor = -1

    def read(self, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return `count` bytes from `start` on as a one-dimensional tensor of `dtype`. Raises
        `WeightsError`.
        """
        import torch

        if not count:
            return torch.empty(0, dtype=dtype)
        array = self._scratch.take(count)
        try:
            self._check()
            done = _fill(self._descriptor, array.data, start)
            self._check()
        except OSError as error:
            # A disk error on a file that could be opened.
            self._refuse("readable data", error.strerror or str(error))
        if done < count:
            self._refuse(f"{start + count:,} bytes", f"{start + done:,} bytes")
        return torch.from_numpy(array).view(dtype)

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
        if identity_of(self._descriptor) != self.identity:
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
    """Read from `start` on until `view` is full or the file ends, and return the number of
    contiguous bytes read. Raises OSError.
    """
    count = len(view)
    readers = max(1, min(_READERS, os.cpu_count() or 1, count // _READER_BYTES))
    bounds = [count * reader // readers for reader in range(readers + 1)]
    counts = [0] * readers
    failures: list[OSError] = []

    def fill(reader: int) -> None:
        done, end = bounds[reader], bounds[reader + 1]
        try:
            while done < end:
                piece = view[done : min(end, done + _PIECE_BYTES)]
                count_read = os.preadv(descriptor, [piece], start + done)
                if not count_read:
                    break
                done += count_read
        except OSError as error:
            failures.append(error)
        counts[reader] = done - bounds[reader]

    threads = [threading.Thread(target=fill, args=(reader,)) for reader in range(1, readers)]
    for thread in threads:
        thread.start()
    fill(0)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    for reader in range(readers):
        if counts[reader] < bounds[reader + 1] - bounds[reader]:
            return bounds[reader] + counts[reader]
    return count
