"""Weights in safetensors files: one file, or a model folder, opened, read and written.

A model is one file, or a folder with `model.safetensors`, or a folder with
`model.safetensors.index.json` that says which shard holds which tensor. Which of the three is never
guessed: a folder with both is refused. Every header is checked by
`engine.formats.safetensors_header` before any data is touched. Opening a model costs no memory: a tensor
is read when it is asked for (`engine.formats.open_file`).

The files say nothing of the model but its tensors: configuration and tokenizer are in the
`config.json` and `tokenizer.json` beside them. ST13 is a set of shards that does not fit its index,
ST18 an index that names a file outside its folder, by a path or a link; the other codes are the header's.

Importing this module does not load torch; `get`, `write_safetensors` and
`tensors_sha256` do.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from engine import files, limits
from engine.errors import BadInput, DiskFull, WeightsError
from engine.formats.open_file import OpenFile, Scratch
from engine.formats.safetensors_header import (
    DTYPES,
    Header,
    TensorInfo,
    read_header,
    read_json_object,
    refuse,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "SafetensorsFolder",
    "TensorInfo",
    "fsync_folder",
    "open_safetensors",
    "read_header",
    "tensor_bytes",
    "tensors_sha256",
    "unwritable",
    "write_safetensors",
]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"


class SafetensorsFolder:
    """The tensors of one file or of all shards of a folder; data is read when asked for.

    A `WeightFile` with Hugging Face names.
    """

    format: Literal["safetensors"] = "safetensors"
    convention: Literal["hf"] = "hf"

    def __init__(self, path: Path, headers: list[Header]) -> None:
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}
        self.metadata: dict[str, str] = {}
        """The text under `__metadata__`; of several shards, the last that has a key."""
        named_apr = [
            f"AP12 {header.path}: a safetensors file named .apr, read as what it is"
            for header in headers
            if header.path.suffix.lower() == ".apr"
        ]
        self.warnings: tuple[str, ...] = (*named_apr, *(w for h in headers for w in h.warnings))
        for header in headers:
            self.metadata |= header.metadata
            for name, info in header.tensors.items():
                if name in self.tensors:
                    refuse(
                        path,
                        f'tensor "{name}" in one shard',
                        f"it in {self.tensors[name].file.name} and {info.file.name}",
                        code="ST13",
                    )
                self.tensors[name] = info
        scratch = Scratch()
        self._files = {
            one.path: OpenFile(one.path, "weights", "", one.identity, scratch) for one in headers
        }

    def get(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, in memory of its own: writes never reach the file."""
        import torch

        info = self.tensors.get(name)
        if info is None:
            refuse(self.path, f'tensor "{name}"', f"{len(self.tensors)} tensors without it")
        dtype = getattr(torch, DTYPES[info.dtype][1] or "", None)
        if dtype is None:
            where = f'{info.file}, tensor "{name}"'
            refuse(where, "a dtype that torch has", info.dtype, code="ST12")
        return self._files[info.file].read(info.start, info.bytes, dtype).view(info.shape)

    @property
    def folder(self) -> Path:
        """Where the files are that belong to the weights."""
        return self.path if os.path.isdir(self.path) else self.path.parent

    def config_dict(self) -> dict[str, Any]:
        """The `config.json` beside the weights. Raises `WeightsError`."""
        return read_json_object(
            self.folder / CONFIG_FILE, "model configuration", limits.MODEL_CONFIG
        )

    def tokenizer_json(self) -> bytes | None:
        """The `tokenizer.json` beside the weights, or None. Raises `WeightsError`."""
        path = self.folder / TOKENIZER_FILE
        if not os.path.lexists(path):
            return None
        return files.read_bytes(path, "tokenizer", limits.TOKENIZER_FILE, error=WeightsError)

    def close(self) -> None:
        """Lets go of the files; tensors of `get` live on."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def open_safetensors(path: str | Path) -> SafetensorsFolder:
    """Opens a file, an index, or a model folder, and checks every header. Raises `WeightsError`."""
    path = Path(path)
    if not os.path.isdir(path):
        if path.name.endswith(".index.json"):
            return open_index(path)
        return SafetensorsFolder(path, [read_header(path)])
    single, index = path / SINGLE_FILE, path / INDEX_FILE
    if os.path.exists(single) and os.path.exists(index):
        refuse(path, f"{SINGLE_FILE} or {INDEX_FILE}", "both", "name one of the two files instead")
    if os.path.exists(index):
        return SafetensorsFolder(path, _read_shards(index))
    if os.path.lexists(single):
        return SafetensorsFolder(path, [read_header(single)])
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        refuse(path, "a readable folder", str(error.strerror))
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    refuse(
        path,
        f"{SINGLE_FILE} or {INDEX_FILE}",
        ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "an empty folder",
        f"convert {pickled[0]} to safetensors first" if pickled else None,
    )


def open_index(path: Path) -> SafetensorsFolder:
    """Opens the shards that an index file lists, whatever its name. Raises `WeightsError`."""
    return SafetensorsFolder(path, _read_shards(path))


def write_safetensors(
    path: str | Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes a new file, each tensor cast to `dtype` on its way, and returns with it on the disk.

    Host memory peaks at one tensor, wherever the tensors live. An existing file is refused and
    stays as it is; a write that fails leaves nothing behind. Raises `WeightsError`, `DiskFull`.
    """
    path = Path(path)
    header, order = _layout(tensors, metadata, dtype)
    written = False
    try:
        file = path.open("xb")
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        with file:
            file.write(len(header).to_bytes(8, "little") + header)
            for name in order:
                file.write(tensor_bytes(tensors[name], dtype))
            file.flush()
            os.fsync(file.fileno())
        fsync_folder(path.parent)
        written = True
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        if not written:
            path.unlink(missing_ok=True)


