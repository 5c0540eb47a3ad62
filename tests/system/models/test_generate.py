"""Generation: against forward passes without a cache, against transformers' generate, the same whatever
runs beside it, and never a token out of NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import BadInput, NoAnswer
from engine.model_families import FAMILIES
from engine.models.decode import GREEDY, HISTORY, Sampling, choose_cuda_graph, draw
from engine.models.decoder import Decoder
from engine.models.generate import StopText, generate, next_token
from engine.models.load import load_decoder, load_packed_decoder, save_decoder
from tests.support.families import CHANGES
from tests.support.packed_models import lively, make_config, write

DRAWN = Sampling(temperature=1.3, top_k=40, top_p=0.95)
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5], [8], [9, 7, 9, 3, 2], [7] * 20]


def tokens_of(decoder: Decoder, prompts: Sequence[Sequence[int]], **how: Any) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in prompts]
    for index, token, _ in generate(decoder, prompts, **{"max_tokens": 12, **how}):
        found[index].append(token)
    return found


@torch.no_grad()
def without_cache(decoder: Decoder, prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(decoder(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_cache_changes_no_greedy_token(family: str) -> None:
    decoder = lively(make_config(family, **CHANGES[family]))
    expected = [without_cache(decoder, prompt, 12) for prompt in PROMPTS]
    assert tokens_of(decoder, PROMPTS) == expected
    assert len({tuple(row) for row in expected}) > 1, (
        "the models says the same whatever it is asked"
    )


def test_logits_with_a_cache_are_those_without(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = lively(make_config())
    seen: list[torch.Tensor] = []

    def keep(logits_V: torch.Tensor, *rest: Any) -> int:
        seen.append(logits_V.clone())
        return next_token(logits_V, *rest)

    monkeypatch.setattr("engine.models.generate.next_token", keep)
    (row,) = tokens_of(decoder, [PROMPTS[1]])
    with torch.no_grad():
        whole_TV = decoder(torch.tensor([PROMPTS[1] + row]))[0, len(PROMPTS[1]) - 1 : -1]
    torch.testing.assert_close(torch.stack(seen), whole_TV, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_greedy_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    import transformers

    decoder = lively(make_config(family, **CHANGES[family]))
    save_decoder(decoder, tmp_path / "model", torch.float32)
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(tmp_path / "model").eval()
    ours = tokens_of(load_decoder(tmp_path / "model"), PROMPTS)
    for prompt, row in zip(PROMPTS, ours, strict=True):
        tokens_BT = torch.tensor([prompt])
        answer = theirs.generate(
            tokens_BT,
            attention_mask=torch.ones_like(tokens_BT),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
        )
        assert answer[0, len(prompt) :].tolist() == row


def test_packed_weights_generate_as_their_dense_values(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", lively(make_config()), "Q4_K")
    dense = tokens_of(load_decoder(path), PROMPTS)
    assert tokens_of(load_packed_decoder(path), PROMPTS) == dense


@pytest.mark.parametrize(
    ("sampling", "dtype"),
    [
        (GREEDY, torch.float32),
        (DRAWN, torch.bfloat16),
        pytest.param(GREEDY, torch.bfloat16, marks=pytest.mark.soak),
        pytest.param(DRAWN, torch.float32, marks=pytest.mark.soak),
    ],
)
def test_the_number_of_rows_changes_no_token(sampling: Sampling, dtype: torch.dtype) -> None:
    decoder = lively(make_config()).to(dtype)
    prompts = [[1 + i, 2 * i + 1, 5] * (1 + i % 4) for i in range(11)]
    reference = tokens_of(decoder, prompts, sampling=sampling, rows=8)
    for rows in (1, 3):
        assert tokens_of(decoder, prompts, sampling=sampling, rows=rows) == reference
    backwards = tokens_of(
        decoder, prompts[::-1], sampling=sampling, keys=range(len(prompts))[::-1], rows=5
    )
    assert backwards[::-1] == reference


class _Device:
    """Rows whose tokens are known beforehand: `script[prompt][n]` is the n-th token of a prompt."""

    def __init__(self, script: dict[int, list[int]], rows: int) -> None:
        self.script, self.vocab_size = script, 101
        self.at: list[tuple[int, int]] = [(0, 0)] * rows
        self.most = 0
        self.unread = 0

    def uniform(self, random: torch.Generator, count: int) -> None:
        return None

    def start(self, row: int, prompt: Sequence[int], uniform: None) -> _Device._Chosen:
        self.at[row] = (prompt[0], 0)
        return self._made()

    def step(self) -> _Device._Chosen:
        self.at = [(prompt, count + 1) for prompt, count in self.at]
        return self._made()

    def _made(self) -> _Device._Chosen:
        self.unread += 1
        self.most = max(self.most, self.unread)
        tokens = [(self.script[prompt] + [99] * 100)[count] for prompt, count in self.at]
        return _Device._Chosen(self, tokens)

    class _Chosen:
        def __init__(self, device: _Device, tokens: list[int]) -> None:
            self.device, self.tokens = device, tokens

        def wait(self) -> list[int]:
            self.device.unread -= 1
            return self.tokens


@given(st.lists(st.integers(1, 6), min_size=1, max_size=40), st.integers(1, 8), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_a_host_that_reads_behind_misses_and_adds_no_token(
    lengths: list[int], rows: int, max_tokens: int
) -> None:
    # Sequences end by token 7 after `lengths` tokens, or by length; what follows is never seen.
    script = {index: [20 + index] * (length - 1) + [7] for index, length in enumerate(lengths)}
    device = _Device(script, rows)

    def steps(*_: Any, **__: Any) -> _Device:
        return device

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.models.generate.coverage", lambda *_: None)
        patch.setattr("engine.models.decode_step.DecodeSteps", steps)
        prompts = [[index] for index in script]
        found = tokens_of(
            Decoder(make_config()), prompts, max_tokens=max_tokens, end_ids=[7], tile=rows
        )
    assert found == [row[:max_tokens] for row in script.values()]
    assert device.most <= HISTORY


def test_a_cpu_has_no_graphs_and_says_why() -> None:
    decision = choose_cuda_graph(lively(make_config()), 8)
    assert decision.choice == "off"
    assert "the model is on the CPU" in decision.lines()[1]


def test_a_seed_is_one_text_and_another_seed_another() -> None:
    decoder = lively(make_config())
    one, again, other = (
        tokens_of(decoder, PROMPTS, sampling=Sampling(temperature=1.0, seed=seed))
        for seed in (1, 1, 2)
    )
    assert one == again != other


def test_draws_follow_the_distribution_cut_by_top_k_and_top_p() -> None:
    p_V = torch.tensor([0.05, 0.4, 0.3, 0.2, 0.05])
    random = torch.Generator().manual_seed(0)
    for sampling, expected in (
        (Sampling(temperature=1.0), p_V),
        (Sampling(temperature=1.0, top_k=2), torch.tensor([0, 4 / 7, 3 / 7, 0, 0])),
        (Sampling(temperature=1.0, top_p=0.65), torch.tensor([0, 4 / 7, 3 / 7, 0, 0])),
        (Sampling(temperature=0.5), p_V**2 / (p_V**2).sum()),
    ):
        drawn = [next_token(p_V.log(), sampling, random) for _ in range(2000)]
        share_V = torch.bincount(torch.tensor(drawn), minlength=5) / 2000
        # Four standard deviations of a share of 2,000 are at most 0.045.
        assert (share_V - expected).abs().max() < 0.045
        assert set(drawn) <= set(expected.nonzero().flatten().tolist())


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_k=5),
        Sampling(temperature=1.5, top_p=0.6),
        Sampling(temperature=2.0, top_k=30, top_p=0.9),
    ],
)
def test_a_draw_on_the_device_is_that_of_the_host(sampling: Sampling) -> None:
    for seed in range(200):
        logits_V = 3 * torch.randn(50, generator=torch.Generator().manual_seed(seed))
        on_host = next_token(logits_V, sampling, torch.Generator().manual_seed(seed))
        uniform = torch.rand((), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert int(draw(logits_V, sampling, uniform[None])) == on_host
    last = torch.tensor([1.0 - 1e-16], dtype=torch.float64)
    assert 0 <= int(draw(logits_V, sampling, last)) < 50
    # Refused by whoever looks at the logits; here it must be some id.
    assert 0 <= int(draw(torch.full((50,), torch.nan), sampling, last)) < 50


def test_a_tiny_top_p_and_a_temperature_near_zero_are_greedy() -> None:
    decoder = lively(make_config())
    greedy = tokens_of(decoder, PROMPTS)
    assert tokens_of(decoder, PROMPTS, sampling=Sampling(temperature=1, top_p=1e-9)) == greedy
    assert tokens_of(decoder, PROMPTS, sampling=Sampling(temperature=1, top_k=1)) == greedy
    assert tokens_of(decoder, PROMPTS, sampling=Sampling(temperature=1e-6)) == greedy


def test_equal_logits_take_the_lowest_id() -> None:
    logits_V = torch.tensor([0.0, 2.0, 2.0, 1.0])
    assert next_token(logits_V, GREEDY, torch.Generator()) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0)])
def test_a_logit_that_is_not_finite_is_no_token(bad: float, sampling: Sampling) -> None:
    logits_V = torch.tensor([0.0, bad, 1.0])
    with pytest.raises(NoAnswer, match="1 of 3 NaN or infinite"):
        next_token(logits_V, sampling, torch.Generator())


def test_a_model_with_a_nan_weight_answers_nothing() -> None:
    decoder = lively(make_config())
    with torch.no_grad():
        decoder.norm.weight[3] = float("nan")
    with pytest.raises(NoAnswer, match="NaN"):
        tokens_of(decoder, PROMPTS)


def test_end_ids_and_length_end_a_sequence() -> None:
    decoder = lively(make_config())
    (row,) = tokens_of(decoder, PROMPTS[:1])
    last = list(generate(decoder, PROMPTS[:1], max_tokens=12))[-1]
    assert last.ended == "length"
    end = row[4]
    cut = list(generate(decoder, PROMPTS[:1], max_tokens=12, end_ids=[end]))
    assert [one.token for one in cut] == row[: row.index(end) + 1]
    assert cut[-1].ended == "end_of_text"


@pytest.mark.parametrize(
    ("prompts", "said"),
    [([[]], "at least one token"), ([[101]], "ids below 101"), ([[1] * 250], "256 tokens")],
)
def test_a_prompt_that_the_model_cannot_have_is_refused(
    prompts: list[list[int]], said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        tokens_of(lively(make_config()), prompts)


@given(
    st.text(alphabet="ab\ufffdEN", max_size=30),
    st.lists(st.text(alphabet="abEN", min_size=1, max_size=4), max_size=3),
    st.data(),
)
@settings(max_examples=200)
def test_streamed_text_is_the_text_before_the_first_stop_string(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    state, given_out, at = StopText(stops), "", 0
    while at < len(text) and not state.stopped:
        at += data.draw(st.integers(1, 5))
        state.update(text[:at])
        given_out += state.sure(last=at >= len(text))
    places = [place for stop in stops if (place := text[:at].find(stop)) >= 0]
    assert given_out == text[: min(places)] if places else given_out == text
