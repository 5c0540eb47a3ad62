"""The data that one step of a run trained on: its rows, their documents by name, and their text, proved by content.

The run's records (`engine.log.rows`) have a hash of each row. The corpus is read again, and each hash is looked up in
it: first as the prescribed row, and if that differs, among all rows of both splits.
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

HASHED_TOKENS = 1 << 20
"""Number of tokens whose rows are hashed at a time."""
TRAINING, HELD_OUT = SPLITS = ("training", "held-out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of a document that is in a row."""

    document: str
    begin: int
    """Index in the document of its first token in the row."""
    tokens: int
    length: int
    """Number of tokens of the whole document."""

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
    """The prescribed training row, by the order of the data."""
    row: int | None
    """The row of the corpus with this content; None if there is none."""
    split: str
    """Split of `row`, one of SPLITS."""
    labels: int = 0
    pieces: tuple[Piece, ...] = ()
    text: tuple[Marked, ...] = ()
    """Text in order, and whether it is to be predicted from what precedes it in the row."""

    @property
    def in_turn(self) -> bool:
        return self.row == self.turn and self.split == TRAINING

    def __str__(self) -> str:
        if self.in_turn:
            return f"row {self.row:,}, which was due"
        if self.row is None:
            return f"NOT row {self.turn:,}, which was due: no row of the corpus has this content"
        whose = "held-out row" if self.split == HELD_OUT else "row"
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
        """Return the fields for JSON, with a description."""
        fields = asdict(self)
        for row_fields, row in zip(fields["rows"], self.rows, strict=True):
            row_fields |= {"in_turn": row.in_turn, "says": str(row)}
            for piece_fields, piece in zip(row_fields["pieces"], row.pieces, strict=True):
                piece_fields["says"] = str(piece)
        return {**fields, "about": self.lines()}

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
    """Return the rows that a step trained on. Raises BadInput for a step that is not recorded, CorpusError for a corpus
    that has changed, and RunLogError."""
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
    prescribed = _prescribed_rows(spec, tokens.train, [rank for rank, _ in trained], ranks, step)
    corpus_rows = _find_in_corpus(trained, prescribed, streams, spec.data.seq_len)
    names = _RowFormatter(spec, inputs, streams, corpus_rows, progress)
    agrees = None
    if done is not None and done.rows_digest is not None:
        agrees = done.rows_digest == digest.hex()
    return StepRows(
        step=step,
        loss=None if done is None else done.loss,
        seq_len=spec.data.seq_len,
        ranks=ranks,
        digest_agrees=agrees,
        rows=tuple(names.row(*row) for row in zip(trained, prescribed, corpus_rows, strict=True)),
    )


def _recorded(run: RunFolder, step: int) -> tuple[list[tuple[int, TrainedRow]], int, bytes]:
    """Return the rows of a step with their ranks, how many ranks there are, and the running digest of the first rank
    after it."""
    rows, digest, last = [], NO_ROWS, 0
    first = _record_file(run, 0, step)
    ranks = read_ranks(first) if first.exists() else 0
    for rank in range(ranks):
        for number, step_rows in itertools.groupby(
            read_rows(_record_file(run, rank, step)), lambda r: r.step
        ):
            last = max(last, number)
            if number > step:
                break
            part = list(step_rows)
            if rank == 0:
                digest = extended(digest, [row.hash for row in part])
            if number == step:
                rows += [(rank, row) for row in part]
    if not rows:
        present = f"those of steps up to {last:,}" if last else "none"
        raise BadInput.expected("rows", run.path / "rows", f"the rows of step {step:,}", present)
    return rows, ranks, digest


def _record_file(run: RunFolder, rank: int, step: int) -> Path:
    """Return the file that holds the step: files of another number of ranks were renamed to RANK-until-STEP.bin."""
    path = path_of(run, rank)
    earlier = [
        (int(file.stem.rpartition("-")[2]), file)
        for file in path.parent.glob(f"{rank}-until-*.bin")
    ]
    return min((item for item in earlier if item[0] >= step), default=(0, path))[1]


def _logged(run: RunFolder, step: int) -> tuple[StepDone | None, DataReady | None]:
    """Return the newest record of a step, which a resume may have repeated, and of the data."""
    done, data = None, None
    for event in events_of(run.events):
        if isinstance(event, StepDone) and event.step == step:
            done = event
        elif isinstance(event, DataReady):
            data = event
    return done, data


