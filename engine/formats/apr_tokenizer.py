"""The tokenizer in the metadata of an .apr file, into it and out of it.

Other readers of the format know tables, and rebuild a byte-level BPE from them:

    tokenizer.vocabulary    the text of each id          tokenizer.merges      "left right", by rank
    tokenizer.token_type    a number for each id         tokenizer.pre_type    how text is cut first
    tokenizer.bos_token_id, tokenizer.eos_token_id       tokenizer.vocab_size

Tables lose what they have no column for (a normalizer, added tokens that strip spaces), so a file
written here has them for others and the `tokenizer.json` itself, byte for byte, under one more key:
deflated, because its text would come close to the 16 MiB that metadata may have. A file of another
writer gives a `tokenizer.json` made from its tables when they say everything that ids depend on:
which tokens are special, and how text is cut. If not it gives none, and says why: ids that are
nearly right are worse than none.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine import limits
from engine.errors import TokenizerError
from engine.formats.apr_header import refuse
from engine.formats.gguf_tokenizer import PRE_TOKENIZERS
from engine.formats.gguf_vocabulary import TokenType

EXACT = "tokenizer.json.zlib.base64"
VOCABULARY, MERGES, TOKEN_TYPES = (
    "tokenizer.vocabulary",
    "tokenizer.merges",
    "tokenizer.token_type",
)
PRE_TYPE = "tokenizer.pre_type"
_LIMIT_BYTES = limits.TOKENIZER_FILE.most
# Architectures whose tokenizers are all cut in one way; files from before `pre_type` rely on it.
_PRE_OF_ARCHITECTURE = {"qwen2": "qwen2", "qwen3": "qwen2"}
_ADDED_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def embed(tokenizer_json: bytes) -> dict[str, Any]:
    """The metadata keys for a `tokenizer.json`: its bytes, and tables if it is a byte-level BPE.

    Raises `TokenizerError` for bytes that are no such file.
    """
    try:
        record = json.loads(tokenizer_json.decode())
        model = record["model"]
        added = {token["id"]: token for token in record.get("added_tokens") or ()}
        texts = {i: text for text, i in (model.get("vocab") or {}).items()}
        texts |= {i: token["content"] for i, token in added.items()}
        merges = [
            one if isinstance(one, str) else " ".join(one) for one in model.get("merges") or ()
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise TokenizerError.expected(
            "tokenizer", "to write", "a tokenizer.json of the tokenizers library", reason
        ) from error
    found = {EXACT: base64.b64encode(zlib.compress(tokenizer_json, 6)).decode()}
    if model.get("type") != "BPE" or not _are_ids(texts):
        return found
    ids = range(max(texts, default=-1) + 1)
    kinds = [_kind(texts, added, i) for i in ids]
    splits = _splits(record.get("pre_tokenizer"))
    pre = next((name for name, row in PRE_TOKENIZERS.items() if row.splits == splits), None)
    return {
        **found,
        VOCABULARY: [texts.get(i, f"[PAD{i}]") for i in ids],
        MERGES: merges,
        TOKEN_TYPES: kinds,
        "tokenizer.vocab_size": len(ids),
        "tokenizer.model_type": "gpt2",
        **({} if pre is None else {PRE_TYPE: pre}),
    }


def unsupported(metadata: Mapping[str, Any], path: Path) -> list[str]:
    """Why the metadata gives no `tokenizer.json`, as one warning; nothing when it does."""
    missing = [key for key in (MERGES, TOKEN_TYPES) if key not in metadata]
    pre = _pre_type(metadata)
    if EXACT in metadata:
        return []
    if VOCABULARY not in metadata:
        reason = "the file brings none"
    elif missing:
        reason = f"{', '.join(missing)} missing beside {VOCABULARY}"
    elif not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        reason = f"{PRE_TYPE} {pre!r:.40} is not supported; {', '.join(PRE_TOKENIZERS)} are"
    else:
        return []
    return [f"{path}: no tokenizer: {reason}"]


def extract(metadata: Mapping[str, Any], path: Path) -> bytes | None:
    """The `tokenizer.json` that the metadata holds; None where `unsupported` says why.

    Raises `WeightsError` AP09 where it is damaged.
    """
    if EXACT in metadata:
        return _exact(metadata[EXACT], path)
    if unsupported(metadata, path):
        return None
    vocab, added = _tokens(metadata, path)
    row = PRE_TOKENIZERS[_pre_type(metadata)]
    cuts: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
        for split in row.splits
    ]
    spell = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    found = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None if row.normalizer == "none" else {"type": row.normalizer},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, spell]},
        "post_processor": None,
        "decoder": spell,
        "model": {
            "type": "BPE",
            "ignore_merges": row.ignore_merges,
            "vocab": vocab,
            "merges": _merges(metadata[MERGES], vocab, path),
        },
    }
    return json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()


def _pre_type(metadata: Mapping[str, Any]) -> Any:
    """How text is cut, by its name; from the architecture where the file does not say."""
    said = metadata.get(PRE_TYPE)
    return _PRE_OF_ARCHITECTURE.get(str(metadata.get("architecture"))) if said is None else said


def _are_ids(texts: Mapping[Any, object]) -> bool:
    """Integers from 0 with few gaps, so that a list by id is no larger than what it is made of."""
    return all(type(i) is int and 0 <= i < 2 * len(texts) + 1024 for i in texts)


def _kind(texts: Mapping[int, str], added: Mapping[int, Mapping[str, Any]], i: int) -> int:
    if i in added:
        return int(TokenType.CONTROL if added[i].get("special") else TokenType.USER_DEFINED)
    return int(TokenType.NORMAL if i in texts else TokenType.UNUSED)


def _splits(pre_tokenizer: object) -> tuple[str, ...]:
    """The expressions of a pre-tokenizer that cuts and then spells bytes, as all rows here do."""
    parts = pre_tokenizer.get("pretokenizers") if isinstance(pre_tokenizer, dict) else None
    patterns = [
        part.get("pattern")
        for part in (parts if isinstance(parts, list) else [])
        if isinstance(part, dict) and part.get("type") == "Split"
    ]
    return tuple(str(pattern.get("Regex")) for pattern in patterns if isinstance(pattern, dict))


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


def _tokens(metadata: Mapping[str, Any], path: Path) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Token -> id, and the tokens that are looked for in text before it is cut."""
    texts, kinds = metadata[VOCABULARY], metadata[TOKEN_TYPES]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        refuse("AP09", path, f"{VOCABULARY} to be a list of texts", f"{texts!r:.40}")
    if not isinstance(kinds, list) or len(kinds) != len(texts):
        refuse("AP09", path, f"{len(texts):,} numbers of {TOKEN_TYPES}", f"{kinds!r:.40}")
    vocab: dict[str, int] = {}
    added: list[dict[str, Any]] = []
    for i, (text, kind) in enumerate(zip(texts, kinds, strict=True)):
        if kind == TokenType.UNUSED:
            continue
        if not text or text in vocab:
            where = f"{path}, {VOCABULARY}[{i}]"
            refuse("AP09", where, "a text of its own", json.dumps(text) if text else "none")
        vocab[text] = i
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED):
            flags = dict.fromkeys(_ADDED_FLAGS, False)
            added.append({"id": i, "content": text, **flags, "special": kind == TokenType.CONTROL})
    return vocab, added


def _merges(merges: object, vocab: Mapping[str, int], path: Path) -> list[list[str]]:
    if not isinstance(merges, list):
        refuse("AP09", path, f"{MERGES} to be a list", f"{merges!r:.40}")
    pairs = []
    for i, text in enumerate(merges):
        left, space, right = text.partition(" ") if isinstance(text, str) else ("", "", "")
        if not space or left not in vocab or right not in vocab or left + right not in vocab:
            where = f"{path}, {MERGES}[{i}]"
            refuse("AP09", where, "two tokens that make a third, with a space", f"{text!r:.80}")
        pairs.append([left, right])
    return pairs
