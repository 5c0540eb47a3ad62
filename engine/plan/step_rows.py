"""The data that one step of a run trained on: its rows, their documents by name, and their text, proved by content.

The run's records (`engine.log.rows`) have a hash of each row. The corpus is read again, and each hash is looked up in
it: first as the row that was due, and if that differs, among all rows of both splits.
"""

# Shapes: B rows, T tokens of a row

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.data.batches import IGNORED, Batch, Batches, Int64Array, gather_rows
from engine.data.corpus import Corpus
from engine.data.packing import FILLS, STREAM, places
from engine.data.row_hashes import hashes_of
from engine.data.token_cache import Progress, no_progress
from engine.data.tokens import TokenStream
from engine.errors import BadInput, CorpusError
from engine.log.events import DataReady, StepDone
from engine.log.folder import RunFolder
from engine.log.read import events_of
from engine.log.rows import NO_ROWS, TrainedRow, extended, path_of, read_ranks, read_rows
from engine.plan.data_overview import Marked, marked
from engine.plan.inputs import Inputs, open_corpus_of
from engine.spec import RunSpec
from engine.units import format_count

AT_ONCE = 1 << 20
"""Tokens whose rows are hashed at a time."""
SPLITS = ("training", "held-out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of a document that is in a row."""

    document: str
    begin: int
    """The first of its tokens in the row, of all `length` tokens of the document."""
    tokens: int
    length: int

    def __str__(self) -> str:
        if self.tokens == self.length:
            return f"{self.document}, whole"
        end = self.begin + self.tokens
        return f"{self.document}, tokens {self.begin + 1:,} to {end:,} of {self.length:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    hash: str
    rank: int
    turn: int
    """The training row that was due, by the order of the data."""
    row: int | None
    """The row that it is; None where the corpus has none like it."""
    split: str
    """Split of `row`, one of SPLITS."""
    labels: int = 0
    pieces: tuple[Piece, ...] = ()
    text: tuple[Marked, ...] = ()
    """Text in order, and whether it is to be predicted from what precedes it in the row."""

    @property
    def in_turn(self) -> bool:
        return self.row == self.turn and self.split == SPLITS[0]

    def __str__(self) -> str:
        if self.in_turn:
            return f"row {self.row:,}, which was due"
        if self.row is None:
            return f"NOT row {self.turn:,}, which was due: no row of the corpus has this content"
        whose = "held-out row" if self.split == SPLITS[1] else "row"
        return f"{whose} {self.row:,}, and NOT row {self.turn:,}, which was due"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    step: int
    loss: float | None
    """As logged; None where it was not finite or the step is not in the log."""
    seq_len: int
    ranks: int
    digest_agrees: bool | None
    """Whether the running digest in the log is that of the records; None where it has none."""
    rows: tuple[StepRow, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON, with its description."""
        found = asdict(self)
        for one, row in zip(found["rows"], self.rows, strict=True):
            one |= {"in_turn": row.in_turn, "says": str(row)}
            for part, piece in zip(one["pieces"], row.pieces, strict=True):
                part["says"] = str(piece)
        return {**found, "about": self.lines()}

    def lines(self) -> list[str]:
        """Format it for people, without the text of the rows."""
        loss = "" if self.loss is None else f", loss {self.loss:.4f}"
        ranks = f" on {self.ranks} ranks" if self.ranks > 1 else ""
        labels = sum(row.labels for row in self.rows)
        lines = [
            f"step {self.step:,}{loss}: {len(self.rows):,} rows of {self.seq_len:,} tokens{ranks}, "
            f"{format_count(labels)} labels"
        ]
        wrong = sum(not row.in_turn for row in self.rows)
        proof = "each row is the one that was due, by content"
        if wrong:
            proof = f"{wrong:,} of {len(self.rows):,} rows are NOT those that were due"
        if self.digest_agrees is not None:
            agree = "agrees" if self.digest_agrees else "does NOT agree"
            proof += f"; the digest in the log {agree} with the records"
        return [*lines, proof]


def rows_of_step(
    run: RunFolder, spec: RunSpec, inputs: Inputs, step: int, progress: Progress = no_progress
) -> StepRows:
    """Raises BadInput where the step is not on record, CorpusError where the corpus is another one now, RunLogError."""
    trained, ranks, digest = _recorded(run, step)
    done, data = _logged(run, step)
    tokens = inputs.load_tokens(spec.data, progress)
    if data is not None and data.train_sha256 != tokens.train.sha256:
        raise CorpusError.expected(
            "corpus",
            spec.data.corpus,
            f"the tokens that the run began with (sha256 {data.train_sha256[:12]})",
            f"others ({tokens.train.sha256[:12]})",
            hint="restore the files as they were",
        )
    streams = dict(zip(SPLITS, (tokens.train, tokens.heldout), strict=True))
    turns = _turns(spec, tokens.train, [rank for rank, _ in trained], ranks, step)
    found = _found(trained, turns, streams, spec.data.seq_len)
    names = _Names(spec, inputs, streams, found, progress)
    agrees = None
    if done is not None and done.rows_digest is not None:
        agrees = done.rows_digest == digest.hex()
    return StepRows(
        step=step,
        loss=None if done is None else done.loss,
        seq_len=spec.data.seq_len,
        ranks=ranks,
        digest_agrees=agrees,
        rows=tuple(names.row(*one) for one in zip(trained, turns, found, strict=True)),
    )


def _recorded(run: RunFolder, step: int) -> tuple[list[tuple[int, TrainedRow]], int, bytes]:
    """Return the rows of a step with their ranks, how many ranks there are, and the running digest of the first rank
    after it."""
    rows, digest, last = [], NO_ROWS, 0
    first = _file(run, 0, step)
    ranks = read_ranks(first) if first.exists() else 0
    for rank in range(ranks):
        for number, of_step in itertools.groupby(
            read_rows(_file(run, rank, step)), lambda r: r.step
        ):
            last = max(last, number)
            if number > step:
                break
            part = list(of_step)
            if rank == 0:
                digest = extended(digest, [row.hash for row in part])
            if number == step:
                rows += [(rank, row) for row in part]
    if not rows:
        until = f"those of steps up to {last:,}" if last else "none"
        raise BadInput.expected("rows", run.path / "rows", f"the rows of step {step:,}", until)
    return rows, ranks, digest


def _file(run: RunFolder, rank: int, step: int) -> Path:
    """Return the file that has the step: those of other numbers of ranks were set aside as RANK-until-STEP.bin."""
    path = path_of(run, rank)
    aside = [
        (int(one.stem.rpartition("-")[2]), one) for one in path.parent.glob(f"{rank}-until-*.bin")
    ]
    return min((one for one in aside if one[0] >= step), default=(0, path))[1]


def _logged(run: RunFolder, step: int) -> tuple[StepDone | None, DataReady | None]:
    """Return the newest record of a step, which a resume may have repeated, and of the data."""
    done, data = None, None
    for event in events_of(run.events):
        if isinstance(event, StepDone) and event.step == step:
            done = event
        elif isinstance(event, DataReady):
            data = event
    return done, data


def _turns(
    spec: RunSpec, stream: TokenStream, of_rank: list[int], ranks: int, step: int
) -> list[int]:
    """Return the row that was due for each row that a step trained on; `of_rank` has their ranks."""
    rows, passes = spec.train.rows, spec.train.accumulation
    batches = Batches(stream, seq_len=spec.data.seq_len, rows_per_batch=rows, seed=spec.train.seed)
    due: dict[int, Iterator[int]] = {}
    for rank in range(ranks):
        numbers = [((step - 1) * passes + index) * ranks + rank for index in range(passes)]
        of_passes = [batches.row_ids_at(number * rows, rows) for number in numbers]
        due[rank] = iter(np.concatenate(of_passes).tolist())
    return [next(due[rank], -1) for rank in of_rank]


def _found(
    trained: list[tuple[int, TrainedRow]],
    turns: list[int],
    streams: dict[str, TokenStream],
    length: int,
) -> list[tuple[str, int] | None]:
    """Return the row that each is, with its split."""
    train = streams[SPLITS[0]]
    due = hashes_of(gather_rows(train, length, np.maximum(np.array(turns), 0)))
    found: list[tuple[str, int] | None] = [
        (SPLITS[0], turn) if one.row == row.hash else None
        for (_, row), turn, one in zip(trained, turns, due, strict=True)
    ]
    if None not in found:
        return found
    known: dict[bytes, tuple[str, int]] = {}
    sought = {row.hash for (_, row), one in zip(trained, found, strict=True) if one is None}
    for split, stream in streams.items():
        each = max(1, AT_ONCE // length)
        for first in range(0, len(stream) // length, each):
            row_ids = np.arange(first, min(first + each, len(stream) // length))
            for number, one in zip(
                row_ids, hashes_of(gather_rows(stream, length, row_ids)), strict=True
            ):
                if one.row in sought:
                    known.setdefault(one.row, (split, int(number)))
    return [
        known.get(row.hash) if one is None else one
        for (_, row), one in zip(trained, found, strict=True)
    ]


class _Names:
    """Makes rows to show: with the names of their documents, which the corpus has."""

    def __init__(
        self,
        spec: RunSpec,
        inputs: Inputs,
        streams: dict[str, TokenStream],
        found: list[tuple[str, int] | None],
        progress: Progress,
    ) -> None:
        self._streams, self._length, self._inputs = streams, spec.data.seq_len, inputs
        data = spec.data
        corpus = open_corpus_of(
            data, lambda done: progress("reading the names of documents", done, None)
        )
        self._numbers = {SPLITS[0]: corpus.train.numbers, SPLITS[1]: corpus.heldout.numbers}
        self._in_split: dict[str, Int64Array] = {}
        """The document of the split that each document of a stream is; FILLS for padding."""
        if data.packing == STREAM:
            self._in_split = {
                split: np.arange(len(stream.lengths)) for split, stream in streams.items()
            }
        else:
            whole = inputs.load_tokens(replace(data, packing=STREAM), progress, corpus=corpus)
            for split, stream in zip(SPLITS, (whole.train, whole.heldout), strict=True):
                placed = places(stream.lengths, data.seq_len, data.packing)
                self._in_split[split] = np.array([number for number, _ in placed])
        self._names = self._read(corpus, [one for one in found if one is not None])

    def _read(self, corpus: Corpus, rows: list[tuple[str, int]]) -> dict[int, str]:
        wanted = {
            int(self._numbers[split][in_split])
            for split, row in rows
            for in_split in self._in_split[split][np.unique(self._batch(split, row).documents_BT)]
            if in_split != FILLS
        }
        return {
            n: one.name for n, one in corpus.train.index.read(np.array(sorted(wanted), np.int64))
        }

    def _batch(self, split: str, row: int) -> Batch:
        return gather_rows(self._streams[split], self._length, np.array([row]))

    def row(
        self, trained: tuple[int, TrainedRow], turn: int, found: tuple[str, int] | None
    ) -> StepRow:
        rank, one = trained
        split, row = found or (SPLITS[0], None)
        shown = StepRow(hash=one.hash.hex(), rank=rank, turn=turn, row=row, split=split)
        if row is None:
            return shown
        batch, stream = self._batch(split, row), self._streams[split]
        tokens_T, labels_T = batch.tokens_BT[0], batch.labels_BT[0]
        numbers, begins, counts = np.unique(
            batch.documents_BT[0], return_index=True, return_counts=True
        )
        pieces = []
        for number, begin, count in zip(
            numbers.tolist(), begins.tolist(), counts.tolist(), strict=True
        ):
            in_split = int(self._in_split[split][number])
            if in_split != FILLS:
                pieces.append(
                    Piece(
                        document=self._names[int(self._numbers[split][in_split])],
                        begin=row * self._length + begin - int(stream.starts[number]),
                        tokens=count,
                        length=int(stream.lengths[number]),
                    )
                )
        is_label_T = np.append(False, labels_T[:-1] != IGNORED)
        return replace(
            shown,
            labels=int((labels_T != IGNORED).sum()),
            pieces=tuple(pieces),
            text=marked(self._inputs.tokenizer, tokens_T, is_label_T),
        )
