"""Generated text at its edges: draws against transformers' own cuts, characters of several tokens, stop
strings across tokens, and a context that is exactly full.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.errors import BadInput
from engine.formats.tokenizer import Tokenizer, open_tokenizer
from engine.generation import complete as completions
from engine.generation.complete import complete
from engine.generation.generate import Generated, generate
from engine.generation.sampling import Sampling, choose, row_key, uniform
from tests.support.kit import Kit
from tests.support.packed_models import lively, make_config

DRAWS = 64


@given(
    seed=st.integers(0, 10**6),
    size=st.integers(1, 40),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 1000]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
)
@settings(max_examples=80)
def test_draws_are_of_the_ids_that_transformers_keeps(
    seed: int, size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits_V = 2 * torch.randn(size, generator=torch.Generator().manual_seed(seed))
    # What transformers keeps, in the order in which it cuts.
    scores_BV = TemperatureLogitsWarper(temperature)(None, logits_V[None].double())
    if top_k:
        scores_BV = TopKLogitsWarper(top_k)(None, scores_BV)
    p_V = scores_BV[0].softmax(0)
    # A sum that is top_p to rounding is in or out by the order of its terms.
    sums_V = p_V.sort(descending=True).values.cumsum(0)
    assume(top_p == 1 or bool(((sums_V - top_p).abs() > 1e-9).all()))
    if top_p < 1:
        scores_BV = TopPLogitsWarper(top_p)(None, scores_BV)
    if min_p > 0:
        scores_BV = MinPLogitsWarper(min_p)(None, scores_BV)
    kept = set(scores_BV[0].isfinite().nonzero().flatten().tolist())
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    numbers = [uniform(row_key(seed, "a row"), number) for number in range(DRAWS)]
    found = choose(
        logits_V[None].expand(DRAWS, -1), sampling, torch.tensor(numbers, dtype=torch.float64)
    )
    drawn = set(found.token_B.tolist())
    assert drawn <= kept
    likeliest = int(logits_V.argmax())
    assert likeliest in kept and (len(kept) > 1 or drawn == {likeliest})


@pytest.mark.parametrize(
    "given_", [{"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}, {"temperature": -0.1}, {"min_p": 1.5}]
)
def test_a_cut_that_keeps_nothing_or_makes_no_sense_is_refused(given_: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=next(iter(given_))):
        Sampling(**given_)
    for value in (float("nan"), float("inf")):
        with pytest.raises(BadInput):
            Sampling(temperature=value)


def test_a_context_may_be_full_to_the_last_position_and_no_further() -> None:
    decoder = lively(make_config())
    most = decoder.config.max_position_embeddings
    prompt = [1 + at % 90 for at in range(most - 3)]
    found = [one.token for one in generate(decoder, [prompt, [5]], max_tokens=3)]
    assert len(found) == 6
    with pytest.raises(BadInput, match=f"{most + 1:,}"):
        list(generate(decoder, [prompt, [5]], max_tokens=4))


@pytest.fixture(scope="module")
def tokenizer(kit: Kit) -> Tokenizer:
    return open_tokenizer(kit.teacher)


def pieces(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
    stops: Sequence[str] = (),
) -> list[list[str]]:
    """What is given out, piece by piece, of models that say `texts`, byte by byte where a tokenizer
    has no more: their tokens come in turn."""
    rows = [[int(one) for one in ids] for ids in tokenizer.encode_documents(texts)]

    def said(*_: Any, stop: Any, **__: Any) -> Any:
        alive = {index: list(row) for index, row in enumerate(rows)}
        tokens: dict[int, list[int]] = {index: [] for index in alive}
        while alive:
            for index in list(alive):
                tokens[index].append(alive[index].pop(0))
                ended = "stop" if stop(index, tokens[index]) else None
                ended = ended or (None if alive[index] else "length")
                yield Generated(index, tokens[index][-1], ended, 0.0)  # type: ignore[arg-type]
                if ended:
                    del alive[index]

    monkeypatch.setattr(completions, "generate", said)
    decoder = lively(make_config())
    found: list[list[str]] = [[] for _ in texts]
    for piece in complete(decoder, tokenizer, ["x"] * len(texts), max_tokens=99, stops=stops):
        found[piece.prompt].append(piece.text)
    return found


def test_characters_of_several_tokens_are_given_out_whole(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["naïve café", "日本語 ok", "a👩‍👩‍👧b", "ü"]
    (counts,) = [[len(ids) for ids in tokenizer.encode_documents(texts)]]
    assert any(count > len(text) for count, text in zip(counts, texts, strict=True)), (
        "every character is one token: nothing is seen"
    )
    found = pieces(tokenizer, texts, monkeypatch)
    assert ["".join(row) for row in found] == texts
    assert not any("\ufffd" in piece for row in found for piece in row)


def test_a_stop_string_across_tokens_ends_the_text_before_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["return 1\n\n\ndef next(): pass", "a é\ndé b", "no end"]
    stops = ["\ndef ", "\ndé"]
    for stop in stops:
        (ids,) = tokenizer.encode_documents([stop])
        assert len(ids) > 1, "the stop string is one token: nothing is seen"
    found = pieces(tokenizer, texts, monkeypatch, stops)
    assert ["".join(row) for row in found] == ["return 1\n\n", "a é", "no end"]


def test_a_seed_is_one_text_whatever_runs_beside_it(kit: Kit, tmp_path: Path) -> None:
    from engine.evaluate.model import open_model

    model = open_model(kit.teacher, device="cpu", precision="fp32")
    prompts = ["def f(", "import ", "class A", "x = 1\n", "# é", "for i in"]

    def texts(rows: int, keys: Sequence[str], prompts: Sequence[str]) -> dict[str, str]:
        found = dict.fromkeys(keys, "")
        for piece in complete(
            model.decoder,
            model.tokenizer,
            prompts,
            max_tokens=10,
            sampling=Sampling(temperature=1.2, top_k=50, top_p=0.9, seed=7),
            keys=keys,
            rows=rows,
        ):
            found[keys[piece.prompt]] += piece.text
        return found

    keys = [f"task/{index}" for index in range(len(prompts))]
    whole = texts(8, keys, prompts)
    assert len(set(whole.values())) > 1
    assert texts(1, keys, prompts) == texts(3, keys, prompts) == whole
    # The second half alone, as after a kill.
    assert texts(2, keys[3:], prompts[3:]) == {key: whole[key] for key in keys[3:]}
