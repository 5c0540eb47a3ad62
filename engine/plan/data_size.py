"""Measure what a run would train on, without torch: documents, tokens, and the passes over them that its steps make.

A corpus of at most `SAMPLED_BYTES` is split and tokenized as the run would (which then finds the tokens in the cache),
so its numbers are exact and a corpus too small for one row is refused. Of a larger one the first megabytes are
tokenized, and the tokens of the rest follow from its bytes. Every record of the first `LISTED_BYTES` is read, so that
those with a fault are counted; the number of the others is estimated from the sizes of the files.
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
"""Size of the text that is listed; listing a file of records reads every record."""
SAMPLED_BYTES = 2 << 20
"""Size of the text that is tokenized, which takes a second on a slow core."""
MANY_PASSES = 10
"""Number of epochs above which a model is more likely to memorise a text than to learn from it."""
PIECE_BYTES = 16 << 20
"""Largest size of a document that is read for the sample."""


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
    """Share of the labels of conversations whose conversation begins in an earlier row; None for text, and where not
    all was tokenized."""
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
        lines += [f"data: {fault}" for fault in self.left_out]
        lines += behind_a_cut_lines(self.behind_a_cut, "data: ")
        lines.append(
            f"steps: {steps:,} of {self.tokens_per_step:,} tokens each, {passes_text(self.passes)}"
        )
        return lines


def passes_text(passes: float | None) -> str:
    """Describe how often the steps train on the same text, with advice if that is many times."""
    if passes is None:
        return "an unknown number of passes over the training text"
    text = f"{passes:.3g} passes over the training text"
    if passes > MANY_PASSES:
        text += f": more than {MANY_PASSES} mostly memorise it; lower train.steps, or add text"
    return text


def behind_a_cut_lines(share: float | None, prefix: str = "") -> list[str]:
    """Describe how many labels of conversations are predicted without their question; empty if none are."""
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
    """Estimate how many documents are beyond those that were read, from their size and the sizes of the files."""
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
    """The first documents of a corpus, with their texts."""

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
        """Return the number of tokens in `listed` bytes with `texts` texts, and the share of the tokens that are
        labelled; None for text. Raises CorpusError where none can be tokenized."""
        if not self.size_bytes:
            return None, None
        encoded = list(inputs.encoder(spec.data).encode(self.documents))
        left_out: dict[str, LeftOut] = {}
        for one in encoded:
            if one.left_out is not None:
                count_left_out(left_out, one.left_out)
        sampled = sum(len(one.ids) for one in encoded)
        raise_if_no_tokens(tuple(left_out.values()), sampled)
        # Every text is followed by one end-of-text token, however long it is.
        ends = sum(not document.is_chat for document in self.documents)
        tokens = round((sampled - ends) / self.size_bytes * listed) + texts
        if ends == len(self.documents):
            return tokens, None
        return tokens, sum(int(one.labels.sum()) for one in encoded) / max(1, sampled)
