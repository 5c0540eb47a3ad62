"""Prompts are what comes before a turn or the beginning of a text, and labels are the written tokens alone."""

from __future__ import annotations

import numpy as np
import pytest

from engine.data.batches import IGNORED, Batch
from engine.train.rollout import (
    PADDING,
    Turns,
    Written,
    is_written,
    prompt_of,
    turns_of,
    written_batch,
)


def batch_of(*rows: tuple[list[int], list[int], str]) -> Batch:
    """Rows by tokens, documents and which positions have a label (`x`), which is the next token."""
    tokens_BT, documents_BT = (np.array([row[at] for row in rows]) for at in (0, 1))
    next_BT = np.roll(tokens_BT, -1, axis=1)
    has_BT = np.array([[mark == "x" for mark in row[2]] for row in rows])
    return Batch(
        tokens_BT=tokens_BT,
        documents_BT=documents_BT,
        labels_BT=np.where(has_BT, next_BT, IGNORED),
        row_ids=np.arange(len(rows)),
    )


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1 / 3, 0.75, 1.0])
def test_written_passes_are_spread_evenly(share: float) -> None:
    made = [is_written(share, index) for index in range(600)]
    for count in range(1, 601):
        assert abs(sum(made[:count]) - share * count) < 1 + 1e-9
    assert sum(made) in (int(600 * share), int(600 * share) + 1, round(600 * share))


def test_a_text_is_continued_from_its_first_tokens() -> None:
    text = batch_of((list(range(10, 22)), [0] * 3 + [1] * 9, "xx.xxxxxxxx."))
    assert prompt_of(text, 0, 3, 0) == [13, 14, 15]
    # At most half of what the row has of the document.
    assert prompt_of(text, 0, 100, 0) == [13, 14, 15, 16]


def test_a_turn_is_written_behind_all_that_comes_before_it() -> None:
    #                  question     answer    question answer
    chat = batch_of((list(range(10, 22)), [0] * 12, "..xxx...xxx."))
    assert {tuple(prompt_of(chat, 0, 2, key)) for key in range(8)} == {
        tuple(range(10, 13)),
        tuple(range(10, 19)),
    }
    # A row that ends with a prompt has no room behind it.
    full = batch_of((list(range(10, 22)), [0] * 12, "..xxx......x"))
    assert prompt_of(full, 0, 2, 1) == list(range(10, 13))
    only = batch_of((list(range(10, 22)), [0] * 12, "...........x"))
    assert prompt_of(only, 0, 2, 1) == [10, 11]
    # A row that begins within a turn.
    cut = batch_of((list(range(10, 22)), [0] * 12, "xx......xxx."))
    assert prompt_of(cut, 0, 2, 5) == list(range(10, 19))


def test_the_end_and_the_length_of_turns_are_found_and_texts_have_none() -> None:
    tokens = [7, 1, 2, 3, 9, 4, 5, 6, 9, 8, 8, 8]
    assert turns_of([batch_of((tokens, [0] * 12, "..xx.xxx...."))]) == Turns(9, 2.5)
    # A turn that the row cuts off has no end.
    assert turns_of([batch_of((tokens, [0] * 12, "..xx..xxxxxx"))]) == Turns(9, 2)
    assert turns_of([batch_of((tokens, [0] * 12, "x" * 12))]) is None
    # Texts with padding between them.
    assert turns_of([batch_of((tokens, [0] * 5 + [1] + [2] * 6, "xxxx..xxxxx."))]) is None
    # Turns without a common end.
    assert turns_of([batch_of((tokens, [0] * 12, "..xx.xx....."))]) is None


def test_labels_are_the_written_tokens_and_nothing_else() -> None:
    written = Written([[5, 6, 7], [8]], [[1, 2], [3, 4, 9]], [False, True], [-1.0, -2.0])
    batch = written_batch(written, 6, np.array([40, 2]))
    assert batch.tokens_BT.tolist() == [[5, 6, 7, 1, 2, 0], [8, 3, 4, 9, 0, 0]]
    assert batch.labels_BT.tolist() == [
        [IGNORED, IGNORED, 1, 2, IGNORED, IGNORED],
        [3, 4, 9, IGNORED, IGNORED, IGNORED],
    ]
    p = PADDING
    assert batch.documents_BT.tolist() == [[0, 0, 0, 0, 0, p], [0, 0, 0, 0, p, p]]
    assert batch.row_ids.tolist() == [40, 2]
