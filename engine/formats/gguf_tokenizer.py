"""Convert a byte-level BPE tokenizer between GGUF metadata and a `tokenizer.json`.

Both contain the tokens and the merges. The pre-tokenizer, which splits text before bytes are
merged, is a list of regular expressions in a `tokenizer.json` and a name in GGUF,
`tokenizer.ggml.pre`. The names known here are the rows of
`engine.formats.tokenizer.PRE_TOKENIZERS`. Each expression splits the results of the previous
expression.

    tokenizer.json                               GGUF
    model.vocab, added_tokens[].content          tokenizer.ggml.tokens
    added_tokens[].special                       token_type CONTROL (true), USER_DEFINED (false)
    model.merges                                 tokenizer.ggml.merges
    pre_tokenizer, model.ignore_merges           tokenizer.ggml.pre
    post_processor                               tokenizer.ggml.add_bos_token, add_eos_token
    normalizer                                   nothing

GGUF has no field for a normalizer. Each row of PRE_TOKENIZERS implies one: `qwen2` implies NFC, which Qwen2's own
tokenizer has. A tokenizer with another normalizer than its row is written with the key `NORMALIZER_KEY`, which other
readers ignore, as they ignore NFC.

A row of the embedding without a token is written as the token `[PAD<id>]` of type UNUSED. It is left out when a
`tokenizer.json` is built. Every other token is in `model.vocab`, including added tokens: otherwise the library would
renumber them.

From a file with another kind of tokenizer no `tokenizer.json` is built, and a warning gives the reason:
nearly correct ids are worse than none.

When a tokenizer is written (`tokenizer_metadata`), everything that GGUF cannot express is refused
with a `TokenizerError`, because the file would give other ids: a pre-tokenizer without a name, a
normalizer other than NFC, an added token that strips white space, a template that adds more than a
first and a last token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from engine.errors import TokenizerError, WeightsError
from engine.formats.gguf_metadata import MERGES, TOKEN_TYPES, TOKENS, TokenType, token_id
from engine.formats.gguf_values import GgufMetadata, GgufValue, ValueType, quoted, refuse
from engine.formats.tokenizer import PRE_TOKENIZERS, PreTokenizer, make_inner

MODEL_KEY = "tokenizer.ggml.model"
PRE_KEY = "tokenizer.ggml.pre"
ADD_KEY = "tokenizer.ggml.add_{}_token"
NORMALIZER_KEY = "apr_workbench.tokenizer.normalizer"
"""`none` or `NFC`; written only if it differs from the row of `PRE_TOKENIZERS`."""


def unsupported_tokenizer(metadata: GgufMetadata) -> list[str]:
    """Return a warning that says why no `tokenizer.json` can be built from this file; an empty list if one
    can.
    """
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
    """Return a `tokenizer.json` that gives the ids of this file; None in the cases that
    `unsupported_tokenizer` reports. Raises `WeightsError` GG08 for tokens or merges that contradict
    each other.
    """
    if unsupported_tokenizer(metadata):
        return None
    pre = PRE_TOKENIZERS[metadata.get(PRE_KEY, "default")]
    texts, kinds, merges = (metadata[key] for key in (TOKENS, TOKEN_TYPES, MERGES))
    normalizer = metadata.get(NORMALIZER_KEY, pre.normalizer)
    around = _post_processor(metadata, pre)
    return tokenizer_json("GG08 gguf", metadata.path, texts, kinds, merges, pre, normalizer, around)


def tokenizer_json(
    what: str,
    path: Path,
    texts: Sequence[str],
    kinds: Sequence[int],
    merges: Sequence[str],
    pre: PreTokenizer,
    normalizer: str,
    post_processor: dict[str, Any] | None,
) -> bytes:
    """Return a `tokenizer.json` of a byte-level BPE from its tables: the text and the type of each id, and its merges.
    `what` and `path` name the file in errors. Raises `WeightsError` for tables that contradict each other.
    """
    vocab: dict[str, int] = {}
    added: list[dict[str, Any]] = []
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for number, (text, kind) in enumerate(zip(texts, kinds, strict=True)):
        if kind == TokenType.UNUSED:
            continue
        if not text or text in vocab:
            found = f"that of {vocab[text]}, {quoted(text)}" if text else "none"
            raise WeightsError.expected(what, f"{path}, token {number}", "a text of its own", found)
        vocab[text] = number
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED):
            # Added tokens are matched before the text is split into pre-tokens.
            is_special = kind == TokenType.CONTROL
            added.append({"id": number, "content": text, **flags, "special": is_special})
    pairs = []
    for number, text in enumerate(merges):
        # In files of other writers the left token may begin with a space, so the first character is no separator.
        cut = text.find(" ", 1)
        left, right = text[:cut], text[cut + 1 :]
        if cut < 0 or left not in vocab or right not in vocab or left + right not in vocab:
            expected = "two tokens that make a third, with a space"
            raise WeightsError.expected(what, f"{path}, merge {number}", expected, quoted(text))
        pairs.append([left, right])
    record = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None if normalizer == "none" else {"type": normalizer},
        "pre_tokenizer": _pre_tokenizer(pre.splits),
        "post_processor": post_processor,
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
            "merges": pairs,
        },
    }
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()


def _pre_tokenizer(splits: tuple[str, ...]) -> dict[str, Any]:
    """Return a pre-tokenizer in the form of a tokenizer.json. It splits text by one expression after the
    other, and then encodes bytes.
    """
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
    """Return a post-processor that adds the first and last token if the file requests it."""
    first_id = token_id(metadata, "bos") if _flag(metadata, "bos", pre.add_bos) else None
    last_id = token_id(metadata, "eos") if _flag(metadata, "eos", False) else None
    if first_id is None and last_id is None:
        return None
    texts: list[str] = metadata[TOKENS]
    ids = {texts[number]: number for number in (first_id, last_id) if number is not None}

    def template(sequence: str, type_id: int) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = [{"Sequence": {"id": sequence, "type_id": type_id}}]
        if first_id is not None:
            parts.insert(0, {"SpecialToken": {"id": texts[first_id], "type_id": type_id}})
        if last_id is not None:
            parts.append({"SpecialToken": {"id": texts[last_id], "type_id": type_id}})
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
    value = metadata.get(key, absent)
    if type(value) is not bool:
        refuse("GG08", f"{metadata.path}, key {quoted(key)}", "a BOOL", f"{value!r:.40}")
    return value


def tokenizer_metadata(raw: bytes, rows: int, where: object) -> dict[str, GgufValue]:
    """Return the metadata of the tokenizer in `raw`, padded to the `rows` of the embedding.

    `where` names it in errors. Raises `TokenizerError`.
    """
    record = _parse(raw, where)
    name, normalizer = _pre_tokenizer_name(record, where)
    texts: list[str] = [f"[PAD{number}]" for number in range(rows)]
    kinds = [int(TokenType.UNUSED)] * rows
    added = {token["content"]: token for token in record["added_tokens"]}
    ids = record["model"]["vocab"] | {text: token["id"] for text, token in added.items()}
    for text, number in ids.items():
        if number >= rows:
            _refuse_tokenizer(
                where, f"ids below {rows:,}, the rows of the embedding", f"{text!r} at {number:,}"
            )
        if kinds[number] != TokenType.UNUSED:
            _refuse_tokenizer(
                where, f"one token at id {number:,}", f"{texts[number]!r} and {text!r}"
            )
        texts[number] = text
        kinds[number] = _token_type(added.get(text), where)
    merges = [f"{left} {right}" for left, right in record["model"]["merges"]]
    values = {
        MODEL_KEY: GgufValue(ValueType.STRING, "gpt2"),
        PRE_KEY: GgufValue(ValueType.STRING, name),
        TOKENS: GgufValue(ValueType.ARRAY, texts, ValueType.STRING),
        TOKEN_TYPES: GgufValue(ValueType.ARRAY, kinds, ValueType.INT32),
        MERGES: GgufValue(ValueType.ARRAY, merges, ValueType.STRING),
    }
    if normalizer != PRE_TOKENIZERS[name].normalizer:
        values[NORMALIZER_KEY] = GgufValue(ValueType.STRING, normalizer)
    for role, text in zip(
        ("bos", "eos"), _added_around(record["post_processor"], where), strict=True
    ):
        values[ADD_KEY.format(role)] = GgufValue(ValueType.BOOL, text is not None)
        if text is not None:
            key = f"tokenizer.ggml.{role}_token_id"
            values[key] = GgufValue(ValueType.UINT32, ids[text])
    return values


def _parse(raw: bytes, where: object) -> dict[str, Any]:
    """Return the tokenizer in the form in which the library serialises it, which spells each setting in one way."""
    try:
        inner = make_inner(raw, Path(str(where)))
    except TokenizerError as error:
        _refuse_tokenizer(where, "a tokenizer of the tokenizers library", error.message)
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
            _refuse_tokenizer(
                where, f"a byte-level BPE with {key} {allowed[0]!r}", f"{model[key]!r:.80}"
            )
    return record


def _pre_tokenizer_name(record: dict[str, Any], where: object) -> tuple[str, str]:
    """Return the GGUF name of the pre-tokenizer, and the normalizer."""
    splits = _splits(record["pre_tokenizer"], where)
    named = [name for name, pre in PRE_TOKENIZERS.items() if pre.splits == splits]
    if not named:
        known = ", ".join(PRE_TOKENIZERS)
        _refuse_tokenizer(
            where, f"text split as by one of {known} cuts it", f"the expressions {splits!r:.200}"
        )
    ignore_merges = record["model"].get("ignore_merges", False)
    if ignore_merges != PRE_TOKENIZERS[named[0]].ignore_merges:
        _refuse_tokenizer(
            where, f"ignore_merges {not ignore_merges}, as for {named[0]}", f"{ignore_merges}"
        )
    normalizer = record["normalizer"]
    if normalizer not in (None, {"type": "NFC"}):
        _refuse_tokenizer(where, "the normalizer NFC or none", f"{normalizer!r:.80}")
    return named[0], "none" if normalizer is None else "NFC"


def _splits(cutter: dict[str, Any] | None, where: object) -> tuple[str, ...]:
    """Return the regular expressions that split text before it is encoded as bytes."""
    steps = [cutter] if cutter is not None else []
    if cutter is not None and cutter["type"] == "Sequence":
        steps = cutter["pretokenizers"]
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        _refuse_tokenizer(
            where, "a ByteLevel pre-tokenizer without prefix space at the end", f"{steps!r:.200}"
        )
    expressions = []
    for step in steps[:-1]:
        is_isolating = step["type"] == "Split" and (step["behavior"], step["invert"]) == (
            "Isolated",
            False,
        )
        if not is_isolating or "Regex" not in step["pattern"]:
            _refuse_tokenizer(
                where, "a Split pre-tokenizer that isolates a regular expression", f"{step!r:.200}"
            )
        expressions.append(step["pattern"]["Regex"])
    if steps[-1]["use_regex"]:
        expressions.extend(PRE_TOKENIZERS["gpt-2"].splits)
    return tuple(expressions)


def _token_type(added: dict[str, Any] | None, where: object) -> TokenType:
    if added is None:
        return TokenType.NORMAL
    for flag in ("lstrip", "rstrip", "single_word"):
        if added[flag]:
            _refuse_tokenizer(
                where, f"added tokens without {flag}", f"{added['content']!r} with it"
            )
    return TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED


def _added_around(post: dict[str, Any] | None, where: object) -> tuple[str | None, str | None]:
    """Return the tokens that are added before and after each document."""
    steps = [] if post is None else post.get("processors", [post])
    # ByteLevel changes offsets but not ids.
    steps = [step for step in steps if step["type"] != "ByteLevel"]
    if not steps:
        return None, None
    kinds = [step["type"] for step in steps]
    if kinds != ["TemplateProcessing"]:
        _refuse_tokenizer(where, "a TemplateProcessing post-processor at most", ", ".join(kinds))
    parts = steps[0]["single"]
    sequence = [number for number, part in enumerate(parts) if "Sequence" in part]
    if len(sequence) != 1 or sequence[0] > 1 or len(parts) - sequence[0] > 2:
        _refuse_tokenizer(
            where, "at most one token before and one after a document", f"{parts!r:.200}"
        )
    before, after = parts[: sequence[0]], parts[sequence[0] + 1 :]
    return _single(steps[0], before, where), _single(steps[0], after, where)


def _single(template: dict[str, Any], parts: list[dict[str, Any]], where: object) -> str | None:
    if not parts:
        return None
    tokens = template["special_tokens"][parts[0]["SpecialToken"]["id"]]["tokens"]
    if len(tokens) != 1:
        _refuse_tokenizer(
            where, "one token for each special token of the template", f"{tokens!r:.80}"
        )
    return str(tokens[0])


def _refuse_tokenizer(where: object, expected: str, found: str) -> NoReturn:
    raise TokenizerError.expected("tokenizer for GGUF", where, expected, found)
