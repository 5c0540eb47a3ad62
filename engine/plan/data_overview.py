"""Overview of the data of a spec: documents, tokens, labels, and what was left out and why.

All numbers are counted on the tokens that the models would read. Of a large corpus only the first part is read.
"""

# Shapes: B rows, T tokens of a row

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.data.batches import Int64Array, count_rows, labelled_rows, labels_after_a_cut
from engine.data.corpus import Corpus, Split
from engine.data.left_out import LeftOut, count_left_out
from engine.data.packing import STREAM
from engine.data.token_cache import Progress, no_progress, remarks_of
from engine.data.tokens import TokenStream
from engine.formats.tokenizer import Tokenizer
from engine.plan.data_size import behind_a_cut_lines, passes_text
from engine.plan.inputs import Inputs, open_corpus_of
from engine.spec import RunSpec
from engine.units import format_bytes, format_count

TOKENIZED_BYTES = 16 << 20
"""Size of the text that is tokenized by default, in bytes; it takes some seconds."""
BARS = 40
"""Length of the longest bar of a histogram, in characters."""
SAMPLE_TOKENS = 400
"""Largest number of tokens shown of a document."""
REASONS = 10
"""Largest number of reasons, remarks and copies that are listed."""


Marked = tuple[str, bool]
"""A segment of text, and whether its tokens are labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOverview:
    """The training split or the held-out split."""

    documents: int
    conversations: int
    text_bytes: int
    tokens: int
    labelled: int
    """Number of tokens that are labels."""
    rows: int
    unlabelled_rows: int
    """Number of rows without a label, which are not trained on."""
    padding: int
    """Number of positions in the rows that are padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Reason why data is left out or used only in part."""

    text: str
    count: int
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    count: int
    names: tuple[tuple[str, str], ...]
    """Pairs of names, of a copy and of its original, for the first copies. A record is named by its file and line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The beginning of a training document, as the models read it."""

    name: str
    tokens: int
    shown: int
    parts: tuple[Marked, ...]
    """The text in segments, each with whether its tokens are labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    source: str
    seq_len: int
    train: SplitOverview
    heldout: SplitOverview
    steps: int
    passes: float | None
    """Number of epochs that the steps make; None if part of the corpus was not read."""
    behind_a_cut: float | None
    """Share of the labels, 0 to 1, whose conversation begins in an earlier row; None for plain text."""
    lengths: tuple[tuple[int, int], ...]
    """Histogram of the lengths of training documents: the upper bound of each bin in tokens, a power of two, and the
    number of documents in the bin."""
    longer_than_a_row: int
    repeated: Copies
    """Training documents with the same content as an earlier one."""
    dropped: Copies
    """Documents dropped from the training split because their text is also held out."""
    left_out: tuple[Reason, ...]
    remarks: tuple[Reason, ...]
    """Reasons why parts of records and conversations are not read, not rendered or not labelled."""
    partly_labelled: int
    beyond_bytes: int
    """Number of documents that were not read because the corpus is too large; 0 if all were read."""
    samples: tuple[Sample, ...]

    def lines(self) -> list[str]:
        """Return the overview as lines for the terminal, without the samples."""
        part = (
            f" (of at most {format_bytes(TOKENIZED_BYTES)}; {self.beyond_bytes:,} documents were not read)"
            if self.beyond_bytes
            else ""
        )
        lines = [f"{self.source}{part}"]
        for name, side in (("train", self.train), ("held-out", self.heldout)):
            what = f"{side.documents:,} documents"
            if side.conversations:
                what += f" ({side.conversations:,} conversations)"
            share = side.labelled / side.tokens if side.tokens else 0.0
            lines.append(
                f"{name:9} {what}, {format_bytes(side.text_bytes)}, {format_count(side.tokens)} tokens, "
                f"{share:.1%} of them with a label; {side.rows:,} rows of {self.seq_len:,}"
            )
            if side.padding:
                positions = side.rows * self.seq_len
                lines.append(
                    f"{'':9} {side.padding / positions:.1%} of their positions are padding"
                )
            if side.unlabelled_rows:
                lines.append(f"{'':9} {side.unlabelled_rows:,} rows have no label and are not used")
        lines.append(f"{self.steps:,} steps: {passes_text(self.passes)}")
        lines += behind_a_cut_lines(self.behind_a_cut)
        lines += ["", "tokens of a training document"]
        lines += self._histogram()
        if self.longer_than_a_row:
            lines.append(
                f"{self.longer_than_a_row:,} are longer than a row; the rest of each document is in the next row"
            )
        remarks = []
        for copies, words in (
            (self.repeated, "training documents are copies of another one"),
            (
                self.dropped,
                "documents are dropped from the training split, because their text is held out",
            ),
        ):
            if copies.count:
                remarks.append(f"{copies.count:,} {words}:")
                remarks += [f"    {name} is {other}" for name, other in copies.names]
                if copies.count > len(copies.names):
                    remarks.append(f"    and {copies.count - len(copies.names):,} more")
        if self.partly_labelled:
            remarks.append(
                f"{self.partly_labelled:,} conversations have an assistant turn without labels"
            )
        remarks += [
            f"{reason.count:,} left out: {reason.text} (as {reason.example})"
            for reason in self.left_out
        ]
        for remark in self.remarks:
            example = f" (as {remark.example})" if remark.example else ""
            remarks.append(f"in {remark.count:,}: {remark.text}{example}")
        return [*lines, *(["", *remarks] if remarks else [])]

    def _histogram(self) -> list[str]:
        most = max((count for _, count in self.lengths), default=1)
        lines = []
        for high, count in self.lengths:
            # A bin that is not empty has a bar of at least one character.
            bar = "#" * max(bool(count), round(BARS * count / most))
            lines.append(f"{f'to {high:,}':>12} {count:>9,} {bar}".rstrip())
        return lines


