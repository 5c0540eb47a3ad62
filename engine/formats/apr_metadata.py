"""The metadata of an .apr file: JSON, one spelling for each thing, and the model's configuration.

Writers spell the same number in several ways. Each alias is folded into its canonical key:

    canonical                  aliases                                    config.json
    hidden_size                hidden_dim d_model n_embd                  as canonical
    num_layers                 num_hidden_layers n_layers n_layer         num_hidden_layers
    num_heads                  num_attention_heads n_heads n_head         num_attention_heads
    num_kv_heads               num_key_value_heads n_kv_heads             num_key_value_heads
    vocab_size                 n_vocab                                    as canonical
    intermediate_size          ffn_dim intermediate_dim n_inner           as canonical
    max_position_embeddings    max_seq_len context_length n_ctx           as canonical
    rms_norm_eps               layer_norm_eps norm_eps                    as canonical

A canonical key that is null gives way to its alias; where both have a value the canonical one
counts and a warning names both. Training checkpoints have keys twice: the last value counts, with a
warning. Keys nobody knows are kept. `model_type`, `total_size`, `param_count` and the three of
provenance (`license`, `data_source`, `data_license`, null where unknown) are always written.

A canonical set of keys cannot say all that a config.json does, so files written here hold the whole
of it under `hf_config`, and a file in which the two disagree is refused (AP09). No torch.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import WeightsError
from engine.formats.apr_header import METADATA_LIMIT_BYTES, refuse
from engine.formats.gguf_meta import LARGEST_REAL, shortest_decimal
from engine.formats.safetensors_header import TensorInfo, parse_object

HF_CONFIG = "hf_config"
HEAD = "lm_head.weight"
ROPE_HALVES = 2
"""`rope_type` of a reader that turns x[i] with x[i + half], as Hugging Face's models do."""

ALIASES = {
    "hidden_size": ("hidden_dim", "d_model", "n_embd"),
    "num_layers": ("num_hidden_layers", "n_layers", "n_layer"),
    "num_heads": ("num_attention_heads", "n_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads", "n_kv_heads"),
    "vocab_size": ("n_vocab",),
    "intermediate_size": ("ffn_dim", "intermediate_dim", "n_inner"),
    "max_position_embeddings": ("max_seq_len", "context_length", "n_ctx"),
    "rms_norm_eps": ("layer_norm_eps", "norm_eps"),
}
# Canonical key -> that of a config.json.
_CONFIG_KEYS = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "head_dim": "head_dim",
}
PROVENANCE = ("license", "data_source", "data_license")


def read_metadata(path: Path, raw: bytes, first_byte: int) -> tuple[dict[str, Any], list[str]]:
    """The metadata with its aliases folded, and warnings. Raises `WeightsError` AP09."""
    twice: list[str] = []
    found = parse_object(raw, "apr metadata", path, first_byte=first_byte, code="AP09", twice=twice)
    odd = [f"{path}: metadata key {json.dumps(key)} twice, the last counts" for key in twice]
    for canonical, aliases in ALIASES.items():
        value = found.get(canonical)
        for alias in aliases:
            other = found.pop(alias, None)
            if value is None:
                value = other
            elif other is not None and other != value:
                odd.append(
                    f"{path}: metadata {alias} {other!r:.40} ignored for {canonical} {value!r:.40}"
                )
        found.pop(canonical, None)
        if value is not None:
            found[canonical] = value
    return found, odd


