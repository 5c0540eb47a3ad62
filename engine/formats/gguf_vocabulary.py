"""The tokens of a GGUF file: whether their arrays fit each other and the embedding.

    tokenizer.ggml.tokens         STRING    one text for each row of `token_embd.weight`
    tokenizer.ggml.token_type     INT32     one for each token: see `TokenType`
    tokenizer.ggml.scores         FLOAT32   one for each token
    tokenizer.ggml.merges         STRING    "left right", in order of rank
    tokenizer.ggml.*_token_id     UINT32    the id of a token with a role

Only types and counts are looked at here, which takes no time; texts are read by
`engine.formats.gguf_tokenizer`. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from engine.formats.gguf_header import GgufMetadata
from engine.formats.gguf_values import ValueType, quoted, refuse
from engine.formats.safetensors_header import TensorInfo

EMBEDDING = "token_embd.weight"
TOKENS = "tokenizer.ggml.tokens"
TOKEN_TYPES = "tokenizer.ggml.token_type"
SCORES = "tokenizer.ggml.scores"
MERGES = "tokenizer.ggml.merges"
ENDS = ("eos", "eot", "eom")
"""Roles of tokens that end a text; the first is the one a model is asked to stop at."""

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
    """Found in text before it is split, but not special."""
    UNUSED = 5
    """Fills a row of the embedding that no token has: `[PAD151937]`."""
    BYTE = 6


def check_vocabulary(metadata: GgufMetadata, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Refuses tokenizer arrays of a wrong type or length (GG08, GG18); answers warnings."""
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
    embedding = tensors.get(EMBEDDING)
    if embedding is not None and tokens.count != embedding.shape[0]:
        refuse(
            "GG18",
            f"{metadata.path}, tensor {quoted(EMBEDDING)}",
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
    """The id of a token with a role: bos, eos, padding. None when it has no token."""
    found = metadata.get(f"tokenizer.ggml.{name}_token_id")
    tokens = metadata.entry(TOKENS)
    fits = _is_token(found, tokens.count if tokens is not None else 2**31)
    return found if fits else None


def _is_token(number: object, count: int) -> bool:
    return type(number) is int and 0 <= number < count
