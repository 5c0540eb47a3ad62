"""Measure what a run would train on, without torch: documents, tokens, and epochs.

A corpus of at most `SAMPLED_BYTES` is split and tokenized as in the run, which then finds the tokens in the cache. Its
numbers are exact, and a corpus too small for one row is refused. Of a larger corpus, the first `SAMPLED_BYTES` are
tokenized, and the number of tokens is extrapolated from its size. Of a corpus beyond `LISTED_BYTES`, only the records
in that many bytes are read and their faults counted; the number of the other records is estimated from the file sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine import limits
from engine.data.batches import labelled_rows, labels_after_a_cut
from engine.data.corpus import Document
from engine.data.left_out import LeftOut, RecordFaults, Skipped, count_left_out
from engine.data.records import shown
from engine.data.sources import Piece, column_names, list_files, list_pieces
from engine.data.tokens import raise_if_no_tokens
from engine.formats.tokenizer import TextTooLong
from engine.plan.inputs import Inputs, open_corpus_of
from engine.spec import RunSpec
from engine.spec.sections import DataSection
from engine.units import format_bytes, format_count

LISTED_BYTES = 64 << 20
"""Size of the text whose records are all read, in bytes."""
SAMPLED_BYTES = 2 << 20
"""Size of the text that is tokenized, in bytes; it takes a second on a slow core."""
MANY_PASSES = 10
"""Number of epochs above which a model mostly memorises its training text."""
PIECE_BYTES = 16 << 20
"""Largest size of a document in the sample, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSize:
    """The size of the data, held-out documents included."""

    documents: int | None
    """None if the corpus is larger than LISTED_BYTES."""
    text_bytes: int | None
    tokens: int | None
    exact: bool
    """Whether the whole corpus was tokenized; if not, `tokens` is estimated from the first `sampled_bytes`."""
    sampled_bytes: int
    tokens_per_step: int
    passes: float | None
    """Number of epochs that the steps of the spec make; None if unknown."""
    labelled: float | None = None
    """Share of the tokens that are labels, 0 to 1; None for plain text."""
    behind_a_cut: float | None = None
    """Share of the labels, 0 to 1, whose conversation begins in an earlier row; None for plain text, and if part of the
    corpus was not tokenized."""
    read: int = 0
    """Number of documents that were read, including those with a fault."""
    not_read: int | None = 0
    """Estimated number of documents that were not read; None if the file sizes give no estimate."""
    left_out: tuple[LeftOut, ...] = ()
    """Records left out because of a fault; if the whole corpus was tokenized, also unusable conversations."""

    def lines(self, steps: int) -> list[str]:
        """Return the measurements as lines for the terminal."""
        if self.documents is None or self.text_bytes is None:
            data = (
                f"more than {format_bytes(LISTED_BYTES)} of text; documents and tokens are unknown"
            )
        else:
            data = f"{self.documents:,} documents, {format_bytes(self.text_bytes)}, "
            if self.tokens is None:
                data += "an unknown number of tokens"
            elif self.exact:
                data += f"{self.tokens:,} tokens"
            else:
                sample = format_bytes(self.sampled_bytes)
                data += (
                    f"about {format_count(self.tokens)} tokens, estimated from the first {sample}"
                )
        if self.labelled is not None:
            data += f", {self.labelled:.1%} of them with a label"
        lines = [f"data: {data}"]
        if self.not_read != 0:
            rest = "the others" if self.not_read is None else f"about {self.not_read:,} more"
            lines.append(f"data: {self.read:,} documents were read, {rest} were not")
        lines += [f"data: {fault}" for fault in self.left_out]
        lines += behind_a_cut_lines(self.behind_a_cut, "data: ")
        lines.append(
            f"steps: {steps:,} of {self.tokens_per_step:,} tokens each, {passes_text(self.passes)}"
        )
        return lines


def passes_text(passes: float | None) -> str:
    """Describe the number of epochs, with advice if it is larger than MANY_PASSES."""
    if passes is None:
        return "an unknown number of passes over the training text"
    text = f"{passes:.3g} passes over the training text"
    if passes > MANY_PASSES:
        text += f"; after more than {MANY_PASSES} a model mostly memorises it: lower train.steps, or add text"
    return text


def behind_a_cut_lines(share: float | None, prefix: str = "") -> list[str]:
    """Describe the share of labels whose conversation begins in an earlier row; empty if there are none."""
    if not share:
        return []
    return [
        f"{prefix}{share:.1%} of the labels follow a cut: the beginning of their conversation is in an earlier "
        "row; data.packing=documents keeps conversations whole, a longer data.seq_len cuts fewer"
    ]


