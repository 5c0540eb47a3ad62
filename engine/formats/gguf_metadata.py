"""Convert a model's configuration between GGUF metadata and a Hugging Face `config.json`.

    GGUF, after `<architecture>.`          config.json
    block_count                            num_hidden_layers
    embedding_length                       hidden_size
    feed_forward_length                    intermediate_size
    context_length                         max_position_embeddings
    attention.head_count                   num_attention_heads
    attention.head_count_kv                num_key_value_heads      (absent: as many as heads)
    attention.key_length                   head_dim                 (absent: width / heads)
    attention.layer_norm_rms_epsilon       rms_norm_eps
    rope.freq_base                         rope_theta
    rope.scaling.*                         rope_parameters          (linear, yarn)
    tokenizer.ggml.{bos,eos,padding}_token_id   bos_token_id, eos_token_id, pad_token_id

Not in the metadata: whether the head is tied (then there is no `output.weight`) and the vocabulary
size (the rows of `token_embd.weight`). Llama 3.1's RoPE scaling is a tensor, `rope_freqs.weight`;
the model loader converts it to numbers.

GGUF stores reals as fp32, so 1e-6 is read as 9.99999997e-07. `read_config` returns the shortest
decimal that is the same fp32 number, so a configuration survives the round trip.

The supported architectures are in `engine.model_families`. Two families may have the same architecture name: a
`llama` file with a sliding window is read as a Mistral, any other as a Llama, which computes the same. Other
architectures are refused by name (GG17), and so is a mixture of experts with the name `llama`.

**The vocabulary** check compares the token arrays with each other and with the embedding. It looks
only at types and counts, which takes no time; `engine.formats.gguf_tokenizer` reads the texts.

    tokenizer.ggml.tokens         STRING    one text for each row of `token_embd.weight`
    tokenizer.ggml.token_type     INT32     one for each token: see `TokenType`
    tokenizer.ggml.scores         FLOAT32   one for each token
    tokenizer.ggml.merges         STRING    "left right", in order of rank
    tokenizer.ggml.*_token_id     UINT32    the id of a token with a role

This module does not import torch.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NoReturn

from engine.errors import WeightsError
from engine.formats.gguf_values import (
    LARGEST_REAL,
    GgufMetadata,
    GgufValue,
    ValueType,
    quoted,
    refuse,
)
from engine.formats.weights import TensorInfo
from engine.model_families import EMBEDDING, FAMILIES, GGUF_LOCAL_BASE, HEAD, Family

_COUNTS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
}
_YARN = {
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
TOKENS = "tokenizer.ggml.tokens"
TOKEN_TYPES = "tokenizer.ggml.token_type"
SCORES = "tokenizer.ggml.scores"
MERGES = "tokenizer.ggml.merges"
ENDS = ("eos", "eot", "eom")
"""Roles of tokens that end a document; the first is the model's default stop token."""

_ELEMENTS = {
    TOKENS: ValueType.STRING,
    TOKEN_TYPES: ValueType.INT32,
    SCORES: ValueType.FLOAT32,
    MERGES: ValueType.STRING,
}


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    """Special: `<|im_start|>`."""
    USER_DEFINED = 4
    """An added token that is not special: matched in text before it is split into pre-tokens."""
    UNUSED = 5
    """Fills a row of the embedding that belongs to no token: `[PAD151937]`."""
    BYTE = 6


