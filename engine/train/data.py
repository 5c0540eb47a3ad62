"""Prepare the data of a run: read the corpus, split it, tokenize it, and take the held-out rows.

A resumed run must see the tokens that it began with. The order of rows is a function of the seed and the
number of rows (`engine.data.batches`), so a position in that order is only valid for the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.data.batches import Batch, heldout_rows
from engine.data.corpus import open_corpus
from engine.data.sources import column_names
from engine.data.tokens import TokenStream
from engine.errors import CorpusError
from engine.log.events import DataReady, Phase
from engine.plan.inputs import Inputs
from engine.plan.memory import EVAL_ROWS_AT_ONCE
from engine.spec import RunSpec
from engine.train import record
from engine.train.record import Log


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    stream: TokenStream
    heldout_stream: TokenStream
    heldout: list[Batch]
    ready: DataReady


def prepare_data(spec: RunSpec, inputs: Inputs, seen: DataReady | None, log: Log) -> Data:
    """Read, split and tokenize the corpus.

    `seen` is what the first session of a resumed run logged. Raises CorpusError when the tokens differ
    from it.
    """
    data = spec.data
    log(Phase(name="reading the corpus", detail=data.corpus))
    corpus = open_corpus(
        data.corpus,
        heldout_fraction=data.heldout_fraction,
        include_tests=data.include_tests,
        max_bytes=data.max_bytes or None,
        columns=column_names(data.columns),
    )
    count = corpus.train.document_count + corpus.heldout.document_count
    log(Phase(name="tokenizing", detail=f"{count} documents"))
    train = inputs.rows(corpus.train.documents, data)
    held = inputs.rows(corpus.heldout.documents, data)
    rows = heldout_rows(held, data.seq_len, spec.eval.rows)
    ready = record.data(corpus, train, held, data.seq_len)
    log(ready)
    if seen is not None and seen.train_sha256 != ready.train_sha256:
        raise CorpusError(
            f"corpus: {data.corpus} — expected the tokens this run began with "
            f"(sha256 {seen.train_sha256[:12]}), found others ({ready.train_sha256[:12]})",
            hint="restore the files as they were, or start a new run",
        )
    return Data(
        stream=train, heldout_stream=held, heldout=list(rows.split(EVAL_ROWS_AT_ONCE)), ready=ready
    )
