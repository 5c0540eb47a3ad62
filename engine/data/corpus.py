"""A corpus: documents to train on, and other documents for evaluation.

The split is by document and a function of the document's name alone:

    held out  <=>  first 8 bytes of sha256(name), as a fraction of 2^64,  <  heldout_fraction

so adding, removing or editing one document moves no other, and a file of the standard library is on the
same side on every machine and Python version. `heldout_fraction` is therefore the expected share of
documents, not a share of bytes.

Both splits are ordered by that same hash. `max_bytes` walks that order and takes each document that still
fits, so the subset depends only on the documents.

Invariants of a `Corpus`: neither split is empty; no text of one equals a text of the other (an exact copy
is dropped from train); each `sha256` covers the names and the bytes in order, with their lengths, so it
changes when anything in the split does.

Not covered: near-duplicates (the same file with another licence line) are kept on both sides.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from engine.data.records import shown
from engine.data.sources import Piece, Reader, Skipped, list_pieces
from engine.errors import CorpusError

CHECK_BYTES = 1 << 20
"""`check_corpus` stops once it has read this much text."""
_COPY = "the same text is held out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    name: str
    text: str
    """Of a conversation, the JSON of its record."""
    is_chat: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One side of a corpus, ordered by the hash of the documents' names."""

    documents: tuple[Document, ...]
    size_bytes: int
    """Size of the texts in UTF-8."""
    sha256: str

    @property
    def document_count(self) -> int:
        return len(self.documents)


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    source: str
    train: Split
    heldout: Split
    skipped: tuple[Skipped, ...]
    """What is in neither split, with the reason; this includes the copies dropped from train."""
    duplicates: int
    """Documents dropped from train because their text is held out."""
    beyond_max_bytes: int
    """Documents left out because they did not fit into `max_bytes`."""


def open_corpus(
    source: str,
    *,
    heldout_fraction: float,
    include_tests: bool = False,
    max_bytes: int | None = None,
    columns: Sequence[str] = (),
) -> Corpus:
    """Read `source` (see `engine.data.sources`) and split it. Raises CorpusError when it cannot be used.

    `columns` names the one or two columns of records that are read. `max_bytes` bounds the bytes of
    train, and `max_bytes * heldout_fraction` those of held-out, which keeps at least one document (then
    the smallest). Files that do not fit are not read.
    """
    _check_settings(heldout_fraction, max_bytes)
    listed: list[Skipped] = []
    pieces: list[Piece] = []
    for item in list_pieces(source, include_tests=include_tests, columns=columns):
        if isinstance(item, Skipped):
            listed.append(item)
        else:
            pieces.append(item)
    if not pieces:
        raise _empty(source, listed)
    pieces.sort(key=lambda piece: _position(piece.name))
    boundary = heldout_fraction * 2**64
    heldout_pieces = [piece for piece in pieces if _position(piece.name) < boundary]
    train_pieces = pieces[len(heldout_pieces) :]

    reading = _Reading()
    heldout_bytes = None if max_bytes is None else int(max_bytes * heldout_fraction)
    heldout = reading.take(heldout_pieces, heldout_bytes)
    if not heldout:
        # Without held-out text a run cannot be judged, so one document is kept even if it exceeds its
        # share of the budget.
        by_size = sorted(heldout_pieces, key=lambda piece: piece.size_bytes)
        heldout = next(([document] for piece in by_size if (document := reading.read(piece))), [])
    if not heldout:
        raise _no_heldout(source, pieces, heldout_fraction)
    held_out_texts = {_digest(document.text) for document in heldout}
    train = reading.take(train_pieces, max_bytes, held_out_texts=held_out_texts)
    if not train:
        raise _no_train(source, train_pieces, reading.duplicates, max_bytes)

    skipped = (*listed, *reading.skipped.values())
    return Corpus(
        source=source,
        train=_split(train),
        heldout=_split(heldout),
        skipped=tuple(sorted(skipped, key=lambda one: one.name)),
        duplicates=reading.duplicates,
        beyond_max_bytes=len(pieces) - len(train) - len(heldout) - len(reading.skipped),
    )


def check_corpus(source: str, *, include_tests: bool = False, columns: Sequence[str] = ()) -> bool:
    """Raise the CorpusError that `open_corpus` would raise within the first MiB of text; return whether there are
    conversations in it.

    It stops at the document that reaches this size, and does not split, so it cannot tell whether
    anything is held out.
    """
    skipped: list[Skipped] = []
    read_bytes, chats = 0, False
    with Reader() as reader:
        for item in list_pieces(source, include_tests=include_tests, columns=columns):
            chats |= isinstance(item, Piece) and item.is_chat
            found = reader.read(item) if isinstance(item, Piece) else item
            if isinstance(found, Skipped):
                skipped.append(found)
                continue
            read_bytes += len(found)
            if read_bytes >= CHECK_BYTES:
                break
    if not read_bytes:
        raise _empty(source, skipped)
    return chats


