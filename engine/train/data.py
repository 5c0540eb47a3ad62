"""Prepare the data of a run: read the corpus, split it, tokenize it, and take the held-out rows.

A resumed run must read the same training and held-out tokens as its first session. The order of rows is a function of
the seed and the number of rows (`engine.data.batches`), so a position in that order is only valid for the same tokens.
Losses before and after a resume are only comparable on the same held-out tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.data.batches import Batch, heldout_rows
from engine.data.tokens import TokenStream
from engine.errors import CorpusError
from engine.log.events import DataReady, Note, Phase
from engine.plan.inputs import Inputs
from engine.plan.memory import EVAL_ROWS_AT_ONCE
from engine.spec import RunSpec
from engine.train import to_events
from engine.train.to_events import Log
from engine.units import format_bytes

PROGRESS_EVERY_S = 10.0
"""Interval between logged progress lines, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    stream: TokenStream
    heldout_stream: TokenStream
    heldout: list[Batch]
    ready: DataReady


class _Progress:
    """Logs the beginning of each stage of reading the corpus, and its progress every PROGRESS_EVERY_S."""

    def __init__(self, log: Log, source: str) -> None:
        self._log, self._source = log, source
        self._what, self._at_s = "", 0.0
        self("reading the corpus", 0, None)

    def __call__(self, what: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if what == self._what and now < self._at_s + PROGRESS_EVERY_S:
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

    `seen` is the event that the first session of a resumed run logged. Raises CorpusError when the tokens
    differ from those of that event.
    """
    data = spec.data
    tokens = inputs.load_tokens(data, _Progress(log, data.corpus))
    if not tokens.is_kept:
        log(Note(level="warning", text=f"tokens: {tokens.note}"))
    log(Phase(name="selecting the held-out rows", detail=tokens.note))
    train, heldout = tokens.train, tokens.heldout
    rows = heldout_rows(heldout, data.seq_len, spec.eval.rows)
    ready = to_events.data(data.corpus, tokens, data.seq_len)
    log(ready)
    begun = ready if seen is None else seen
    for split, before, now in (
        ("training", begun.train_sha256, ready.train_sha256),
        ("held-out", begun.heldout_sha256, ready.heldout_sha256),
    ):
        if before != now:
            raise CorpusError(
                f"corpus: {data.corpus} — expected the {split} tokens this run began with "
                f"(sha256 {before[:12]}), found different ones (sha256 {now[:12]})",
                hint="restore the original files, or start a new run",
            )
    return Data(
        stream=train,
        heldout_stream=heldout,
        heldout=list(rows.split(EVAL_ROWS_AT_ONCE)),
        ready=ready,
    )