def read_config(metadata: GgufMetadata, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Return the content of a Hugging Face `config.json` of this model. Raises `WeightsError` GG17,
    GG18.
    """
    family = _family(metadata)
    reader = _Reader(metadata, family.gguf)
    config: dict[str, Any] = {
        "architectures": [family.hf_class],
        "model_type": family.name,
        family.activation_key: family.activation,
        **{hf: reader.count(key) for key, hf in _COUNTS.items()},
    }
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = reader.count("attention.head_count_kv", heads)
    config["head_dim"] = reader.count("attention.key_length", config["hidden_size"] // heads)
    config["rms_norm_eps"] = reader.real("attention.layer_norm_rms_epsilon")
    config["rope_theta"] = reader.real("rope.freq_base", 10_000.0)
    config["rope_parameters"] = {
        "rope_theta": config["rope_theta"],
        **_rope_scaling(reader, config["head_dim"]),
    }
    if window := reader.get("attention.sliding_window"):
        # If the family supports no window, `engine.models.config` refuses this key by name.
        config["sliding_window"] = window
        if not family.sliding_window:
            config["use_sliding_window"] = True
    elif family.sliding_window:
        config["sliding_window"] = None
    if step := family.gguf_rope_interval:
        layers = range(1, config["num_hidden_layers"] + 1)
        config["no_rope_layers"] = [int(number % step != 0) for number in layers]
    if step := family.gguf_window_interval:
        config["sliding_window_pattern"] = step
        config["rope_local_base_freq"] = reader.real("rope.freq_base_swa", GGUF_LOCAL_BASE)
    if family.query_scale:
        config["query_pre_attn_scalar"] = _query_scalar(family, config)
    if family.gguf_biases:
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    config["vocab_size"] = _vocab_size(reader, tensors)
    config["tie_word_embeddings"] = HEAD.gguf not in tensors
    ends = [end for end in (token_id(metadata, name) for name in ENDS) if end is not None]
    ends = list(dict.fromkeys(ends))
    config["bos_token_id"] = token_id(metadata, "bos")
    config["eos_token_id"] = ends if len(ends) > 1 else next(iter(ends), None)
    if (padding := token_id(metadata, "padding")) is not None:
        config["pad_token_id"] = padding
    return config


def config_metadata(config: Mapping[str, Any], where: object) -> dict[str, GgufValue]:
    """Return the metadata for a `config.json`; `where` names it in errors.

    The type of each number is checked, but not whether the numbers fit together, because they come from a model that
    was opened.
    """
    arch = config.get("model_type")
    family = FAMILIES.get(arch) if isinstance(arch, str) else None
    if family is None:
        _refuse_config(where, f"a model_type of {', '.join(FAMILIES)}", arch)
    arch = family.gguf
    window = config.get("sliding_window") if family.sliding_window else None
    length = config.get("max_position_embeddings")
    if step := family.gguf_window_interval:
        _check_windows(family, step, config, where)
    elif type(window) is int and type(length) is int and window < length:
        # Other readers of this architecture have no window, and would attend to all tokens.
        _refuse_config(where, f"a sliding_window of null or at least {length}", window)
    if step := family.gguf_rope_interval:
        flags = config.get("no_rope_layers") or []
        if flags != [int(number % step != 0) for number in range(1, len(flags) + 1)]:
            _refuse_config(
                where, f"no_rope_layers with a 0 for every layer whose number {step} divides", flags
            )
    heads = config.get("num_attention_heads")
    shared = config.get("num_key_value_heads")
    head_dim = config.get("head_dim")
    if head_dim is None and type(heads) is int and type(config.get("hidden_size")) is int and heads:
        head_dim = config["hidden_size"] // heads
    counts: dict[str, Any] = {key: config.get(hf) for key, hf in _COUNTS.items()}
    counts |= {
        "attention.head_count_kv": heads if shared is None else shared,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "vocab_size": config.get("vocab_size"),
    }
    if family.gguf_window_interval:
        counts["attention.sliding_window"] = window
    nested = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    nested = nested.get("full_attention", nested)
    if family.gguf_rope_dimension:
        share = nested.get("partial_rotary_factor", 1.0)
        counts["rope.dimension_count"] = int(head_dim * share) if head_dim else head_dim
    reals: dict[str, Any] = {
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "rope.freq_base": nested.get("rope_theta", config.get("rope_theta")),
    }
    values: dict[str, GgufValue] = {}
    kind = nested.get("rope_type", nested.get("type", "default"))
    if kind in ("linear", "yarn"):
        values[f"{arch}.rope.scaling.type"] = GgufValue(ValueType.STRING, kind)
        reals["rope.scaling.factor"] = nested.get("factor")
        if kind == "yarn":
            length = nested.get("original_max_position_embeddings")
            counts["rope.scaling.original_context_length"] = length
            reals |= {key: nested[hf] for key, hf in _YARN.items() if nested.get(hf) is not None}
    elif kind not in ("default", "llama3"):
        _refuse_config(where, "rotary positions of default, linear, yarn or llama3", kind)
    values |= {f"{arch}.{key}": uint32(number, key, where) for key, number in counts.items()}
    for key, number in reals.items():
        if type(number) not in (int, float) or not 0 < number < LARGEST_REAL:
            _refuse_config(where, f"{key} between 0 and {LARGEST_REAL:g}", number)
        values[f"{arch}.{key}"] = GgufValue(ValueType.FLOAT32, float(number))
    ends = config.get("eos_token_id")
    roles = dict(zip(ENDS, ends if isinstance(ends, list) else [ends], strict=False))
    roles |= {"bos": config.get("bos_token_id"), "padding": config.get("pad_token_id")}
    for name, number in roles.items():
        if number is not None:
            key = f"tokenizer.ggml.{name}_token_id"
            values[key] = uint32(number, key, where)
    return values


def _query_scalar(family: Family, config: Mapping[str, Any]) -> Any:
    """Return the number by whose square root readers of a GGUF file divide attention scores."""
    if config["num_hidden_layers"] == family.gguf_wide_layers:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]


def _check_windows(family: Family, step: int, config: Mapping[str, Any], where: object) -> None:
    """Refuse settings for which GGUF has no key, if other readers of this architecture assume a different value: they
    would compute something else."""
    types = config.get("layer_types") or []
    expected = [
        "sliding_attention" if number % step else "full_attention"
        for number in range(1, len(types) + 1)
    ]
    if types != expected:
        _refuse_config(where, f"layer_types with full_attention in every layer {step}", types)
    if (local := config.get("rope_local_base_freq")) != GGUF_LOCAL_BASE:
        _refuse_config(where, f"a rope_local_base_freq of {GGUF_LOCAL_BASE:g}", local)
    scalar = config.get("query_pre_attn_scalar")
    if scalar != (expected_scalar := _query_scalar(family, config)):
        _refuse_config(where, f"a query_pre_attn_scalar of {expected_scalar}", scalar)


def shortest_decimal(real: float) -> float:
    """Return the number with the fewest digits that is stored as the same fp32 number."""
    stored = struct.pack("<f", real)
    shorter = (float(f"{real:.{digits}g}") for digits in range(1, 9))
    return next((decimal for decimal in shorter if struct.pack("<f", decimal) == stored), real)


def uint32(number: Any, key: str, where: object) -> GgufValue:
    """Return a count or an id to write, in the type that other readers require."""
    if type(number) is not int or not 0 <= number < 2**32:
        _refuse_config(where, f"{key} from 0 to 2^32 - 1", number)
    return GgufValue(ValueType.UINT32, number)


class _Reader:
    """Reader of an architecture's metadata values that checks their types. Raises `WeightsError` GG17."""

    def __init__(self, metadata: GgufMetadata, arch: str) -> None:
        self.metadata = metadata
        self.arch = arch

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.arch}.{key}")

    def count(self, key: str, absent: int | None = None) -> int:
        """Return a positive integer; a list with one value per layer is accepted if all are equal."""
        value = self.get(key)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if value is None and absent is not None:
            return absent
        if type(value) is not int or not 1 <= value < 2**31:
            self.refuse(key, "an integer from 1 to 2^31 - 1", value)
        return value

    def real(self, key: str, absent: float | None = None) -> float:
        value = self.get(key)
        if value is None and absent is not None:
            return absent
        if type(value) is not float or not 0 < value < LARGEST_REAL:
            self.refuse(key, f"a number between 0 and {LARGEST_REAL:g}", value)
        return shortest_decimal(value)

    def refuse(self, key: str, expected: str, found: object) -> NoReturn:
        where = f"{self.metadata.path}, key {quoted(f'{self.arch}.{key}')}"
        refuse("GG17", where, expected, "none" if found is None else f"{found!r:.80}")


