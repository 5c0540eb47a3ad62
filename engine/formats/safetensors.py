"""Opens, checks, reads and writes weights in safetensors files: one file, or a model folder.

A model is one file, or a folder with `model.safetensors`, or a folder with
`model.safetensors.index.json`, which lists the shard of each tensor. The choice is never guessed: a
folder with both is refused. Every header is checked before any data is read. Opening a model costs
no memory: a tensor is read when it is requested. The files contain only tensors: configuration and
tokenizer are in the `config.json` and `tokenizer.json` of the same folder.

    byte 0      8 bytes   N, the length of the header, unsigned little-endian
    byte 8      N bytes   JSON: {name: {"dtype", "shape", "data_offsets": [begin, end]}, ...},
                          and text under "__metadata__"
    byte 8+N    the rest  the data; offsets count from here, and tensors fill it without holes,
                          overlaps or a tail

The `safetensors` library checks this layout too. But its reader maps the file, so a file that is
truncated while it is read kills the process; it accepts duplicate keys, its messages name neither
tensor nor byte, it reports a failed download (a Git-LFS pointer, an HTML page) as a bad number, and
it has no parser for a header alone. Here nothing is allocated from an unchecked length, and a file
is refused with a code and the byte or the tensor that is wrong:

    ST01  shorter than a header      ST07  a key twice               ST12  unknown dtype
    ST02  another kind of file       ST08  data cut short            ST13  shards do not fit the index
    ST03  header longer than file    ST09  trailing bytes            ST17  too many tensors
    ST04  header over the limit      ST10  overlap, hole, reversed   ST18  an index names a file outside
    ST05  not UTF-8, not JSON        ST11  shape and bytes disagree        its folder, by a path or a link

ST06, a header that does not start with its brace, is a warning, and so is an unknown field.

Importing this module does not import torch; `get`, `write_safetensors` and `tensors_sha256` do. Not
covered: values (`engine.models.load` refuses NaN and infinity).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

from engine import files, limits
from engine.errors import WeightsError
from engine.formats.kinds import HEADER_LIMIT_BYTES, START_BYTES, Kind, kind_of, other_kind
from engine.formats.weights import (
    CUT_SHORT,
    OpenFile,
    Scratch,
    TensorInfo,
    WeightFile,
    identity_of,
    open_regular,
    parse_object,
    read_json_object,
)
from engine.formats.writing import fsync_folder, tensor_bytes, tensor_parts, unwritable
from engine.model_families import ROPE_BUFFER, in_text_model

if TYPE_CHECKING:
    import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"

TENSORS_LIMIT = limits.TENSORS.most
"""A 70B model has fewer than a thousand; a header of a million empty tensors would only take time.
"""

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

_GGUF_TYPE = re.compile(r"(Q\d|IQ\d|TQ\d|MXFP)\w*", re.IGNORECASE)


class SafetensorsFolder(WeightFile):
    """The tensors of one file or of all shards of a folder, with Hugging Face names."""

    format = "safetensors"
    convention = "hf"

    def __init__(self, path: Path, headers: list[Header], warnings: Sequence[str] = ()) -> None:
        self.path = path
        tensors: dict[str, TensorInfo] = {}
        metadata: dict[str, str] = {}
        named_apr = [
            f"AP12 {header.path}: a safetensors file named .apr, read as what it is"
            for header in headers
            if header.path.suffix.lower() == ".apr"
        ]
        self.warnings = (*named_apr, *warnings, *(w for h in headers for w in h.warnings))
        for header in headers:
            metadata |= header.metadata  # for duplicate keys the last shard's value is used
            for name, info in header.tensors.items():
                if name in tensors:
                    refuse(
                        path,
                        f'tensor "{name}" in one shard',
                        f"it in {tensors[name].file.name} and {info.file.name}",
                        code="ST13",
                    )
                tensors[name] = info
        self.tensors, self.metadata = _of_text_model(tensors), metadata
        self.warnings = (*self.warnings, *_left_out(path, self.tensors))
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
        return read_json_object(
            self.folder / CONFIG_FILE, "model configuration", limits.MODEL_CONFIG
        )

    def tokenizer_json(self) -> bytes | None:
        """Return the `tokenizer.json` in the folder of the weights, or None. Raises `WeightsError`."""
        path = self.folder / TOKENIZER_FILE
        if not os.path.lexists(path):
            return None
        return files.read_bytes(path, "tokenizer", limits.TOKENIZER_FILE, error=WeightsError)


def open_index(path: Path) -> SafetensorsFolder:
    """Open the shards that an index file lists, whatever its name. Raises `WeightsError`."""
    headers, total = _read_shards(path)
    total_bytes = sum(info.bytes for header in headers for info in header.tensors.values())
    warnings = []
    if total is not None and (isinstance(total, bool) or total != total_bytes):
        warnings.append(
            f"{path}: metadata.total_size is {total!r:.80}, its shards hold {total_bytes:,} bytes of tensors; "
            "nothing here reads it"
        )
    return SafetensorsFolder(path, headers, warnings)


def _of_text_model(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors by the names that they have in a language model alone, in a checkpoint that also has a vision
    model. Tensors of other parts keep their names, and `TensorInfo.name` is always that in the file."""
    renamed = {in_text_model(name) or name: info for name, info in tensors.items()}
    return renamed if len(renamed) == len(tensors) else tensors


