"""A model in one weight format, written in another.

Every tensor goes by itself from the source to the new file: renamed, its rows put into the
order of the new convention where that differs, and its values left alone where they can be:

    kept         the type is already the wanted one: the same bytes
    cast         floats, or blocks made floats, in another float type
    quantized    floats, or other blocks made floats first, in new blocks

So a conversion there and back between float types loses nothing, and blocks that both formats have
move byte for byte. The configuration, the tokenizer, the chat template and the model's name come
along. Nothing is overwritten: the new file or folder appears when all of it is on the disk, and a
conversion that fails leaves nothing behind.

Host memory: one tensor; for a folder of safetensors, one shard of at most `SHARD_BYTES`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import UsageError, WeightsError
from engine.export.about import about, chat_template, folder_of
from engine.export.folder import write_folder
from engine.export.mixture import QUANTS, tensor_types
from engine.formats.apr_write import write_apr
from engine.formats.gguf_write import write_gguf
from engine.formats.open import open_weights
from engine.formats.weights import WeightFile
from engine.models.config import ROPE_DIVISORS, ModelConfig, config_of
from engine.models.load import check_tied
from engine.models.names import (
    APR_HALVES,
    APR_NEIGHBOURS,
    check_fits,
    names_for,
    neighbours_turn,
    permute_rows,
    turned_heads,
    unpermute_rows,
)
from engine.models.rope import divisors
from engine.quant.blocks import BlockType
from engine.quant.quantize import quantize
from engine.quant.reference import FLOATS
from engine.quant.tensor import QuantTensor

CONVENTION_OF = {"safetensors": "hf", "gguf": "gguf", "apr": "apr"}
_FORMAT_OF_SUFFIX = {".gguf": "gguf", ".apr": "apr", "": "safetensors"}
_TYPE_OF = {dtype: name for name, dtype in FLOATS.items()}
FILE_TYPES = {"f32": 0, "q8_0": 7, "q4_k_m": 15, "q6_k": 18, "bf16": 32}
"""`general.file_type` of llama.cpp, which has one number for each mixture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One tensor more is written."""

    done: int
    total: int
    name: str
    """In the new file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What a conversion did."""

    source: Path
    target: Path
    format: str
    quant: str
    kept: int
    cast: int
    quantized: int
    tensors: dict[str, int]
    """Of each type in the new file."""
    weights: int
    bytes: int
    """Of the tensors in the new file."""
    tokenizer: bool
    """Whether the new file has one."""
    warnings: tuple[str, ...]
    """Of the source."""
    elapsed_s: float

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / self.weights


@dataclass(slots=True, kw_only=True)
class _Tally:
    kept: int = 0
    cast: int = 0
    quantized: int = 0
    weights: int = 0
    bytes: int = 0
    tensors: dict[str, int] = field(default_factory=dict)


def format_of(target: Path, asked: str | None) -> str:
    """The format to write: the one asked for, or that of the target's suffix."""
    if asked is not None:
        return asked
    found = _FORMAT_OF_SUFFIX.get(target.suffix.lower())
    if found is None and not target.suffix[1:].isalpha():
        found = "safetensors"  # a folder named for a version: qwen2.5-0.5
    if found is None:
        raise UsageError(
            f"target: {target} — expected a .gguf, an .apr, or a folder for safetensors, "
            f"found {target.suffix}",
            hint="say which with --format",
        )
    return found


def convert(
    source: str | Path,
    target: str | Path,
    quant: str,
    *,
    format_: str | None = None,
    tokenizer: bool = True,
    origin: Mapping[str, str] | None = None,
    device: str | torch.device = "cpu",
    on_tensor: Callable[[Progress], None] = lambda progress: None,
) -> Converted:
    """Writes the model in `source` to `target`, which must not exist; `device` does the arithmetic.

    `tokenizer=False` leaves the tokenizer out, for one that the new format has no way to say. `origin` is
    what a GGUF or .apr file says of the model beside what its source does: `name`, `license`, ...
    Raises `WeightsError`, `UsageError`, `TokenizerError`, `DiskFull`.
    """
    started_s = time.monotonic()
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("device: cuda — expected a GPU, found none", hint="cpu does the same")
    source, target = Path(source), Path(target)
    format_ = format_of(target, format_)
    if target.exists() or target.is_symlink():
        raise WeightsError.expected(
            "target", target, "a path where nothing is yet", "something", hint="choose another name"
        )
    with open_weights(source) as weights:
        config = config_of(weights)
        check_fits(config, weights, source, weights.convention)
        types = tensor_types(config, quant, format_)
        check_tied(config, weights)
        tally = _Tally()
        tokenizer_json = weights.tokenizer_json() if tokenizer else None
        convention = CONVENTION_OF[format_]
        tensors = _converted(weights, config, types, convention, device, tally)
        tensors = _reporting(tensors, len(types), on_tensor)
        _write(target, format_, quant, weights, config, tensors, tokenizer_json, origin or {})
        warnings = tuple(weights.warnings)
    return Converted(
        source=source,
        target=target,
        format=format_,
        quant=quant,
        kept=tally.kept,
        cast=tally.cast,
        quantized=tally.quantized,
        tensors=tally.tensors,
        weights=tally.weights,
        bytes=tally.bytes,
        tokenizer=tokenizer_json is not None,
        warnings=warnings,
        elapsed_s=time.monotonic() - started_s,
    )


