"""A tokenizer.json, opened for training: text to ids and back, and whether it fits a model.

The tokenizing itself is the `tokenizers` library. What this module adds:

- a file that is not a tokenizer (a Git LFS pointer, a saved web page, a download cut short) is
  refused by what it is;
- truncation, padding and BPE dropout stored in the file are switched off: with them a document
  would lose its end, gain pad tokens, or give other ids each time, and no error would say so;
- an added token that the library would quietly give another id than the file does is refused;
- `vocab_size` is the highest id + 1, added tokens included, because that is what has to fit the
  rows of an embedding. The count of tokens is smaller when ids have gaps, and the `vocab_size` of a
  model's config is larger when its embedding is padded.

A special token spelt out in the text (`<|im_start|>`) becomes that token, as it does everywhere in
this family of models: rendered chats depend on it. No special token is added around a text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine import limits
from engine.errors import TokenizerError
from engine.files import depth_of, open_regular, read_bytes
from engine.formats import tokenizer_trial

if TYPE_CHECKING:
    import tokenizers

FILE_NAME = "tokenizer.json"
END_OF_TEXT_NAMES = ("<|endoftext|>", "<|im_end|>", "</s>")
"""Looked for in this order: in a chat model the first ends a document, the second only a turn."""

# The library needs some 100 bytes a token while a batch is in it, so this bounds it to tens of MiB.
_BATCH_CHARACTERS = 1 << 20
_START_BYTES = 512
_OTHER_FORMATS = ("merges.txt", "tokenizer.model", "vocab.json", "vocab.txt")
_LIBRARY_PREFIX = "Cannot instantiate Tokenizer from buffer: "
_DOWNLOAD_HINT = "download the file again"


class Tokenizer:
    """An open tokenizer. Made by `open_tokenizer`."""

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
        """Of the bytes of the file."""
        self._end_of_text = end_of_text
        ids = inner.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1
        """The highest id + 1, added tokens included."""

    @property
    def end_of_text_id(self) -> int:
        """The id that ends a document. TokenizerError when there is none."""
        if self._end_of_text is not None:
            found = self._inner.token_to_id(self._end_of_text)
            wanted = f"the token {self._end_of_text!r}"
        else:
            special = {
                token.content: token_id
                for token_id, token in self._inner.get_added_tokens_decoder().items()
                if token.special
            }
            found = next((special[name] for name in END_OF_TEXT_NAMES if name in special), None)
            wanted = f"a special token named {', '.join(END_OF_TEXT_NAMES)}"
        if found is None:
            raise TokenizerError.expected(
                "tokenizer", self.path, wanted, "none", hint="name the token that ends a document"
            )
        return found

    def encode_documents(
        self, texts: Sequence[str], progress: Callable[[int, int], None] | None = None
    ) -> list[NDArray[np.uint32]]:
        """The ids of each text, in order.

        `progress(done, total)` counts characters, after each batch of about a million.
        """
        total = sum(len(text) for text in texts)
        done = 0
        encoded: list[NDArray[np.uint32]] = []
        for batch in _batches(texts):
            with _panic_is_bad_input(self.path):
                encodings = self._inner.encode_batch_fast(batch, add_special_tokens=False)
            encoded.extend(np.array(encoding.ids, dtype=np.uint32) for encoding in encodings)
            done += sum(len(text) for text in batch)
            if progress is not None:
                progress(done, total)
        return encoded

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens spelt out. An id that is no token gives no text."""
        with _panic_is_bad_input(self.path):
            return self._inner.decode([int(one) for one in ids], skip_special_tokens=False)

    def fits(self, config_vocab_size: int, where: str) -> None:
        """TokenizerError when an id lies beyond the rows of an embedding.

        `config_vocab_size` is their number and `where` names the model in the message. Fewer ids
        than rows is usual: embeddings are padded to a round number.
        """
        if self.vocab_size <= config_vocab_size:
            return
        vocab = self._inner.get_vocab(with_added_tokens=True)
        first = min(token_id for token_id in vocab.values() if token_id >= config_vocab_size)
        raise TokenizerError.expected(
            "tokenizer",
            self.path,
            f"ids below {config_vocab_size:,}, the embedding rows of {where}",
            f"id {first:,} ({self._inner.id_to_token(first)!r}) and on to {self.vocab_size - 1:,}",
            hint="use the tokenizer that belongs to the model",
        )

    def tokens(self) -> dict[int, str]:
        """Each id with its token, added tokens included; byte-level tokens in their own spelling."""
        vocab = self._inner.get_vocab(with_added_tokens=True)
        return {token_id: token for token, token_id in vocab.items()}

    def same_ids(self, other: Tokenizer) -> int | None:
        """The first id that is not the same token in both, or None when every id is.

        An id that only one of them has differs. Equal ids do not promise equal text to ids: merges
        may still differ.
        """
        mine, theirs = self._inner, other._inner
        ids = {*mine.get_vocab().values(), *theirs.get_vocab().values()}
        differing = (i for i in sorted(ids) if mine.id_to_token(i) != theirs.id_to_token(i))
        return next(differing, None)


