"""Measure what a run would train on, without torch: documents, tokens, and the passes over them that its steps make.

A corpus of at most `SAMPLED_BYTES` is split and tokenized as the run would, so its numbers are exact and a corpus too
small for one row is refused. Of a larger one the first megabytes are tokenized, and the tokens of the rest follow from
its bytes. Every record of the first `LISTED_BYTES` is read, so that those with a fault are counted; how many there are
beyond is estimated from the sizes of the files.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine import limits
from engine.data.batches import labelled_rows, labels_after_a_cut
from engine.data.corpus import Document
from engine.data.left_out import LeftOut, RecordFaults, Skipped
from engine.data.records import shown
from engine.data.sources import Piece, column_names, list_files, list_pieces
from engine.data.tokens import TokenStream
from engine.formats.tokenizer import TextTooLong
from engine.plan.inputs import Inputs, open_corpus_of
from engine.spec import RunSpec
from engine.spec.sections import DataSection
from engine.units import format_bytes, format_count

LISTED_BYTES = 64 << 20
"""Text that is listed; of a file of records, listing reads every record."""
SAMPLED_BYTES = 2 << 20
"""Text that is tokenized: a second on a slow core."""
MANY_PASSES = 10
"""Passes over a text beyond which a model is more likely to memorise it than to learn from it."""
PIECE_BYTES = 16 << 20
"""A larger document is not read for the sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSize:
    """The size of the data, held-out documents included."""

    documents: int | None
    """None where there are more than were listed."""
    text_bytes: int | None
    tokens: int | None
    exact: bool
    """Whether all of it was tokenized; otherwise `tokens` is estimated from `sampled_bytes`."""
    sampled_bytes: int
    tokens_per_step: int
    passes: float | None
    """Passes over the training text that the steps of the spec make."""
    labelled: float | None = None
    """Share of the tokens of conversations that are to be predicted; None for text."""
    behind_a_cut: float | None = None
    """Share of the labels of conversations whose conversation begins in an earlier row; None for text."""
    read: int = 0
    """Documents that were read, those with a fault among them."""
    not_read: int | None = 0
    """About how many documents of a larger corpus were not read; None where the files do not tell."""
    left_out: tuple[LeftOut, ...] = ()
    """Records with a fault among those that were read; of a tokenized corpus, also those without tokens."""

    def lines(self, steps: int) -> list[str]:
        """Format it for people."""
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
                data += f"about {format_count(self.tokens)} tokens, by the first {sample}"
        if self.labelled is not None:
            data += f", {self.labelled:.1%} of them with a label"
        lines = [f"data: {data}"]
        if self.not_read != 0:
            rest = "the others" if self.not_read is None else f"about {self.not_read:,} more"
            lines.append(f"data: {self.read:,} documents were read, {rest} were not")
        lines += [f"data: {one}" for one in self.left_out]
        lines += behind_a_cut_lines(self.behind_a_cut, "data: ")
        lines.append(
            f"steps: {steps:,} of {self.tokens_per_step:,} tokens each, {passes_text(self.passes)}"
        )
        return lines


def passes_text(passes: float | None) -> str:
    """Say how often steps train on the same text, and what many times do."""
    if passes is None:
        return "an unknown number of passes over the training text"
    text = f"{passes:.3g} passes over the training text"
    if passes > MANY_PASSES:
        text += f": more than {MANY_PASSES} mostly memorise it; lower train.steps, or add text"
    return text


def behind_a_cut_lines(share: float | None, prefix: str = "") -> list[str]:
    """Say how many labels of conversations are predicted without their question; nothing where none is."""
    if not share:
        return []
    return [
        f"{prefix}{share:.1%} of the labels follow a cut: the beginning of their conversation is in an earlier "
        "row; data.packing=documents keeps conversations whole, a longer data.seq_len cuts fewer"
    ]


