"""A corpus: documents to train on, and other documents for evaluation.

The split is by document and a function of the document's name alone:

    held out  <=>  first 8 bytes of sha256(name), as a fraction of 2^64,  <  heldout_fraction

so adding, removing or editing one document moves no other, and a file of the standard library is in the same split
on every machine and Python version. `heldout_fraction` is therefore the expected share of documents, not of bytes.

Both splits are ordered by that same hash. `max_bytes` walks that order and takes each document that still
fits, so the subset depends only on the documents.

Invariants of a `Corpus`: neither split is empty; no text of one equals a text of the other (an exact copy is dropped
from train). Near copies (the same file with a different licence line) may be in both splits: `engine.data.overlap`
finds them.

A corpus may be larger than memory: it is read once to be split, which keeps 24 bytes per document and no text, and
again, in the order of the files, whenever the texts are needed. A document that has changed by then is refused.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from engine.data.left_out import SKIP_AT_MOST, LeftOut, RecordFaults, Skipped
from engine.data.records import shown, unusable
from engine.data.sources import hash_of, list_pieces
from engine.errors import CorpusError

CHECK_BYTES = 1 << 20
"""Amount of text after which `check_corpus` stops, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    name: str
    text: str
    """The text, or the JSON of a conversation's record."""
    is_chat: bool = False
    place: str = field(default="", compare=False)
    """File and line of a record; empty for a document that is not a record."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """One side of a corpus, ordered by the hash of the documents' names."""

    index: Index = field(repr=False)
    numbers: NDArray[np.int64] = field(repr=False)
    """Document numbers in the index, in order. Shape (D,)."""
    size_bytes: int
    """Size of the texts in UTF-8, in bytes."""
    chats: int
    """Number of documents that are conversations."""

    @property
    def document_count(self) -> int:
        return len(self.numbers)

    @property
    def contents(self) -> NDArray[np.uint64]:
        """Hash of each document's content, used to find copies: of its text, or of a conversation without ids."""
        index, numbers = self.index, self.numbers
        return np.where(index.are_chats[numbers], index.positions[numbers], index.digests[numbers])

    def first_copies(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return, for each document in `numbers`, the first document of the split with the same text."""
        digests, first = np.unique(self.index.digests[self.numbers], return_index=True)
        places = np.searchsorted(digests, self.index.digests[numbers])
        return self.numbers[first[places]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    source: str
    train: Split
    heldout: Split
    skipped: tuple[Skipped, ...]
    """Files and documents that are left out, except for invalid records."""
    faults: tuple[LeftOut, ...]
    """Invalid records, counted by reason, the most frequent first."""
    remarks: Mapping[str, int]
    """Warnings about parts of records that are not read although the user may expect it, each with its record count."""
    dropped: NDArray[np.int64]
    """Document numbers dropped from train because their text is held out."""
    beyond_max_bytes: int
    """Number of documents left out because they did not fit into `max_bytes`."""

    def read(self) -> Iterator[tuple[int, Document]]:
        """Yield the documents of both splits in the order of the files, each with its number in the index."""
        numbers = np.concatenate([self.train.numbers, self.heldout.numbers])
        return self.train.index.read(numbers)


class Index:
    """Hashes, size and kind of each document of a source, by its number in the order of the files. Shape (P,) each."""

    def __init__(
        self,
        source: str,
        *,
        include_tests: bool,
        columns: tuple[str, ...],
        skip_at_most: float,
        progress: Callable[[int], None],
    ) -> None:
        self._list = partial(list_pieces, source, include_tests=include_tests, columns=columns)
        self.source = source
        self.skipped: list[Skipped] = []
        self.faults = RecordFaults(shown(source), skip_at_most)
        self.remarks: Counter[str] = Counter()
        positions, digests, sizes, are_chats = array("Q"), array("Q"), array("Q"), bytearray()
        done = 0
        for item in self._list():
            if isinstance(item, Skipped):
                if not self.faults.add(item):
                    self.skipped.append(item)
                continue
            if item.remark:
                self.remarks[item.remark] += 1
            are_chats.append(item.is_chat)
            positions.append(hash_of(item.name.encode()))
            digests.append(item.digest)
            sizes.append(item.size_bytes)
            done += item.size_bytes
            progress(done)
        self.faults.raise_if_too_many(len(positions))
        self.positions = np.frombuffer(positions, dtype=np.uint64)
        """Hashes of the names, in [0, 2^64)."""
        self.digests = np.frombuffer(digests, dtype=np.uint64)
        """Hashes of the texts, in [0, 2^64)."""
        self.sizes = np.frombuffer(sizes, dtype=np.uint64)
        self.are_chats = np.frombuffer(are_chats, dtype=np.bool_)

    def __len__(self) -> int:
        return len(self.positions)

    def take(
        self, numbers: NDArray[np.int64], max_bytes: int | None, heldout: Split | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return two lists of document numbers, in order: the documents that fit into `max_bytes` and are not copies
        of held-out text, and the copies."""
        left_bytes = math.inf if max_bytes is None else max_bytes
        is_copy = np.zeros(len(numbers), dtype=np.bool_)
        if heldout is not None:
            is_copy = np.isin(self.digests[numbers], heldout.index.digests[heldout.numbers])
        taken, copies = array("q"), array("q")
        for number, copy in zip(numbers, is_copy, strict=True):
            size = int(self.sizes[number])
            if size > left_bytes:
                continue
            if copy:
                copies.append(number)
            else:
                left_bytes -= size
                taken.append(number)
        return np.array(taken, dtype=np.int64), np.array(copies, dtype=np.int64)

    def split(self, numbers: NDArray[np.int64]) -> Split:
        return Split(
            index=self,
            numbers=numbers,
            size_bytes=int(self.sizes[numbers].sum()),
            chats=int(np.count_nonzero(self.are_chats[numbers])),
        )

    def read(self, numbers: NDArray[np.int64]) -> Iterator[tuple[int, Document]]:
        """Yield these documents in the order of the files. Raises CorpusError if they have changed."""
        is_requested = np.zeros(len(self) + 1, dtype=np.bool_)
        is_requested[numbers] = True
        number = -1
        for item in self._list():
            if isinstance(item, Skipped):
                continue
            number += 1
            if not is_requested[min(number, len(self))]:
                continue
            if (
                hash_of(item.name.encode()) != self.positions[number]
                or item.digest != self.digests[number]
            ):
                break
            yield (
                number,
                Document(name=item.name, text=item.text, is_chat=item.is_chat, place=item.place),
            )
        else:
            if number + 1 == len(self):
                return
        raise unusable(
            shown(self.source),
            "the documents that were there when it was split",
            "changed documents",
            hint="start again when no program writes to them",
        )


def open_corpus(
    source: str,
    *,
    heldout_fraction: float,
    include_tests: bool = False,
    max_bytes: int | None = None,
    columns: Sequence[str] = (),
    skip_at_most: float = SKIP_AT_MOST,
    progress: Callable[[int], None] = lambda done: None,
) -> Corpus:
    """Read `source` (see `engine.data.sources`) and split it. Raises CorpusError when it cannot be used.

    `columns` names the one or two columns of records that are read. `max_bytes` bounds the bytes of
    train, and `max_bytes * heldout_fraction` those of held-out, which always keeps at least its smallest document. At
    most the share `skip_at_most` of the records may be invalid. `progress` is called with the bytes of text read so
    far.
    """
    index = Index(
        source,
        include_tests=include_tests,
        columns=tuple(columns),
        skip_at_most=skip_at_most,
        progress=progress,
    )
    if not len(index):
        raise _empty(source, index.skipped)
    # Documents of one name stay in the order of the files.
    order = np.argsort(index.positions, kind="stable")
    boundary = np.uint64(math.ceil(heldout_fraction * 2**64))
    count = int(np.searchsorted(index.positions, boundary, sorter=order))
    heldout_numbers, train_numbers = order[:count], order[count:]

    heldout_bytes = None if max_bytes is None else int(max_bytes * heldout_fraction)
    numbers, _ = index.take(heldout_numbers, heldout_bytes)
    if not len(numbers):
        # A run cannot be evaluated without held-out text: the smallest document is kept, beyond max_bytes too.
        smallest = np.argsort(index.sizes[heldout_numbers], kind="stable")[:1]
        numbers = heldout_numbers[smallest]
    if not len(numbers):
        raise _no_heldout(source, index, int(order[0]), heldout_fraction)
    heldout = index.split(numbers)
    numbers, copies = index.take(train_numbers, max_bytes, heldout)
    if not len(numbers):
        raise _no_train(source, index, train_numbers, len(copies), max_bytes)

    train = index.split(numbers)
    kept_count = train.document_count + heldout.document_count
    return Corpus(
        source=source,
        train=train,
        heldout=heldout,
        skipped=tuple(sorted(index.skipped, key=lambda item: item.name)),
        faults=index.faults.left_out,
        remarks=index.remarks,
        dropped=copies,
        beyond_max_bytes=len(index) - kept_count - len(copies),
    )


def check_corpus(source: str, *, include_tests: bool = False, columns: Sequence[str] = ()) -> bool:
    """Raise the CorpusError that `open_corpus` would raise within the first MiB of text; return whether there are
    conversations in it.

    It stops at the document that reaches this size, and does not split, so it cannot tell whether
    anything is held out.
    """
    skipped: list[Skipped] = []
    faults = RecordFaults(shown(source), 1.0)
    read_bytes, chats = 0, False
    for item in list_pieces(source, include_tests=include_tests, columns=columns):
        if isinstance(item, Skipped):
            if not faults.add(item):
                skipped.append(item)
            continue
        chats |= item.is_chat
        read_bytes += len(item.text)
        if read_bytes >= CHECK_BYTES:
            break
    if not read_bytes:
        faults.raise_if_too_many(0)
        raise _empty(source, skipped)
    return chats


def _empty(source: str, skipped: list[Skipped]) -> CorpusError:
    why = f" ({skipped[0].name}: {skipped[0].reason})" if skipped else ""
    found = f"no document, {len(skipped):,} skipped{why}"
    return CorpusError(f"corpus: {shown(source)} — expected text, found {found}")


def _faults_note(index: Index) -> str:
    """Return a note on the invalid records; empty if there are none."""
    faults = index.faults
    if faults.first is None:
        return ""
    return f" ({faults.count:,} records are left out, first: {faults.first.message})"


def _no_heldout(source: str, index: Index, first: int, heldout_fraction: float) -> CorpusError:
    hint = "add documents: one document cannot be in both splits"
    lowest = int(index.positions[first]) / 2**64
    if len(index) > 1 and lowest >= heldout_fraction:
        # Rounded up, so that the value printed is one that works.
        hint = f"add documents, or set heldout_fraction to {math.ceil(lowest * 1000 + 1) / 1000}"
    return CorpusError(
        f"corpus: {shown(source)} — expected at least one held-out document, "
        f"found none of {len(index):,} at heldout_fraction {heldout_fraction}{_faults_note(index)}",
        hint=hint,
    )


def _no_train(
    source: str,
    index: Index,
    numbers: NDArray[np.int64],
    duplicates: int,
    max_bytes: int | None,
) -> CorpusError:
    sizes = index.sizes[numbers]
    found = f"none of {len(sizes):,} ({duplicates:,} are copies of held-out text)"
    hint = "add documents, or lower heldout_fraction"
    smallest_bytes = int(sizes.min()) if len(sizes) else 0
    if max_bytes is not None and smallest_bytes > max_bytes:
        found = f"the smallest has {smallest_bytes:,} bytes and max_bytes is {max_bytes:,}"
        hint = f"set max_bytes to at least {smallest_bytes}"
    return CorpusError(
        f"corpus: {shown(source)} — expected at least one document to train on, found {found}{_faults_note(index)}",
        hint=hint,
    )
