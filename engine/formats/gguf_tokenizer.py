"""A byte-level BPE tokenizer, between GGUF metadata and a `tokenizer.json`.

Both hold the tokens and the merges. How text is cut before bytes are merged is a list of regular
expressions in a `tokenizer.json` and a name in GGUF, `tokenizer.ggml.pre`; the names known here are
the rows of `PRE_TOKENIZERS`. Each expression cuts the parts that the one before it made.

    tokenizer.json                               GGUF
    model.vocab, added_tokens[].content          tokenizer.ggml.tokens
    added_tokens[].special                       token_type CONTROL (true), USER_DEFINED (false)
    model.merges                                 tokenizer.ggml.merges
    pre_tokenizer, model.ignore_merges           tokenizer.ggml.pre
    post_processor                               tokenizer.ggml.add_bos_token, add_eos_token
    normalizer                                   nothing

GGUF has no place for a normalizer. Qwen2's own tokenizer has NFC, so that is what `qwen2` means; a
tokenizer that differs from its row is written with the key `NORMALIZER_KEY`, which other readers
pass over, as they pass over NFC.

A row of the embedding that no token has is filled with `[PAD<id>]`, of type UNUSED. It is left out
of the `tokenizer.json`, where it was not either. Every other token stands in `model.vocab`, the
added ones too: the library would number them anew otherwise.

A file with another kind of tokenizer gives none, and a warning: ids that are nearly right are worse
than none. Writing is in `engine.formats.gguf_tokenizer_write`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from engine.formats.gguf_header import GgufMetadata
from engine.formats.gguf_values import quoted, refuse
from engine.formats.gguf_vocabulary import MERGES, TOKEN_TYPES, TOKENS, TokenType, token_id

MODEL_KEY = "tokenizer.ggml.model"
PRE_KEY = "tokenizer.ggml.pre"
ADD_KEY = "tokenizer.ggml.add_{}_token"
NORMALIZER_KEY = "apr_workbench.tokenizer.normalizer"
"""`none` or `NFC`; only where it is not that of the row of `PRE_TOKENIZERS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    splits: tuple[str, ...]
    normalizer: str = "none"
    ignore_merges: bool = False
    """A part of the text that is a token as a whole is that token, whatever merges would give."""
    add_bos: bool = False
    """Where the file does not say."""


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "qwen2": PreTokenizer(splits=(_WORDS.replace("DIGITS", ""),), normalizer="NFC"),
    "llama-bpe": PreTokenizer(
        splits=(_WORDS.replace("DIGITS", "{1,3}"),), ignore_merges=True, add_bos=True
    ),
    "gpt-2": PreTokenizer(splits=(_GPT2 + r"|\s+",)),
    # What a file without a name means.
    "default": PreTokenizer(
        splits=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    ),
}


_KINDS = frozenset(TokenType)


def unsupported_tokenizer(metadata: GgufMetadata) -> list[str]:
    """Why there is no `tokenizer.json` for this file, as one warning; nothing when there is one."""
    model, pre = metadata.get(MODEL_KEY), metadata.get(PRE_KEY, "default")
    if model is None and TOKENS not in metadata:
        reason = "the file brings no tokenizer"
    elif model != "gpt2":
        reason = f"tokenizer model {model!r:.40} is not supported; gpt2 (byte-level BPE) is"
    elif not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        reason = f"{PRE_KEY} {pre!r:.40} is not supported; {', '.join(PRE_TOKENIZERS)} are"
    elif missing := [key for key in (TOKENS, TOKEN_TYPES, MERGES) if key not in metadata]:
        reason = f"{', '.join(missing)} missing"
    elif metadata.get(NORMALIZER_KEY, "none") not in ("none", "NFC"):
        reason = f"{NORMALIZER_KEY} {metadata[NORMALIZER_KEY]!r:.40} is not supported"
    else:
        return []
    return [f"{metadata.path}: no tokenizer.json: {reason}"]


def build_tokenizer_json(metadata: GgufMetadata) -> bytes | None:
    """A `tokenizer.json` that gives the ids of this file, None where `unsupported_tokenizer` says
    why. Raises `WeightsError` GG08 for tokens or merges that contradict each other."""
    if unsupported_tokenizer(metadata):
        return None
    pre = PRE_TOKENIZERS[metadata.get(PRE_KEY, "default")]
    vocab, added = _read_tokens(metadata)
    normalizer = metadata.get(NORMALIZER_KEY, pre.normalizer)
    found = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None if normalizer == "none" else {"type": normalizer},
        "pre_tokenizer": _pre_tokenizer(pre.splits),
        "post_processor": _post_processor(metadata, pre),
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": vocab,
            "merges": _read_merges(metadata, vocab),
        },
    }
    return json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()


def _read_tokens(metadata: GgufMetadata) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Token -> id, and the tokens that are looked for in text before it is cut."""
    vocab: dict[str, int] = {}
    added: list[dict[str, Any]] = []
    kinds: list[int] = metadata[TOKEN_TYPES]

    def wrong(expected: str, found: str) -> NoReturn:
        refuse("GG08", f"{metadata.path}, key {quoted(TOKENS)}[{number}]", expected, found)

    for number, (text, kind) in enumerate(zip(metadata[TOKENS], kinds, strict=True)):
        if kind == TokenType.UNUSED:
            continue
        if kind not in _KINDS:
            wrong("a token type from 1 to 6", f"{kind}")
        if kind == TokenType.BYTE and not re.fullmatch("<0x[0-9A-F]{2}>", text):
            wrong("<0x00> to <0xFF> for a token of type BYTE", quoted(text))
        if not text or text in vocab:
            wrong("a text of its own", f"that of {vocab[text]}, {quoted(text)}" if text else "none")
        vocab[text] = number
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED):
            added.append(_added_token(text, number, special=kind == TokenType.CONTROL))
    return vocab, added


def _read_merges(metadata: GgufMetadata, vocab: Mapping[str, int]) -> list[list[str]]:
    merges = []
    for number, text in enumerate(metadata[MERGES]):
        # The left side may begin with a space in files of other writers, so never split there.
        cut = text.find(" ", 1)
        left, right = text[:cut], text[cut + 1 :]
        if cut < 0 or left not in vocab or right not in vocab or left + right not in vocab:
            where = f"{metadata.path}, key {quoted(MERGES)}[{number}]"
            refuse("GG08", where, "two tokens that make a third, with a space", quoted(text))
        merges.append([left, right])
    return merges


def _added_token(text: str, number: int, *, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, **flags, "special": special}


def _pre_tokenizer(splits: tuple[str, ...]) -> dict[str, Any]:
    cuts: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
        for split in splits
    ]
    spell = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {"type": "Sequence", "pretokenizers": [*cuts, spell]}


def _post_processor(metadata: GgufMetadata, pre: PreTokenizer) -> dict[str, Any] | None:
    """Adds the first and last token where the file asks for it."""
    first = token_id(metadata, "bos") if _flag(metadata, "bos", pre.add_bos) else None
    last = token_id(metadata, "eos") if _flag(metadata, "eos", False) else None
    if first is None and last is None:
        return None
    texts: list[str] = metadata[TOKENS]
    ids = {texts[number]: number for number in (first, last) if number is not None}

    def template(sequence: str, type_id: int) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = [{"Sequence": {"id": sequence, "type_id": type_id}}]
        if first is not None:
            parts.insert(0, {"SpecialToken": {"id": texts[first], "type_id": type_id}})
        if last is not None:
            parts.append({"SpecialToken": {"id": texts[last], "type_id": type_id}})
        return parts

    return {
        "type": "TemplateProcessing",
        "single": template("A", 0),
        "pair": template("A", 0) + template("B", 1),
        "special_tokens": {
            text: {"id": text, "ids": [number], "tokens": [text]} for text, number in ids.items()
        },
    }


def _flag(metadata: GgufMetadata, name: str, absent: bool) -> bool:
    key = ADD_KEY.format(name)
    found = metadata.get(key, absent)
    if type(found) is not bool:
        refuse("GG08", f"{metadata.path}, key {quoted(key)}", "a BOOL", f"{found!r:.40}")
    return found
