"""Read and write the metadata of an .apr file: JSON with canonical keys, the model's configuration and its
tokenizer.

Writers use several names for the same number. Each alias is mapped to its canonical key:

    canonical                  aliases                                    config.json
    hidden_size                hidden_dim d_model n_embd                  as canonical
    num_layers                 num_hidden_layers n_layers n_layer         num_hidden_layers
    num_heads                  num_attention_heads n_heads n_head         num_attention_heads
    num_kv_heads               num_key_value_heads n_kv_heads             num_key_value_heads
    vocab_size                 n_vocab                                    as canonical
    intermediate_size          ffn_dim intermediate_dim n_inner           as canonical
    max_position_embeddings    max_seq_len context_length n_ctx           as canonical
    rms_norm_eps               layer_norm_eps norm_eps                    as canonical

If a canonical key is null, its alias is used; if both have a value, the canonical one is used. Of
duplicate keys, which training checkpoints have, the last value is used. Unknown keys are kept.
`model_type`, `total_size`, `param_count` and the three provenance keys (`license`, `data_source`,
`data_license`, null if unknown) are always written.

The canonical keys cannot express a whole config.json. So files written here contain the whole config.json under
`hf_config`; if that key is present, it is read instead of the canonical keys.

**The tokenizer.** Other readers of the format use tables, from which they rebuild a byte-level BPE:

    tokenizer.vocabulary    the text of each id          tokenizer.merges      "left right", by rank
    tokenizer.token_type    a number for each id         tokenizer.pre_type    the pre-tokenizer
    tokenizer.bos_token_id, tokenizer.eos_token_id       tokenizer.vocab_size

The tables cannot express everything (a normalizer, added tokens that strip spaces). So a file written here also has
the `tokenizer.json` itself, byte for byte, under a key of its own. It is compressed with deflate, because without
compression it would come close to the metadata limit of 16 MiB. The file has the tables too, for other readers, if GGUF
can represent the tokenizer. From a file of another writer a `tokenizer.json` is built from the tables, if they contain
everything that token ids depend on: which tokens are special, and the pre-tokenizer. If they do not, the file has no
tokenizer here, and a warning gives the reason: nearly correct ids are worse than none.

This module does not import torch.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from engine import limits
from engine.errors import TokenizerError, WeightsError
from engine.files import parse_json
from engine.formats import gguf_metadata
from engine.formats.gguf_metadata import shortest_decimal
from engine.formats.gguf_tokenizer import PRE_KEY, tokenizer_json, tokenizer_metadata
from engine.formats.gguf_values import LARGEST_REAL
from engine.formats.tokenizer import PRE_TOKENIZERS, make_inner
from engine.formats.weights import TensorInfo
from engine.model_families import FAMILIES, HEAD

METADATA_LIMIT_BYTES = limits.APR_METADATA.most
HF_CONFIG = "hf_config"
ROPE_HALVES = 2
"""Value of `rope_type` for RoPE that rotates x[i] with x[i + half], as Hugging Face's models do."""

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
# Canonical key -> key of a config.json.
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

EXACT = "tokenizer.json.zlib.base64"
VOCABULARY, MERGES, TOKEN_TYPES = (
    "tokenizer.vocabulary",
    "tokenizer.merges",
    "tokenizer.token_type",
)
PRE_TYPE = "tokenizer.pre_type"
_LIMIT_BYTES = limits.TOKENIZER_FILE.most


def refuse(
    code: str, where: object, expected: str, found: str, hint: str | None = None
) -> NoReturn:
    """Raise the `WeightsError` for an .apr file."""
    raise WeightsError.expected(f"{code} apr", where, expected, found, hint=hint)


def read_metadata(path: Path, raw: bytes) -> dict[str, Any]:
    """Return the metadata with canonical keys. Raises `WeightsError` AP09."""
    metadata = parse_json(raw, path, "AP09 apr metadata", error=WeightsError)
    if not isinstance(metadata, dict):
        refuse("AP09", path, "a JSON object as metadata", f"{metadata!r:.80}")
    for canonical, aliases in ALIASES.items():
        found = [metadata.pop(key, None) for key in (canonical, *aliases)]
        value = next((value for value in found if value is not None), None)
        if value is not None:
            metadata[canonical] = value
    return metadata


def read_config(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> dict[str, Any]:
    """Return the content of a Hugging Face `config.json` of the model. Raises `WeightsError` AP09.

    It is built from the canonical keys if the file has no `hf_config`. Then `tied_embeddings` says whether
    the head is tied; without that key, the tensors do.
    """
    config = metadata.get(HF_CONFIG)
    if config is None:
        config = _config_of(path, metadata, tensors)
    if not isinstance(config, dict):
        refuse("AP09", path, f"{HF_CONFIG} to be an object", f"{config!r:.80}")
    check_family(config, path)
    return dict(config)


def check_family(config: Mapping[str, Any], path: Path) -> None:
    """Raise `WeightsError` AP09 for a family that .apr has no keys for."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is not None and not family.apr:
        known = ", ".join(row.name for row in FAMILIES.values() if row.apr)
        refuse("AP09", path, f"a family that .apr describes: {known}", family.name)


def build_metadata(
    config: Mapping[str, Any],
    extra: Mapping[str, Any],
    tokenizer: Mapping[str, Any],
    *,
    total_bytes: int,
    parameters: int,
    quantization: Mapping[str, Any] | None,
) -> bytes:
    """Return the metadata of a new file as JSON. Raises `WeightsError`.

    `extra` cannot override values that are computed here: the canonical keys and their aliases,
    the configuration, sizes, and the tokenizer if one is given.
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
        "tokenizer.eos_token_id": _first_of(config.get("eos_token_id")),
        HF_CONFIG: dict(config),
    }
    others = {alias for aliases in ALIASES.values() for alias in aliases}
    further = {
        key: value
        for key, value in extra.items()
        if key not in computed
        and key not in others
        and not (tokenizer and key.startswith("tokenizer."))
    }
    metadata = {
        **{key: value for key, value in computed.items() if value is not None},
        **tokenizer,
        **dict.fromkeys(PROVENANCE),
        "rope_type": ROPE_HALVES,
        **further,
    }
    try:
        raw = json.dumps(
            metadata, ensure_ascii=False, separators=(",", ":"), allow_nan=False
        ).encode()
    except (ValueError, TypeError, RecursionError) as error:
        # NaN, a lone surrogate, or a value that JSON cannot represent.
        raise WeightsError.expected("apr metadata", "to write", "JSON", str(error)) from error
    if len(raw) > METADATA_LIMIT_BYTES:
        expected = f"at most {METADATA_LIMIT_BYTES:,} bytes"
        raise WeightsError.expected("apr metadata", "to write", expected, f"{len(raw):,}")
    return raw