def other_parts(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Return the tensors outside the language model of a checkpoint that also has a vision model."""
    if all(name == info.name for name, info in tensors.items()):
        return []
    return [
        name
        for name in tensors
        if not name.startswith(("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head."))
    ]


def _left_out(path: Path, tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Yield what the native decoder does not read of a file."""
    buffers = [name for name in tensors if ROPE_BUFFER.fullmatch(name)]
    if buffers:
        yield f"{path}: {_count_names(buffers, 'buffer')} of RoPE not read: config.json says the same"
    if others := other_parts(tensors):
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
        # As JSON, so that no name can imitate another tensor's dtype or shape.
        digest.update(
            json.dumps([name, dtype_code(tensor.dtype), list(tensor.shape)]).encode() + b"\n"
        )
        for part in tensor_parts(tensor):
            digest.update(part)
    return digest.hexdigest()


def header_bytes(
    tensors: Iterable[tuple[str, str, Sequence[int]]],
    metadata: Mapping[str, str] | None = None,
    *,
    spaced: bool = False,
) -> bytes:
    """Return what precedes the data: the length of the header, and its JSON.

    `tensors` are names, dtype codes and shapes, in the order of the data. Wide types come first, as
    in the library, so each tensor starts at a multiple of its width. `spaced` puts spaces after
    separators, as Python's JSON does by default.
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


def escapes(name: str) -> bool:
    """Whether a file named in an index may be outside the index's folder, or is not a valid file
    name.

    This checks only the name: the Hugging Face cache stores its files as links that leave the
    folder.
    """
    inside = PurePosixPath(name)
    is_invalid = "\\" in name or not name.isprintable()
    return is_invalid or inside.is_absolute() or ".." in inside.parts or not inside.parts


def _stays_inside(folder: Path, shard: str) -> bool:
    """Whether a shard, with links followed, is in its folder or in the blobs of a Hugging Face
    cache.

    That cache keeps `snapshots/<revision>/<file>` as links to `blobs/<digest>` two folders up.
    """
    real = Path(os.path.realpath(folder / shard))
    blobs = Path(os.path.realpath(folder)).parent.parent / "blobs"
    return real.is_relative_to(os.path.realpath(folder)) or real.parent == blobs


def _read_shards(index: Path) -> tuple[list[Header], object]:
    """Return the headers of all shards of an index, after checking that each tensor is in its
    listed shard, and the total size that it says.
    """
    raw = read_json_object(index, "safetensors index", limits.WEIGHTS_HEADER)
    weight_map, about = raw.get("weight_map"), raw.get("metadata")
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
                expected = f"a shard for tensor {json.dumps(name)}"
                refuse(index, expected, f"none, and it is in {shard}", code="ST13")
    holds = {shard: header.tensors for shard, header in zip(shards, headers, strict=True)}
    for name, shard in weight_map.items():
        if name not in holds[shard]:
            others = [holder for holder in shards if name in holds[holder]]
            found = f"it in {others[0]}" if others else "it in no shard"
            refuse(index, f"tensor {json.dumps(name)} in {shard}", found, code="ST13")
    return headers, about.get("total_size") if isinstance(about, dict) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A checked header: its tensors fill the rest of the file exactly."""

    path: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    file_bytes: int
    identity: tuple[int, ...] = ()
    """Identity of the file that was read, as `engine.formats.weights` compares it."""
    warnings: tuple[str, ...] = ()
    """Deviations from the format that this reader accepts, one line each."""


def read_header(path: str | Path) -> Header:
    """Read and check the header of one file; no tensor data is read. Raises `WeightsError`."""
    path = Path(path)
    with open_regular(path, "safetensors file") as file:
        identity = identity_of(file.fileno())
        file_bytes = os.fstat(file.fileno()).st_size
        start = file.read(START_BYTES)
        kind = kind_of(start)
        if kind not in (Kind.SAFETENSORS, Kind.EMPTY, Kind.UNKNOWN):
            raise other_kind("weights", path, Kind.SAFETENSORS.value, kind, start, "ST02")
        if file_bytes < 8:
            refuse(
                path,
                "8 bytes of header length",
                f"a file of {file_bytes} bytes",
                CUT_SHORT,
                code="ST01",
            )
        header_bytes = int.from_bytes(start[:8], "little")
        if header_bytes > HEADER_LIMIT_BYTES:
            refuse(
                path,
                f"a header of at most {HEADER_LIMIT_BYTES:,} bytes",
                f"a length of {header_bytes:,} (the file starts with {start[:8]!r})",
                "this may be no safetensors file at all",
                code="ST04",
            )
        if 8 + header_bytes > file_bytes:
            refuse(
                path,
                f"a header of {header_bytes:,} bytes",
                f"a truncated file of {file_bytes:,} bytes",
                CUT_SHORT,
                code="ST03",
            )
        file.seek(8)
        text = file.read(header_bytes)
    raw = parse_object(
        text,
        "safetensors header",
        path,
        first_byte=8,
        code="ST05",
        twice_code="ST07",
        no_minus_zero=True,
    )
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        refuse(path, "__metadata__ of text to text", f"{metadata!r:.80}", code="ST05")
    if len(raw) > TENSORS_LIMIT:
        refuse(path, f"at most {TENSORS_LIMIT:,} tensors", f"{len(raw):,}", code="ST17")
    data_start = 8 + header_bytes
    tensors = {name: _tensor_info(path, name, raw[name], data_start) for name in raw}
    _check_layout(path, tensors, data_start, file_bytes)
    return Header(
        path=path,
        tensors=tensors,
        metadata=metadata,
        file_bytes=file_bytes,
        identity=identity,
        warnings=tuple(_oddities(path, text, raw)),
    )


def refuse(
    where: object, expected: str, found: str, hint: str | None = None, *, code: str = ""
) -> NoReturn:
    """Raise the `WeightsError` for a weight file; `code` is the error code, such as ST08."""
    raise WeightsError.expected(f"{code} weights".lstrip(), where, expected, found, hint=hint)


def _oddities(path: Path, text: bytes, raw: dict[str, Any]) -> Iterator[str]:
    spaces = len(text) - len(text.lstrip())
    if spaces:
        yield f"ST06 {path}: non-canonical header start, {spaces} bytes of white space at byte 8"
    for name, entry in raw.items():
        for field in entry.keys() - {"dtype", "shape", "data_offsets"}:
            yield f"{path}, tensor {json.dumps(name)}: unknown field {json.dumps(field)} ignored"


def _tensor_info(path: Path, name: str, raw: object, data_start: int) -> TensorInfo:
    where = f"{path}, tensor {json.dumps(name)}"
    entry = raw if isinstance(raw, dict) else {}
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        gguf = ", a GGUF type" if isinstance(dtype, str) and _GGUF_TYPE.fullmatch(dtype) else ""
        refuse(
            where,
            f"one of the dtypes {', '.join(DTYPES)}",
            f"{dtype!r:.80}{gguf}",
            "quantized blocks are kept in .gguf and .apr files" if gguf else None,
            code="ST12",
        )
    if not counts(shape):
        refuse(where, "a shape of integers from 0", f"{shape!r:.80}", code="ST11")
    if not counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        refuse(where, "data_offsets of [begin, end]", f"{offsets!r:.80}", code="ST10")
    begin, end = offsets
    bits = math.prod(shape) * DTYPES[dtype][0]
    if bits != (end - begin) * 8:
        refuse(
            where,
            f"{bits / 8:,g} bytes for {dtype}{shape!r:.80}",
            f"{end - begin:,} bytes",
            code="ST11",
        )
    if math.prod(size for size in shape if size) >= 2**63:
        # Possible only with a dimension of zero, with no bytes; torch cannot create such a
        # tensor.
        refuse(where, "a shape below 2^63", f"{shape!r:.80}", code="ST11")
    return TensorInfo(
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        file=path,
        start=data_start + begin,
        bytes=end - begin,
    )


def counts(value: object) -> TypeGuard[list[int]]:
    """Whether it is a short list of integers from 0 to 2^63 - 1, so that their product stays small."""
    return (
        isinstance(value, list)
        and len(value) <= 64
        and all(type(count) is int and 0 <= count < 2**63 for count in value)
    )


def _check_layout(
    path: Path, tensors: dict[str, TensorInfo], data_start: int, file_bytes: int
) -> None:
    """Check that each byte after the header belongs to exactly one tensor."""
    end, previous = data_start, "the header"
    for info in sorted(tensors.values(), key=lambda info: (info.start, info.bytes)):
        name = f"tensor {json.dumps(info.name)}"
        if info.start < end:
            refuse(
                path,
                f"{name} after {previous}",
                f"it overlaps {previous} at byte {info.start:,}",
                code="ST10",
            )
        if info.start > end:
            refuse(
                path,
                f"{name} at byte {end:,}",
                f"a hole of {info.start - end:,} bytes before it",
                code="ST10",
            )
        end, previous = info.start + info.bytes, name
    if end > file_bytes:
        refuse(
            path,
            f"{end:,} bytes",
            f"a truncated file of {file_bytes:,}: {end - file_bytes:,} bytes are missing",
            CUT_SHORT,
            code="ST08",
        )
    if end < file_bytes:
        refuse(
            path,
            f"{end:,} bytes",
            f"{file_bytes - end:,} trailing bytes of no tensor",
            "another file may be hidden after the weights",
            code="ST09",
        )
