"""Prepare the data of a run: read the corpus, split it, tokenize it, and take the held-out rows.

A resumed run must see the tokens that it began with, of both splits. The order of rows is a function of the seed and
the number of rows (`engine.data.batches`), so a position in that order is only valid for the same tokens, and losses
before and after are only comparable on the same text.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from engine.data.batches import Batch, heldout_rows
from engine.data.packing import DOCUMENTS, WINDOW
from engine.data.token_cache import Made
from engine.data.tokens import TokenStream
from engine.errors import CorpusError
from engine.log.events import DataReady, Note, Phase
from engine.plan.inputs import Inputs
from engine.plan.memory import EVAL_ROWS_AT_ONCE
from engine.spec import RunSpec
from engine.train import record
from engine.train.record import Log
from engine.units import format_bytes

PACKED_LOOKED_AT = 1 << 17
PACKED_ALLOWED = 0.02
"""Share of the rows that may be needless."""
SAID_EVERY_S = 10.0
"""How often the progress of what takes long is logged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    stream: TokenStream
    heldout_stream: TokenStream
    heldout: list[Batch]
    made: tuple[Made, Made]
    """What was made of the documents of both splits."""
    ready: DataReady


def needless_rows(stream: TokenStream, seq_len: int) -> int:
    """Return how many of the first rows fit into the padding of another one, each into its own: none of which as many
    were made as are needed, but for few at the edges of what is packed together."""
    assert stream.padding is not None
    rows = min(len(stream) // seq_len, PACKED_LOOKED_AT)
    fills = stream.padding & (stream.starts[:-1] < rows * seq_len)
    padding_B = np.bincount(
        stream.starts[:-1][fills] // seq_len, weights=stream.lengths[fills], minlength=rows
    )
    # The rest of a document longer than a row stays where it is.
    whole_B = np.isin(np.arange(rows) * seq_len, stream.starts)
    taken = np.sort(seq_len - padding_B[whole_B & (padding_B > 0)]).tolist()
    fullest, least, pairs = len(taken) - 1, 0, 0
    while least < fullest:
        if taken[least] + taken[fullest] <= seq_len:
            least, pairs = least + 1, pairs + 1
        fullest -= 1
    return pairs if pairs > max(PACKED_ALLOWED * rows, len(stream.lengths) / WINDOW + 1) else 0


class _Said:
    """Logs what is being done to the corpus: when it begins, and how far it is every few seconds."""

    def __init__(self, log: Log, source: str) -> None:
        self._log, self._source = log, source
        self._what, self._at_s = "", 0.0
        self("reading the corpus", 0, None)

    def __call__(self, what: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if what == self._what and now < self._at_s + SAID_EVERY_S:
            return
        detail = self._source
        if what == self._what and done:
            detail = format_bytes(done)
        if total:
            detail = f"{done / total:.0%} of {format_bytes(total)}"
        self._what, self._at_s = what, now
        self._log(Phase(name=what, detail=detail))


def prepare_data(spec: RunSpec, inputs: Inputs, seen: DataReady | None, log: Log) -> Data:
    """Read, split and tokenize the corpus, or take its tokens from the cache.

    `seen` is what the first session of a resumed run logged. Raises CorpusError when the tokens differ
    from it.
    """
    data = spec.data
    tokens = inputs.load_tokens(data, _Said(log, data.corpus))
    if not tokens.is_kept:
        log(Note(level="warning", text=f"tokens: {tokens.note}"))
    log(Phase(name="taking the rows", detail=tokens.note))
    train, held = tokens.train, tokens.heldout
    rows = heldout_rows(held, data.seq_len, spec.eval.rows)
    ready = record.data(data.corpus, tokens, data.seq_len)
    log(ready)
    if data.packing == DOCUMENTS and (more := needless_rows(train, data.seq_len)):
        text = (
            f"packing: of the first {min(len(train) // data.seq_len, PACKED_LOOKED_AT):,} rows {more:,} fit into the "
            "padding of others, and are computed for nothing: look at what places documents (engine.data.packing)"
        )
        log(Note(level="warning", text=text))
    begun = ready if seen is None else seen
    for split, before, now in (
        ("training", begun.train_sha256, ready.train_sha256),
        ("held-out", begun.heldout_sha256, ready.heldout_sha256),
    ):
        if before != now:
            raise CorpusError(
                f"corpus: {data.corpus} — expected the {split} tokens this run began with "
                f"(sha256 {before[:12]}), found others ({now[:12]})",
                hint="restore the files as they were, or start a new run",
            )
    return Data(
        stream=train,
        heldout_stream=held,
        heldout=list(rows.split(EVAL_ROWS_AT_ONCE)),
        made=tokens.made,
        ready=ready,
    )
