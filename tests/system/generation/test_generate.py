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
from engine.generation import slots as slots_module
from engine.generation.complete import StopText
from engine.generation.generate import Generator, generate
from engine.generation.pages import PagePool
from engine.generation.sampling import GREEDY, Sampling, choose, row_key, uniform
from engine.generation.size import PAGE, pages_for, token_bytes
from engine.generation.slots import HISTORY, Admitted
from engine.model_families import FAMILIES
from engine.models.decoder import Decoder
from engine.models.load import load_decoder, load_packed_decoder, save_decoder
from tests.support.families import CHANGES
from tests.support.packed_models import lively, make_config, write

DRAWN = Sampling(temperature=1.3, top_k=40, top_p=0.95)
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5], [8], [9, 7, 9, 3, 2], [7] * 20]


def tokens_of(decoder: Decoder, prompts: Sequence[Sequence[int]], **how: Any) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in prompts]
    for one in generate(decoder, prompts, **{"max_tokens": 12, **how}):
        found[one.prompt].append(one.token)
    return found


@torch.no_grad()
def without_cache(decoder: Decoder, prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(decoder(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


FEW = ("qwen2", "gemma3_text")
"""A plain cache, and one with windows."""


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_cache_changes_no_greedy_token(family: str) -> None:
    decoder = lively(make_config(family, **CHANGES[family]))
    expected = [without_cache(decoder, prompt, 12) for prompt in PROMPTS]
    assert tokens_of(decoder, PROMPTS) == expected
    assert len({tuple(row) for row in expected}) > 1, (
        "the models says the same whatever it is asked"
    )


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
def test_log_probabilities_are_those_of_a_full_forward_pass(
    family: str, sampling: Sampling
) -> None:
    decoder = lively(make_config(family, **CHANGES[family]))
    found: list[list[Any]] = [[] for _ in PROMPTS]
    for one in generate(decoder, PROMPTS, max_tokens=12, sampling=sampling):
        found[one.prompt].append(one)
    for prompt, row in zip(PROMPTS, found, strict=True):
        tokens_T = torch.tensor([one.token for one in row])
        with torch.no_grad():
            whole_TV = decoder(torch.tensor([[*prompt, *tokens_T.tolist()]]))[0]
        scores_TV = whole_TV[len(prompt) - 1 : -1].double() / (sampling.temperature or 1)
        log_p_T = scores_TV.log_softmax(-1).gather(1, tokens_T[:, None])[:, 0]
        said_T = torch.tensor([one.log_p for one in row]).double()
        torch.testing.assert_close(said_T, log_p_T, rtol=0, atol=1e-5)


NEAR = 1e-4
"""Distance of two largest logits from which on rounding may choose between them."""


@pytest.mark.parametrize(
    ("family", "slots", "tied"),
    [
        # The logits of every family are compared in tests/unit/models/test_decoder.py, and its cache above.
        *(
            pytest.param(family, 7, False, marks=[pytest.mark.soak] * (family not in FEW))
            for family in FAMILIES
        ),
        *(
            pytest.param(family, slots, True, marks=pytest.mark.soak)
            for family in FAMILIES
            for slots in (1, 7, 64)
        ),
    ],
)
def test_greedy_tokens_are_those_of_transformers(
    family: str, slots: int, tied: bool, tmp_path: Path
) -> None:
    import transformers

    decoder = lively(make_config(family, tied, **CHANGES[family]), seed=slots)
    save_decoder(decoder, tmp_path / "model", torch.float32)
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(tmp_path / "model").eval()
    prompts = [[(7 * i + 3 * at) % 101 for at in range(1 + 11 * i % 29)] for i in range(slots + 2)]
    ours = tokens_of(load_decoder(tmp_path / "model"), prompts, slots=slots)
    for prompt, row in zip(prompts, ours, strict=True):
        tokens_BT = torch.tensor([prompt])
        answer = theirs.generate(
            tokens_BT,
            attention_mask=torch.ones_like(tokens_BT),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = [logits_BV[0].topk(2).values for logits_BV in answer.logits]
        near = [bool(both[0] - both[1] < NEAR) for both in best]
        sure = near.index(True) if True in near else len(row)
        assert answer.sequences[0, len(prompt) :].tolist()[:sure] == row[:sure]


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
    """Slots whose tokens are known beforehand: `script[prompt][n]` is the n-th token of a prompt."""

    def __init__(self, script: dict[int, list[int]], slots: int) -> None:
        self.script = script
        self.at: list[tuple[int, int]] = [(0, 0)] * slots
        self.most = 0
        self.unread = 0

    def begin(self, admitted: Sequence[Admitted]) -> _Device._Chosen:
        for one in admitted:
            self.at[one.slot] = (one.prompt[0], 0)
        return self._made()

    def step(self) -> _Device._Chosen:
        self.at = [(prompt, count + 1) for prompt, count in self.at]
        return self._made()

    def stop(self, slots: Sequence[int]) -> None:
        """Slots that stopped go on here, as they may on a device that has not heard of it."""

    def _made(self) -> _Device._Chosen:
        self.unread += 1
        self.most = max(self.most, self.unread)
        tokens = [(self.script[prompt] + [99] * 100)[count] for prompt, count in self.at]
        return _Device._Chosen(self, tokens)

    class _Chosen:
        def __init__(self, device: _Device, tokens: list[int]) -> None:
            self.device, self.tokens = device, tokens

        def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
            self.device.unread -= 1
            return torch.tensor(self.tokens), torch.zeros(len(self.tokens))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=40), st.integers(1, 8), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_a_host_that_reads_behind_misses_and_adds_no_token(
    lengths: list[int], slots: int, max_tokens: int
) -> None:
    # Sequences end by token 7 after `lengths` tokens, or by length; what follows is never seen.
    script = {index: [20 + index] * (length - 1) + [7] for index, length in enumerate(lengths)}
    device = _Device(script, slots)

    def made(*_: Any, **__: Any) -> _Device:
        return device

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.generation.generate.Slots", made)
        prompts = [[index] for index in script]
        found = tokens_of(
            Decoder(make_config()), prompts, max_tokens=max_tokens, end_ids=[7], slots=slots
        )
    assert found == [row[:max_tokens] for row in script.values()]
    assert device.most <= HISTORY


def test_equal_prompts_run_once_and_share_what_they_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = lively(make_config())
    prompts = [[5 + at % 7 for at in range(PAGE + 3)]] * 3 + [[8] * PAGE] * 2
    alone = [tokens_of(decoder, [prompt])[0] for prompt in prompts]
    starts: list[int] = []
    taken: list[int] = []
    begin, take = slots_module.NativeForward.start, PagePool.take

    def counted(self: Any, some: Sequence[Any]) -> torch.Tensor:
        starts.append(len(some))
        return begin(self, some)

    def counting(self: PagePool, count: int) -> list[int]:
        taken.append(count)
        return take(self, count)

    monkeypatch.setattr(slots_module.NativeForward, "start", counted)
    monkeypatch.setattr(PagePool, "take", counting)
    assert tokens_of(decoder, prompts) == alone
    assert starts == [2]
    assert taken == [2, 1, 1, 2, 1]


def test_a_generation_that_is_given_up_frees_its_slots_and_pages() -> None:
    decoder = lively(make_config())
    generator = Generator(decoder, slots=3, capacity=40, pages=3)

    def tokens() -> list[int]:
        return [one.token for one in generator.generate(PROMPTS[:4], max_tokens=12)]

    whole = tokens()
    begun = generator.generate(PROMPTS[:4], max_tokens=12)
    next(begun)
    begun.close()  # type: ignore[attr-defined]
    assert tokens() == whole
    assert generator._pool.free == 3


def test_a_cache_for_two_sequences_serves_all_one_after_the_other() -> None:
    decoder = lively(make_config())
    prompts = [[1 + i, 2 * i + 1, 5] * (1 + i % 4) for i in range(7)]
    page = PAGE * token_bytes(decoder.config, 4)
    found = tokens_of(decoder, prompts, cache_bytes=2 * page)
    assert found == tokens_of(decoder, prompts)
    with pytest.raises(BadInput, match="room for its keys and values"):
        tokens_of(decoder, [[5] * 150], cache_bytes=2 * page)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=30), st.data())
def test_pages_are_free_again_once_nobody_holds_them(
    lengths: list[int], data: st.DataObject
) -> None:
    pool = PagePool(1 + sum(map(pages_for, lengths)))
    whole = pool.free
    held: list[list[int]] = []
    for length in lengths:
        held.append(pool.take(pages_for(length)))
        if data.draw(st.booleans()):
            pool.share(held[-1])
            held.append(list(held[-1]))
    assert 0 not in {page for pages in held for page in pages}
    for pages in data.draw(st.permutations(held)):
        pool.release(pages)
    assert pool.free == whole


def test_a_seed_is_one_text_and_another_seed_another() -> None:
    decoder = lively(make_config())
    one, again, other = (
        tokens_of(decoder, PROMPTS, sampling=Sampling(temperature=1.0, seed=seed))
        for seed in (1, 1, 2)
    )
    assert one == again != other


def drawn_from(logits_V: torch.Tensor, sampling: Sampling, count: int = 1) -> list[int]:
    """The tokens that `count` draws give."""
    numbers = [uniform(row_key(sampling.seed, "a row"), number) for number in range(count)]
    rows_BV = logits_V[None].expand(count, -1)
    return choose(rows_BV, sampling, torch.tensor(numbers, dtype=torch.float64)).token_B.tolist()


def test_draws_follow_the_distribution_cut_by_top_k_top_p_and_min_p() -> None:
    p_V = torch.tensor([0.05, 0.4, 0.3, 0.2, 0.05])
    for sampling, expected in (
        (Sampling(temperature=1.0), p_V),
        (Sampling(temperature=1.0, top_k=2), torch.tensor([0, 4 / 7, 3 / 7, 0, 0])),
        (Sampling(temperature=1.0, top_p=0.65), torch.tensor([0, 4 / 7, 3 / 7, 0, 0])),
        (Sampling(temperature=1.0, min_p=0.45), torch.tensor([0, 4 / 9, 3 / 9, 2 / 9, 0])),
        (Sampling(temperature=0.5), p_V**2 / (p_V**2).sum()),
    ):
        drawn = drawn_from(p_V.log(), sampling, 2000)
        share_V = torch.bincount(torch.tensor(drawn), minlength=5) / 2000
        # Four standard deviations of a share of 2,000 are at most 0.045.
        assert (share_V - expected).abs().max() < 0.045
        assert set(drawn) <= set(expected.nonzero().flatten().tolist())


def test_uniform_numbers_of_sequences_are_uniform_and_unrelated() -> None:
    first, second = (
        torch.tensor([uniform(row_key(0, name), at) for at in range(4000)]) for name in ("a", "b")
    )
    for numbers in (first, second, (first + second) % 1):
        counts = torch.histc(numbers, 20, 0, 1)
        # Chi-squared of 19 degrees of freedom is beyond 43.8 in one of a thousand.
        assert float(((counts - 200) ** 2 / 200).sum()) < 43.8


def test_a_draw_at_the_very_end_takes_a_token_that_can_be_drawn() -> None:
    last = torch.tensor([1.0 - 2**-53], dtype=torch.float64)
    logits_BV = torch.tensor([[1.0, 2.0, 3.0, -1e5, -1e5]])
    assert int(choose(logits_BV, Sampling(temperature=1.0), last).token_B) == 2


def test_a_tiny_top_p_and_a_temperature_near_zero_are_greedy() -> None:
    decoder = lively(make_config())
    greedy = tokens_of(decoder, PROMPTS)
    assert tokens_of(decoder, PROMPTS, sampling=Sampling(temperature=1, top_p=1e-9)) == greedy
    assert tokens_of(decoder, PROMPTS, sampling=Sampling(temperature=1, top_k=1)) == greedy
    assert tokens_of(decoder, PROMPTS, sampling=Sampling(temperature=1e-6)) == greedy


def test_equal_logits_take_the_lowest_id() -> None:
    assert drawn_from(torch.tensor([0.0, 2.0, 2.0, 1.0]), GREEDY) == [1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=2, min_p=0.1)]
)
def test_logits_that_are_not_finite_are_counted(bad: float, sampling: Sampling) -> None:
    logits_BV = torch.tensor([[0.0, bad, 1.0], [0.0, 2.0, 1.0]])
    found = choose(logits_BV, sampling, torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert found.bad_B.tolist() == [1, 0]


def test_one_broken_sequence_loses_no_token_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = lively(make_config())
    whole = tokens_of(decoder, PROMPTS)
    step = slots_module.NativeForward.step
    steps = 0

    def broken(self: Any, *given_: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        logits_BV = step(self, *given_)
        if steps == 5:
            logits_BV[1] = float("nan")
        return logits_BV

    monkeypatch.setattr(slots_module.NativeForward, "step", broken)
    found: list[list[int]] = [[] for _ in PROMPTS]
    with pytest.raises(NoAnswer, match=r"sequence 1 .*101 of 101 NaN or infinite"):
        for one in generate(decoder, PROMPTS, max_tokens=12):
            found[one.prompt].append(one.token)
    assert [len(row) for row in found] == [6, 5, 6, 6, 6]
    assert found == [row[: len(made)] for row, made in zip(whole, found, strict=True)]


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
        given_out += state.take_final(last=at >= len(text))
    places = [place for stop in stops if (place := text[:at].find(stop)) >= 0]
    assert given_out == text[: min(places)] if places else given_out == text
