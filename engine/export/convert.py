"""Convert a model from one weight format to another.

Tensors are converted one at a time: each is renamed, its rows are reordered if the
new convention requires it, and its values are unchanged if possible:

    kept         the tensor already has the requested type: the same bytes
    cast         floats, or dequantised blocks, are cast to another float type
    quantized    floats, or dequantised blocks, are quantised to new blocks

So a conversion to another format in the same float type and back loses nothing, and block types that both formats have
are copied byte for byte. The configuration and the tokenizer are converted too, and so is other information about the
model, which each format stores in its own place:

    safetensors   chat_template.jinja in the folder, else `chat_template` in
                  tokenizer_config.json: a text, or a list of named ones with a `default`
    gguf          metadata `tokenizer.chat_template`, `general.name`, `general.license`, ...
    apr           metadata `chat_template`, `name`, `license`, ...

Within one format all metadata strings about the model's origin are kept; between formats, only keys that both have.
A chat template comes from the model's author: it is copied, never rendered here.

Nothing is overwritten. The new file or folder appears when it is complete on disk, and a failed conversion
leaves no files.

Peak host memory is one tensor; for a folder of safetensors it is one shard of at most `SHARD_BYTES`.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine import limits
from engine.errors import UsageError, WeightsError
from engine.export.hf_folder import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, write_folder
from engine.export.mixture import tensor_types
from engine.files import read_json_object, read_text
from engine.formats.adapter import is_adapter
from engine.formats.apr_write import write_apr
from engine.formats.gguf_write import write_gguf
from engine.formats.open import open_weights
from engine.formats.tokenizer import FILE_NAME
from engine.formats.weights import WeightFile
from engine.model_families import ROPE_DIVISORS
from engine.models.config import ModelConfig
from engine.models.load import (
    load_decoder,
    non_finite_values,
    refuse_non_finite,
    save_decoder,
    sources,
)
from engine.models.names import (
    APR_HALVES,
    APR_NEIGHBOURS,
    check_fits,
    joined,
    names_for,
    permute_rows,
    rotated_heads,
    shifted,
)
from engine.models.read_config import NATIVE, config_of
from engine.models.rope import divisors
from engine.quant.blocks import QUANTS, BlockType
from engine.quant.quantize import quantize
from engine.quant.reference import FLOATS
from engine.quant.tensor import QuantTensor

CONVENTION_OF = {"safetensors": "hf", "gguf": "gguf", "apr": "apr"}
_FORMAT_OF_SUFFIX = {".gguf": "gguf", ".apr": "apr", "": "safetensors"}
_TYPE_OF = {dtype: name for name, dtype in FLOATS.items()}
_TEMPLATE_KEY = {"gguf": "tokenizer.chat_template", "apr": "chat_template"}
# .apr key -> GGUF key.
_ORIGIN = {key: f"general.{key}" for key in ("name", "author", "version", "description", "license")}
FILE_TYPES = {"f32": 0, "q8_0": 7, "q4_k_m": 15, "q6_k": 18, "bf16": 32}
"""Values of llama.cpp's `general.file_type`, which has one number for each mixture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a conversion, reported after each tensor that was written."""

    done: int
    total: int
    name: str
    """The name in the new file."""


@dataclass(slots=True, kw_only=True)
class Converted:
    """The result of a conversion; its counts grow while the conversion runs."""

    source: Path
    target: Path
    format: str
    quant: str
    kept: int = 0
    cast: int = 0
    quantized: int = 0
    tensors: dict[str, int] = field(default_factory=dict)
    """Number of tensors of each type in the new file."""
    weights: int = 0
    bytes: int = 0
    """Size of the tensors in the new file."""
    tokenizer: bool
    """Whether the new file has a tokenizer."""
    warnings: tuple[str, ...] = ()
    """Warnings from reading the source."""
    elapsed_s: float = 0.0

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / self.weights