def tensors_sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    """A digest of names, dtypes, shapes and bytes; neither order nor device enters it."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        # As JSON, so that no name can imitate another tensor's dtype or shape.
        digest.update(json.dumps([name, _code(tensor.dtype), list(tensor.shape)]).encode() + b"\n")
        digest.update(tensor_bytes(tensor, None))
    return digest.hexdigest()


def unwritable(path: Path, error: OSError) -> BadInput:
    """The error to raise for a write that the system refused: `DiskFull` or `WeightsError`."""
    reason = str(error.strerror)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull.expected("weights to write", path, "room for them", reason)
    if isinstance(error, FileExistsError):
        return WeightsError.expected("weights to write", path, "nothing at that path", "something")
    return WeightsError.expected("weights to write", path, "a path that can be written", reason)


def fsync_folder(path: Path) -> None:
    """Makes a new or renamed entry of a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _layout(
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None,
    dtype: torch.dtype | None,
) -> tuple[bytes, list[str]]:
    """The header's JSON, and the order of the data."""
    codes = {name: _code(dtype or tensor.dtype) for name, tensor in tensors.items()}
    # Wide types first, as the library orders them: each tensor starts at a multiple of its width.
    order = sorted(tensors, key=lambda name: (-DTYPES[codes[name]][0], name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].numel() * DTYPES[codes[name]][0] // 8
        header[name] = {
            "dtype": codes[name],
            "shape": list(tensors[name].shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % 8), order


def tensor_bytes(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> memoryview:
    """The bytes of a tensor in row-major order, in host memory, cast to `dtype` if given."""
    import torch

    flat = tensor.detach().to(device="cpu", dtype=dtype).contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _code(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    for code, (_, torch_name) in DTYPES.items():
        if torch_name == name:
            return code
    raise WeightsError(f"{dtype}: a safetensors file has no such dtype")


def escapes(name: str) -> bool:
    """Whether a file named in an index may lie outside the index's folder, or is no file name.

    By name only: the Hugging Face cache stores its files as links that leave the folder.
    """
    inside = PurePosixPath(name)
    odd = "\\" in name or not name.isprintable()
    return odd or inside.is_absolute() or ".." in inside.parts or not inside.parts


def _stays_inside(folder: Path, shard: str) -> bool:
    """Whether a shard, links followed, lies in its folder or in the blobs of a Hugging Face cache.

    That cache keeps `snapshots/<revision>/<file>` as links to `blobs/<digest>` two folders up.
    """
    real = Path(os.path.realpath(folder / shard))
    blobs = Path(os.path.realpath(folder)).parent.parent / "blobs"
    return real.is_relative_to(os.path.realpath(folder)) or real.parent == blobs


def _read_shards(index: Path) -> list[Header]:
    """The headers of all shards of an index; each tensor is in the shard it is said to be in."""
    weight_map = read_json_object(index, "safetensors index", limits.WEIGHTS_HEADER).get(
        "weight_map"
    )
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        found = f"{weight_map!r:.80}"
        refuse(index, "a weight_map of tensor names to file names", found, code="ST13")
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if escapes(shard):
            found = f"the shard path {json.dumps(shard)}"
            refuse(index, "shards inside the folder", found, code="ST18")
    for shard in shards:
        if not _stays_inside(index.parent, shard):
            found = f"{json.dumps(shard)}, a link to {os.path.realpath(index.parent / shard)}"
            hint = "name that folder itself if the link is meant"
            refuse(index, "shards inside the folder", found, hint, code="ST18")
    missing = [shard for shard in shards if not os.path.exists(index.parent / shard)]
    if missing:
        refuse(
            index,
            f"{len(shards)} shards",
            f"{len(missing)} missing: {', '.join(missing[:8])}" + (", ..." if missing[8:] else ""),
            "fetch the rest of the model",
            code="ST13",
        )
    headers = [read_header(index.parent / shard) for shard in shards]
    for shard, header in zip(shards, headers, strict=True):
        for name in header.tensors:
            if name not in weight_map:
                wanted = f"a shard for tensor {json.dumps(name)}"
                refuse(index, wanted, f"none, and it is in {shard}", code="ST13")
    holds = {shard: header.tensors for shard, header in zip(shards, headers, strict=True)}
    for name, shard in weight_map.items():
        if name not in holds[shard]:
            others = [other for other in shards if name in holds[other]]
            found = f"it in {others[0]}" if others else "it in no shard"
            refuse(index, f"tensor {json.dumps(name)} in {shard}", found, code="ST13")
    return headers
