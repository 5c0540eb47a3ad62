"""One held-out prompt, continued at each evaluation: the same prompt, and the most likely tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.generation.generate import generate
from engine.models.packed import head_of
from engine.train.heldout import MAX_PROMPT, greedy_continuation, prompt_of
from tests.support.packed_models import lively, make_batch, make_config

V = 117
CPU = torch.device("cpu")


def test_a_continuation_is_that_of_generating_text() -> None:
    decoder = lively(make_config(vocab_size=V))
    for length in (1, 5, MAX_PROMPT):
        prompt = list(range(3, 3 + length))
        state = torch.get_rng_state()
        wanted = [one.token for one in generate(decoder, [prompt], max_tokens=12)]
        for guess in ([0] * 12, wanted, wanted[::-1]):
            assert (
                greedy_continuation(decoder.hidden, head_of(decoder), prompt, guess, CPU) == wanted
            )
        assert torch.equal(torch.get_rng_state(), state)


def test_a_good_guess_takes_one_pass() -> None:
    decoder, passes = lively(make_config(vocab_size=V)), []

    def hidden(*rows: torch.Tensor) -> torch.Tensor:
        passes.append(rows)
        return decoder.hidden(*rows)

    found = greedy_continuation(hidden, head_of(decoder), [3, 4], [0] * 8, CPU)
    assert len(passes) <= 9
    passes.clear()
    assert (
        greedy_continuation(hidden, head_of(decoder), [3, 4], found, CPU) == found
        and len(passes) == 1
    )


def test_a_prompt_is_the_beginning_of_a_document() -> None:
    batch = make_batch(2, 40, V)
    assert prompt_of([batch]) == batch.tokens_BT[0, :MAX_PROMPT].tolist()


def test_a_prompt_of_a_conversation_ends_where_something_is_to_be_learnt() -> None:
    batch = make_batch(1, 40, V)
    labels_BT = batch.labels_BT.copy()
    labels_BT[:, :30] = -100
    asked = replace(batch, labels_BT=labels_BT)
    assert prompt_of([asked]) == batch.tokens_BT[0, 31 - MAX_PROMPT : 31].tolist()


def test_a_prompt_is_of_one_document() -> None:
    batch = make_batch(1, 40, V)
    documents_BT = np.repeat(np.arange(5), 8)[None]
    found = prompt_of([replace(batch, documents_BT=documents_BT)])
    assert found == batch.tokens_BT[0, : len(found)].tolist() and len(found) <= 8


@pytest.mark.parametrize("rows", [0, 1])
def test_without_a_label_there_is_no_prompt(rows: int) -> None:
    batch = make_batch(1, 40, V)
    asked = replace(batch, labels_BT=np.full_like(batch.labels_BT, -100))
    assert prompt_of([asked][:rows]) == []
