"""Show the data that one step of a run trained on: its rows, the names of their documents, and their text.

The run recorded a hash of each row that it trained on (`engine.log.rows`). The corpus is read again, and the hash of
the row that the data order prescribes is compared with the recorded hash.
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
from engine.data.packing import PADDING, STREAM, packed_lengths
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentSpan:
    """The tokens of one document that are in a row."""

    document: str
    begin: int
    """Index within the document of the first token that is in the row."""
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
    row: int
    """The training row that the data order prescribes."""
    in_turn: bool
    """Whether the row that was trained on has the content of the prescribed row."""
    labels: int = 0
    pieces: tuple[DocumentSpan, ...] = ()
    text: tuple[Marked, ...] = ()
    """The text of the row in segments, each with whether its tokens are labels."""

    def __str__(self) -> str:
        if self.in_turn:
            return f"row {self.row:,}, as prescribed"
        return f"NOT the prescribed row {self.row:,}: its content does not have the recorded hash"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    step: int
    loss: float | None
    """The logged loss; None if it was not finite or the step is not in the log."""
    seq_len: int
    ranks: int
    digest_agrees: bool | None
    """Whether the running digest in the log equals that of the recorded hashes; None if the log has none."""
    rows: tuple[StepRow, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON, with a description."""
        fields = asdict(self)
        for row_fields, row in zip(fields["rows"], self.rows, strict=True):
            row_fields["says"] = str(row)
            for piece_fields, piece in zip(row_fields["pieces"], row.pieces, strict=True):
                piece_fields["says"] = str(piece)
        return {**fields, "about": self.lines()}

    def lines(self) -> list[str]:
        """Return the step's rows as lines for the terminal, without their text."""
        loss = "" if self.loss is None else f", loss {self.loss:.4f}"
        ranks = f" on {self.ranks} ranks" if self.ranks > 1 else ""
        labels = sum(row.labels for row in self.rows)
        lines = [
            f"step {self.step:,}{loss}: {len(self.rows):,} rows of {self.seq_len:,} tokens{ranks}, "
            f"{format_count(labels)} labels"
        ]
        wrong = sum(not row.in_turn for row in self.rows)
        proof = "the content of each row is that of the prescribed row"
        if wrong:
            proof = f"{wrong:,} of {len(self.rows):,} rows are NOT the prescribed rows"
        if self.digest_agrees is not None:
            agree = "agrees" if self.digest_agrees else "does NOT agree"
            proof += f"; the digest in the log {agree} with the recorded hashes"
        return [*lines, proof]


def rows_of_step(
    run: RunFolder, spec: RunSpec, inputs: Inputs, step: int, progress: Progress = no_progress
) -> StepRows:
    """Return the rows that a step trained on. Raises BadInput if the step is not recorded, CorpusError if the corpus
    has changed, and RunLogError if the log cannot be read."""
    trained, ranks, digest = _recorded(run, step)
    done, data = _logged(run, step)
    tokens = inputs.load_tokens(spec.data, progress)
    if data is not None and data.train_sha256 != tokens.train.sha256:
        raise CorpusError.expected(
            "corpus",
            spec.data.corpus,
            f"the tokens that the run began with (sha256 {data.train_sha256[:12]})",
            f"different tokens (sha256 {tokens.train.sha256[:12]})",
            hint="restore the original files",
        )
    prescribed = _prescribed_rows(spec, tokens.train, [rank for rank, _ in trained], ranks, step)
    row_ids = np.array(prescribed)
    batch = gather_rows(tokens.train, spec.data.seq_len, row_ids)
    describe = _RowFormatter(spec, inputs, tokens.train, row_ids, progress)
    agrees = None
    if done is not None and done.rows_digest is not None:
        agrees = done.rows_digest == digest.hex()
    return StepRows(
        step=step,
        loss=None if done is None else done.loss,
        seq_len=spec.data.seq_len,
        ranks=ranks,
        digest_agrees=agrees,
        rows=tuple(
            describe.row(rank, row, prescribed_row, in_turn=content.row == row.hash)
            for (rank, row), prescribed_row, content in zip(
                trained, prescribed, hashes_of(batch), strict=True
            )
        ),
    )


