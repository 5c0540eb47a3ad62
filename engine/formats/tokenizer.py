"""Opens a tokenizer.json for training: text to ids and back, and a check that it fits a model.

The tokenizing itself is done by the `tokenizers` library. This module adds:

- a file that is not a tokenizer (a Git LFS pointer, a saved web page, a truncated download) is
  refused with its kind;
- truncation, padding and BPE dropout stored in the file are switched off: with them a document
  would silently lose its end, gain pad tokens, or get different ids each time;
- an added token to which the library would silently give another id than the file does is refused;
- `vocab_size` is the highest id + 1, added tokens included, because that must fit the rows of an
  embedding. The number of tokens is smaller if ids have gaps, and the `vocab_size` of a model's
  config is larger if its embedding is padded.

A special token that is spelt out in the text (`<|im_start|>`) becomes that token, as in all other
tools for these models: rendered chats depend on it. No special token is added around a text.

**A tokenizer with unknown parts is tested in a child process** before this process opens it. The
library is compiled code that executes what a file specifies: a regular expression that it cannot
compile kills the process, one that backtracks never ends, and a chain of replacements can turn one
letter into gigabytes. So the file is first opened by a child process with limits on memory and CPU
time, which runs it on texts of many scripts, long runs of characters, and the texts that the file
itself names. If the child fails, the file is refused with the reason. A tokenizer of common parts,
byte-level BPE with an expression of a known family, is not tested. Others cost a third of a second,
once for each content and process. Not covered: a hostile file that misbehaves only on a text that
is not tested.

**A long document goes through the library in pieces**, because the library holds about 320 bytes for
each part of the text that it processes at once. A piece ends only where it is proved that the tokens of the
pieces are those of the whole: see `_Cuts`. A document with more than `limits.UNCUT_TEXT` between two such places
is refused.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import limits
from engine.errors import TokenizerError
from engine.files import depth_of, open_regular, read_bytes

if TYPE_CHECKING:
    import numpy as np
    import tokenizers
    from numpy.typing import NDArray

FILE_NAME = "tokenizer.json"
END_OF_TEXT_NAMES = ("<|endoftext|>", "<|im_end|>", "</s>")
"""Searched in this order: in a chat model the first ends a document, the second only a turn."""

# The library needs up to 320 bytes per character while it holds a batch, so this limits it to 80 MiB.
# Its threads share a batch by pieces.
_BATCH_CHARACTERS = 1 << 18
_PIECE_CHARACTERS = 1 << 15
_START_BYTES = 512
_OTHER_FORMATS = ("merges.txt", "tokenizer.model", "vocab.json", "vocab.txt")
_LIBRARY_PREFIX = "Cannot instantiate Tokenizer from buffer: "
_DOWNLOAD_HINT = "download the file again"

_CLOCK_S = 120.0
"""Wall-clock limit, for a child that waits; one that computes is ended by its CPU limit."""
_KNOWN_PARTS = frozenset(
    {"NFC", "NFD", "NFKC", "NFKD", "Sequence", "Split", "ByteLevel", "TemplateProcessing"}
)
_NAMED_TEXTS = 200
_tried: set[str] = set()
"""SHA-256 of the files that this process has tested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    splits: tuple[str, ...]
    normalizer: str = "none"
    ignore_merges: bool = False
    """A part of the text that is itself a token becomes that token, whatever the merges would give.
    """
    add_bos: bool = False
    """The default if the file does not say."""


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
        """The tokenizer.json itself."""
        self.sha256 = sha256
        """SHA-256 of the bytes of the file."""
        self._end_of_text = end_of_text
        self._cuts = _cuts_of(inner)
        self.encoded_s = self.encoded_cpu_s = 0.0
        """Seconds spent on encoding, and CPU seconds of all threads in that time."""
        ids = inner.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1
        """The highest id + 1, added tokens included."""

    @property
    def end_of_text_id(self) -> int:
        """The id that ends a document. Raises TokenizerError if there is none."""
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
        """An id to fill rows with; nothing reads it."""
        try:
            return self.end_of_text_id
        except TokenizerError:
            return 0

    def encode_documents(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Return the ids of each text, in order.

        Raises TextTooLong for a text that cannot be cut and is too long to be taken whole.
        """
        import numpy as np

        # An array grows in place: a list of the pieces' ids, joined at the end, would hold them twice.
        encoded = [array("I") for _ in texts]
        for batch in _batches(self._pieces(texts)):
            pieces = [piece for _, piece in batch]
            with _panic_is_bad_input(self.path):
                begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
                encodings = self._inner.encode_batch_fast(pieces, add_special_tokens=False)
                self.encoded_s += time.perf_counter() - begun_s
                self.encoded_cpu_s += time.process_time() - begun_cpu_s
            for (text, _), encoding in zip(batch, encodings, strict=True):
                encoded[text].extend(encoding.ids)
        return [np.frombuffer(ids, dtype=np.uint32) for ids in encoded]

    def encode_whole(self, text: str) -> NDArray[np.uint32]:
        """Return the ids of one text, encoded without cutting it; `encode_documents` gives the same."""
        import numpy as np

        with _panic_is_bad_input(self.path):
            return np.array(self._inner.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def encode_each(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of short texts that are no documents: `encoded_s` does not include them."""
        with _panic_is_bad_input(self.path):
            encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_with_starts(
        self, texts: Sequence[str]
    ) -> list[tuple[NDArray[np.uint32], NDArray[np.int64]]]:
        """Return for each text its ids, and the character of the text at which each token begins.

        The ids are those of `encode_documents`, and both arrays have the same length. If the bytes of
        a character are split over several tokens, all of them begin at that character. The white space
        that a token begins with belongs to it, also where the file has `trim_offsets`. Raises TextTooLong
        for a text that is too long to be taken whole, and TokenizerError where the starts do not follow
        the text.
        """
        import numpy as np

        encoded: list[list[tuple[NDArray[np.uint32], NDArray[np.int64]]]] = [[] for _ in texts]
        reached = [0] * len(texts)
        for batch in _batches(self._pieces(texts)):
            pieces = [piece for _, piece in batch]
            with _panic_is_bad_input(self.path):
                encodings = self._untrimmed.encode_batch(pieces, add_special_tokens=False)
            for (text, piece), encoding in zip(batch, encodings, strict=True):
                ids = np.array(encoding.ids, dtype=np.uint32)
                starts = np.array([start for start, _ in encoding.offsets], dtype=np.int64)
                if np.any(np.diff(starts, prepend=0) < 0):
                    raise TokenizerError.expected(
                        "tokenizer",
                        self.path,
                        "tokens in the order of the text",
                        f"{piece[:40]!a} with tokens at {starts[:10].tolist()}",
                    )
                encoded[text].append((ids, starts + reached[text]))
                reached[text] += len(piece)
        return [
            (np.concatenate([ids for ids, _ in parts]), np.concatenate([at for _, at in parts]))
            for parts in encoded
        ]

    @functools.cached_property
    def _untrimmed(self) -> tokenizers.Tokenizer:
        """The tokenizer without its post-processor, which may leave white space out of the offsets. It
        adds nothing around a text that is encoded without special tokens, so the ids are the same.
        """
        from tokenizers import Tokenizer as Inner

        # From the file and not from `to_str()`, which the library cannot read back if two tokens have the same id.
        inner = Inner.from_buffer(self.raw)
        _without_options(inner)
        inner.post_processor = None
        return inner

    @functools.cached_property
    def special_tokens(self) -> frozenset[str]:
        """The texts of all special tokens."""
        added = self._inner.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token in its own spelling, or None."""
        return self._inner.token_to_id(token)

    def check_length(self, text: str) -> None:
        """Raise TextTooLong for a text that `encode_documents` refuses."""
        for _ in self._pieces([text]):
            pass

    def _pieces(self, texts: Sequence[str]) -> Iterator[tuple[int, str]]:
        """Yield each text in pieces, with its index."""
        for index, text in enumerate(texts):
            start = 0
            while len(text) - start > 2 * _PIECE_CHARACTERS:
                end = self._cuts.before(text, start, start + _PIECE_CHARACTERS)
                end = end or self._cuts.after(text, start, start + _PIECE_CHARACTERS)
                if end is None:
                    break
                yield index, self._whole(text[start:end], start)
                start = end
            yield index, self._whole(text[start:], start)

    def _whole(self, piece: str, start: int) -> str:
        """Return a piece that cannot be cut further, if it is not too long."""
        # A character has at most 4 bytes.
        limit = limits.UNCUT_TEXT.most
        if len(piece) * 4 > limit and (size := len(piece.encode("utf-8", "replace"))) > limit:
            error = TextTooLong.expected(
                "tokenizer",
                self.path,
                f"text that can be cut without changing its tokens after {limits.UNCUT_TEXT}",
                f"{size:,} bytes from character {start:,} on that cannot",
                hint="break the line, or split the document",
            )
            error.reason = (
                f"the tokenizer takes {limits.UNCUT_TEXT} without a place where it may cut"
            )
            raise error
        return piece

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, with special tokens spelt out. An id that is not a token gives
        no text.
        """
        with _panic_is_bad_input(self.path):
            return self._inner.decode(
                [int(token_id) for token_id in ids], skip_special_tokens=False
            )

    def decode_each(self, rows: Iterable[Sequence[int]]) -> list[str]:
        """Return the text of each row of ids, as `decode` does."""
        with _panic_is_bad_input(self.path):
            return self._inner.decode_batch(list(map(list, rows)), skip_special_tokens=False)

    def fits(self, config_vocab_size: int, where: str) -> None:
        """Raise TokenizerError if an id is beyond the rows of an embedding.

        `config_vocab_size` is their number and `where` names the model in the message. Fewer ids
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
            f"id {first_id:,} ({self._inner.id_to_token(first_id)!r}) and on to {self.vocab_size - 1:,}",
            hint="use the tokenizer that belongs to the model",
        )

    def tokens(self) -> dict[int, str]:
        """Return each id with its token, added tokens included; byte-level tokens in their own
        spelling.
        """
        vocab = self._inner.get_vocab(with_added_tokens=True)
        return {token_id: token for token, token_id in vocab.items()}

    def same_ids(self, other: Tokenizer) -> int | None:
        """Return the first id that is not the same token in both, or None if all are.

        An id that only one of them has counts as different. Even if all ids are equal, the two may
        encode text differently, because merges may differ.
        """
        own, others = self._inner, other._inner
        ids = {*own.get_vocab().values(), *others.get_vocab().values()}
        differing = (i for i in sorted(ids) if own.id_to_token(i) != others.id_to_token(i))
        return next(differing, None)


def open_tokenizer(
    path: Path | str, *, end_of_text: str | None = None, raw: bytes | None = None
) -> Tokenizer:
    """Open a tokenizer.json, or the one in a folder, or `raw`: the one inside the file `path`.

    `end_of_text` names the token that ends a document, if none of `END_OF_TEXT_NAMES` does. Raises
    TokenizerError for a file that is missing or is not a tokenizer, and for an `end_of_text` that
    is not one of its tokens.
    """
    path = Path(path, FILE_NAME) if os.path.isdir(path) and raw is None else Path(path)
    raw = _read(path) if raw is None else raw
    digest = hashlib.sha256(raw).hexdigest()
    inner, record = make_inner(raw, path, digest)
    _without_options(inner)
    tokenizer = Tokenizer(inner, path=path, raw=raw, sha256=digest, end_of_text=end_of_text)
    if tokenizer.vocab_size == 0:
        raise TokenizerError.expected("tokenizer", path, "at least one token", "no token")
    _check_added_ids(record, inner, path)
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


def make_inner(raw: bytes, path: Path, sha256: str) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Return the library's tokenizer for a file's content, and its parsed JSON. Raises
    TokenizerError.
    """
    record = _parse(raw, path)
    _test_in_child(raw, record, sha256, path)
    # Imported here because it loads a shared library of 10 MB, which a viewer never needs.
    from tokenizers import Tokenizer as Inner

    try:
        with _panic_is_bad_input(path):
            return Inner.from_buffer(raw), record
    except ValueError as error:
        reason = " ".join(str(error).removeprefix(_LIBRARY_PREFIX).split())[:200]
        raise TokenizerError.expected(
            "tokenizer", path, "a tokenizer of the tokenizers library", reason
        ) from error


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
        _refuse_other_content(file.read(_START_BYTES), path)
    return read_bytes(path, "tokenizer", limits.TOKENIZER_FILE, error=TokenizerError)


def _refuse_other_content(start: bytes, path: Path) -> None:
    if start.startswith(b"version https://git-lfs"):
        found, hint = "a Git LFS pointer", "run git lfs pull"
    elif start.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        found, hint = "a web page", "download the raw file, not the page that shows it"
    elif not start.strip():
        found, hint = "an empty file", _DOWNLOAD_HINT
    elif not start.lstrip().startswith(b"{"):
        found, hint = f"a file that begins with {start[:8]!r}", f"give {FILE_NAME}"
    else:
        return
    raise TokenizerError.expected("tokenizer", path, "a JSON object", found, hint=hint)


def _parse(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        record = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        found = f"0x{raw[error.start]:02x} at byte {error.start:,}"
        raise TokenizerError.expected("tokenizer", path, "UTF-8", found) from None
    except json.JSONDecodeError as error:
        found = f"{error.msg} at line {error.lineno:,}, column {error.colno:,}"
        raise TokenizerError.expected(
            "tokenizer", path, "JSON", found, hint=_DOWNLOAD_HINT
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        found = "nesting too deep" if isinstance(error, RecursionError) else str(error)
        raise TokenizerError.expected("tokenizer", path, "JSON", found) from None
    if not isinstance(record, dict):
        raise TokenizerError.expected("tokenizer", path, "a JSON object", "another value")
    parts = [record.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")]
    # Every part is run over every text, one after the other.
    count = sum(1 for _ in _objects(parts))
    # A template has an object for each special token.
    count += sum("type" in part for part in _objects(record.get("post_processor")))
    if count > limits.TOKENIZER_PARTS.most:
        found = f"{count:,}"
        raise TokenizerError.expected("tokenizer", path, f"{limits.TOKENIZER_PARTS}", found)
    # Without the model, which is nearly all of the file, and for which the library has its own
    # limit.
    other_keys = {key: value for key, value in record.items() if key != "model"}
    if depth_of(other_keys) > limits.JSON_DEPTH.most:
        raise TokenizerError.expected("tokenizer", path, f"JSON nested {limits.JSON_DEPTH}", "more")
    return record


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a duplicate key in an object of the file: the library might take one value and this
    module the other. A vocabulary may contain a token twice.
    """
    mapping = dict(pairs)
    if len(mapping) != len(pairs) and ("type" in mapping or "model" in mapping):
        raise ValueError("a duplicate key in one object")
    return mapping


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


def _batches(pieces: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    batch: list[tuple[int, str]] = []
    characters = 0
    for index, piece in pieces:
        batch.append((index, piece))
        characters += len(piece)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


# Where a document may be cut.
#
# A place between the characters x and y is safe if the tokens of the text up to it, followed by those
# of the text from it on, are the tokens of the whole. The library works in five steps, and each has to
# give for the two sides separately what it gives for the whole:
#
# - Added tokens are searched in the text, and those marked so in the normalized text. Safe if none
#   spans the place, and, for those that depend on or absorb adjacent characters, if none touches it.
# - The normalizer: safe if x and y are characters that no normal form changes or joins with others.
# - The first pre-tokenizer: see `_WORDS_END` and `_DIGITS`. Its expressions have no lookbehind, so from
#   a place where a part ends the rest is cut as if the text began there.
# - Further pre-tokenizers and the model see one part at a time.
# - The post-processor: nothing is added around a text.

_CLASSES = {
    "L": "A-Za-z\u4e00-\u9fa5",
    "D": "0-9",
    "S": "\\t\\n\\x0b\\x0c\\r ",
    "P": "!-/:-@\\[-_{|}~\u3001\u3002",
}
"""Letters, digits, space and punctuation that every expression counts as such and every normal form
leaves alone. All other characters, combining ones among them, are never next to a cut."""
_WORDS_END = ("LD", "LS", "LP", "DL", "DS", "DP", "PD")
"""Classes of x and y between which a part always ends, in the expressions of GPT-2, Qwen2 and Llama 3: a
part with a letter ends with its last letter, and a digit is only with digits (in GPT-2's also after
a space). Nothing after x decides how far the part reaches that holds x, as it would if x were a space."""
_MARKS_END = ("LP", "DP", "PL", "PD")
"""The same for the expression that separates runs of punctuation from everything else."""
_DIGITS = {"": 1, "{1,3}": 3}
"""Digits of a part, for each form of `_WORDS`: counted from the start of a run of digits."""
_INDEPENDENT = frozenset({"Split", "ByteLevel", "Digits"})
"""Pre-tokenizers whose result for a part depends on that part alone."""


class TextTooLong(TokenizerError):
    """A text that cannot be cut, and is too long to be taken whole. `reason` is the same for all of them."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Cuts:
    """The places at which documents may be cut for one tokenizer."""

    ends: tuple[str, ...] = ()
    """Classes of the characters on both sides; none where no place is known to be safe."""
    digits: int = 0
    """Number of digits after which a run of digits may be cut; 0 for never."""
    spans: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Added tokens by each pair of adjacent characters that they contain."""
    normalized: frozenset[str] = frozenset()
    """Pairs of adjacent characters in an added token that is searched in the normalized text."""
    touching: frozenset[str] = frozenset()
    """First and last characters of the added tokens that may neither begin nor end at a cut."""

    def before(self, text: str, start: int, end: int) -> int | None:
        """The last safe place after `start`, up to `end`."""
        return self._first(text, start, range(end, start, -1))

    def after(self, text: str, start: int, end: int) -> int | None:
        """The first safe place from `end` on, as far as a piece may reach."""
        limit = min(len(text), start + limits.UNCUT_TEXT.most + 1)
        return self._first(text, start, range(end, limit))

    def _first(self, text: str, start: int, places: range) -> int | None:
        if not self.ends:
            return None
        run_start = -1
        for place in places:
            x, y = text[place - 1], text[place]
            classes = _CLASS_OF.get(x, "?") + _CLASS_OF.get(y, "?")
            if classes != "DD":
                run_start = -1
                if classes not in self.ends:
                    continue
            elif self.digits != 1:
                if not 0 <= run_start < place:
                    run_start = self._run_start(text, start, place)
                is_full_run = self.digits and (place - run_start) % self.digits == 0
                if not is_full_run or not self._begins(text, start, run_start):
                    continue
            if x in self.touching or y in self.touching or x + y in self.normalized:
                continue
            if not self._is_spanned(text, place):
                return place
        return None

    @staticmethod
    def _run_start(text: str, start: int, place: int) -> int:
        while place > start and _CLASS_OF.get(text[place - 1]) == "D":
            place -= 1
        return place

    @staticmethod
    def _begins(text: str, start: int, run_start: int) -> bool:
        """Whether a run of digits begins here: a digit of another script before it would belong to it."""
        return run_start == start or text[run_start - 1] in _CLASS_OF

    def _is_spanned(self, text: str, place: int) -> bool:
        """Whether an added token begins before the place and ends after it."""
        for token in self.spans.get(text[place - 1 : place + 1], ()):
            for inside in range(1, len(token)):
                if place >= inside and text.startswith(token, place - inside):
                    return True
        return False


def _class_of() -> dict[str, str]:
    letters = {name: re.compile(f"[{characters}]") for name, characters in _CLASSES.items()}
    alphabet = [chr(code) for code in (*range(128), 0x3001, 0x3002, *range(0x4E00, 0x9FA6))]
    return {
        character: name
        for character in alphabet
        for name, pattern in letters.items()
        if pattern.fullmatch(character)
    }


_CLASS_OF = _class_of()


def _cuts_of(inner: tokenizers.Tokenizer) -> _Cuts:
    """Return where documents may be cut; nowhere unless every part of the tokenizer is known."""
    normalizers = _list_parts(inner.normalizer, "normalizers")
    cutters = _list_parts(inner.pre_tokenizer, "pretokenizers")
    if not cutters or any(
        step["type"] not in ("NFC", "NFD", "NFKC", "NFKD") for step in normalizers
    ):
        return _Cuts()
    first, *further = cutters
    if any(step["type"] not in _INDEPENDENT for step in further):
        return _Cuts()
    if not all(map(_adds_nothing, _list_parts(inner.post_processor, "processors"))):
        return _Cuts()
    ends, digits = _cut_rule(first)
    added = inner.get_added_tokens_decoder().values()
    spans: dict[str, set[str]] = {}
    normalized, touching = set[str](), set[str]()
    for token in added:
        content = token.content
        if token.normalized and inner.normalizer is not None:
            forms = [content, inner.normalizer.normalize_str(content)]
            normalized |= {form[i : i + 2] for form in forms for i in range(len(form) - 1)}
        for i in range(len(content) - 1):
            spans.setdefault(content[i : i + 2], set()).add(content)
        if token.lstrip or token.rstrip or token.single_word:
            touching |= {content[:1], content[-1:]}
        if digits > 1 and (content[:1].isnumeric() or content[-1:].isnumeric()):
            digits = 0  # the digits are counted from the end of such a token
    spans_by_pair = {pair: tuple(sorted(contents)) for pair, contents in spans.items()}
    return _Cuts(ends, digits, spans_by_pair, frozenset(normalized), frozenset(touching))


def _list_parts(part: Any, inside: str) -> list[dict[str, Any]]:
    """Return a part of the library's tokenizer as a list of the parts it consists of."""
    if part is None:
        return []
    parts, waiting = [], [json.loads(part.__getstate__())]
    while waiting:
        step = waiting.pop()
        if step["type"] == "Sequence":
            waiting += reversed(step[inside])
        else:
            parts.append(step)
    return parts


def _cut_rule(pre_tokenizer: Mapping[str, Any]) -> tuple[tuple[str, ...], int]:
    """Return the classes of characters between which a pre-tokenizer always ends a part, and the number of digits after
    which it cuts a run of digits."""
    if (
        pre_tokenizer["type"] == "ByteLevel"
        and pre_tokenizer["use_regex"]
        and not pre_tokenizer["add_prefix_space"]
    ):
        return _WORDS_END, 0
    if pre_tokenizer["type"] != "Split" or (
        pre_tokenizer["behavior"],
        pre_tokenizer["invert"],
    ) not in (
        ("Isolated", False),
        ("Removed", True),
    ):
        return (), 0
    expression = pre_tokenizer["pattern"].get("Regex")
    for count, digits in _DIGITS.items():
        if expression == _WORDS.replace("DIGITS", count):
            return _WORDS_END, digits
    if expression in (_GPT2, _GPT2 + r"|\s+"):
        # Without the last alternative, spaces before a word are a gap, and the gap is a part as well.
        return _WORDS_END, 0
    if expression == PRE_TOKENIZERS["default"].splits[0] and not pre_tokenizer["invert"]:
        return _MARKS_END, 0
    return (), 0


def _adds_nothing(processor: Mapping[str, Any]) -> bool:
    """Whether a post-processor leaves the ids of a text unchanged if no special tokens are requested."""
    if processor["type"] == "TemplateProcessing":
        return sum("Sequence" in item for item in processor["single"]) == 1
    return bool(processor["type"] == "ByteLevel")


def _test_in_child(raw: bytes, record: Mapping[str, Any], sha256: str, path: Path) -> None:
    """Test a tokenizer in a child process. Raises TokenizerError if it fails."""
    if sha256 in _tried or is_of_known_parts(record):
        return
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _CHILD, json.dumps(_child_limits(record, len(raw)))],
            input=raw,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_CLOCK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _refusal(path, f"one that has not ended after {_CLOCK_S:.0f} s") from None
    except OSError as error:
        found = f"no child process: {error.strerror}"
        raise TokenizerError.expected(
            "tokenizer", path, "a test in a child process", found
        ) from None
    output = done.stdout.decode("utf-8", "replace").strip()
    if done.returncode < 0:
        raise _refusal(path, f"one that signal {-done.returncode} ended")
    if done.returncode or output != "sound":
        raise _refusal(path, " ".join(output.split())[:200] or f"exit {done.returncode}")
    _tried.add(sha256)


def is_of_known_parts(record: Mapping[str, Any]) -> bool:
    """Whether the file has only common parts: byte-level BPE without affixes, and expressions of a known family.
    Only such a file is opened without a test in a child process. With other parts the library may panic, and then it
    prints dozens of lines to stderr before Python sees an exception; the stderr of the child is discarded."""
    known = {split for row in PRE_TOKENIZERS.values() for split in row.splits}
    model = record.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE":
        return False
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    for part in _objects([record.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")]):
        # The library guesses the type of a part that has none.
        expression = part.get("Regex") if part.keys() == {"Regex"} else None
        kind = part.get("type")
        if not (isinstance(kind, str) and kind in _KNOWN_PARTS) and not (
            isinstance(expression, str) and expression in known
        ):
            return False
        if isinstance(part.get("pattern"), str):
            return False
    return True


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            yield item
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item


def _child_limits(record: Mapping[str, Any], size: int) -> dict[str, Any]:
    named = [
        text[: limits.TOKENIZER_PROBE.most]
        for part in _objects([record.get(name) for name in ("normalizer", "pre_tokenizer")])
        for text in part.values()
        if isinstance(text, str)
    ]
    return {
        # The library's objects take about ten times the size of the file.
        "bytes": limits.TOKENIZER_MEMORY.most + 32 * size,
        "cpu_s": limits.TOKENIZER_CPU.most,
        "growth": limits.TOKENIZER_GROWTH.most,
        "named": [ascii(text) for text in named[:_NAMED_TEXTS]],
    }


def _refusal(path: Path, found: str) -> TokenizerError:
    memory = limits.TOKENIZER_MEMORY.most >> 20
    seconds = limits.TOKENIZER_CPU.most
    return TokenizerError.expected(
        "tokenizer",
        path,
        f"one that can be opened and used in {memory:,} MiB and {seconds} s",
        found,
    )


_CHILD = """
import ast, json, os, resource, sys
os.environ["TOKENIZERS_PARALLELISM"] = "false"
orders = json.loads(sys.argv[1])
for name, most in (("AS", orders["bytes"]), ("CPU", orders["cpu_s"]), ("CORE", 0), ("FSIZE", 0)):
    limit = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(limit)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(limit, (most, most))
letters = "aA0 .,'-_\\n\\t\\xe9\\u4e2d\\ud55c\\u0301\\u2581\\xa0\\ufdfa\\u0130\\U0001f600"
texts = ["".join(map(chr, range(1, 1024))), "def f(x):\\n    return x + 1\\n" * 20, letters * 10]
texts += [letter * count for letter in letters for count in (1, 2, 30, 400)]
texts += [letter * 40 + "!" for letter in letters]
for text in map(ast.literal_eval, orders["named"]):
    texts += [text, text * 2, "a" + text + "a", " " + text * 20]
try:
    from tokenizers import Tokenizer
    inner = Tokenizer.from_buffer(sys.stdin.buffer.read())
    inner.no_truncation()
    inner.no_padding()
    for text in texts:
        most = orders["growth"] * (len(text) + 16)
        made = inner.normalizer.normalize_str(text) if inner.normalizer else text
        ids = inner.encode_batch_fast([text], add_special_tokens=False)[0].ids
        back = inner.decode(ids, skip_special_tokens=False)
        if max(len(made), len(ids), len(back)) > most:
            sys.exit(print("one that turns %d characters into %d" % (len(text), max(len(made), len(back)))))
except BaseException as error:
    if isinstance(error, SystemExit):
        raise
    print(type(error).__name__ + ": " + str(error)[:200].encode("ascii", "backslashreplace").decode())
else:
    print("sound")
"""