@dataclass(slots=True, kw_only=True)
class _Reading:
    """Reads pieces, and records which were skipped or were duplicates."""

    skipped: dict[str, Skipped] = field(default_factory=dict)
    duplicates: int = 0

    def take(
        self,
        pieces: list[Piece],
        max_bytes: int | None,
        *,
        held_out_texts: Collection[bytes] = (),
    ) -> list[Document]:
        """Return, in order, each document that still fits and is not a copy of held-out text.

        What fits depends on which are copies, so what would be taken if none were is read first, in the order of the
        files; only where a copy leaves room for others is there another pass.
        """
        read: dict[int, Document | Skipped] = {}
        while True:
            fitting = list(_fitting(pieces, max_bytes, read))
            unread = [number for number in fitting if number not in read]
            if not unread:
                break
            unread.sort(key=lambda number: _place(pieces[number]))
            with Reader() as reader:
                for number in unread:
                    read[number] = self._read(pieces[number], reader, held_out_texts)
        taken: list[Document] = []
        for number in fitting:
            found = read[number]
            if isinstance(found, Document):
                taken.append(found)
                continue
            self.skipped[pieces[number].name] = found
            self.duplicates += found.reason == _COPY
        return taken

    def read(self, piece: Piece) -> Document | None:
        with Reader() as reader:
            found = self._read(piece, reader, ())
        if isinstance(found, Document):
            return found
        self.skipped[piece.name] = found
        return None

    def _read(
        self, piece: Piece, reader: Reader, held_out_texts: Collection[bytes]
    ) -> Document | Skipped:
        text = reader.read(piece)
        if isinstance(text, Skipped):
            return text
        if held_out_texts and _digest(text) in held_out_texts:
            return Skipped(name=piece.name, reason=_COPY)
        return Document(name=piece.name, text=text, is_chat=piece.is_chat)


def _fitting(
    pieces: Sequence[Piece], max_bytes: int | None, read: Mapping[int, Document | Skipped]
) -> Iterator[int]:
    """Yield which pieces fit after those before them. One that is not read yet is taken to be a document."""
    left_bytes = math.inf if max_bytes is None else max_bytes
    for number, piece in enumerate(pieces):
        if piece.size_bytes <= left_bytes:
            yield number
            if not isinstance(read.get(number), Skipped):
                left_bytes -= piece.size_bytes


def _place(piece: Piece) -> tuple[str, int, int]:
    return str(piece.file.path), piece.start_byte, piece.record or 0


def _check_settings(heldout_fraction: float, max_bytes: int | None) -> None:
    if not 0 < heldout_fraction < 1:
        raise CorpusError.expected(
            "corpus", "heldout_fraction", "a number between 0 and 1", repr(heldout_fraction)
        )
    if max_bytes is not None and max_bytes < 1:
        raise CorpusError.expected(
            "corpus", "max_bytes", "at least 1, or none for no limit", repr(max_bytes)
        )


def _position(name: str) -> int:
    """Return the position of a name in [0, 2^64)."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8")).digest()[:8], "big")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8")).digest()


def _split(documents: Iterable[Document]) -> Split:
    documents = tuple(documents)
    whole = hashlib.sha256()
    size_bytes = 0
    for document in documents:
        raw = document.text.encode("utf-8")
        size_bytes += len(raw)
        for part in (document.name.encode("utf-8"), raw):
            # The length keeps "ab" + "c" and "a" + "bc" apart.
            whole.update(len(part).to_bytes(8, "little"))
            whole.update(part)
    return Split(documents=documents, size_bytes=size_bytes, sha256=whole.hexdigest())


def _empty(source: str, skipped: list[Skipped]) -> CorpusError:
    why = f" ({skipped[0].name}: {skipped[0].reason})" if skipped else ""
    found = f"no document, {len(skipped):,} skipped{why}"
    return CorpusError(f"corpus: {shown(source)} — expected text, found {found}")


def _no_heldout(source: str, pieces: list[Piece], heldout_fraction: float) -> CorpusError:
    hint = "add documents: one document cannot be on both sides"
    lowest = _position(pieces[0].name) / 2**64
    if len(pieces) > 1 and lowest >= heldout_fraction:
        # Rounded up, so that the value printed is one that works.
        hint = f"add documents, or set heldout_fraction to {math.ceil(lowest * 1000 + 1) / 1000}"
    return CorpusError(
        f"corpus: {shown(source)} — expected at least one held-out document, "
        f"found none of {len(pieces):,} at heldout_fraction {heldout_fraction}",
        hint=hint,
    )


def _no_train(
    source: str, train_pieces: list[Piece], duplicates: int, max_bytes: int | None
) -> CorpusError:
    found = f"none of {len(train_pieces):,} ({duplicates:,} are copies of held-out text)"
    hint = "add documents, or lower heldout_fraction"
    smallest_bytes = min((piece.size_bytes for piece in train_pieces), default=0)
    if max_bytes is not None and smallest_bytes > max_bytes:
        found = f"the smallest has {smallest_bytes:,} bytes and max_bytes is {max_bytes:,}"
        hint = f"set max_bytes to at least {smallest_bytes}"
    return CorpusError(
        f"corpus: {shown(source)} — expected at least one document to train on, found {found}",
        hint=hint,
    )