def _converted(
    weights: WeightFile,
    config: ModelConfig,
    types: dict[str, BlockType],
    convention: str,
    device: torch.device,
    tally: _Tally,
) -> Iterator[tuple[str, Tensor | QuantTensor]]:
    """Each tensor under its new name, in the order of the forward pass."""
    have = neighbours_turn(config, weights.convention, weights.metadata, weights.path)
    want = _neighbours(config, convention)
    names = names_for(convention, config)
    for ours, name in names_for(weights.convention, config).items():
        tensor = _as_type(weights.get(name), types[ours], name, device, tally)
        heads = turned_heads(config, ours)
        if heads and want and not have:
            tensor = permute_rows(tensor, heads)
        elif heads and have and not want:
            tensor = unpermute_rows(tensor, heads)
        tally.tensors[types[ours].name] = tally.tensors.get(types[ours].name, 0) + 1
        tally.weights += math.prod(tensor.shape)
        tally.bytes += tensor.nbytes
        yield names[ours], tensor


def _neighbours(config: ModelConfig, convention: str) -> bool:
    """Whether the readers of a format turn neighbours: those of .apr do as those of GGUF."""
    return config.family == "llama" and convention != "hf"


def _as_type(
    source: Tensor | QuantTensor,
    wanted: BlockType,
    name: str,
    device: torch.device,
    tally: _Tally,
) -> Tensor | QuantTensor:
    held = source.type.name if isinstance(source, QuantTensor) else _TYPE_OF[source.dtype]
    if held == wanted.name:
        tally.kept += 1
        return source
    values = source.to(device)
    if isinstance(values, QuantTensor):
        values = values.dequantize()
    found = quantize(values, wanted, name=name)
    if wanted.name not in FLOATS:
        tally.quantized += 1
        return found
    tally.cast += 1
    return found.blocks.view(FLOATS[wanted.name]).view(found.shape)


def _reporting(
    tensors: Iterator[tuple[str, Tensor | QuantTensor]],
    total: int,
    on_tensor: Callable[[Progress], None],
) -> Iterator[tuple[str, Tensor | QuantTensor]]:
    """Reports each tensor when the writer is done with it."""
    for done, (name, tensor) in enumerate(tensors, 1):
        yield name, tensor
        on_tensor(Progress(done=done, total=total, name=name))


def _write(
    target: Path,
    format_: str,
    quant: str,
    weights: WeightFile,
    config: ModelConfig,
    tensors: Iterator[tuple[str, Tensor | QuantTensor]],
    tokenizer_json: bytes | None,
    origin: Mapping[str, str],
) -> None:
    raw = {**weights.config_dict(), **config.to_hf_dict()}
    for stale in ("torch_dtype", "dtype"):
        raw.pop(stale, None)
    if format_ == "safetensors":
        write_folder(
            target,
            config={**raw, "dtype": str(FLOATS[QUANTS[quant]]).removeprefix("torch.")},
            tensors=((name, _floats(tensor)) for name, tensor in tensors),
            tokenizer_json=tokenizer_json,
            chat_template=chat_template(weights),
            beside=folder_of(weights) if weights.format == "safetensors" else None,
        )
        return
    metadata = about(weights, format_, origin)
    if format_ == "gguf":
        metadata["general.file_type"] = FILE_TYPES[quant]
        if config.rope_scaling is not None:
            stored = divisors(config.rope_scaling, config.rope_theta, config.head_dim)
            tensors = chain([(ROPE_DIVISORS, torch.tensor(stored))], tensors)
        write_gguf(
            target, config=raw, tensors=tensors, tokenizer_json=tokenizer_json, metadata=metadata
        )
        return
    metadata["rope_type"] = APR_NEIGHBOURS if _neighbours(config, "apr") else APR_HALVES
    write_apr(target, config=raw, tensors=tensors, tokenizer_json=tokenizer_json, metadata=metadata)


def _floats(tensor: Tensor | QuantTensor) -> Tensor:
    assert isinstance(tensor, Tensor), "tensor_types gives safetensors float types"
    return tensor