def overview_of_data(
    spec: RunSpec,
    inputs: Inputs,
    *,
    samples: int,
    everything: bool,
    progress: Progress = no_progress,
) -> Overview:
    """Read, split and tokenize the corpus as the run would; without `everything`, only its first TOKENIZED_BYTES.

    Raises CorpusError and TokenizerError.
    """
    data = spec.data
    max_bytes = data.max_bytes or None
    if not everything:
        max_bytes = min(max_bytes or TOKENIZED_BYTES, TOKENIZED_BYTES)
    part = dataclasses.replace(data, max_bytes=max_bytes or 0)
    corpus = open_corpus_of(part, lambda done: progress("splitting the corpus", done, None))
    stream = dataclasses.replace(part, packing=STREAM)
    unpacked = inputs.load_tokens(stream, progress, corpus=corpus)
    packed = inputs.load_tokens(part, progress, corpus=corpus)
    train, heldout = unpacked.train, unpacked.heldout
    lengths = train.lengths
    repeated, first = _repeated(corpus.train)
    return Overview(
        source=data.corpus,
        seq_len=data.seq_len,
        train=_part(corpus.train, train, packed.train, data.seq_len, "train"),
        heldout=_part(corpus.heldout, heldout, packed.heldout, data.seq_len, "held-out"),
        steps=spec.train.steps,
        passes=spec.train.steps * spec.rows_per_step * data.seq_len / len(packed.train)
        if not corpus.beyond_max_bytes or data.max_bytes == max_bytes
        else None,
        behind_a_cut=labels_after_a_cut(packed.train, data.seq_len) if corpus.train.chats else None,
        lengths=_histogram_of(lengths[lengths > 0].tolist()),
        longer_than_a_row=int((lengths > data.seq_len).sum()),
        repeated=_copies(corpus, repeated, first),
        dropped=_copies(corpus, corpus.dropped, corpus.heldout.first_copies(corpus.dropped)),
        left_out=_reasons(corpus, (*corpus.faults, *train.left_out, *heldout.left_out)),
        remarks=tuple(
            Reason(text=remark.reason, count=remark.count, example=remark.example)
            for remark in remarks_of(unpacked)[:REASONS]
        ),
        partly_labelled=train.partly_labelled + heldout.partly_labelled,
        beyond_bytes=corpus.beyond_max_bytes,
        samples=_samples(corpus.train, train, inputs, samples),
    )


