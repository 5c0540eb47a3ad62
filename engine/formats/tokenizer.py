"""Open a tokenizer.json for training: documents to ids and back, and a check that it fits a model.

The tokenizing itself is done by the `tokenizers` library. This module adds:

- a file that is not a tokenizer (a Git LFS pointer, a saved web page, a truncated download) is
  refused with its kind;
- truncation, padding and BPE dropout stored in the file are switched off: with them a document
  would silently lose its end, gain pad tokens, or get different ids each time;
- a file is refused if the library would silently give one of its added tokens a different id;
- `vocab_size` is the highest id + 1, added tokens included, because that must fit the rows of an
  embedding. The number of tokens is smaller if ids have gaps, and the `vocab_size` of a model's
  config is larger if its embedding is padded.

A special token that is spelt out in a document (`<|im_start|>`) becomes that token, as in all other
tools for these models: rendered chats depend on it. No special token is added before or after a document.

**A long document is encoded in chunks**, because the library holds about 320 bytes for each pre-token of
the text that it processes at once. A document is cut only at positions at which the tokens of the chunks are
provably those of the whole document: see `_Cuts`. A document with more than `limits.UNCUT_TEXT` between two
such positions is refused.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import limits
from engine.errors import TokenizerError
from engine.files import open_regular, parse_json, read_bytes
from engine.formats.kinds import HINTS, START_BYTES, Kind, kind_of

if TYPE_CHECKING:
    import numpy as np
    import tokenizers
    from numpy.typing import NDArray

FILE_NAME = "tokenizer.json"
END_OF_TEXT_NAMES = ("<|endoftext|>", "<|im_end|>", "</s>")
"""Names of the end-of-text token, by priority: in a chat model the first ends a document, the second only a turn."""

# The library needs up to 320 bytes per character of a batch, so a batch of this size needs at most 80 MiB.
_BATCH_CHARACTERS = 1 << 18
# Chunks are much smaller than a batch, because the library distributes the chunks of a batch over its threads.
_CHUNK_CHARACTERS = 1 << 15
_OTHER_FORMATS = ("merges.txt", "tokenizer.model", "vocab.json", "vocab.txt")
_LIBRARY_PREFIX = "Cannot instantiate Tokenizer from buffer: "


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    splits: tuple[str, ...]
    normalizer: str = "none"
    ignore_merges: bool = False
    """Whether a pre-token that is in the vocabulary becomes that token without merges."""
    add_bos: bool = False
    """Whether a beginning-of-text token is added, if the GGUF file does not say."""


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_WORDS_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "qwen2": PreTokenizer(splits=(_WORDS_PATTERN.replace("DIGITS", ""),), normalizer="NFC"),
    "llama-bpe": PreTokenizer(
        splits=(_WORDS_PATTERN.replace("DIGITS", "{1,3}"),), ignore_merges=True, add_bos=True
    ),
    "gpt-2": PreTokenizer(splits=(_GPT2 + r"|\s+",)),
    # For a GGUF file that names no pre-tokenizer.
    "default": PreTokenizer(
        splits=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    ),
}


class Tokenizer:
    """An open tokenizer. Created by `open_tokenizer`."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        path: Path,
        raw: bytes,
        sha256: str,
        end_of_text: str | None,
    ) -> None:
        self._inner = inner
        self.path = path
        self.raw = raw
        """Content of the tokenizer.json."""
        self.sha256 = sha256
        """SHA-256 of the bytes of the file."""
        self._end_of_text = end_of_text
        self._cuts = _cuts_of(inner)
        ids = inner.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1
        """Highest id + 1, added tokens included."""

    @property
    def end_of_text_id(self) -> int:
        """Id of the token that ends a document. Raises TokenizerError if there is none."""
        if self._end_of_text is not None:
            token = self._inner.token_to_id(self._end_of_text)
            expected = f"the token {self._end_of_text!r}"
        else:
            special = {
                added.content: token_id
                for token_id, added in self._inner.get_added_tokens_decoder().items()
                if added.special
            }
            token = next((special[name] for name in END_OF_TEXT_NAMES if name in special), None)
            expected = f"a special token named {', '.join(END_OF_TEXT_NAMES)}"
        if token is None:
            raise TokenizerError.expected(
                "tokenizer", self.path, expected, "none", hint="name the token that ends a document"
            )
        return token

    @property
    def padding_id(self) -> int:
        """Id that fills the padding of rows, which no computation uses."""
        try:
            return self.end_of_text_id
        except TokenizerError:
            return 0

    def encode_documents(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Return the ids of each document, in order.

        Raises TextTooLong if a document has no cut position within the maximum length.
        """
        import numpy as np

        # An array grows in place; joining lists of the chunks' ids at the end would hold all ids twice.
        encoded = [array("I") for _ in texts]
        for batch in _batches(self._chunks(texts)):
            chunks = [chunk for _, chunk in batch]
            with _panic_is_bad_input(self.path):
                encodings = self._inner.encode_batch_fast(chunks, add_special_tokens=False)
            for (text, _), encoding in zip(batch, encodings, strict=True):
                encoded[text].extend(encoding.ids)
        return [np.frombuffer(ids, dtype=np.uint32) for ids in encoded]

    def encode_whole(self, text: str) -> NDArray[np.uint32]:
        """Return the ids of one document, encoded without cutting it; `encode_documents` gives the same ids."""
        import numpy as np

        with _panic_is_bad_input(self.path):
            return np.array(self._inner.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def encode_each(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of strings that are short enough to be encoded without cutting."""
        with _panic_is_bad_input(self.path):
            encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_with_starts(
        self, texts: Sequence[str]
    ) -> list[tuple[NDArray[np.uint32], NDArray[np.int64]]]:
        """Return for each document its ids, and the index of the character at which each token begins.

        The ids are those of `encode_documents`, and both arrays have the same length. If the bytes of
        a character are split over several tokens, all of them begin at that character. White space at
        the beginning of a token belongs to the token, even if the file has `trim_offsets`. Raises
        TextTooLong as `encode_documents` does, and TokenizerError if the tokens are not in the order of
        the document.
        """
        import numpy as np

        encoded: list[list[tuple[NDArray[np.uint32], NDArray[np.int64]]]] = [[] for _ in texts]
        reached = [0] * len(texts)
        for batch in _batches(self._chunks(texts)):
            chunks = [chunk for _, chunk in batch]
            with _panic_is_bad_input(self.path):
                encodings = self._untrimmed.encode_batch(chunks, add_special_tokens=False)
            for (text, chunk), encoding in zip(batch, encodings, strict=True):
                ids = np.array(encoding.ids, dtype=np.uint32)
                starts = np.array([start for start, _ in encoding.offsets], dtype=np.int64)
                if np.any(np.diff(starts, prepend=0) < 0):
                    raise TokenizerError.expected(
                        "tokenizer",
                        self.path,
                        "tokens in the order of the document",
                        f"{chunk[:40]!a} with tokens at {starts[:10].tolist()}",
                    )
                encoded[text].append((ids, starts + reached[text]))
                reached[text] += len(chunk)
        return [
            (np.concatenate([ids for ids, _ in parts]), np.concatenate([at for _, at in parts]))
            for parts in encoded
        ]

    @functools.cached_property
    def _untrimmed(self) -> tokenizers.Tokenizer:
        """Tokenizer without its post-processor, which may trim white space off the offsets. The ids are the
        same, because without special tokens a post-processor adds none.
        """
        from tokenizers import Tokenizer as Inner

        # Built from the file, because the library cannot read its own `to_str()` if two tokens have the same id.
        inner = Inner.from_buffer(self.raw)
        _without_options(inner)
        inner.post_processor = None
        return inner

    @functools.cached_property
    def special_tokens(self) -> frozenset[str]:
        """Strings of all special tokens."""
        added = self._inner.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token in its own spelling, or None."""
        return self._inner.token_to_id(token)

    def check_length(self, text: str) -> None:
        """Raise TextTooLong if `encode_documents` would."""
        for _ in self._chunks([text]):
            pass

    def _chunks(self, texts: Sequence[str]) -> Iterator[tuple[int, str]]:
        """Yield the chunks of each document, with the document's index."""
        for index, text in enumerate(texts):
            start = 0
            while len(text) - start > 2 * _CHUNK_CHARACTERS:
                least, most = start + _CHUNK_CHARACTERS, start + limits.UNCUT_TEXT.most
                end = self._cuts.first(text, least, most)
                if end is None:
                    break
                yield index, self._checked(text[start:end], start)
                start = end
            yield index, self._checked(text[start:], start)

    def _checked(self, chunk: str, start: int) -> str:
        """Return a chunk of a document, if it is not too long. `start` is the index of its first character."""
        # A character has at most 4 bytes.
        limit = limits.UNCUT_TEXT.most
        if len(chunk) * 4 > limit and (size := len(chunk.encode("utf-8", "replace"))) > limit:
            error = TextTooLong.expected(
                "tokenizer",
                self.path,
                f"a position at least every {limits.UNCUT_TEXT} where a cut does not change the tokens",
                f"none in {size:,} bytes from character {start:,} on",
                hint="break the line, or split the document",
            )
            error.reason = (
                f"more than {limits.UNCUT_TEXT} without a position where the tokenizer allows a cut"
            )
            raise error
        return chunk

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, with special tokens spelt out. An id that is not a token gives
        no text.
        """
        with _panic_is_bad_input(self.path):
            return self._inner.decode(
                [int(token_id) for token_id in ids], skip_special_tokens=False
            )

    def decode_each(self, rows: Iterable[Sequence[int]]) -> list[str]:
        """Return the text of each row of ids. An id that is not a token gives no text."""
        with _panic_is_bad_input(self.path):
            return self._inner.decode_batch(list(map(list, rows)), skip_special_tokens=False)

    def fits(self, config_vocab_size: int, where: str) -> None:
        """Raise TokenizerError if the tokenizer has an id beyond the rows of an embedding.

        `config_vocab_size` is the number of rows, and `where` names the model in the message. Fewer ids
        than rows are common: embeddings are padded to a round number.
        """
        if self.vocab_size <= config_vocab_size:
            return
        vocab = self._inner.get_vocab(with_added_tokens=True)
        first_id = min(token_id for token_id in vocab.values() if token_id >= config_vocab_size)
        raise TokenizerError.expected(
            "tokenizer",
            self.path,
            f"ids below {config_vocab_size:,}, the embedding rows of {where}",
            f"id {first_id:,} ({self._inner.id_to_token(first_id)!r}) up to {self.vocab_size - 1:,}",
            hint="use the tokenizer that belongs to the model",
        )

    def tokens(self) -> dict[int, str]:
        """Return the token of each id, added tokens included; byte-level tokens as the file spells
        them.
        """
        vocab = self._inner.get_vocab(with_added_tokens=True)
        return {token_id: token for token, token_id in vocab.items()}

    def first_differing_id(self, other: Tokenizer) -> int | None:
        """Return the lowest id that has different tokens in the two tokenizers; None if there is none.

        An id that only one of them has counts as different. Even without a difference the two may
        encode a document differently, because merges may differ.
        """
        own, others = self._inner, other._inner
        ids = {*own.get_vocab().values(), *others.get_vocab().values()}
        differing = (i for i in sorted(ids) if own.id_to_token(i) != others.id_to_token(i))
        return next(differing, None)


def open_tokenizer(
    path: Path | str, *, end_of_text: str | None = None, raw: bytes | None = None
) -> Tokenizer:
    """Open a tokenizer.json, the one in a folder, or `raw`: the bytes of one embedded in the file `path`.

    `end_of_text` names the token that ends a document, if none of `END_OF_TEXT_NAMES` does. Raises
    TokenizerError for a file that is missing or is not a tokenizer, and for an `end_of_text` that
    is not one of its tokens.
    """
    path = Path(path, FILE_NAME) if os.path.isdir(path) and raw is None else Path(path)
    raw = _read(path) if raw is None else raw
    digest = hashlib.sha256(raw).hexdigest()
    inner = make_inner(raw, path)
    _without_options(inner)
    tokenizer = Tokenizer(inner, path=path, raw=raw, sha256=digest, end_of_text=end_of_text)
    if tokenizer.vocab_size == 0:
        raise TokenizerError.expected("tokenizer", path, "at least one token", "no token")
    if end_of_text is not None:
        _ = tokenizer.end_of_text_id
    return tokenizer


def _without_options(inner: tokenizers.Tokenizer) -> None:
    """Turn off truncation, padding and dropout, which make tokens depend on more than the text."""
    from tokenizers.models import BPE

    inner.no_truncation()
    inner.no_padding()
    if isinstance(inner.model, BPE):
        inner.model.dropout = None


def make_inner(raw: bytes, path: Path) -> tokenizers.Tokenizer:
    """Return the library's tokenizer for a file's content. Raises TokenizerError."""
    # Imported here because it loads a shared library of 10 MB, which a viewer never needs.
    from tokenizers import Tokenizer as Inner

    try:
        with _panic_is_bad_input(path):
            inner = Inner.from_buffer(raw)
    except ValueError as error:
        reason = " ".join(str(error).removeprefix(_LIBRARY_PREFIX).split())[:200]
        raise TokenizerError.expected(
            "tokenizer", path, "a tokenizer of the tokenizers library", reason
        ) from error
    _check_added_ids(parse_json(raw, path, "tokenizer", error=TokenizerError), inner, path)
    return inner


@contextlib.contextmanager
def _panic_is_bad_input(path: Path) -> Iterator[None]:
    """Turn a panic of the library into a TokenizerError about the file. A panic is not an Exception
    and has no class that could be imported.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        found = f"a panic of the library: {' '.join(str(error).split())[:200]}"
        raise TokenizerError.expected("tokenizer", path, "one that works", found) from None


def _read(path: Path) -> bytes:
    others = [name for name in _OTHER_FORMATS if os.path.exists(path.with_name(name))]
    if others and not os.path.lexists(path):
        found = f"only {', '.join(others)}"
        hint = "save it with transformers' AutoTokenizer.save_pretrained"
        raise TokenizerError.expected("tokenizer", path, "a file", found, hint=hint)
    with open_regular(path, "tokenizer", error=TokenizerError) as file:
        # A weight file given by mistake is gigabytes; its first bytes suffice to identify it.
        start = file.read(START_BYTES)
    if (kind := kind_of(start)) is not Kind.JSON:
        found = kind.value if kind is not Kind.UNKNOWN else f"a file that begins with {start[:8]!r}"
        hint = HINTS.get(kind, f"give {FILE_NAME}")
        raise TokenizerError.expected("tokenizer", path, "a JSON object", found, hint=hint)
    return read_bytes(path, "tokenizer", limits.TOKENIZER_FILE, error=TokenizerError)


def _check_added_ids(record: dict[str, Any], inner: tokenizers.Tokenizer, path: Path) -> None:
    """Refuse a file with an added token that the library silently renumbers, because its id leaves
    a gap or is taken.
    """
    for token in record.get("added_tokens") or ():
        name, file_id = token["content"], token["id"]
        library_id = inner.token_to_id(name)
        if library_id != file_id:
            raise TokenizerError.expected(
                "tokenizer",
                path,
                f"added token {name!r} at id {file_id:,} as the file says",
                f"id {library_id} given by the library, because {file_id:,} leaves a gap or is taken",
            )


def _batches(chunks: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    batch: list[tuple[int, str]] = []
    characters = 0
    for index, chunk in chunks:
        batch.append((index, chunk))
        characters += len(chunk)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


# Positions at which a document may be cut.
#
# A position between the characters x and y is safe if the tokens of the text before it, followed by the tokens of
# the text after it, are the tokens of the whole. The library works in five steps. The position is safe if every step
# gives the same result for the two sides as for the whole:
#
# - Added tokens are searched in the text, those with `normalized` in the normalised text. Safe if none contains
#   x followed by y, and none with `lstrip`, `rstrip` or `single_word` begins or ends at the position.
# - The normalizer: safe if x and y are characters that no normal form changes or combines with their neighbours.
# - The first pre-tokenizer: safe where a pre-token always ends (`_WORDS_END`). Its expressions have no lookbehind, so
#   the rest is split as if the text began there.
# - Further pre-tokenizers and the model process one pre-token at a time.
# - The post-processor: safe if it adds nothing before or after a document.

_LETTERS = "A-Za-z\u4e00-\u9fa5"
_DIGITS = "0-9"
_SPACES = "\\t\\n\\x0b\\x0c\\r "
_SIGNS = "!-/:-@\\[-_{|}~\u3001\u3002"
# Letters, digits, white space and punctuation that every expression classifies so, and that no normal form changes.
# A cut is never next to any other character, such as a combining one.
_WORDS_END = re.compile(
    f"(?<=[{_LETTERS}])(?=[{_DIGITS}{_SPACES}{_SIGNS}])"
    f"|(?<=[{_DIGITS}])(?=[{_LETTERS}{_SPACES}{_SIGNS}])|(?<=[{_SIGNS}])(?=[{_DIGITS}])"
)
"""Positions at which a pre-token always ends, in the expressions of GPT-2, Qwen2 and Llama 3. There, a pre-token with
letters ends with its last letter, and a pre-token with digits has only digits (in GPT-2's expression also a leading
space). No position after white space is listed, because there the following characters change the pre-token."""
_MARKS_END = re.compile(
    f"(?<=[{_LETTERS}{_DIGITS}])(?=[{_SIGNS}])|(?<=[{_SIGNS}])(?=[{_LETTERS}{_DIGITS}])"
)
"""Positions at which a pre-token always ends, in the expression that separates runs of punctuation from all else."""
_INDEPENDENT = frozenset({"Split", "ByteLevel", "Digits"})
"""Pre-tokenizers that, after the first one, process each pre-token independently of the others."""
_WORD_FAMILIES = ("qwen2", "llama-bpe", "gpt-2")


class TextTooLong(TokenizerError):
    """A document has no cut position within the maximum length."""

    reason: str = ""
    """Message without the file and the position, which is equal for all such documents."""


@dataclass(frozen=True, slots=True)
class _Cuts:
    """The positions at which documents may be cut for one tokenizer."""

    positions: re.Pattern[str] | None = None
    """Pattern that matches between two characters; None if no position is known to be safe."""
    pairs: frozenset[str] = frozenset()
    """Pairs of adjacent characters of the added tokens, which may not be cut."""
    touching: frozenset[str] = frozenset()
    """First and last characters of the added tokens that may neither begin nor end at a cut."""

    def first(self, text: str, start: int, end: int) -> int | None:
        """Return the first safe position from `start` to `end`; None if there is none."""
        if self.positions is None:
            return None
        for match in self.positions.finditer(text, start, end + 1):
            pair = text[match.start() - 1 : match.start() + 1]
            if pair not in self.pairs and self.touching.isdisjoint(pair):
                return match.start()
        return None


def _cuts_of(inner: tokenizers.Tokenizer) -> _Cuts:
    """Return the safe positions of a tokenizer; none if it has a component that is not known here."""
    normalizers = _components(inner.normalizer, "normalizers")
    cutters = _components(inner.pre_tokenizer, "pretokenizers")
    if not cutters or any(
        step["type"] not in ("NFC", "NFD", "NFKC", "NFKD") for step in normalizers
    ):
        return _Cuts()
    first, *further = cutters
    if any(step["type"] not in _INDEPENDENT for step in further):
        return _Cuts()
    if not all(map(_adds_nothing, _components(inner.post_processor, "processors"))):
        return _Cuts()
    pairs, touching = set[str](), set[str]()
    for token in inner.get_added_tokens_decoder().values():
        forms = [token.content]
        if token.normalized and inner.normalizer is not None:
            forms.append(inner.normalizer.normalize_str(token.content))
        pairs |= {form[i : i + 2] for form in forms for i in range(len(form) - 1)}
        if token.lstrip or token.rstrip or token.single_word:
            touching |= {token.content[:1], token.content[-1:]}
    return _Cuts(_pre_token_ends(first), frozenset(pairs), frozenset(touching))


def _components(component: Any, members: str) -> list[dict[str, Any]]:
    """Return a component of a tokenizer as a flat list. `members` is the key of the components in a `Sequence`."""
    if component is None:
        return []
    flat, waiting = [], [json.loads(component.__getstate__())]
    while waiting:
        step = waiting.pop()
        if step["type"] == "Sequence":
            waiting += reversed(step[members])
        else:
            flat.append(step)
    return flat


def _pre_token_ends(pre_tokenizer: Mapping[str, Any]) -> re.Pattern[str] | None:
    """Return a pattern of positions at which a pre-tokenizer always ends a pre-token; None if it is not known."""
    if (
        pre_tokenizer["type"] == "ByteLevel"
        and pre_tokenizer["use_regex"]
        and not pre_tokenizer["add_prefix_space"]
    ):
        return _WORDS_END
    if pre_tokenizer["type"] != "Split" or (
        pre_tokenizer["behavior"],
        pre_tokenizer["invert"],
    ) not in (
        ("Isolated", False),
        ("Removed", True),
    ):
        return None
    expression = pre_tokenizer["pattern"].get("Regex")
    # _GPT2 lacks the last alternative of GPT-2's expression, `\s+`. The text that it leaves unmatched, spaces before
    # a word, becomes a pre-token as well.
    if expression in (_GPT2, *(PRE_TOKENIZERS[name].splits[0] for name in _WORD_FAMILIES)):
        return _WORDS_END
    if expression == PRE_TOKENIZERS["default"].splits[0] and not pre_tokenizer["invert"]:
        return _MARKS_END
    return None


def _adds_nothing(processor: Mapping[str, Any]) -> bool:
    """Return whether a post-processor leaves ids unchanged if no special tokens are requested."""
    if processor["type"] == "TemplateProcessing":
        return sum("Sequence" in item for item in processor["single"]) == 1
    return bool(processor["type"] == "ByteLevel")
