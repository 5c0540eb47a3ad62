"""Generate training rows with a model: on-policy distillation (Agarwal et al. 2023, arXiv 2306.13649).

    corpus row -> prompt -> completion by the model -> a row of prompt and completion, labels on the completion only

A micro-batch has either corpus rows only or generated rows only; `is_written` spreads the generated micro-batches
evenly over a run. A prompt is the part of a corpus row before a turn of the assistant, or the first tokens of a
document. Completions depend only on the weights, the seed, the step and the row, so a resumed run generates the same
ones (bit for bit on a CPU).
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
"""Document number of the padding after a generated row, whose prompt and completion are document 0."""


RowKey = tuple[int, int, int]
"""Key of a generated row: the step, the index of its micro-batch among the step's generated micro-batches, and the
index of the row in that micro-batch, counted over all ranks. Both indices start at 0."""


class Written(NamedTuple):
    """The rows of one generated micro-batch."""

    prompts: list[list[int]]
    completions: list[list[int]]
    """The generated tokens of each row, including the end token."""
    ended: list[bool]
    """Whether each completion ends with an end token, and not at the length limit."""
    log_p: list[float]
    """Sum of the log-probabilities with which each completion's tokens were sampled, in nats."""


def is_written(share: float, index: int) -> bool:
    """Return whether the rows of a run's micro-batch `index`, from 0, are generated."""
    return math.floor((index + 1) * share) > math.floor(index * share)


def prompt_of(batch: Batch, row: int, max_tokens: int, key: int) -> list[int]:
    """Return the prompt of a corpus row, from the document that has most of the row's labels.

    In a conversation, the prompt is all tokens before one of the assistant's turns, which `key` selects. In plain
    text, it is the beginning of the document: at most half of it, and at most `max_tokens` tokens.
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
    # Turns that cannot be generated: one whose beginning is in an earlier row has no prompt, and after a prompt that
    # fills the row no token fits.
    turns = [position for position in begins if first < position < len(tokens_T) - 1]
    last = first + max(1, min(max_tokens, (end - first) // 2))
    if turns:
        last = turns[key % len(turns)] + 1
    return [int(token) for token in tokens_T[first:last]]


class Turns(NamedTuple):
    """Statistics of the assistant's turns in a corpus."""

    end: int
    """The token that ends more than half of the turns."""
    tokens: float
    """Median length of a turn in tokens, including the end token."""


def turns_of(batches: Sequence[Batch]) -> Turns | None:
    """Return the end token and the median length of the turns: labelled tokens after unlabelled ones of the same
    document. None if there are no turns, or if no token ends more than half of them.
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
    """Return rows of prompt and completion, padded to `seq_len`. Only the completions are labels."""
    shape = (len(written.prompts), seq_len)
    tokens_BT = np.zeros(shape, dtype=np.int64)
    documents_BT = np.full(shape, PADDING, dtype=np.int64)
    labels_BT = np.full(shape, IGNORED, dtype=np.int64)
    for row, (prompt, completion) in enumerate(
        zip(written.prompts, written.completions, strict=True)
    ):
        whole = [*prompt, *completion]
        tokens_BT[row, : len(whole)] = whole
        documents_BT[row, : len(whole)] = 0
        # Each token is predicted at the position before it.
        labels_BT[row, len(prompt) - 1 : len(whole) - 1] = completion
    return Batch(
        tokens_BT=tokens_BT, documents_BT=documents_BT, labels_BT=labels_BT, row_ids=row_ids
    )


@dataclass(slots=True)
class Completion:
    """The tokens that a model generates for one prompt."""

    tokens: list[int]
    log_p: float = 0.0
    ended: bool = False


class Rollout:
    """Generates the rows of a run's generated micro-batches."""

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
        """`decoder` generates `slots` rows at once, in `dtype`. The number of slots is fixed, because the exact bits of
        a row depend on it. A completion ends at the end token of the corpus's `turns` or at an end token of the model.
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
        """Return a batch of generated rows for each of `batches`, with prompts from its rows."""
        keys, prompts, max_tokens = [], [], self.section.prompt_tokens
        for index, batch in enumerate(batches):
            first = self._rank * len(batch.row_ids)
            for row in range(len(batch.row_ids)):
                keys.append((step, index, first + row))
                prompts.append(prompt_of(batch, row, max_tokens, row_key(self._seed, keys[-1])))
        completions = self._complete(keys, prompts)
        result, first = [], 0
        for batch in batches:
            part = slice(first, first + len(batch.row_ids))
            first = part.stop
            written = Written(
                prompts[part],
                [completion.tokens for completion in completions[part]],
                [completion.ended for completion in completions[part]],
                [completion.log_p for completion in completions[part]],
            )
            result.append((written_batch(written, self._seq_len, batch.row_ids), written))
        return result

    def prepare(self) -> None:
        """Create the generator, unless it exists, so that no step waits for its allocation, compilation and capture."""
        if self._generator is None:
            self._generator = Generator(
                self._writer,
                slots=self._slots,
                capacity=self._seq_len,
                end_ids=self._ends,
                sampling=self._sampling,
                dtype=self._dtype,
            )

    def _complete(self, keys: Sequence[RowKey], prompts: Sequence[list[int]]) -> list[Completion]:
        """Generate a completion of each prompt."""
        limits = [
            max(1, min(self.section.max_new_tokens, self._seq_len - len(prompt)))
            for prompt in prompts
        ]
        completions = [Completion([]) for _ in prompts]
        self.prepare()
        assert self._generator is not None
        if self._writer is not self._decoder:
            gather_weights(self._decoder, self._writer)
        self._generator.refresh()
        for step in self._generator.generate(prompts, max_tokens=limits, keys=keys):
            completion = completions[step.prompt]
            completion.tokens.append(step.token)
            completion.log_p += step.log_p
            completion.ended = step.ended == "end_of_text"
        return completions
