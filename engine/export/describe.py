"""What a weight file holds, from its headers alone: no tensor is read, and torch is not loaded.

A file that this engine has no decoder for is described like any other; what speaks against running
it is among the warnings. Bits per weight count every byte of every tensor, scales included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import BadInput
from engine.files import parse_json
from engine.formats.gguf_vocabulary import TOKEN_TYPES, TOKENS, TokenType
from engine.formats.open import open_weights
from engine.formats.safetensors_header import TensorInfo
from engine.formats.weights import WeightFile
from engine.models.config import ModelConfig, config_of
from engine.models.names import check_fits, embedding_and_head
from engine.units import format_bytes, format_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Tensors taken together."""

    tensors: int
    weights: int
    bytes: int

    @property
    def bits_per_weight(self) -> float | None:
        return 8 * self.bytes / self.weights if self.weights else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    rows: int | None
    """Of the embedding."""
    tokens: int | None
    """Of the tokenizer in the file or beside it; None when there is none, or it cannot be read."""
    bos: int | None
    eos: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    path: Path
    format: str
    convention: str
    files: tuple[Path, ...]
    """Those with tensors in them."""
    architecture: str | None
    config: Mapping[str, Any] | None
    """As a config.json has it; None when the file says nothing of it."""
    runs: bool
    """Whether this engine has a decoder for it, and all tensors for the decoder are there."""
    total: Share
    by_dtype: Mapping[str, Share]
    vocabulary: Vocabulary
    tensors: tuple[TensorInfo, ...]
    warnings: tuple[str, ...]


def describe(path: str | Path) -> Description:
    """The description of a weight file or model folder. Raises `WeightsError`."""
    with open_weights(path) as weights:
        warnings = list(weights.warnings)
        config, raw = _configuration(weights, warnings)
        runs = config is not None
        if config is not None:
            try:
                check_fits(config, weights, path, weights.convention)
            except BadInput as error:
                runs = False
                warnings.append(str(error))
        return Description(
            path=Path(path),
            format=weights.format,
            convention=weights.convention,
            files=tuple(sorted({info.file for info in weights.tensors.values()})),
            architecture=_text(raw, "model_type"),
            config=raw,
            runs=runs,
            total=_share(weights.tensors.values()),
            by_dtype={
                dtype: _share(info for info in weights.tensors.values() if info.dtype == dtype)
                for dtype in sorted({info.dtype for info in weights.tensors.values()})
            },
            vocabulary=_vocabulary(weights, raw, warnings),
            tensors=tuple(weights.tensors.values()),
            warnings=tuple(warnings),
        )


def as_json(found: Description, *, tensors: bool) -> dict[str, Any]:
    """One JSON value; `tensors` adds the table."""
    record: dict[str, Any] = {
        "path": str(found.path),
        "format": found.format,
        "convention": found.convention,
        "files": [str(file) for file in found.files],
        "architecture": found.architecture,
        "runs": found.runs,
        "config": found.config,
        **_share_json(found.total),
        "dtypes": {dtype: _share_json(share) for dtype, share in found.by_dtype.items()},
        "vocabulary": {
            "rows": found.vocabulary.rows,
            "tokens": found.vocabulary.tokens,
            "bos_token_id": found.vocabulary.bos,
            "eos_token_ids": list(found.vocabulary.eos),
        },
        "warnings": list(found.warnings),
    }
    if tensors:
        record["table"] = [
            {
                "name": info.name,
                "dtype": info.dtype,
                "shape": list(info.shape),
                "bytes": info.bytes,
                "file": info.file.name,
                "start": info.start,
            }
            for info in found.tensors
        ]
    return record


def as_lines(found: Description, *, tensors: bool) -> list[str]:
    """The same for people; `tensors` adds the table."""
    bits = found.total.bits_per_weight
    lines = [
        f"{found.path}: {found.format}, {found.architecture or 'architecture unknown'}"
        f"{'' if found.runs else ' (cannot be run here: see the warnings)'}",
        f"  {found.total.tensors} tensors, {format_count(found.total.weights)} weights, "
        f"{format_bytes(found.total.bytes)}"
        f"{'' if bits is None else f', {bits:.2f} bits per weight'}",
    ]
    if found.config is not None:
        lines.append(f"  {_shape_text(found.config)}")
    vocabulary = found.vocabulary
    tokens = "no tokenizer" if vocabulary.tokens is None else f"{vocabulary.tokens:,} tokens"
    rows = "unknown" if vocabulary.rows is None else f"{vocabulary.rows:,} rows"
    ends = ", ".join(map(str, vocabulary.eos)) or "none"
    lines.append(f"  vocabulary: {rows}, {tokens}, bos {vocabulary.bos}, eos {ends}")
    lines += _table(
        [
            (
                dtype,
                f"{share.tensors} tensors",
                format_count(share.weights),
                format_bytes(share.bytes),
            )
            for dtype, share in found.by_dtype.items()
        ]
    )
    if tensors:
        lines += _table(
            [
                (info.name, info.dtype, str(list(info.shape)), format_bytes(info.bytes))
                for info in found.tensors
            ]
        )
    lines += [f"warning: {text}" for text in found.warnings]
    return lines