def measure_data(spec: RunSpec, inputs: Inputs) -> DataSize:
    """Measure the data of `spec`. Raises CorpusError, TokenizerError."""
    data, train = spec.data, spec.train
    per_step = spec.rows_per_step * data.seq_len
    documents = texts = listed = 0
    sample, whole = _Sample(), True
    labelled = behind = None
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
            whole = False
            break
        if item.size_bytes > limits.UNCUT_TEXT.most and isinstance(text := item.read(), str):
            try:
                inputs.tokenizer.check_length(text)
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
        tokens, labelled, behind = sample.estimate(spec, inputs, listed, texts)
    faults.refuse_too_many(documents)
    passes = None
    if tokens is not None:
        trained = tokens * (1 - data.heldout_fraction)
        if data.max_bytes:
            trained = min(trained, tokens * data.max_bytes / listed)
        passes = train.steps * per_step / trained
    return DataSize(
        documents=documents if whole else None,
        text_bytes=listed if whole else None,
        tokens=tokens,
        exact=False,
        sampled_bytes=0 if tokens is None else sample.size_bytes,
        tokens_per_step=per_step,
        passes=passes,
        labelled=labelled,
        behind_a_cut=behind,
        read=documents + faults.count,
        not_read=0 if whole else _not_read(data, documents, listed),
        left_out=faults.left_out,
    )


def _not_read(data: DataSection, documents: int, size_bytes: int) -> int | None:
    """Estimate how many documents are beyond those that were read, from their size and the sizes of the files."""
    files = list_files(
        data.corpus, include_tests=data.include_tests, columns=column_names(data.columns)
    )
    paths = [one.path for one in files if not isinstance(one, Skipped)]
    if not documents or any(path.suffix in (".gz", ".zst", ".parquet") for path in paths):
        return None
    every = sum(path.stat().st_size for path in paths)
    return max(1, round(documents * every / size_bytes) - documents)


def _exact(spec: RunSpec, inputs: Inputs, per_step: int) -> DataSize:
    data = spec.data
    corpus = open_corpus_of(data)
    train = inputs.rows(corpus.train.documents, data)
    held = inputs.rows(corpus.heldout.documents, data)
    labelled_rows(held, data.seq_len, "held-out")
    labelled_rows(train, data.seq_len, "train")
    size = corpus.train.size_bytes + corpus.heldout.size_bytes
    return DataSize(
        documents=corpus.train.document_count + corpus.heldout.document_count,
        text_bytes=size,
        tokens=train.token_count + held.token_count,
        exact=True,
        sampled_bytes=size,
        tokens_per_step=per_step,
        passes=spec.train.steps * per_step / len(train),
        labelled=_share(train),
        behind_a_cut=_behind(train, data.seq_len),
        read=len(corpus.train.index) + sum(one.count for one in corpus.faults),
        left_out=(*corpus.faults, *train.left_out, *held.left_out),
    )


class _Sample:
    """The first documents of a corpus, with their texts."""

    def __init__(self) -> None:
        self.documents: list[Document] = []
        self.size_bytes = 0

    def add(self, piece: Piece) -> None:
        """Take a document, unless there are enough."""
        if self.size_bytes >= SAMPLED_BYTES or piece.size_bytes > PIECE_BYTES:
            return
        if isinstance(text := piece.read(), str):
            if not piece.is_chat:
                text = text[: SAMPLED_BYTES - self.size_bytes]
            self.documents.append(Document(name=piece.name, text=text, is_chat=piece.is_chat))
            self.size_bytes += len(text.encode())

    def estimate(
        self, spec: RunSpec, inputs: Inputs, listed: int, texts: int
    ) -> tuple[int | None, float | None, float | None]:
        """Return the tokens of `listed` bytes with so many texts in them, the share of the tokens that are labelled,
        and that of the labels that follow a cut."""
        if not self.size_bytes:
            return None, None, None
        stream = inputs.tokenize(self.documents, spec.data)
        # Every text is followed by one end-of-text token, however long it is.
        ends = sum(not document.is_chat for document in self.documents)
        tokens = round((len(stream) - ends) / self.size_bytes * listed) + texts
        packed = inputs.pack(stream, spec.data)
        return tokens, _share(stream), _behind(packed, spec.data.seq_len)


def _behind(packed: TokenStream, seq_len: int) -> float | None:
    return None if packed.labelled is None else labels_after_a_cut(packed, seq_len)


def _share(stream: TokenStream) -> float | None:
    return None if stream.labelled is None else stream.labelled_count / max(1, stream.token_count)