def format_of(target: Path, requested: str | None) -> str:
    """Return the requested format; by default the format of the target's suffix."""
    if requested is not None:
        return requested
    format_ = _FORMAT_OF_SUFFIX.get(target.suffix.lower())
    if format_ is None and not target.suffix[1:].isalpha():
        format_ = "safetensors"  # a folder named after a version: qwen2.5-0.5
    if format_ is None:
        raise UsageError(
            f"target: {target} — expected a .gguf, an .apr, or a folder for safetensors, "
            f"found {target.suffix}",
            hint="say which with --format",
        )
    return format_


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
    """Write the model in `source` to `target`, which must not exist; `device` does the arithmetic. An adapter is merged
    into its base in fp32 first, in a temporary folder next to the target.

    `tokenizer=False` leaves the tokenizer out, for one that the new format cannot represent. `origin` adds
    metadata about the model to a GGUF or .apr file: `name`, `license`, ... Raises `WeightsError`,
    `UsageError`, `TokenizerError`, `DiskFull`.
    """
    started_s = time.monotonic()
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "device: cuda — expected a GPU, found none", hint="cpu gives the same result"
        )
    source, target = Path(source), Path(target)
    format_ = format_of(target, format_)
    if target.exists() or target.is_symlink():
        raise WeightsError.expected(
            "target", target, "a new path", "an existing one", hint="choose another name"
        )
    if is_adapter(folder := source):
        with tempfile.TemporaryDirectory(prefix=".merged-", dir=target.absolute().parent) as parent:
            merged = Path(parent) / "model"
            extras = [
                folder / name
                for name in (FILE_NAME, TEMPLATE_FILE, TOKENIZER_CONFIG_FILE)
                if (folder / name).is_file()
            ]
            save_decoder(load_decoder(folder), merged, torch.float32, extra_files=extras)
            done = convert(
                merged,
                target,
                quant,
                format_=format_,
                tokenizer=tokenizer,
                origin=origin,
                device=device,
                on_tensor=on_tensor,
            )
        return dataclasses.replace(done, source=source)
    with open_weights(source) as weights:
        # The formats have tensor names only for the families of our own decoder.
        config = config_of(weights, NATIVE)
        check_fits(config, weights, source, weights.convention)
        types = tensor_types(config, quant, format_)
        tokenizer_json = weights.tokenizer_json() if tokenizer else None
        done = Converted(
            source=source,
            target=target,
            format=format_,
            quant=quant,
            tokenizer=tokenizer_json is not None,
        )
        names = names_for(CONVENTION_OF[done.format], config)
        converted = _convert_tensors(weights, config, types, device, done, on_tensor)
        tensors = joined(names, converted)
        _write(done, weights, config, tensors, tokenizer_json, origin or {})
        done.warnings = tuple(weights.warnings)
    done.elapsed_s = time.monotonic() - started_s
    return done


def _convert_tensors(
    weights: WeightFile,
    config: ModelConfig,
    types: dict[str, BlockType],
    device: torch.device,
    done: Converted,
    on_tensor: Callable[[Progress], None],
) -> Iterator[tuple[str, Tensor | QuantTensor]]:
    """Yield each of our tensors for the new file, in the order of the forward pass. Report progress when the writer
    requests the next one."""
    convention = CONVENTION_OF[done.format]
    names = names_for(convention, config)
    for count, (our_name, name, source) in enumerate(sources(weights, config), 1):
        # A single NaN or infinity makes every output of the new file NaN, far from its cause.
        refuse_non_finite(weights.path, non_finite_values(name, source))
        tensor = _as_type(source, types[our_name], name, device, done)
        if convention == "gguf":
            tensor = shifted(config, our_name, tensor, 1)
        if _rotates_neighbours(config, convention) and (heads := rotated_heads(config, our_name)):
            tensor = permute_rows(tensor, heads)
        done.tensors[types[our_name].name] = done.tensors.get(types[our_name].name, 0) + 1
        done.weights += math.prod(tensor.shape)
        done.bytes += tensor.nbytes
        yield our_name, tensor
        on_tensor(Progress(done=count, total=len(types), name=names[our_name]))


def _rotates_neighbours(config: ModelConfig, convention: str) -> bool:
    """Return whether readers of a format rotate neighbouring dimensions (interleaved RoPE). Readers of .apr do it for
    the same families as readers of GGUF."""
    return config.kind.turns_neighbours and convention != "hf"


