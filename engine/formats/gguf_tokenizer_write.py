"""A `tokenizer.json` as GGUF metadata: the other direction of `engine.formats.gguf_tokenizer`.

What GGUF has no way to say is refused with a `TokenizerError`, since the file would give other ids:
a way of cutting text that has no name, a normalizer but NFC, an added token that takes the white
space beside it, a template that adds more than a first and a last token.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NoReturn

from engine.errors import TokenizerError
from engine.formats.gguf_tokenizer import (
    ADD_KEY,
    MODEL_KEY,
    NORMALIZER_KEY,
    PRE_KEY,
    PRE_TOKENIZERS,
)
from engine.formats.gguf_values import GgufValue, ValueType
from engine.formats.gguf_vocabulary import MERGES, TOKEN_TYPES, TOKENS, TokenType
from engine.formats.tokenizer import make_inner


def tokenizer_metadata(raw: bytes, rows: int, where: object) -> dict[str, GgufValue]:
    """The metadata of the tokenizer in `raw`, filled up to the `rows` of the embedding.

    `where` names it in errors. Raises `TokenizerError`.
    """
    record = _parsed(raw, where)
    name, normalizer = _pre_tokenizer_name(record, where)
    texts: list[str] = [f"[PAD{number}]" for number in range(rows)]
    kinds = [int(TokenType.UNUSED)] * rows
    added = {token["content"]: token for token in record["added_tokens"]}
    ids = record["model"]["vocab"] | {text: token["id"] for text, token in added.items()}
    for text, number in ids.items():
        if number >= rows:
            _refuse(
                where, f"ids below {rows:,}, the rows of the embedding", f"{text!r} at {number:,}"
            )
        if kinds[number] != TokenType.UNUSED:
            _refuse(where, f"one token at id {number:,}", f"{texts[number]!r} and {text!r}")
        texts[number] = text
        kinds[number] = _token_type(added.get(text), where)
    merges = [f"{left} {right}" for left, right in record["model"]["merges"]]
    values = {
        MODEL_KEY: GgufValue(type=ValueType.STRING, value="gpt2"),
        PRE_KEY: GgufValue(type=ValueType.STRING, value=name),
        TOKENS: GgufValue(type=ValueType.ARRAY, element=ValueType.STRING, value=texts),
        TOKEN_TYPES: GgufValue(type=ValueType.ARRAY, element=ValueType.INT32, value=kinds),
        MERGES: GgufValue(type=ValueType.ARRAY, element=ValueType.STRING, value=merges),
    }
    if normalizer != PRE_TOKENIZERS[name].normalizer:
        values[NORMALIZER_KEY] = GgufValue(type=ValueType.STRING, value=normalizer)
    for role, text in zip(
        ("bos", "eos"), _added_around(record["post_processor"], where), strict=True
    ):
        values[ADD_KEY.format(role)] = GgufValue(type=ValueType.BOOL, value=text is not None)
        if text is not None:
            key = f"tokenizer.ggml.{role}_token_id"
            values[key] = GgufValue(type=ValueType.UINT32, value=ids[text])
    return values


def _parsed(raw: bytes, where: object) -> dict[str, Any]:
    """The tokenizer as the library writes it, which has one spelling for everything."""
    try:
        inner, _ = make_inner(raw, Path(str(where)), hashlib.sha256(raw).hexdigest())
    except TokenizerError as error:
        _refuse(where, "a tokenizer of the tokenizers library", error.message)
    record: dict[str, Any] = json.loads(inner.to_str())
    model = record["model"]
    for key, allowed in {
        "type": ("BPE",),
        "unk_token": (None, ""),
        "continuing_subword_prefix": (None, ""),
        "end_of_word_suffix": (None, ""),
        "byte_fallback": (False,),
    }.items():
        if model.get(key, allowed[0]) not in allowed:
            _refuse(where, f"a byte-level BPE with {key} {allowed[0]!r}", f"{model[key]!r:.80}")
    for token in json.loads(raw).get("added_tokens", ()):
        if (given := inner.token_to_id(token["content"])) != token["id"]:
            # It renumbers an added token whose id is taken or leaves a gap, and says nothing.
            expected = f"{token['content']!r} at id {token['id']:,}, as the file says"
            _refuse(where, expected, f"id {given} given by the tokenizers library")
    return record


def _pre_tokenizer_name(record: dict[str, Any], where: object) -> tuple[str, str]:
    """The name in GGUF of the way that text is cut, and the normalizer."""
    splits = _splits(record["pre_tokenizer"], where)
    named = [name for name, pre in PRE_TOKENIZERS.items() if pre.splits == splits]
    if not named:
        known = ", ".join(PRE_TOKENIZERS)
        _refuse(where, f"text cut as one of {known} cuts it", f"the expressions {splits!r:.200}")
    ignore_merges = record["model"].get("ignore_merges", False)
    if ignore_merges != PRE_TOKENIZERS[named[0]].ignore_merges:
        _refuse(where, f"ignore_merges {not ignore_merges}, as for {named[0]}", f"{ignore_merges}")
    normalizer = record["normalizer"]
    if normalizer not in (None, {"type": "NFC"}):
        _refuse(where, "the normalizer NFC or none", f"{normalizer!r:.80}")
    return named[0], "none" if normalizer is None else "NFC"


def _splits(cutter: dict[str, Any] | None, where: object) -> tuple[str, ...]:
    """The regular expressions that cut text, before it is spelt in bytes."""
    steps = [cutter] if cutter is not None else []
    if cutter is not None and cutter["type"] == "Sequence":
        steps = cutter["pretokenizers"]
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        _refuse(
            where, "a ByteLevel pre-tokenizer without prefix space at the end", f"{steps!r:.200}"
        )
    found = []
    for step in steps[:-1]:
        plain = step["type"] == "Split" and (step["behavior"], step["invert"]) == (
            "Isolated",
            False,
        )
        if not plain or "Regex" not in step["pattern"]:
            _refuse(where, "text cut by isolating a regular expression", f"{step!r:.200}")
        found.append(step["pattern"]["Regex"])
    if steps[-1]["use_regex"]:
        found.extend(PRE_TOKENIZERS["gpt-2"].splits)
    return tuple(found)


def _token_type(added: dict[str, Any] | None, where: object) -> TokenType:
    if added is None:
        return TokenType.NORMAL
    for flag in ("lstrip", "rstrip", "single_word"):
        if added[flag]:
            _refuse(where, f"added tokens without {flag}", f"{added['content']!r} with it")
    return TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED


def _added_around(post: dict[str, Any] | None, where: object) -> tuple[str | None, str | None]:
    """The tokens that are put before and after each text."""
    steps = [] if post is None else post.get("processors", [post])
    # ByteLevel moves offsets and no ids.
    steps = [step for step in steps if step["type"] != "ByteLevel"]
    if not steps:
        return None, None
    kinds = [step["type"] for step in steps]
    if kinds != ["TemplateProcessing"]:
        _refuse(where, "a TemplateProcessing post-processor at most", ", ".join(kinds))
    parts = steps[0]["single"]
    sequence = [number for number, part in enumerate(parts) if "Sequence" in part]
    if len(sequence) != 1 or sequence[0] > 1 or len(parts) - sequence[0] > 2:
        _refuse(where, "at most one token before and after a text", f"{parts!r:.200}")
    before, after = parts[: sequence[0]], parts[sequence[0] + 1 :]
    return _single(steps[0], before, where), _single(steps[0], after, where)


def _single(template: dict[str, Any], parts: list[dict[str, Any]], where: object) -> str | None:
    if not parts:
        return None
    tokens = template["special_tokens"][parts[0]["SpecialToken"]["id"]]["tokens"]
    if len(tokens) != 1:
        _refuse(where, "one token for each place of the template", f"{tokens!r:.80}")
    return str(tokens[0])


def _refuse(where: object, expected: str, found: str) -> NoReturn:
    raise TokenizerError.expected("tokenizer for GGUF", where, expected, found)