def _family(metadata: GgufMetadata) -> Family:
    where = f'{metadata.path}, key "general.architecture"'
    rows: dict[str, list[Family]] = {}
    for family in FAMILIES.values():
        rows.setdefault(family.gguf, []).append(family)
    known = f"one of {', '.join(rows)}"
    architecture = metadata.get("general.architecture")
    if architecture is None:
        refuse("GG17", where, known, "none", "the file may hold no model, or only part of one")
    if not isinstance(architecture, str) or architecture not in rows:
        refuse("GG17", where, known, f"{architecture!r:.80}, which is not supported")
    experts = metadata.get(f"{architecture}.expert_count")
    if experts:
        refuse("GG17", where, known, f"{architecture} with {experts!r:.40} experts, not supported")
    slides = bool(metadata.get(f"{architecture}.attention.sliding_window"))
    return next(
        (row for row in rows[architecture] if row.sliding_window is slides), rows[architecture][0]
    )


def _rope_scaling(reader: _Reader, head_dim: int) -> dict[str, Any]:
    """Return the fields of `rope_parameters` other than the base."""
    kind = reader.get("rope.scaling.type")
    fields: dict[str, Any] = {"rope_type": "default"}
    if kind in ("linear", "yarn"):
        fields = {"rope_type": kind, "factor": reader.real("rope.scaling.factor")}
        if kind == "yarn":
            length = reader.count("rope.scaling.original_context_length")
            fields["original_max_position_embeddings"] = length
            present = {key: hf for key, hf in _YARN.items() if reader.get(key) is not None}
            fields |= {hf: reader.real(key) for key, hf in present.items()}
    elif kind not in (None, "none"):
        reader.refuse("rope.scaling.type", "none, linear or yarn", kind)
    rotated = reader.count("rope.dimension_count", head_dim)
    if rotated != head_dim:
        share = rotated / head_dim
        # Readers round the product down.
        fields["partial_rotary_factor"] = (
            share if int(head_dim * share) == rotated else math.nextafter(share, 1)
        )
    return fields


