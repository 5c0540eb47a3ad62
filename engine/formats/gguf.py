"""Weights in GGUF: one file, or the parts of a split one, opened, checked and read.

A split model is `name-00001-of-00003.gguf` and its siblings; any part may be named, and
all are opened. Each part says which it is (`split.no`, from 0) and how many there are, and holds
tensors of its own; configuration and tokenizer are in the first. A part that is missing, or is not
the part that its name says, is refused by name (GG19).

`get` answers float types as torch tensors, block types as `QuantTensor`, in memory of their own. A file that is
cut short, replaced or written to after its header was read is refused (GG16).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from engine.formats.gguf_header import GgufHeader, read_gguf_header
from engine.formats.gguf_meta import read_config
from engine.formats.gguf_tokenizer import build_tokenizer_json, unsupported_tokenizer
from engine.formats.gguf_values import quoted, refuse
from engine.formats.gguf_vocabulary import check_vocabulary
from engine.formats.open_file import OpenFile, Scratch
from engine.formats.safetensors_header import TensorInfo
from engine.quant.blocks import BLOCK_TYPES, row_bytes

if TYPE_CHECKING:
    import torch

    from engine.quant.tensor import QuantTensor

__all__ = ["GgufFile", "open_gguf"]

_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_TORCH_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class GgufFile:
    """A `WeightFile` with the names of llama.cpp (`blk.0.attn_q.weight`). Made by `open_gguf`."""

    def __init__(self, path: Path, headers: list[GgufHeader]) -> None:
        self.path = path
        self.format: Literal["gguf"] = "gguf"
        self.convention: Literal["gguf"] = "gguf"
        self.tensors: Mapping[str, TensorInfo] = _merged(headers)
        self._metadata = headers[0].metadata
        self.metadata: Mapping[str, Any] = self._metadata
        """Every key/value pair of the (first) file; the chat template is under
        `tokenizer.chat_template`."""
        odd = [_unclaimed(header) for header in headers if header.unclaimed_bytes]
        odd += check_vocabulary(self._metadata, self.tensors)
        odd += unsupported_tokenizer(self._metadata)
        self.warnings: tuple[str, ...] = tuple(odd)
        scratch = Scratch()
        self._files = {
            one.path: OpenFile(one.path, "gguf", "GG16", one.identity, scratch) for one in headers
        }

    def get(self, name: str) -> torch.Tensor | QuantTensor:
        """The tensor on the CPU, in memory of its own: writes never reach the file."""
        import torch

        from engine.quant.tensor import QuantTensor

        info = self.tensors.get(name)
        if info is None:
            where = f"{self.path}, tensor {quoted(name)}"
            refuse(
                "GG14", where, "a tensor of this name", f"{len(self.tensors)} tensors without it"
            )
        file = self._files[info.file]
        if info.dtype in _TORCH_DTYPES:
            dtype = getattr(torch, _TORCH_DTYPES[info.dtype])
            return file.read(info.start, info.bytes, dtype).view(info.shape)
        kind = BLOCK_TYPES[info.dtype]
        flat = file.read(info.start, info.bytes, torch.uint8)
        blocks = flat.view(*info.shape[:-1], row_bytes(kind, info.shape[-1]))
        return QuantTensor(blocks=blocks, type=kind, shape=info.shape)

    def config_dict(self) -> dict[str, Any]:
        """What a Hugging Face `config.json` of this model says. GG17 for another architecture.

        The scaled rotary positions of Llama 3.1 are not in it: they are the tensor
        `rope_freqs.weight`.
        """
        return read_config(self._metadata, self.tensors)

    def tokenizer_json(self) -> bytes | None:
        """A `tokenizer.json` that gives the ids of this file; None, with the reason in `warnings`,
        for a kind of tokenizer that is not supported."""
        return build_tokenizer_json(self._metadata)

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


def open_gguf(path: str | Path) -> GgufFile:
    """Opens a GGUF file, or any part of a split one, and checks every header. `WeightsError`."""
    path = Path(path)
    header = read_gguf_header(path)
    count = _split_number(header, "split.count", 1)
    if count <= 1:
        return GgufFile(path, [header])
    return GgufFile(path, _open_parts(path, header, count))


def _open_parts(path: Path, opened: GgufHeader, count: int) -> list[GgufHeader]:
    """The headers of all parts, in order."""
    match = _PART.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        expected = f"a name that ends in -00001-of-{count:05}.gguf, part {count} being the last"
        refuse("GG19", path, expected, quoted(path.name), "give the parts their names back")
    names = [f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    missing = [name for name in names if not path.with_name(name).exists()]
    if missing:
        listed = ", ".join(missing[:8]) + (", ..." if missing[8:] else "")
        found = f"{len(missing)} missing: {listed}"
        refuse("GG19", path, f"{count} parts", found, "fetch the rest of the model")
    headers = []
    for number, name in enumerate(names):
        part = path.with_name(name)
        header = opened if part == path else read_gguf_header(part)
        said = _split_number(header, "split.no", None), _split_number(header, "split.count", None)
        if said != (number, count):
            expected = f"split.no {number} and split.count {count}"
            refuse("GG19", part, expected, f"{said[0]} and {said[1]}", "a part may be there twice")
        headers.append(header)
    tensors = sum(len(header.tensors) for header in headers)
    promised = _split_number(headers[0], "split.tensors.count", tensors)
    if promised != tensors:
        refuse("GG19", path, f"{promised:,} tensors in all parts", f"{tensors:,}")
    return headers


def _split_number(header: GgufHeader, key: str, absent: int | None) -> int:
    found = header.metadata.get(key, absent)
    # Names have five digits for it.
    if type(found) is not int or not 0 <= found <= 99_999:
        refuse(
            "GG19",
            f"{header.path}, key {quoted(key)}",
            "a number from 0 to 99,999",
            f"{found!r:.40}",
        )
    return found


def _merged(headers: list[GgufHeader]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for name, info in header.tensors.items():
            if name in tensors:
                found = f"it in {tensors[name].file.name} and {info.file.name}"
                refuse("GG14", f"{info.file}, tensor {quoted(name)}", "it in one part", found)
            tensors[name] = info
    return tensors


def _unclaimed(header: GgufHeader) -> str:
    return f"{header.path}: {header.unclaimed_bytes:,} bytes of the data belong to no tensor"
