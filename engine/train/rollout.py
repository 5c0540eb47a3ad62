"""Writes rows of a step with a model: on-policy distillation (Agarwal et al. 2023, arXiv 2306.13649).

    corpus row -> prompt -> the model goes on -> a row of prompt and text, with labels on the text alone

A forward pass is read from the corpus or written as a whole; `is_written` spreads the written ones evenly over a
run. A prompt is the part of a corpus row before a turn of the assistant, or the first tokens of a document. What is
written is a function of weights, seed, step and row, so a run that resumes writes the same (on a CPU to the bit).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from engine.data.batches import IGNORED, Batch, Int64Array
from engine.formats.tokenizer import Tokenizer
from engine.generation.complete import end_ids
from engine.generation.generate import Generator
from engine.generation.sampling import Sampling, row_key
from engine.models.decoder import Decoder
from engine.spec import RolloutSection

# Shapes: B rows, T tokens of a row

PADDING = 1
"""Document number of the padding after a written row; the row's own document is 0."""


class Written(NamedTuple):
    """The rows that a model wrote for one forward pass."""

    prompts: list[list[int]]
    texts: list[list[int]]
    """The written tokens of each row, the end of text included."""
    ended: list[bool]
    """Whether the text ends by itself and not by its length."""
    log_p: list[float]
    """Sum of the log-probabilities of each row's tokens, as they were drawn, in nats."""


def is_written(share: float, index: int) -> bool:
    """Return whether forward pass `index` of a run, from 0, is written."""
    return math.floor((index + 1) * share) > math.floor(index * share)


def prompt_of(batch: Batch, row: int, most: int, key: int) -> list[int]:
    """Return the prompt of a corpus row: of its longest document with a label, what comes before a turn of the
    assistant (one of them, by `key`), or at most `most` tokens of a text.
    """
    tokens_T, documents_T = batch.tokens_BT[row], batch.documents_BT[row]
    labelled_T = batch.labels_BT[row] != IGNORED
    counts = Counter(documents_T[labelled_T].tolist())
    document = counts.most_common(1)[0][0]
    places = np.flatnonzero(documents_T == document)
    first, end = int(places[0]), int(places[-1]) + 1
    begins = [
        place
        for place in range(first, end)
        if labelled_T[place] and (place == first or not labelled_T[place - 1])
    ]
    # A row may begin within a turn, which has no prompt, or end with a prompt, which leaves no room.
    turns = [place for place in begins if first < place < len(tokens_T) - 1]
    last = first + max(1, min(most, (end - first) // 2))
    if turns:
        last = turns[key % len(turns)] + 1
    return [int(token) for token in tokens_T[first:last]]


def turn_ends(batches: Sequence[Batch]) -> set[int]:
    """Return the token that ends most labelled parts within rows, as that of a turn; empty for texts, whose labels
    end with the row or the document.
    """
    found: Counter[int] = Counter()
    for batch in batches:
        labelled_BT = batch.labels_BT != IGNORED
        stops_BT = labelled_BT[:, :-1] & ~labelled_BT[:, 1:]
        found.update(batch.labels_BT[:, :-1][stops_BT].tolist())
    if not found:
        return set()
    token, count = found.most_common(1)[0]
    return {int(token)} if 2 * count > found.total() else set()


def written_batch(written: Written, seq_len: int, row_ids: Int64Array) -> Batch:
    """Return rows of prompt and text, padded to `seq_len`. The labels are the written tokens."""
    shape = (len(written.texts), seq_len)
    tokens_BT = np.zeros(shape, dtype=np.int64)
    documents_BT = np.full(shape, PADDING, dtype=np.int64)
    labels_BT = np.full(shape, IGNORED, dtype=np.int64)
    for row, (prompt, text) in enumerate(zip(written.prompts, written.texts, strict=True)):
        whole = [*prompt, *text]
        tokens_BT[row, : len(whole)] = whole
        documents_BT[row, : len(whole)] = 0
        # Each token is predicted at the position before it.
        labels_BT[row, len(prompt) - 1 : len(whole) - 1] = text
    return Batch(
        tokens_BT=tokens_BT, documents_BT=documents_BT, labels_BT=labels_BT, row_ids=row_ids
    )


@dataclass(slots=True)
class _Row:
    tokens: list[int]
    log_p: float = 0.0
    ended: bool = False


class Rollout:
    """Writes the rows of a run's written passes."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        section: RolloutSection,
        *,
        seed: int,
        seq_len: int,
        slots: int,
        dtype: torch.dtype,
        ends: set[int],
    ) -> None:
        """`decoder` writes, in `dtype`, `slots` rows side by side: always as many, because a row's bits depend on it.
        `ends` are further tokens that end a text, in addition to the model's own.
        """
        self.section, self._seq_len, self._seed = section, seq_len, seed
        self._decoder, self._dtype = decoder, dtype
        self._ends = sorted({*end_ids(decoder, tokenizer), *ends})
        self._sampling = Sampling(
            temperature=section.temperature,
            top_k=section.top_k,
            top_p=section.top_p,
            min_p=section.min_p,
            seed=seed,
        )
        self._generator: Generator | None = None
        self._slots = slots

    def write(self, batches: Sequence[Batch], step: int) -> list[tuple[Batch, Written]]:
        """Return rows written from the prompts of corpus rows, in the place of each of `batches`."""
        names = [
            (step, number, row)
            for number, batch in enumerate(batches)
            for row in range(len(batch.row_ids))
        ]
        most = self.section.prompt_tokens
        prompts = [
            prompt_of(batches[number], row, most, row_key(self._seed, (step, number, row)))
            for step, number, row in names
        ]
        limits = [
            max(1, min(self.section.max_new_tokens, self._seq_len - len(prompt)))
            for prompt in prompts
        ]
        rows = [_Row([]) for _ in prompts]
        generator = self.prepare()
        generator.refresh()
        for one in generator.generate(prompts, max_tokens=limits, keys=names):
            row = rows[one.prompt]
            row.tokens.append(one.token)
            row.log_p += one.log_p
            row.ended = one.ended == "end_of_text"
        found, first = [], 0
        for batch in batches:
            part = slice(first, first + len(batch.row_ids))
            first = part.stop
            written = Written(
                prompts[part],
                [row.tokens for row in rows[part]],
                [row.ended for row in rows[part]],
                [row.log_p for row in rows[part]],
            )
            found.append((written_batch(written, self._seq_len, batch.row_ids), written))
        return found

    def prepare(self) -> Generator:
        """Allocate, compile and capture what writing needs, unless that was done: no step should wait for it."""
        if self._generator is None:
            self._generator = Generator(
                self._decoder,
                slots=self._slots,
                capacity=self._seq_len,
                end_ids=self._ends,
                sampling=self._sampling,
                dtype=self._dtype,
            )
        return self._generator
