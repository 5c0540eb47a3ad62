"""The kernels of generation compute what the decoder and the reference of sampling do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from engine.generation.forward import NativeForward, Start
from engine.generation.fused import FusedForward, JoinedWeights, why_not
from engine.generation.pages import PagedCache, PagePool
from engine.generation.sampling import Sampling, row_key, uniform
from engine.generation.sampling import choose as reference
from engine.generation.size import PAGE, pages_for
from engine.kernels import choose as choosing
from engine.kernels import paged_attention
from engine.kernels.choose import IDS, SlotState, choose
from engine.kernels.layer_parts import BLOCK, add_norm, gate
from engine.model_families import FAMILIES
from engine.models.decoder import ACTIVATIONS, Decoder, RMSNorm
from tests.support.families import CHANGES
from tests.support.packed_models import lively, make_config

LENGTHS = (3, PAGE, 0, 2 * PAGE + 1, 5)
"""Prompts of the slots; the third is idle."""
COVERED = [name for name in FAMILIES if why_not(make_config(name, **CHANGES[name])) is None]
IN_PIECES = ("qwen2", "mistral")
"""Heads that are a multiple of 4 to each key, and 5 of a width that is no power of two to one key."""
STEPS = 2


def step_logits(forward: type[NativeForward], decoder: Decoder) -> list[Tensor]:
    """The logits of some steps behind prompts of `LENGTHS` tokens."""
    needs = [pages_for(length + STEPS) if length else 0 for length in LENGTHS]
    pool = PagePool(1 + sum(needs))
    pages = [pool.take(need) for need in needs]
    cache = PagedCache(
        decoder.config,
        pages=1 + sum(needs),
        slots=len(LENGTHS),
        slot_pages=max(needs),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    cache.set_tables(range(len(LENGTHS)), pages)
    run = forward(decoder, cache)
    for slot, length in enumerate(LENGTHS):
        if length:
            run.start(
                [Start(slot, [(7 * slot + 3 * at) % 101 for at in range(length)], pages[slot])]
            )
    found = []
    for number in range(STEPS):
        tokens = torch.tensor([5, 7, 0, 11, 13 + number])
        places = [length + number if length else -1 for length in LENGTHS]
        logits_BV = run.step(tokens, torch.tensor(places, dtype=torch.int32))
        found.append(logits_BV[[0, 1, 3, 4]])
    return found


def test_most_families_are_covered() -> None:
    assert {"qwen2", "qwen3", "llama", "mistral", "phi3", "smollm3"} <= set(COVERED)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "busy"),
    [
        # Of attention in pieces, shapes of heads are all that families differ in; the layers of every family
        # are in test_layers.py.
        pytest.param(
            family,
            busy,
            marks=[pytest.mark.soak]
            * (family not in (IN_PIECES if busy else (*IN_PIECES, "phi3"))),
        )
        for family in COVERED
        for busy in (0, 10**6)
    ],
)
def test_a_step_in_few_kernels_gives_the_decoders_logits(
    family: str, busy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Sequences whole, and cut into pieces of one page.
    monkeypatch.setattr(paged_attention, "BUSY", busy)
    monkeypatch.setattr(paged_attention, "PIECE_PAGES", 1)
    decoder = lively(make_config(family, **CHANGES[family]))
    expected = step_logits(NativeForward, decoder)
    for found_BV, expected_BV in zip(step_logits(FusedForward, decoder), expected, strict=True):
        torch.testing.assert_close(found_BV, expected_BV, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("columns", [7, 300])
@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32])
def test_a_sum_and_its_norm_are_those_of_the_decoder(columns: int, kept: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(columns)
    kept_BD = torch.randn(5, columns, generator=generator).to(kept)
    y_BD = torch.randn(5, columns, generator=generator).bfloat16()
    norm = RMSNorm(columns, 1e-5).to(kept)
    norm.weight.copy_(torch.randn(columns, generator=generator))
    sum_BD = kept_BD + y_BD
    out_BD = torch.empty_like(y_BD)
    add_norm(y_BD, kept_BD, norm.weight, norm.eps, kept_BD, out_BD)
    # The interpreter cuts bits off where a GPU rounds.
    torch.testing.assert_close(kept_BD, sum_BD, rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(out_BD, norm(sum_BD).bfloat16(), rtol=2**-6, atol=1e-6)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("columns", [8, BLOCK + 4])
def test_a_gate_is_that_of_the_decoder(activation: str, columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    both_BN = torch.randn(3, 2 * columns, generator=generator)
    out_BD = torch.empty(3, columns)
    gate(*both_BN.chunk(2, dim=1), activation, out_BD)
    wanted_BD = ACTIVATIONS[activation](both_BN[:, :columns]) * both_BN[:, columns:]
    torch.testing.assert_close(out_BD, wanted_BD, rtol=1e-5, atol=1e-6)


def test_joined_weights_are_the_parameters_themselves_or_follow_them() -> None:
    decoder = lively(make_config())
    before = {name: each.clone() for name, each in decoder.named_parameters()}
    shared = JoinedWeights(decoder, torch.float32)
    copied = JoinedWeights(decoder, torch.bfloat16)
    assert all(torch.equal(each, before[name]) for name, each in decoder.named_parameters())
    layer = decoder.layers[0]
    with torch.no_grad():
        for name in ("q", "v"):
            layer.attention.get_submodule(name).weight.mul_(2)  # type: ignore[operator,union-attr]
    q_rows = len(layer.attention.q.weight)  # type: ignore[arg-type,union-attr]
    expected_ND = torch.cat(
        [each.weight for each in (layer.attention.q, layer.attention.k, layer.attention.v)]
    )  # type: ignore[union-attr]
    assert torch.equal(shared.layers[0].qkv.weight_ND, expected_ND)
    assert not torch.equal(copied.layers[0].qkv.weight_ND[:q_rows], expected_ND[:q_rows].bfloat16())
    copied.refresh()
    assert torch.equal(copied.layers[0].qkv.weight_ND, expected_ND.bfloat16())


def state_of(rows: int) -> SlotState:
    i32, i64 = torch.int32, torch.int64
    keys = [row_key(3, row) for row in range(rows)]
    return SlotState(
        torch.zeros(rows, dtype=i64),
        torch.tensor([9] * (rows - 1) + [-1], dtype=i32),
        torch.arange(rows, dtype=i32),
        torch.full((rows,), 100, dtype=i32),
        torch.tensor(keys, dtype=i64),
        torch.full((rows,), -7, dtype=i32),
        torch.zeros(rows),
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7, 3.0])
@pytest.mark.parametrize(
    ("ids", "part"),
    [
        (50, 64),
        (2 * 64 + 5, 64),
        # The interpreter joins numbers one by one: parts of the size that a GPU has take 15 s.
        *(pytest.param(ids, IDS, marks=pytest.mark.soak) for ids in (50, 2 * IDS + 5)),
    ],
)
def test_chosen_tokens_are_those_of_the_reference(
    ids: int, part: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "IDS", part)
    rows = 9
    generator = torch.Generator().manual_seed(ids)
    logits_BV = 4 * torch.randn(rows, ids, generator=generator)
    logits_BV[2, 7] = logits_BV[2, 30] = logits_BV[2].max() + 1
    logits_BV[3, 11] = float("nan")
    logits_BV[4] = torch.where(torch.arange(ids) == ids - 1, 50.0, -50.0)
    state = state_of(rows)
    # Rows of logits in another order than their slots.
    source = [4, 3, 2, 1, 0, 5, 6, 7, 8]
    choose(
        logits_BV,
        torch.tensor(source, dtype=torch.int32),
        torch.arange(rows, dtype=torch.int32),
        torch.tensor([ids - 1, ids - 1], dtype=torch.int32),
        state,
        temperature,
    )
    numbers = [uniform(row_key(3, row), row) for row in range(rows)]
    expected = reference(
        logits_BV[source],
        Sampling(temperature=temperature),
        torch.tensor(numbers, dtype=torch.float64),
    )
    for row in range(rows - 1):
        if row == 1:
            assert int(state.chosen_B[row]) == -1 and int(state.position_B[row]) == -1
            continue
        assert int(state.chosen_B[row]) == int(expected.token_B[row])
        torch.testing.assert_close(state.log_p_B[row], expected.log_p_B[row], rtol=0, atol=1e-5)
        assert int(state.token_B[row]) == int(state.chosen_B[row])
        assert int(state.position_B[row]) == (-1 if int(expected.token_B[row]) == ids - 1 else 10)
        assert int(state.count_B[row]) == row + 1
    assert int(state.position_B[0]) == -1, "the end of text leaves a slot idle"
    assert int(state.chosen_B[rows - 1]) == -7, "an idle slot stays as it is"