def _prescribed_rows(
    spec: RunSpec, stream: TokenStream, row_ranks: list[int], ranks: int, step: int
) -> list[int]:
    """Return the prescribed row for each row that a step trained on; `row_ranks` are their ranks."""
    rows, passes = spec.train.rows, spec.train.accumulation
    batches = Batches(stream, seq_len=spec.data.seq_len, rows_per_batch=rows, seed=spec.train.seed)
    rows_by_rank: dict[int, Iterator[int]] = {}
    for rank in range(ranks):
        numbers = [((step - 1) * passes + index) * ranks + rank for index in range(passes)]
        passes_rows = [batches.row_ids_at(number * rows, rows) for number in numbers]
        rows_by_rank[rank] = iter(np.concatenate(passes_rows).tolist())
    return [next(rows_by_rank[rank], -1) for rank in row_ranks]


def _find_in_corpus(
    trained: list[tuple[int, TrainedRow]],
    turns: list[int],
    streams: dict[str, TokenStream],
    length: int,
) -> list[tuple[str, int] | None]:
    """Return the split and number of the corpus row with the content of each trained row; None if there is none."""
    train = streams[TRAINING]
    hashes = hashes_of(gather_rows(train, length, np.maximum(np.array(turns), 0)))
    corpus_rows: list[tuple[str, int] | None] = [
        (TRAINING, turn) if corpus_row.row == row.hash else None
        for (_, row), turn, corpus_row in zip(trained, turns, hashes, strict=True)
    ]
    if None not in corpus_rows:
        return corpus_rows
    rows_by_hash: dict[bytes, tuple[str, int]] = {}
    missing = {
        row.hash
        for (_, row), corpus_row in zip(trained, corpus_rows, strict=True)
        if corpus_row is None
    }
    for split, stream in streams.items():
        rows_at_once = max(1, HASHED_TOKENS // length)
        for first in range(0, len(stream) // length, rows_at_once):
            row_ids = np.arange(first, min(first + rows_at_once, len(stream) // length))
            for number, corpus_row in zip(
                row_ids, hashes_of(gather_rows(stream, length, row_ids)), strict=True
            ):
                if corpus_row.row in missing:
                    rows_by_hash.setdefault(corpus_row.row, (split, int(number)))
    return [
        rows_by_hash.get(row.hash) if corpus_row is None else corpus_row
        for (_, row), corpus_row in zip(trained, corpus_rows, strict=True)
    ]


class _RowFormatter:
    """Describes rows with the names of their documents, which it reads from the corpus."""

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
        self._numbers = {TRAINING: corpus.train.numbers, HELD_OUT: corpus.heldout.numbers}
        self._in_split: dict[str, Int64Array] = {}
        """Index in the split of each document of a stream; FILLS for padding."""
        if data.packing == STREAM:
            self._in_split = {
                split: np.arange(len(stream.lengths)) for split, stream in streams.items()
            }
        else:
            whole = inputs.load_tokens(replace(data, packing=STREAM), progress, corpus=corpus)
            for split, stream in zip(SPLITS, (whole.train, whole.heldout), strict=True):
                placed = places(stream.lengths, data.seq_len, data.packing)
                self._in_split[split] = np.array([number for number, _ in placed])
        self._names = self._read(corpus, [row for row in found if row is not None])

    def _read(self, corpus: Corpus, rows: list[tuple[str, int]]) -> dict[int, str]:
        numbers = {
            int(self._numbers[split][in_split])
            for split, row in rows
            for in_split in self._in_split[split][np.unique(self._batch(split, row).documents_BT)]
            if in_split != FILLS
        }
        return {
            n: document.name
            for n, document in corpus.train.index.read(np.array(sorted(numbers), np.int64))
        }

    def _batch(self, split: str, row: int) -> Batch:
        return gather_rows(self._streams[split], self._length, np.array([row]))

    def row(
        self, trained: tuple[int, TrainedRow], turn: int, found: tuple[str, int] | None
    ) -> StepRow:
        rank, trained_row = trained
        split, row = found or (TRAINING, None)
        result = StepRow(hash=trained_row.hash.hex(), rank=rank, turn=turn, row=row, split=split)
        if row is None:
            return result
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
            result,
            labels=int((labels_T != IGNORED).sum()),
            pieces=tuple(pieces),
            text=marked(self._inputs.tokenizer, tokens_T, is_label_T),
        )