def _copies(corpus: Corpus, numbers: Int64Array, originals: Int64Array) -> Copies:
    if not len(numbers):
        return Copies(count=0, names=())
    shown = numbers[:REASONS], originals[:REASONS]
    documents = corpus.train.index.read(np.concatenate(shown))
    names = {number: document.place or document.name for number, document in documents}
    pairs = tuple((names[a], names[b]) for a, b in zip(*(x.tolist() for x in shown), strict=True))
    return Copies(count=len(numbers), names=pairs)


def _repeated(split: Split) -> tuple[Int64Array, Int64Array]:
    """Return the index numbers of documents with the same content as an earlier one of the split, and of the earlier
    ones."""
    _, first, content_D = np.unique(split.contents, return_index=True, return_inverse=True)
    earlier_D = first[content_D]
    is_copy_D = earlier_D != np.arange(len(earlier_D))
    return split.numbers[is_copy_D], split.numbers[earlier_D[is_copy_D]]


def _part(
    split: Split, stream: TokenStream, packed: TokenStream, seq_len: int, what: str
) -> SplitOverview:
    rows = count_rows(packed, seq_len, what)
    # In plain text all tokens but the first of each document are predicted.
    predicted = len(stream) - int(np.count_nonzero(stream.lengths))
    return SplitOverview(
        documents=split.document_count,
        conversations=split.chats,
        text_bytes=split.size_bytes,
        tokens=len(stream),
        labelled=predicted if stream.labelled is None else stream.labelled_count,
        rows=rows,
        unlabelled_rows=rows - len(labelled_rows(packed, seq_len, what)),
        padding=len(packed) - packed.token_count,
    )


def _histogram_of(lengths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return a histogram of lengths: the upper bound of each bin, a power of two, and the number of lengths in it."""
    counts = Counter((length - 1).bit_length() for length in lengths)
    if not counts:
        return ()
    return tuple((1 << power, counts[power]) for power in range(min(counts), max(counts) + 1))


def _reasons(corpus: Corpus, conversations: Iterable[LeftOut]) -> tuple[Reason, ...]:
    counts: dict[str, LeftOut] = {}
    for record in corpus.skipped:
        count_left_out(counts, record)
    reasons = [*counts.values(), *conversations]
    totals: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for left_out in reasons:
        totals[left_out.reason] += left_out.count
        examples.setdefault(left_out.reason, left_out.example)
    return tuple(
        Reason(text=text, count=count, example=examples[text])
        for text, count in totals.most_common(REASONS)
    )


def _samples(split: Split, stream: TokenStream, inputs: Inputs, count: int) -> tuple[Sample, ...]:
    """Return the beginnings of `count` documents, evenly spaced among those that have tokens."""
    with_tokens = np.flatnonzero(stream.lengths)
    count = min(count, len(with_tokens))
    if not count:
        return ()
    shown = with_tokens[np.arange(count) * len(with_tokens) // count]
    names = {number: document.name for number, document in split.index.read(split.numbers[shown])}
    samples = []
    for number in shown.tolist():
        start, length = int(stream.starts[number]), int(stream.lengths[number])
        ids = stream.tokens[start : start + min(length, SAMPLE_TOKENS)].astype(np.int64)
        labelled = np.ones(len(ids), dtype=np.bool_)
        # The first token has no earlier token to be predicted from.
        labelled[0] = False
        if stream.labelled is not None:
            labelled &= stream.labelled[start : start + len(ids)]
        parts = marked(inputs.tokenizer, ids, labelled)
        samples.append(
            Sample(
                name=names[int(split.numbers[number])], tokens=length, shown=len(ids), parts=parts
            )
        )
    return tuple(samples)


def marked(
    tokenizer: Tokenizer, ids: Int64Array, labelled: NDArray[np.bool_]
) -> tuple[Marked, ...]:
    """Return the text of tokens in segments, cut wherever labelled and unlabelled tokens meet."""
    cuts = [0, *(np.flatnonzero(np.diff(labelled)) + 1).tolist(), len(ids)]
    return tuple(
        (tokenizer.decode(ids[a:b].tolist()), bool(labelled[a]))
        for a, b in itertools.pairwise(cuts)
    )