def _configuration(
    weights: WeightFile, warnings: list[str]
) -> tuple[ModelConfig | None, dict[str, Any] | None]:
    """The configuration, checked and as the file says it; what is wrong goes to `warnings`."""
    raw = None
    try:
        raw = weights.config_dict()
        config = config_of(weights)
    except BadInput as error:
        warnings.append(str(error))
        return None, raw
    # Llama's rope scaling is a tensor in some formats, and in no configuration there.
    return config, {**raw, **config.to_hf_dict()}


def _vocabulary(
    weights: WeightFile, raw: Mapping[str, Any] | None, warnings: list[str]
) -> Vocabulary:
    embedding = weights.tensors.get(embedding_and_head(weights.convention)[0])
    eos = (raw or {}).get("eos_token_id")
    bos = (raw or {}).get("bos_token_id")
    return Vocabulary(
        rows=embedding.shape[0] if embedding is not None and embedding.shape else None,
        tokens=_token_count(weights, warnings),
        bos=bos if isinstance(bos, int) else None,
        eos=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    )


def _token_count(weights: WeightFile, warnings: list[str]) -> int | None:
    """Highest id + 1, added tokens included."""
    if weights.format == "gguf":
        return _gguf_token_count(weights.metadata)
    try:
        text = weights.tokenizer_json()
        if text is None:
            return None
        record = parse_json(text, f"tokenizer.json of {weights.path}", "tokenizer")
        ids = [*record["model"]["vocab"].values()]
        ids += [token["id"] for token in record.get("added_tokens") or ()]
        return max(ids, default=-1) + 1
    except BadInput as error:
        warnings.append(str(error))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        warnings.append(f"tokenizer.json cannot be read: {type(error).__name__}: {error}")
    return None


def _gguf_token_count(metadata: Mapping[str, Any]) -> int | None:
    """Without the tokens that only fill the rows of a padded embedding."""
    kinds, texts = metadata.get(TOKEN_TYPES), metadata.get(TOKENS)
    if not isinstance(kinds, list):
        return len(texts) if isinstance(texts, list) else None
    used = (i for i in reversed(range(len(kinds))) if kinds[i] != TokenType.UNUSED)
    return next(used, -1) + 1


def _share(infos: Iterable[TensorInfo]) -> Share:
    listed = list(infos)
    return Share(
        tensors=len(listed),
        weights=sum(math.prod(info.shape) for info in listed),
        bytes=sum(info.bytes for info in listed),
    )


def _share_json(share: Share) -> dict[str, Any]:
    return {
        "tensors": share.tensors,
        "weights": share.weights,
        "bytes": share.bytes,
        "bits_per_weight": share.bits_per_weight,
    }


def _shape_text(config: Mapping[str, Any]) -> str:
    """The numbers that make the model, as far as they are there."""
    words = (
        ("num_hidden_layers", "layers"),
        ("hidden_size", "wide"),
        ("intermediate_size", "feed-forward"),
        ("num_attention_heads", "heads"),
        ("num_key_value_heads", "key/value heads"),
        ("head_dim", "each"),
        ("max_position_embeddings", "positions"),
    )
    said = [f"{config[key]:,} {word}" for key, word in words if isinstance(config.get(key), int)]
    return ", ".join([*said, "tied head" if config.get("tie_word_embeddings") else "own head"])


def _text(raw: Mapping[str, Any] | None, key: str) -> str | None:
    found = (raw or {}).get(key)
    return found if isinstance(found, str) else None


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns, the last two aligned to the right."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = len(widths) - 2
    return [
        "  "
        + "  ".join(
            f"{cell:<{width}}" if column < left else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