def open_tokenizer(
    path: Path | str, *, end_of_text: str | None = None, raw: bytes | None = None
) -> Tokenizer:
    """Open a tokenizer.json, or the one in a folder, or `raw`: the one inside the file `path`.

    `end_of_text` names the token that ends a document where none of `END_OF_TEXT_NAMES` does.
    TokenizerError for a file that is missing or is no tokenizer, and for an `end_of_text` that is
    no token of it.
    """
    path = Path(path, FILE_NAME) if os.path.isdir(path) and raw is None else Path(path)
    raw = _read(path) if raw is None else raw
    digest = hashlib.sha256(raw).hexdigest()
    inner, record = make_inner(raw, path, digest)
    from tokenizers.models import BPE

    inner.no_truncation()
    inner.no_padding()
    if isinstance(inner.model, BPE):
        inner.model.dropout = None
    tokenizer = Tokenizer(inner, path=path, raw=raw, sha256=digest, end_of_text=end_of_text)
    if tokenizer.vocab_size == 0:
        raise TokenizerError.expected("tokenizer", path, "at least one token", "no token")
    _check_added_ids(record, inner, path)
    if end_of_text is not None:
        _ = tokenizer.end_of_text_id
    return tokenizer


def make_inner(raw: bytes, path: Path, sha256: str) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The library's tokenizer of a file's content, and what the JSON of it says. Raises TokenizerError."""
    record = _parsed(raw, path)
    tokenizer_trial.check(raw, record, sha256, path)
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
    """What the library calls a panic says something of the file; it is no Exception and has no class that
    could be imported."""
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
        # A weight file given by mistake is gigabytes: its first bytes say enough.
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


def _parsed(raw: bytes, path: Path) -> dict[str, Any]:
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
    # The model is left out: it is nearly all of the file, and the library has a limit of its own.
    rest = {key: value for key, value in record.items() if key != "model"}
    if depth_of(rest) > limits.JSON_DEPTH.most:
        raise TokenizerError.expected("tokenizer", path, f"JSON nested {limits.JSON_DEPTH}", "more")
    return record


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a key that is there twice the library may take one and this module the other. A vocabulary may
    name a token twice."""
    found = dict(pairs)
    if len(found) != len(pairs) and ("type" in found or "model" in found):
        raise ValueError("a key twice in one part")
    return found


def _check_added_ids(record: dict[str, Any], inner: tokenizers.Tokenizer, path: Path) -> None:
    """The library renumbers an added token whose id leaves a gap or is taken, and says nothing."""
    for token in record.get("added_tokens") or ():
        name, written = token["content"], token["id"]
        given = inner.token_to_id(name)
        if given != written:
            raise TokenizerError.expected(
                "tokenizer",
                path,
                f"added token {name!r} at id {written:,} as the file says",
                f"id {given} given by the library, because {written:,} leaves a gap or is taken",
            )


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