def _config_of(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> dict[str, Any]:
    names = ("hf_model_type", "architecture", "model_type")
    family = next((metadata[name] for name in names if metadata.get(name)), None)
    if not isinstance(family, str):
        refuse("AP09", path, f"the model's family under {', '.join(names)}", f"{family!r:.40}")
    head = tensors.get(HEAD.hf)
    tied = metadata.get("tied_embeddings")
    config: dict[str, Any] = {
        "model_type": family,
        **{
            hf: _as_decimal(value)
            for key, hf in _CONFIG_KEYS.items()
            if (value := metadata.get(key)) is not None
        },
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
    """Return a float that is exactly an fp32 number as the shortest decimal that rounds to it: 1e-6,
    not 9.999999974752427e-07.
    """
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


def _first_of(value: object) -> object:
    return next(iter(value), None) if isinstance(value, list) else value


def embed(raw: bytes) -> dict[str, Any]:
    """Return the metadata keys for the `tokenizer.json` in `raw`: its bytes, and tables if GGUF can represent it.

    Raises `TokenizerError` if the bytes are not such a file.
    """
    ids = make_inner(raw, Path("to write")).get_vocab(with_added_tokens=True).values()
    keys: dict[str, Any] = {EXACT: base64.b64encode(zlib.compress(raw, 6)).decode()}
    try:
        tables = tokenizer_metadata(raw, max(ids, default=-1) + 1, "to write")
    except TokenizerError:
        return keys
    texts = tables[gguf_metadata.TOKENS].value
    return {
        **keys,
        VOCABULARY: texts,
        MERGES: tables[gguf_metadata.MERGES].value,
        TOKEN_TYPES: tables[gguf_metadata.TOKEN_TYPES].value,
        "tokenizer.vocab_size": len(texts),
        "tokenizer.model_type": "gpt2",
        PRE_TYPE: tables[PRE_KEY].value,
    }


def unsupported(metadata: Mapping[str, Any], path: Path) -> list[str]:
    """Return a warning that says why no `tokenizer.json` can be read from the metadata; an empty list if it
    can.
    """
    missing = [key for key in (MERGES, TOKEN_TYPES) if key not in metadata]
    pre = _pre_type(metadata)
    if EXACT in metadata:
        return []
    if VOCABULARY not in metadata:
        reason = "the file brings none"
    elif missing:
        reason = f"{', '.join(missing)} missing, though the file has {VOCABULARY}"
    elif not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        reason = f"{PRE_TYPE} {pre!r:.40} is not supported; {', '.join(PRE_TOKENIZERS)} are"
    else:
        return []
    return [f"{path}: no tokenizer: {reason}"]


def extract(metadata: Mapping[str, Any], path: Path) -> bytes | None:
    """Return the `tokenizer.json` in the metadata; None in the cases that `unsupported` reports.

    Raises `WeightsError` AP09 if it is damaged.
    """
    if EXACT in metadata:
        return _exact(metadata[EXACT], path)
    if unsupported(metadata, path):
        return None
    texts, kinds, merges = (metadata[key] for key in (VOCABULARY, TOKEN_TYPES, MERGES))
    if (
        not all(isinstance(table, list) for table in (texts, kinds, merges))
        or len(texts) != len(kinds)
        or not all(isinstance(text, str) for text in itertools.chain(texts, merges))
    ):
        expected = (
            f"{VOCABULARY} and {MERGES} as lists of texts, and as many {TOKEN_TYPES} as tokens"
        )
        refuse("AP09", path, expected, "others")
    row = PRE_TOKENIZERS[_pre_type(metadata)]
    return tokenizer_json("AP09 apr", path, texts, kinds, merges, row, row.normalizer, None)


def _pre_type(metadata: Mapping[str, Any]) -> Any:
    """Return the name of the pre-tokenizer; from the architecture if the file has none."""
    stored = metadata.get(PRE_TYPE)
    family = FAMILIES.get(str(metadata.get("architecture")))
    return family.pre_tokenizer if stored is None and family is not None else stored


def _exact(packed: object, path: Path) -> bytes:
    try:
        if not isinstance(packed, str):
            raise binascii.Error("no text")
        inflate = zlib.decompressobj()
        raw = inflate.decompress(base64.b64decode(packed, validate=True), _LIMIT_BYTES)
        if not inflate.eof:
            raise zlib.error(f"no end within {_LIMIT_BYTES:,} bytes")
    except (ValueError, zlib.error) as error:
        where = f"{path}, metadata {json.dumps(EXACT)}"
        refuse("AP09", where, "a deflated tokenizer.json in base64", str(error))
    return raw
