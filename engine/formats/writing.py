"""Write weight files tensor by tensor, each file completely or not at all.

A GGUF or .apr file lists its tensors before their data, but the tensors arrive one at a time, and each may be
quantised only when it is requested. So the data is written to an unnamed temporary file next to
the target (`TensorData`). After the last tensor the header is written to the target, and the data is
copied after it. Peak host memory is one tensor; the disk holds the data twice during the copy.

The target appears under its name only when it is complete on disk. An existing file is never overwritten. A failed
write leaves no file; a killed process leaves the partial file.
"""

from __future__ import annotations

import errno
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from engine.errors import BadInput, DiskFull, WeightsError
from engine.signals import partial_output

if TYPE_CHECKING:
    import torch

COPY_BYTES = 1 << 22
PART_BYTES = 1 << 25
"""Size of the chunks in which a tensor is copied through host memory, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """The position of a tensor in the data file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


class TensorData:
    """Tensor data stored one after the other in a temporary file, each tensor padded to `alignment`."""

    def __init__(self, file: IO[bytes], alignment: int) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self._file, self._alignment, self._end = file, alignment, 0

    def add(self, name: str, dtype: str, shape: tuple[int, ...], raw: memoryview) -> None:
        padding = -len(raw) % self._alignment
        self._file.write(raw)
        self._file.write(bytes(padding))
        self.tensors[name] = StoredTensor(
            dtype=dtype, shape=shape, offset=self._end, bytes=len(raw)
        )
        self._end += len(raw) + padding

    def pieces(self) -> Iterator[bytes]:
        """Yield the written bytes from the beginning, in chunks."""
        self._file.seek(0)
        while piece := self._file.read(COPY_BYTES):
            yield piece


@contextmanager
def new_file(path: Path, alignment: int) -> Iterator[tuple[IO[bytes], TensorData]]:
    """Yield a file with a temporary name to write to, and temporary storage for its tensors. The file is renamed to
    `path` when it is complete on disk, and removed if anything fails. Raises `WeightsError`, `DiskFull`.
    """
    if os.path.lexists(path):
        raise unwritable(path, FileExistsError(errno.EEXIST, "exists"))
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with (
            partial_output(partial),
            partial.open("xb") as file,
            tempfile.TemporaryFile(dir=path.parent) as data,
        ):
            yield file, TensorData(data, alignment)
            file.flush()
            os.fsync(file.fileno())
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            partial.rename(path)
            fsync_folder(path.parent)
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> BadInput:
    """Return the exception for a failed write: `DiskFull` or `WeightsError`."""
    reason = str(error.strerror)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull.expected("weights to write", path, "room for them", reason)
    if isinstance(error, FileExistsError):
        return WeightsError.expected("weights to write", path, "nothing at that path", "something")
    return WeightsError.expected("weights to write", path, "a path that can be written", reason)


def fsync_folder(path: Path) -> None:
    """Make a new or renamed entry of a folder survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def tensor_bytes(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> memoryview:
    """Return the bytes of a tensor in row-major order, in host memory, cast to `dtype` if given."""
    import torch

    flat = tensor.detach().to(device="cpu", dtype=dtype).contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def tensor_chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in row-major order in chunks. A chunk is valid until the next one is requested.

    The next chunk is copied from a GPU on the current stream while the caller uses the current chunk.
    """
    import torch

    if tensor.device.type != "cuda" or not tensor.is_contiguous():
        data = tensor_bytes(tensor)
        for start in range(0, len(data), PART_BYTES):
            yield data[start : start + PART_BYTES]
        return
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    size = min(PART_BYTES, len(flat))
    buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    def start_copy(number: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        source = flat[number * size : (number + 1) * size]
        buffer = buffers[number % 2][: len(source)]
        done: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        buffer.copy_(source, non_blocking=True)
        done.record(torch.cuda.current_stream(tensor.device))
        return buffer, done

    count = -(-len(flat) // size) if size else 0
    next_copy = start_copy(0) if count else None
    for number in range(count):
        assert next_copy is not None
        buffer, done = next_copy
        next_copy = start_copy(number + 1) if number + 1 < count else None
        done.synchronize()
        yield buffer.numpy().data