def read_config(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> dict[str, Any]:
    """What a Hugging Face `config.json` of the model says. Raises `WeightsError` AP09.

    Made from the canonical keys when the file was not written here; whether the head is tied is
    then what the tensors say.
    """
    said = {
        hf: _as_decimal(value)
        for key, hf in _CONFIG_KEYS.items()
        if (value := metadata.get(key)) is not None
    }
    whole = metadata.get(HF_CONFIG)
    if whole is None:
        return _config_of(path, metadata, tensors, said)
    if not isinstance(whole, dict):
        refuse("AP09", path, f"{HF_CONFIG} to be an object", f"{whole!r:.80}")
    config = dict(whole)
    for hf, value in said.items():
        other = _rope_theta(config) if hf == "rope_theta" else config.get(hf)
        if other is not None and not _same(other, value):
            where = f"{path}, metadata {HF_CONFIG}.{hf}"
            refuse("AP09", where, f"{value!r:.40}, as the file's own key says", f"{other!r:.40}")
    return config


def build_metadata(
    config: Mapping[str, Any],
    extra: Mapping[str, Any],
    tokenizer: Mapping[str, Any],
    *,
    total_bytes: int,
    parameters: int,
    quantization: Mapping[str, Any] | None,
) -> bytes:
    """The metadata of a new file as JSON. Raises `WeightsError`.

    What is computed here is not taken from `extra`: the canonical keys with their aliases, the
    configuration, sizes, and the tokenizer where one is given.
    """
    computed: dict[str, Any] = {
        "model_type": config.get("model_type"),
        "total_size": total_bytes,
        "param_count": parameters,
        "architecture": config.get("model_type"),
        "hf_model_type": config.get("model_type"),
        "hf_architecture": next(iter(config.get("architectures") or ()), None),
        **{key: config.get(hf) for key, hf in _CONFIG_KEYS.items()},
        "rope_theta": _rope_theta(config),
        "quantization": quantization,
        "tied_embeddings": config.get("tie_word_embeddings"),
        "tokenizer.bos_token_id": config.get("bos_token_id"),
        "tokenizer.eos_token_id": _first(config.get("eos_token_id")),
        HF_CONFIG: dict(config),
    }
    others = {alias for aliases in ALIASES.values() for alias in aliases}
    kept = {
        key: value
        for key, value in extra.items()
        if key not in computed
        and key not in others
        and not (tokenizer and key.startswith("tokenizer."))
    }
    found = {
        **{key: value for key, value in computed.items() if value is not None},
        **tokenizer,
        **dict.fromkeys(PROVENANCE),
        "rope_type": ROPE_HALVES,
        **kept,
    }
    try:
        raw = json.dumps(found, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        # NaN, a lone surrogate, a value that JSON has no form for.
        raise WeightsError.expected("apr metadata", "to write", "JSON", str(error)) from error
    if len(raw) > METADATA_LIMIT_BYTES:
        expected = f"at most {METADATA_LIMIT_BYTES:,} bytes"
        raise WeightsError.expected("apr metadata", "to write", expected, f"{len(raw):,}")
    return raw


def _config_of(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    said: Mapping[str, Any],
) -> dict[str, Any]:
    names = ("hf_model_type", "architecture", "model_type")
    family = next((metadata[name] for name in names if metadata.get(name)), None)
    if not isinstance(family, str):
        refuse("AP09", path, f"the model's family under {', '.join(names)}", f"{family!r:.40}")
    head = tensors.get(HEAD)
    tied = metadata.get("tied_embeddings")
    config: dict[str, Any] = {
        "model_type": family,
        **said,
        "tie_word_embeddings": tied if isinstance(tied, bool) else not (head and head.bytes),
    }
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    if isinstance(metadata.get("hf_architecture"), str):
        config["architectures"] = [metadata["hf_architecture"]]
    for token in ("bos_token_id", "eos_token_id"):
        if metadata.get(f"tokenizer.{token}") is not None:
            config[token] = metadata[f"tokenizer.{token}"]
    return config


def _as_decimal(value: Any) -> Any:
    """A real that is an fp32 number exactly, as the decimal that was meant: 1e-6 and not
    9.999999974752427e-07."""
    if type(value) is not float or not 0 < abs(value) < LARGEST_REAL:
        return value
    return (
        shortest_decimal(value)
        if struct.unpack("<f", struct.pack("<f", value))[0] == value
        else value
    )


def _rope_theta(config: Mapping[str, Any]) -> Any:
    nested = config.get("rope_parameters")
    inner = nested.get("rope_theta") if isinstance(nested, Mapping) else None
    return config.get("rope_theta") if inner is None else inner


def _first(found: object) -> object:
    return next(iter(found), None) if isinstance(found, list) else found


def _same(one: object, other: object) -> bool:
    """Equal, or equal as the fp32 numbers that other writers store."""
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other
