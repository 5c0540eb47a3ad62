"""Describe a weight file from its headers alone: no tensor is read, and torch is not loaded.

A file that this engine cannot run is described too; its warnings say what prevents running
it. Bits per weight include every byte of every tensor, scales too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.errors import BadInput
from engine.files import parse_json
from engine.formats.open import open_weights
from engine.formats.weights import TensorInfo, WeightFile
from engine.models.config import ModelConfig
from engine.models.names import check_fits, embedding_and_head
from engine.models.read_config import config_of
from engine.terminal import aligned
from engine.units import format_bytes, format_count

Description = dict[str, Any]
"""The object that `engine inspect --json` prints, without its schema."""


def describe(path: str | Path, *, tensors: bool = False) -> Description:
    """Describe a weight file or model folder; `tensors`: add the table of tensors.

        architecture    None when the file does not name it
        config          in the form of config.json; None when the file has no configuration
        runs            whether this engine has a decoder for it, and the file has all tensors that it needs
        files           the files that hold tensors
        vocabulary      `rows` of the embedding; `tokens` of the tokenizer in the file or its folder

    Raises `WeightsError`.
    """
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
        infos = tuple(weights.tensors.values())
        architecture = (raw or {}).get("model_type")
        description: Description = {
            "path": str(path),
            "format": weights.format,
            "convention": weights.convention,
            "files": sorted({str(info.file) for info in infos}),
            "architecture": architecture if isinstance(architecture, str) else None,
            "runs": runs,
            "engine": None if config is None else "native" if config.native else "transformers",
            "config": raw,
            **_sizes(infos),
            "dtypes": {
                dtype: _sizes([info for info in infos if info.dtype == dtype])
                for dtype in sorted({info.dtype for info in infos})
            },
            "vocabulary": _vocabulary(weights, raw or {}, warnings),
            "warnings": warnings,
        }
        if tensors:
            description["table"] = [
                {
                    "name": info.name,
                    "dtype": info.dtype,
                    "shape": list(info.shape),
                    "bytes": info.bytes,
                    "file": info.file.name,
                    "start": info.start,
                }
                for info in infos
            ]
        return description


def description_lines(description: Description) -> list[str]:
    """Format a description for people."""
    bits = description["bits_per_weight"]
    lines = [
        f"{description['path']}: {description['format']}, {description['architecture'] or 'architecture unknown'}"
        f"{'' if description['runs'] else ' (cannot be run here: see the warnings)'}",
        f"  {description['tensors']} tensors, {format_count(description['weights'])} weights, "
        f"{format_bytes(description['bytes'])}"
        f"{'' if bits is None else f', {bits:.2f} bits per weight'}",
    ]
    if description["config"] is not None:
        lines.append(f"  {_shape_text(description['config'])}")
    vocabulary = description["vocabulary"]
    rows, tokens = vocabulary["rows"], vocabulary["tokens"]
    lines.append(
        f"  vocabulary: {'unknown' if rows is None else f'{rows:,} rows'}, "
        f"{'no tokenizer' if tokens is None else f'{tokens:,} tokens'}, "
        f"bos {vocabulary['bos_token_id']}, "
        f"eos {', '.join(map(str, vocabulary['eos_token_ids'])) or 'none'}"
    )
    dtypes = [
        (
            dtype,
            f"{totals['tensors']} tensors",
            format_count(totals["weights"]),
            format_bytes(totals["bytes"]),
        )
        for dtype, totals in description["dtypes"].items()
    ]
    tensors = [
        (tensor["name"], tensor["dtype"], str(tensor["shape"]), format_bytes(tensor["bytes"]))
        for tensor in description.get("table", ())
    ]
    for rows in (dtypes, tensors):
        lines += [f"  {line}" for line in aligned(rows, right=(2, 3))]
    return lines + [f"warning: {text}" for text in description["warnings"]]


def _configuration(
    weights: WeightFile, warnings: list[str]
) -> tuple[ModelConfig | None, dict[str, Any] | None]:
    """Return the configuration, checked and in the file's form; problems are added to `warnings`."""
    raw = None
    try:
        raw = weights.config_dict()
        config = config_of(weights)
    except BadInput as error:
        warnings.append(str(error))
        return None, raw
    # In some formats Llama's RoPE scaling is a tensor, and not part of the configuration.
    return config, {**raw, **config.to_hf_dict()}


def _vocabulary(weights: WeightFile, raw: Mapping[str, Any], warnings: list[str]) -> dict[str, Any]:
    embedding = weights.tensors.get(embedding_and_head(weights.convention)[0])
    bos, eos = raw.get("bos_token_id"), raw.get("eos_token_id")
    return {
        "rows": embedding.shape[0] if embedding is not None and embedding.shape else None,
        "tokens": _token_count(weights, warnings),
        "bos_token_id": bos if isinstance(bos, int) else None,
        "eos_token_ids": eos if isinstance(eos, list) else [] if eos is None else [eos],
    }


def _token_count(weights: WeightFile, warnings: list[str]) -> int | None:
    """Return the highest token id + 1, added tokens included; None without a readable tokenizer.

    Raises `WeightsError` for tokens or merges that contradict each other.
    """
    text = weights.tokenizer_json()
    if text is None:
        return None
    try:
        record = parse_json(text, f"tokenizer.json of {weights.path}", "tokenizer")
        ids = [*record["model"]["vocab"].values()]
        ids += [token["id"] for token in record.get("added_tokens") or ()]
        return max(ids, default=-1) + 1
    except (BadInput, KeyError, TypeError, AttributeError) as error:
        warnings.append(f"tokenizer.json cannot be read: {type(error).__name__}: {error}")
    return None


def _sizes(infos: Sequence[TensorInfo]) -> dict[str, float | None]:
    """Return for some tensors their number, number of weights, bytes, and bits per weight."""
    weights = sum(math.prod(info.shape) for info in infos)
    bytes_ = sum(info.bytes for info in infos)
    return {
        "tensors": len(infos),
        "weights": weights,
        "bytes": bytes_,
        "bits_per_weight": 8 * bytes_ / weights if weights else None,
    }


def _shape_text(config: Mapping[str, Any]) -> str:
    """Describe the known dimensions of the model."""
    words = (
        ("num_hidden_layers", "layers"),
        ("hidden_size", "wide"),
        ("intermediate_size", "feed-forward"),
        ("num_attention_heads", "heads"),
        ("num_key_value_heads", "key/value heads"),
        ("head_dim", "dimensions per head"),
        ("max_position_embeddings", "positions"),
    )
    texts = [f"{config[key]:,} {word}" for key, word in words if isinstance(config.get(key), int)]
    return ", ".join([*texts, "tied head" if config.get("tie_word_embeddings") else "own head"])
