"""What all weight files share: the interface behind which they look the same, and how they are read.

A weight file has names, shapes and dtypes that are known without reading data, metadata, and data
that is read when it is asked for, so that a file that changes meanwhile is refused and ends nothing. Three
formats fill it in, and `engine.formats.open.open_weights` picks one by the file's first bytes:

    format        convention   configuration                 tokenizer
    safetensors   hf           config.json beside the file   tokenizer.json beside the file
    gguf          gguf         from the file's metadata      from the file's metadata
    apr           apr          from the file's metadata      from the file's metadata

`convention` says which names the tensors have; shapes are torch's everywhere, (rows, columns) with
row-major data, so that a linear weight is (out, in). A tensor in quantized blocks stays in its
blocks: `get` gives a `QuantTensor`, and what it is worth is for whoever asked to decide.

Nothing in a weight file is ever executed.

**Bytes are read and not mapped** (`OpenFile`). A file that is cut short or replaced while it is mapped
ends the process with SIGBUS, in the middle of whatever it does. Read, the same is a `WeightsError` that
names the file. What is read is the file whose header was checked: the same inode, with the same length
and time of change, before the first byte and after the last one.

Most tensors are copied to where they are needed at once and are gone before the next is read. Memory that the
process touches for the first time costs several times what reading into it costs, so `Scratch` reads each tensor
into the memory of the last one, unless somebody kept that.
"""

from __future__ import annotations

import json
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
from engine.limits import Limit

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
    """The name in the file: F32, BF16, ..."""
    shape: tuple[int, ...]
    file: Path
    start: int
    """First byte of the data, from the beginning of the file."""
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
    """What is odd about the file and was not worth refusing it for, one line each."""
    _files: Mapping[Path, OpenFile]
    """Those that `tensors` name."""

    @abstractmethod
    def get(self, name: str) -> Tensor | QuantTensor:
        """The tensor on the CPU, in memory of its own: writes never reach the file."""

    @abstractmethod
    def config_dict(self) -> dict[str, Any]:
        """What a Hugging Face `config.json` of this model says."""

    @abstractmethod
    def tokenizer_json(self) -> bytes | None:
        """A `tokenizer.json` of the tokenizers library; None, with the reason in `warnings`, when
        the file brings none."""

    @property
    def folder(self) -> Path:
        """Where the files are that belong to the weights."""
        return self.path if os.path.isdir(self.path) else self.path.parent

    def read(self, info: TensorInfo, dtype: torch.dtype) -> Tensor:
        """The bytes of a tensor as one row of `dtype`."""
        return self._files[info.file].read(info.start, info.bytes, dtype)

    def close(self) -> None:
        """Lets go of the files; tensors of `get` live on."""
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
    """Opens a file to read; a folder, a pipe or nothing at all is refused by what it is."""
    return files.open_regular(path, what, error=WeightsError)


def identity_of(descriptor: int) -> tuple[int, ...]:
    """What changes when a file is replaced or written to."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


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


def read_json_object(path: Path, what: str, limit: Limit) -> dict[str, Any]:
    """A JSON file of one object; duplicate keys and NaN, which `json` takes, are refused."""
    return parse_object(files.read_bytes(path, what, limit, error=WeightsError), what, path)


class _JsonRefused(ValueError):
    """Valid for `json`, not for us."""


class _TwiceError(_JsonRefused):
    """A key that an object has twice: `json` keeps the last value and says nothing."""


def _constant(text: str) -> NoReturn:
    raise _JsonRefused(f"the value {text}")


def _integer(text: str) -> int:
    if text == "-0":
        raise _JsonRefused("the value -0")
    return int(text)


def parse_object(
    raw: bytes,
    what: str,
    path: Path,
    *,
    first_byte: int = 0,
    code: str = "",
    twice_code: str = "",
    twice: list[str] | None = None,
    no_minus_zero: bool = False,
) -> dict[str, Any]:
    """The JSON object in `raw`, which starts at `first_byte` of the file. Raises `WeightsError`.

    A key that comes twice is refused under `twice_code`; or, where a list is given as `twice`,
    noted there, and the last value counts. NaN and infinity are refused, and with
    `no_minus_zero` the integer -0, which is a real number to other readers.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found and twice is None:
                raise _TwiceError(f"the key {json.dumps(key)} twice")
            if key in found and twice is not None:
                twice.append(key)
            key.encode()  # a lone surrogate could be neither printed nor written again
            found[key] = value
        return found

    coded = f"{code} {what}".lstrip()
    try:
        text = raw.decode()
        # A function for each integer costs time, so only where it could find something.
        integer = _integer if no_minus_zero and b"-0" in raw else None
        found = json.loads(
            text, object_pairs_hook=unique, parse_constant=_constant, parse_int=integer
        )
    except UnicodeDecodeError as error:
        at = first_byte + error.start
        raise WeightsError.expected(coded, path, "UTF-8", f"another byte at byte {at}") from error
    except json.JSONDecodeError as error:
        at = first_byte + len(text[: error.pos].encode())
        raise WeightsError.expected(coded, path, "JSON", f"{error.msg} at byte {at}") from error
    except RecursionError as error:
        raise WeightsError.expected(coded, path, "JSON", "brackets nested too deep") from error
    except MemoryError as error:
        raise WeightsError.expected(coded, path, "JSON that fits in memory", "more") from error
    except ValueError as error:
        # A key twice, NaN, a number of thousands of digits, a lone surrogate.
        if isinstance(error, _TwiceError):
            coded = f"{twice_code} {what}".lstrip()
        raise WeightsError.expected(coded, path, "JSON with unique keys", str(error)) from error
    if not isinstance(found, dict):
        raise WeightsError.expected(coded, path, "a JSON object", f"{type(found).__name__}")
    return found
