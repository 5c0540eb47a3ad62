"""Write rows of a step with a model: on-policy distillation (Agarwal et al. 2023, arXiv 2306.13649).

    corpus row -> prompt -> the model goes on -> a row of prompt and text, with labels on the text alone

The rows of a micro-batch are all read from the corpus or all written; `is_written` spreads the written micro-batches
evenly over a run. A prompt is the part of a corpus row before a turn of the assistant, or the first tokens of a
document. What is written is a function of weights, seed, step and row, so a run that resumes writes the same (on a CPU
to the bit).
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
from engine.models.whole_copy import empty_copy, gather_weights, is_sharded
from engine.spec import RolloutSection

# Shapes: B rows, T tokens of a row

PADDING = 1
"""Document number of the padding after a written row; the row's own document is 0."""


RowKey = tuple[int, int, int]
"""Step, number of the micro-batch among those of the step that a model wrote, and row of it over all ranks; both from
0."""


class Written(NamedTuple):
    """The rows of one micro-batch that a model wrote."""

    prompts: list[list[int]]
    texts: list[list[int]]
    """The written tokens of each row, the end of text included."""
    ended: list[bool]
    """Whether the text ends by itself and not by its length."""
    log_p: list[float]
    """Sum of the log-probabilities of each row's tokens, as they were drawn, in nats."""


def is_written(share: float, index: int) -> bool:
    """Return whether a model writes the rows of micro-batch `index` of a run, from 0."""
    return math.floor((index + 1) * share) > math.floor(index * share)


def prompt_of(batch: Batch, row: int, max_tokens: int, key: int) -> list[int]:
    """Return the prompt of a corpus row: in its longest labelled document, the tokens before a turn of the assistant
    (one of them, chosen by `key`), or at most `max_tokens` tokens of a text.
    """
    tokens_T, documents_T = batch.tokens_BT[row], batch.documents_BT[row]
    labelled_T = batch.labels_BT[row] != IGNORED
    counts = Counter(documents_T[labelled_T].tolist())
    document = counts.most_common(1)[0][0]
    positions = np.flatnonzero(documents_T == document)
    first, end = int(positions[0]), int(positions[-1]) + 1
    begins = [
        position
        for position in range(first, end)
        if labelled_T[position] and (position == first or not labelled_T[position - 1])
    ]
    # A row may begin within a turn, which then has no prompt, or end with a prompt, after which no token fits.
    turns = [position for position in begins if first < position < len(tokens_T) - 1]
    last = first + max(1, min(max_tokens, (end - first) // 2))
    if turns:
        last = turns[key % len(turns)] + 1
    return [int(token) for token in tokens_T[first:last]]


class Turns(NamedTuple):
    """The turns of the assistant in a corpus."""

    end: int
    """The token that ends most of them."""
    tokens: float
    """Median length in tokens, the end included."""


def turns_of(batches: Sequence[Batch]) -> Turns | None:
    """Return the common end and the length of the turns, which are labelled parts after a prompt of the same document.
    None for texts, and for turns without a common end.
    """
    ends: Counter[int] = Counter()
    lengths: list[int] = []
    for batch in batches:
        for labels_T, documents_T in zip(batch.labels_BT, batch.documents_BT, strict=True):
            steps_T = np.diff((labels_T != IGNORED).astype(np.int8))
            stops = np.flatnonzero(steps_T == -1)
            for before in np.flatnonzero(steps_T == 1):
                later = stops[stops > before]
                if len(later) and documents_T[before] == documents_T[before + 1]:
                    ends[int(labels_T[later[0]])] += 1
                    lengths.append(int(later[0] - before))
    if not ends:
        return None
    token, count = ends.most_common(1)[0]
    return Turns(token, float(np.median(lengths))) if 2 * count > ends.total() else None


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
class Text:
    """The text that a model writes to one prompt."""

    tokens: list[int]
    log_p: float = 0.0
    ended: bool = False


class Rollout:
    """Writes the rows of those micro-batches of a run that a model writes."""

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
        turns: Turns | None = None,
        rank: int = 0,
    ) -> None:
        """`decoder` writes `slots` rows at once, in `dtype`; the number is fixed, because a row's bits depend on it.
        A text ends at the end token of the corpus's `turns` or at one of the model's own. `rank` is this rank.
        """
        self.section, self.turns = section, turns
        self._seq_len, self._seed, self._rank = seq_len, seed, rank
        self._decoder, self._dtype = decoder, dtype
        self._ends = sorted({*end_ids(decoder, tokenizer), *([turns.end] if turns else [])})
        self._sampling = Sampling(
            temperature=section.temperature,
            top_k=section.top_k,
            top_p=section.top_p,
            min_p=section.min_p,
            seed=seed,
        )
        self._generator: Generator | None = None
        self._slots = slots
        self._writer = empty_copy(decoder) if is_sharded(decoder) else decoder

    def write(self, batches: Sequence[Batch], step: int) -> list[tuple[Batch, Written]]:
        """Return a batch of written rows for each of `batches`, from the prompts of its rows."""
        keys, prompts, max_tokens = [], [], self.section.prompt_tokens
        for index, batch in enumerate(batches):
            first = self._rank * len(batch.row_ids)
            for row in range(len(batch.row_ids)):
                keys.append((step, index, first + row))
                prompts.append(prompt_of(batch, row, max_tokens, row_key(self._seed, keys[-1])))
        texts = self._texts(keys, prompts)
        result, first = [], 0
        for batch in batches:
            part = slice(first, first + len(batch.row_ids))
            first = part.stop
            written = Written(
                prompts[part],
                [text.tokens for text in texts[part]],
                [text.ended for text in texts[part]],
                [text.log_p for text in texts[part]],
            )
            result.append((written_batch(written, self._seq_len, batch.row_ids), written))
        return result

    def prepare(self) -> None:
        """Create the generator, unless there is one, so that no step waits for allocation, compilation and capture."""
        if self._generator is None:
            self._generator = Generator(
                self._writer,
                slots=self._slots,
                capacity=self._seq_len,
                end_ids=self._ends,
                sampling=self._sampling,
                dtype=self._dtype,
            )

    def _texts(self, keys: Sequence[RowKey], prompts: Sequence[list[int]]) -> list[Text]:
        """Write a text to each prompt."""
        limits = [
            max(1, min(self.section.max_new_tokens, self._seq_len - len(prompt)))
            for prompt in prompts
        ]
        texts = [Text([]) for _ in prompts]
        self.prepare()
        assert self._generator is not None
        if self._writer is not self._decoder:
            gather_weights(self._decoder, self._writer)
        self._generator.refresh()
        for step in self._generator.generate(prompts, max_tokens=limits, keys=keys):
            text = texts[step.prompt]
            text.tokens.append(step.token)
            text.log_p += step.log_p
            text.ended = step.ended == "end_of_text"
        return texts