def _as_type(
    source: Tensor | QuantTensor,
    target_type: BlockType,
    name: str,
    device: torch.device,
    done: Converted,
) -> Tensor | QuantTensor:
    source_type = source.type.name if isinstance(source, QuantTensor) else _TYPE_OF[source.dtype]
    if source_type == target_type.name:
        done.kept += 1
        return source
    values = source.to(device)
    if isinstance(values, QuantTensor):
        values = values.dequantize()
    quantized = quantize(values, target_type, name=name)
    if target_type.name not in FLOATS:
        done.quantized += 1
        return quantized
    done.cast += 1
    return quantized.blocks.view(FLOATS[target_type.name]).view(quantized.shape)


def _write(
    done: Converted,
    weights: WeightFile,
    config: ModelConfig,
    tensors: Iterator[tuple[str, Tensor | QuantTensor]],
    tokenizer_json: bytes | None,
    origin: Mapping[str, str],
) -> None:
    raw = {**weights.config_dict(), **config.to_hf_dict()}
    for stale in ("torch_dtype", "dtype"):
        raw.pop(stale, None)
    if done.format == "safetensors":
        write_folder(
            done.target,
            config={**raw, "dtype": str(FLOATS[QUANTS[done.quant]]).removeprefix("torch.")},
            tensors=tensors,
            tokenizer_json=tokenizer_json,
            chat_template=chat_template(weights),
            source=weights.folder if weights.format == "safetensors" else None,
        )
        return
    metadata = _metadata_for(weights, done.format, origin)
    write = write_apr
    if done.format == "gguf":
        write = write_gguf
        metadata["general.file_type"] = FILE_TYPES[done.quant]
        if config.rope_scaling is not None:
            stored = divisors(config.rope_scaling, config.rope_theta, config.head_dim)
            tensors = chain([(ROPE_DIVISORS, torch.tensor(stored))], tensors)
    else:
        metadata["rope_type"] = APR_NEIGHBOURS if _rotates_neighbours(config, "apr") else APR_HALVES
    write(
        done.target,
        config=raw,
        tensors=tensors,
        tokenizer_json=tokenizer_json,
        metadata=metadata,
    )


def _metadata_for(weights: WeightFile, format_: str, origin: Mapping[str, str]) -> dict[str, Any]:
    """Return metadata for a new file of `format_`, "gguf" or "apr"; it always has a name.

    `origin` is added, by the keys of .apr: `name`, `author`, `version`, `description`, `license`.
    """
    metadata: dict[str, Any] = {}
    if weights.format == format_ == "apr":
        # Leave out keys that the writer computes.
        metadata = {k: v for k, v in weights.metadata.items() if not k.startswith("tokenizer.")}
    elif weights.format == format_ == "gguf":
        general = {k: v for k, v in weights.metadata.items() if k.startswith("general.")}
        metadata = {key: text for key, text in general.items() if isinstance(text, str)}
        metadata.pop("general.architecture", None)
    elif weights.format != "safetensors":
        pairs = [(a, g) if format_ == "gguf" else (g, a) for a, g in _ORIGIN.items()]
        values = {new: weights.metadata.get(old) for old, new in pairs}
        metadata = {key: value for key, value in values.items() if value is not None}
    template = chat_template(weights)
    if template is not None:
        metadata[_TEMPLATE_KEY[format_]] = template
    for key, value in origin.items():
        metadata[key if format_ == "apr" else _ORIGIN[key]] = value
    name = "name" if format_ == "apr" else _ORIGIN["name"]
    if not isinstance(metadata.get(name), str):
        plain = weights.format == "safetensors"
        metadata[name] = weights.folder.resolve().name if plain else weights.path.stem
    return metadata


def chat_template(weights: WeightFile) -> str | None:
    """Return the chat template; None if there is none. Raises `WeightsError` for a file that cannot be read."""
    if weights.format != "safetensors":
        template = weights.metadata.get(_TEMPLATE_KEY[weights.format])
        return template if isinstance(template, str) else None
    path = weights.folder / TEMPLATE_FILE
    if path.exists():
        return read_text(path, "chat template", limits.MODEL_TEXT, error=WeightsError)
    path = weights.folder / TOKENIZER_CONFIG_FILE
    if not path.exists():
        return None
    record = read_json_object(
        path, "tokenizer configuration", limits.MODEL_CONFIG, error=WeightsError
    )
    template = record.get("chat_template")
    if isinstance(template, list):
        named = [
            entry
            for entry in template
            if isinstance(entry, dict) and entry.get("name") == "default"
        ]
        template = named[0].get("template") if named else None
    return template if isinstance(template, str) else None