def _vocab_size(reader: _Reader, tensors: Mapping[str, TensorInfo]) -> int:
    """Return the number of rows of the embedding; the metadata is used only if there is no
    embedding.
    """
    if EMBEDDING.gguf in tensors:
        return tensors[EMBEDDING.gguf].shape[0]
    tokens = reader.metadata.entry(TOKENS)
    return reader.count("vocab_size", None if tokens is None else tokens.count)


def _refuse_config(where: object, expected: str, found: object) -> NoReturn:
    raise WeightsError.expected(
        "model configuration for GGUF",
        where,
        expected,
        "none" if found is None else f"{found!r:.80}",
    )


def check_vocabulary(metadata: GgufMetadata, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Refuse tokenizer arrays of a wrong type or length (GG08, GG18); return warnings."""
    for key, element in _ELEMENTS.items():
        entry = metadata.entry(key)
        if entry is not None and entry.element is not element:
            found = (
                entry.type.name if entry.element is None else f"an array of {entry.element.name}"
            )
            where = f"{metadata.path} @{entry.start}"
            refuse("GG08", where, f"{key} as an array of {element.name}", found)
    tokens = metadata.entry(TOKENS)
    if tokens is None:
        return []
    for key in (SCORES, TOKEN_TYPES):
        entry = metadata.entry(key)
        if entry is not None and entry.count != tokens.count:
            where = f"{metadata.path} @{entry.start}"
            refuse("GG08", where, f"{key} for {tokens.count:,} tokens", f"{entry.count:,}")
    embedding = tensors.get(EMBEDDING.gguf)
    if embedding is not None and tokens.count != embedding.shape[0]:
        refuse(
            "GG18",
            f"{metadata.path}, tensor {quoted(EMBEDDING.gguf)}",
            f"a row for each token of the tokenizer, {tokens.count:,}",
            f"{embedding.shape[0]:,} rows",
            "the tokenizer may be that of another model",
        )
    return [
        f"{metadata.path}: {key} {metadata[key]!r:.40} is ignored: {tokens.count:,} tokens"
        for key in metadata
        if key.startswith("tokenizer.ggml.")
        and key.endswith("_token_id")
        and not _is_token(metadata[key], tokens.count)
    ]


def token_id(metadata: GgufMetadata, name: str) -> int | None:
    """Return the id of a token with a role: bos, eos, padding. None if there is no such token."""
    number = metadata.get(f"tokenizer.ggml.{name}_token_id")
    tokens = metadata.entry(TOKENS)
    fits = _is_token(number, tokens.count if tokens is not None else 2**31)
    return number if fits else None


def _is_token(number: object, count: int) -> bool:
    return type(number) is int and 0 <= number < count
