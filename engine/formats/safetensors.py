"""Open, check, read and write weights in safetensors files: one file, or a model folder.

A model is one file, or a folder with `model.safetensors`, or a folder with
`model.safetensors.index.json`, which lists the shard of each tensor. Every header is checked before
any data is read. Opening a model costs no memory: a tensor is read when it is requested. The files
contain only tensors: configuration and tokenizer are in the `config.json` and `tokenizer.json` of the
same folder.

    byte 0      8 bytes   N, the length of the header, unsigned little-endian
    byte 8      N bytes   JSON: {name: {"dtype", "shape", "data_offsets": [begin, end]}, ...},
                          and text under "__metadata__"
    byte 8+N    the rest  the data; offsets count from here, and tensors fill it without holes,
                          overlaps or a tail

The `safetensors` library checks this layout too. But its reader maps the file, so a file that is
truncated while it is read kills the process, its messages name neither tensor nor byte, and it has no
parser for a header alone. Here a file is refused with a code and what is wrong:

    ST02  not safetensors: a failed download, a pickle         ST10  tensors that do not fill the file
    ST05  a header that is not a JSON object                   ST12  a dtype that torch does not have
    ST08  truncated                                            ST13  shards that do not match the index

Importing this module does not import torch; `get`, `write_safetensors` and `tensors_sha256` do. Not
covered: values (`engine.models.load` refuses NaN and infinity).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from engine import files, limits
from engine.errors import WeightsError
from engine.formats.kinds import START_BYTES, Kind, kind_of, other_kind
from engine.formats.weights import (
    CUT_SHORT,
    OpenFile,
    Scratch,
    TensorInfo,
    WeightFile,
    identity_of,
    open_regular,
)
from engine.formats.writing import fsync_folder, tensor_bytes, tensor_chunks, unwritable
from engine.model_families import ROPE_BUFFER, in_text_model

if TYPE_CHECKING:
    import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"

# Name in a file -> bits per value, and torch's name if torch has the dtype.
DTYPES: dict[str, tuple[int, str | None]] = {
    "F64": (64, "float64"),
    "F32": (32, "float32"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "F4": (4, None),
    "I64": (64, "int64"),
    "I32": (32, "int32"),
    "I16": (16, "int16"),
    "I8": (8, "int8"),
    "U64": (64, "uint64"),
    "U32": (32, "uint32"),
    "U16": (16, "uint16"),
    "U8": (8, "uint8"),
    "BOOL": (8, "bool"),
    "C64": (64, "complex64"),
}


class SafetensorsFolder(WeightFile):
    """The tensors of one file or of all shards of a folder, with Hugging Face names."""

    format = "safetensors"
    convention = "hf"

    def __init__(
        self, path: Path, headers: list[Header], tensors: Mapping[str, TensorInfo] | None = None
    ) -> None:
        """Open the tensors in `tensors`, by default all tensors of `headers`."""
        self.path = path
        metadata: dict[str, str] = {}
        found: dict[str, TensorInfo] = {}
        for header in headers:
            metadata |= header.metadata
            found |= header.tensors
        self.tensors, self.metadata = _of_text_model(dict(tensors or found)), metadata
        self.warnings = tuple(_left_out(path, self.tensors))
        scratch = Scratch()
        self._files = {
            header.path: OpenFile(header.path, "weights", "", header.identity, scratch)
            for header in headers
        }

    def get(self, name: str) -> torch.Tensor:
        """Return the tensor on the CPU, in its own memory: writes never reach the file."""
        import torch

        info = self.tensors.get(name)
        if info is None:
            refuse(self.path, f'tensor "{name}"', f"{len(self.tensors)} tensors without it")
        dtype = getattr(torch, DTYPES[info.dtype][1] or "", None)
        if dtype is None:
            where = f'{info.file}, tensor "{name}"'
            refuse(where, "a dtype that torch has", info.dtype, code="ST12")
        return self.read(info, dtype).view(info.shape)

    def config_dict(self) -> dict[str, Any]:
        """Return the `config.json` in the folder of the weights. Raises `WeightsError`."""
        return files.read_json_object(
            self.folder / CONFIG_FILE,
            "model configuration",
            limits.MODEL_CONFIG,
            error=WeightsError,
        )

    def tokenizer_json(self) -> bytes | None:
        """Return the `tokenizer.json` in the folder of the weights, or None. Raises `WeightsError`."""
        path = self.folder / TOKENIZER_FILE
        if not os.path.lexists(path):
            return None
        return files.read_bytes(path, "tokenizer", limits.TOKENIZER_FILE, error=WeightsError)


def open_index(path: Path) -> SafetensorsFolder:
    """Open the shards that an index file lists, whatever its name. Raises `WeightsError`."""
    raw = files.read_json_object(
        path, "safetensors index", limits.WEIGHTS_HEADER, error=WeightsError
    )
    weight_map = raw.get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) and Path(shard).name == shard != "" for shard in weight_map.values()
    ):
        found = f"{weight_map!r:.80}"
        refuse(path, "a weight_map of tensors to files in its folder", found, code="ST13")
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not os.path.exists(path.parent / shard)]
    if missing:
        refuse(
            path,
            f"{len(shards)} shards",
            f"{len(missing)} missing: {', '.join(missing[:8])}" + (", ..." if missing[8:] else ""),
            "fetch the rest of the model",
            code="ST13",
        )
    headers = {shard: read_header(path.parent / shard) for shard in shards}
    for name, shard in weight_map.items():
        if name not in headers[shard].tensors:
            expected = f"tensor {json.dumps(name)} in {shard}"
            refuse(path, expected, "no tensor of this name", code="ST13")
    tensors = {name: headers[shard].tensors[name] for name, shard in weight_map.items()}
    return SafetensorsFolder(path, [*headers.values()], tensors)


def _of_text_model(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors with the names of a plain language model, if the checkpoint also has a vision model. Tensors
    outside the language model keep their names. `TensorInfo.name` is always the name in the file."""
    renamed = {in_text_model(name) or name: info for name, info in tensors.items()}
    return renamed if len(renamed) == len(tensors) else tensors