def _recorded(run: RunFolder, step: int) -> tuple[list[tuple[int, TrainedRow]], int, bytes]:
    """Return the recorded rows of a step with their ranks, the number of ranks, and the first rank's running digest
    after the step."""
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
        present = f"the rows of steps up to {last:,}" if last else "no rows"
        raise BadInput.expected("rows", run.path / "rows", f"the rows of step {step:,}", present)
    return rows, ranks, digest


def _record_file(run: RunFolder, rank: int, step: int) -> Path:
    """Return the file with the rows of `step`. When the number of ranks changes, the file so far is renamed to
    RANK-until-STEP.bin."""
    path = path_of(run, rank)
    earlier = [
        (int(file.stem.rpartition("-")[2]), file)
        for file in path.parent.glob(f"{rank}-until-*.bin")
    ]
    return min((item for item in earlier if item[0] >= step), default=(0, path))[1]


def _logged(run: RunFolder, step: int) -> tuple[StepDone | None, DataReady | None]:
    """Return the newest events of the step and of the data; a resume may have repeated the step."""
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
    """Return the prescribed row for each row that a step trained on; `row_ranks` has the rank of each row."""
    rows, passes = spec.train.rows, spec.train.accumulation
    batches = Batches(stream, seq_len=spec.data.seq_len, rows_per_batch=rows, seed=spec.train.seed)
    rows_by_rank: dict[int, Iterator[int]] = {}
    for rank in range(ranks):
        numbers = [((step - 1) * passes + index) * ranks + rank for index in range(passes)]
        passes_rows = [batches.row_ids_at(number * rows, rows) for number in numbers]
        rows_by_rank[rank] = iter(np.concatenate(passes_rows).tolist())
    return [next(rows_by_rank[rank]) for rank in row_ranks]


class _RowFormatter:
    """Describes training rows, with the names of their documents from the corpus."""

    def __init__(
        self,
        spec: RunSpec,
        inputs: Inputs,
        stream: TokenStream,
        row_ids: Int64Array,
        progress: Progress,
    ) -> None:
        self._stream, self._length, self._inputs = stream, spec.data.seq_len, inputs
        data = spec.data
        corpus = open_corpus_of(
            data, lambda done: progress("reading the names of documents", done, None)
        )
        self._in_split = np.arange(len(stream.lengths))
        """For each document of the stream, its index in the split; PADDING for padding."""
        if data.packing != STREAM:
            whole = inputs.load_tokens(replace(data, packing=STREAM), progress, corpus=corpus)
            placed = packed_lengths(whole.train.lengths, data.seq_len, data.packing)
            self._in_split = np.array([number for number, _ in placed])
        self._numbers = corpus.train.numbers
        """For each document of the split, its number in the index of the corpus."""
        in_split = self._in_split[np.unique(self._batch(row_ids).documents_BT)]
        numbers = np.unique(self._numbers[in_split[in_split != PADDING]])
        self._names = {n: document.name for n, document in corpus.train.index.read(numbers)}

    def _batch(self, row_ids: Int64Array) -> Batch:
        return gather_rows(self._stream, self._length, row_ids)

    def row(self, rank: int, trained: TrainedRow, row: int, *, in_turn: bool) -> StepRow:
        found = StepRow(hash=trained.hash.hex(), rank=rank, row=row, in_turn=in_turn)
        if not in_turn:
            return found
        batch = self._batch(np.array([row]))
        tokens_T, labels_T = batch.tokens_BT[0], batch.labels_BT[0]
        numbers, begins, counts = np.unique(
            batch.documents_BT[0], return_index=True, return_counts=True
        )
        pieces = []
        for number, begin, count in zip(
            numbers.tolist(), begins.tolist(), counts.tolist(), strict=True
        ):
            in_split = int(self._in_split[number])
            if in_split != PADDING:
                pieces.append(
                    DocumentSpan(
                        document=self._names[int(self._numbers[in_split])],
                        begin=row * self._length + begin - int(self._stream.starts[number]),
                        tokens=count,
                        length=int(self._stream.lengths[number]),
                    )
                )
        is_label_T = np.append(False, labels_T[:-1] != IGNORED)
        return replace(
            found,
            labels=int((labels_T != IGNORED).sum()),
            pieces=tuple(pieces),
            text=marked(self._inputs.tokenizer, tokens_T, is_label_T),
        )