def measure_data(spec: RunSpec, inputs: Inputs) -> DataSize:
    """Measure the data of `spec`. Raises CorpusError and TokenizerError."""
    data, train = spec.data, spec.train
    per_step = spec.rows_per_step * data.seq_len
    documents = texts = listed = 0
    sample, all_listed = _Sample(), True
    labelled = None
    faults = RecordFaults(shown(data.corpus), data.skip_at_most)
    for item in list_pieces(
        data.corpus, include_tests=data.include_tests, columns=column_names(data.columns)
    ):
        if not isinstance(item, Piece):
            faults.add(item)
            continue
        listed += item.size_bytes
        if listed > LISTED_BYTES:
            tokens, listed = None, listed - item.size_bytes
            all_listed = False
            break
        if item.size_bytes > limits.UNCUT_TEXT.most:
            try:
                inputs.tokenizer.check_length(item.text)
            except TextTooLong as error:
                name = item.place or item.name
                faults.add(Skipped(name=name, reason=error.reason, fault=error))
                continue
        documents += 1
        texts += not item.is_chat
        sample.add(item)
    else:
        if listed <= SAMPLED_BYTES:
            return _exact(spec, inputs, per_step)
        tokens, labelled = sample.estimate(spec, inputs, listed, texts)
    faults.raise_if_too_many(documents)
    passes = None
    if tokens is not None:
        trained = tokens * (1 - data.heldout_fraction)
        if data.max_bytes:
            trained = min(trained, tokens * data.max_bytes / listed)
        passes = train.steps * per_step / trained
    return DataSize(
        documents=documents if all_listed else None,
        text_bytes=listed if all_listed else None,
        tokens=tokens,
        exact=False,
        sampled_bytes=0 if tokens is None else sample.size_bytes,
        tokens_per_step=per_step,
        passes=passes,
        labelled=labelled,
        read=documents + faults.count,
        not_read=0 if all_listed else _not_read(data, documents, listed),
        left_out=faults.left_out,
    )


def _not_read(data: DataSection, documents: int, size_bytes: int) -> int | None:
    """Estimate how many documents were not read, from the size of those that were read and the sizes of all files."""
    files = list_files(
        data.corpus, include_tests=data.include_tests, columns=column_names(data.columns)
    )
    paths = [file.path for file in files if not isinstance(file, Skipped)]
    if not documents or any(path.suffix in (".gz", ".zst", ".parquet") for path in paths):
        return None
    total_bytes = sum(path.stat().st_size for path in paths)
    return max(1, round(documents * total_bytes / size_bytes) - documents)


def _exact(spec: RunSpec, inputs: Inputs, per_step: int) -> DataSize:
    data = spec.data
    corpus = open_corpus_of(data)
    tokens = inputs.load_tokens(data, corpus=corpus)
    train, heldout = tokens.train, tokens.heldout
    labelled_rows(heldout, data.seq_len, "held-out")
    labelled_rows(train, data.seq_len, "train")
    size = corpus.train.size_bytes + corpus.heldout.size_bytes
    has_labels = train.labelled is not None
    return DataSize(
        documents=sum(tokens.documents),
        text_bytes=size,
        tokens=train.token_count + heldout.token_count,
        exact=True,
        sampled_bytes=size,
        tokens_per_step=per_step,
        passes=spec.train.steps * per_step / len(train),
        labelled=train.labelled_count / max(1, train.token_count) if has_labels else None,
        behind_a_cut=labels_after_a_cut(train, data.seq_len) if has_labels else None,
        read=len(corpus.train.index) + sum(fault.count for fault in corpus.faults),
        left_out=(*corpus.faults, *train.left_out, *heldout.left_out),
    )


class _Sample:
    """The first documents of a corpus."""

    def __init__(self) -> None:
        self.documents: list[Document] = []
        self.size_bytes = 0

    def add(self, piece: Piece) -> None:
        """Add a document, unless the sample is large enough."""
        if self.size_bytes >= SAMPLED_BYTES or piece.size_bytes > PIECE_BYTES:
            return
        text = piece.text
        if not piece.is_chat:
            text = text[: SAMPLED_BYTES - self.size_bytes]
        self.documents.append(Document(name=piece.name, text=text, is_chat=piece.is_chat))
        self.size_bytes += len(text.encode())

    def estimate(
        self, spec: RunSpec, inputs: Inputs, listed: int, texts: int
    ) -> tuple[int | None, float | None]:
        """Return the estimated number of tokens in `listed` bytes, `texts` of whose documents are plain text, and the
        share of labels among the tokens (None for plain text). Raises CorpusError if no document can be tokenized."""
        if not self.size_bytes:
            return None, None
        encoded = list(inputs.encoder(spec.data).encode(self.documents))
        left_out: dict[str, LeftOut] = {}
        for one in encoded:
            if one.left_out is not None:
                count_left_out(left_out, one.left_out)
        sampled = sum(len(one.ids) for one in encoded)
        raise_if_no_tokens(tuple(left_out.values()), sampled)
        # Every plain-text document has one end-of-text token, which does not grow with its length.
        ends = sum(not document.is_chat for document in self.documents)
        tokens = round((sampled - ends) / self.size_bytes * listed) + texts
        if ends == len(self.documents):
            return tokens, None
        return tokens, sum(int(one.labels.sum()) for one in encoded) / max(1, sampled)