def tensors_outside_language_model(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Return the tensors outside the language model of a checkpoint that also has a vision model."""
    if all(name == info.name for name, info in tensors.items()):
        return []
    return [
        name
        for name in tensors
        if not name.startswith(("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head."))
    ]


def _left_out(path: Path, tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Yield warnings about tensors of the file that the native decoder does not read."""
    buffers = [name for name in tensors if ROPE_BUFFER.fullmatch(name)]
    if buffers:
        yield f"{path}: {_count_names(buffers, 'buffer')} of RoPE not read: config.json says the same"
    if others := tensors_outside_language_model(tensors):
        names = _count_names(others, "tensor")
        yield f"{path}: {names} outside the language model, which the native decoder does not read"


def _count_names(names: Sequence[str], noun: str) -> str:
    plural = "" if len(names) == 1 else "s"
    return f"{len(names):,} {noun}{plural} ({min(names)}{', ...' * bool(plural)})"


def write_safetensors(
    path: str | Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a new file, each tensor cast to `dtype`, and return when it is safe on disk.

    Host memory peaks at one tensor, whatever device the tensors are on. An existing file is refused
    and stays unchanged; a failed write leaves no file. Raises `WeightsError`, `DiskFull`.
    """
    path = Path(path)
    codes = {name: dtype_code(dtype or tensor.dtype) for name, tensor in tensors.items()}
    order = sorted(tensors, key=lambda name: (-DTYPES[codes[name]][0], name))
    header = header_bytes(((name, codes[name], tensors[name].shape) for name in order), metadata)
    written = False
    try:
        file = path.open("xb")
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        with file:
            file.write(header)
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
    """Return a digest of names, dtypes, shapes and bytes, independent of order and device."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        # As JSON, so that no name can be mistaken for another tensor's dtype or shape.
        digest.update(
            json.dumps([name, dtype_code(tensor.dtype), list(tensor.shape)]).encode() + b"\n"
        )
        for part in tensor_chunks(tensor):
            digest.update(part)
    return digest.hexdigest()


def header_bytes(
    tensors: Iterable[tuple[str, str, Sequence[int]]],
    metadata: Mapping[str, str] | None = None,
    *,
    spaced: bool = False,
) -> bytes:
    """Return what precedes the data: the length of the header, and its JSON.

    `tensors`: names, dtype codes and shapes, in the order of the data. Wide dtypes must come first, as
    the library writes them, so that each tensor is aligned to its element size. `spaced` puts spaces
    after separators, as Python's JSON does by default.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, code, shape in tensors:
        begin, end = end, end + math.prod(shape) * DTYPES[code][0] // 8
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
    separators = None if spaced else (",", ":")
    text = json.dumps(header, separators=separators, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def dtype_code(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    for code, (_, torch_name) in DTYPES.items():
        if torch_name == name:
            return code
    raise WeightsError(f"{dtype}: a safetensors file has no such dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A checked header: its tensors fill the rest of the file exactly."""

    path: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    file_bytes: int
    identity: tuple[int, ...] = ()
    """Identity of the file that was read (`engine.formats.weights.identity_of`)."""


def read_header(path: str | Path) -> Header:
    """Read and check the header of one file; no tensor data is read. Raises `WeightsError`."""
    path = Path(path)
    with open_regular(path, "safetensors file") as file:
        identity = identity_of(file.fileno())
        file_bytes = os.fstat(file.fileno()).st_size
        start = file.read(START_BYTES)
        kind = kind_of(start)
        if kind is not Kind.SAFETENSORS:
            raise other_kind("weights", path, Kind.SAFETENSORS.value, kind, start, "ST02")
        data_start = 8 + int.from_bytes(start[:8], "little")
        if data_start > file_bytes:
            expected = f"a header of {data_start - 8:,} bytes"
            refuse(
                path, expected, f"a truncated file of {file_bytes:,} bytes", CUT_SHORT, code="ST08"
            )
        file.seek(8)
        text = file.read(data_start - 8)
    raw = files.parse_json(text, path, "ST05 safetensors header", error=WeightsError)
    metadata = raw.pop("__metadata__", None) or {}
    tensors = {name: _tensor_info(path, name, raw[name], data_start) for name in raw}
    _check_layout(path, tensors, data_start, file_bytes)
    return Header(
        path=path, tensors=tensors, metadata=metadata, file_bytes=file_bytes, identity=identity
    )


def refuse(
    where: object, expected: str, found: str, hint: str | None = None, *, code: str = ""
) -> NoReturn:
    """Raise the `WeightsError` for a weight file; `code` is the error code, such as ST08."""
    raise WeightsError.expected(f"{code} weights".lstrip(), where, expected, found, hint=hint)


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    where = f"{path}, tensor {json.dumps(name)}"
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        bits = math.prod(shape) * DTYPES[dtype][0]
        is_sound = bits == 8 * (end - begin) and all(
            type(number) is int and 0 <= number < 2**63 for number in (begin, end, *shape)
        )
    except (TypeError, KeyError, ValueError):
        is_sound = False
    if not is_sound:
        expected = (
            f"a dtype of {', '.join(DTYPES)}, and data_offsets as far apart as its shape needs"
        )
        refuse(where, expected, f"{entry!r:.200}", code="ST10")
    return TensorInfo(
        name=name, dtype=dtype, shape=shape, file=path, start=data_start + begin, bytes=end - begin
    )


def _check_layout(
    path: Path, tensors: dict[str, TensorInfo], data_start: int, file_bytes: int
) -> None:
    """Check that each byte after the header belongs to exactly one tensor."""
    end = data_start
    for info in sorted(tensors.values(), key=lambda info: (info.start, info.bytes)):
        if info.start != end:
            where = f"{path}, tensor {json.dumps(info.name)}"
            refuse(where, f"its data at byte {end:,}", f"{info.start:,}", code="ST10")
        end += info.bytes
    if end > file_bytes:
        found = f"a truncated file of {file_bytes:,}: {end - file_bytes:,} bytes are missing"
        refuse(path, f"{end:,} bytes", found, CUT_SHORT, code="ST08")
    if end < file_bytes:
        found = f"{file_bytes - end:,} bytes of no tensor at its end"
        refuse(path, f"{end:,} bytes", found, code="ST10")
