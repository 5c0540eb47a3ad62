"""Packed documents: where they begin and what positions they give, against the masked path and counting
by hand. What the kernel computes is compared on a GPU.
"""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.models import attention
from engine.models.attention import packing_of, positions, record_documents, starts_of
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, masked_attention_inputs, packed_attention_inputs
from engine.models.load import new_decoder
from engine.models.rope import LongRope
from tests.support.budgets import config

ROWS = st.integers(1, 4)


@st.composite
def documents(draw: st.DrawFn) -> NDArray[np.int64]:
    """Rows cut into documents, with ids that repeat from row to row."""
    rows, length = draw(ROWS), draw(st.integers(1, 40))
    found = []
    for _ in range(rows):
        cuts = draw(st.lists(st.booleans(), min_size=length, max_size=length))
        found.append(np.cumsum(cuts))
    return np.stack(found).astype(np.int64)


@given(documents())
def test_starts_and_positions_are_those_counted_by_hand(ids_BT: NDArray[np.int64]) -> None:
    starts, place = [], np.zeros_like(ids_BT)
    for row, ids in enumerate(ids_BT):
        for at, one in enumerate(ids):
            new = at == 0 or one != ids[at - 1]
            if new:
                starts.append(row * ids_BT.shape[1] + at)
            place[row, at] = 0 if new else place[row, at - 1] + 1
    assert starts_of(ids_BT).tolist() == [*starts, ids_BT.size]
    assert positions(torch.from_numpy(ids_BT)).tolist() == place.tolist()


@given(documents())
def test_asking_the_device_gives_what_the_host_says(ids_BT: NDArray[np.int64]) -> None:
    asked = torch.from_numpy(ids_BT.copy())
    remembered = torch.from_numpy(ids_BT.copy())
    record_documents(remembered, ids_BT)
    assert packing_of(asked).starts_S.tolist() == packing_of(remembered).starts_S.tolist()
    assert packing_of(remembered).starts_S.dtype == packing_of(asked).starts_S.dtype == torch.int32
    longest = int(np.diff(starts_of(ids_BT)).max())
    for packing in (packing_of(asked), packing_of(remembered)):
        assert longest <= packing.longest < longest + attention.LENGTH_STEP + ids_BT.shape[1]


def test_what_is_remembered_ends_with_the_tensor() -> None:
    tensor = torch.zeros(2, 8, dtype=torch.int64)
    record_documents(tensor, np.zeros((2, 8), np.int64))
    assert tensor in attention._PACKINGS
    before = len(attention._PACKINGS)
    del tensor
    assert len(attention._PACKINGS) == before - 1


LONG = LongRope(
    short_factor=(1.0,) * 8, long_factor=(1.0, 2.0) * 4, original_max_position_embeddings=3
)


@pytest.mark.parametrize(
    "shape",
    [
        config(),
        config(family="phi3", long_rope=LONG),
        config(
            family="gemma3_text",
            layers_without_window=(1,),
            sliding_window=5,
            rope_local_base_freq=100.0,
        ),
    ],
)
@pytest.mark.parametrize("windowed", [True, False])
@given(ids_BT=documents())
def test_packed_positions_turn_as_masked_ones(
    ids_BT: NDArray[np.int64], shape: ModelConfig, windowed: bool
) -> None:
    documents_BT = torch.from_numpy(ids_BT)
    masked = masked_attention_inputs(shape, documents_BT, documents_BT, torch.float32, windowed)
    packed = packed_attention_inputs(shape, documents_BT, torch.float32, windowed)
    assert torch.equal(masked.cos_XT1R, packed.cos_XT1R)
    assert torch.equal(masked.sin_XT1R, packed.sin_XT1R)
    assert packed.mask_B1TT is None and packed.packing is not None


# On a GPU

SHAPES = [
    config(),
    config(shared=4),
    config(family="qwen3", head_dim=32),
    config(family="mistral", sliding_window=7),
    config(
        family="gemma3_text",
        layers=3,
        layers_without_window=(2,),
        sliding_window=5,
        rope_local_base_freq=100.0,
        query_pre_attn_scalar=40,
    ),
]


def answers(
    decoder: Decoder, documents_BT: NDArray[np.int64], packed: bool, amp: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states, and all gradients, of seeded tokens under a seeded upstream gradient."""
    rng = torch.Generator("cuda").manual_seed(0)
    tokens_BT = torch.randint(0, 64, documents_BT.shape, device="cuda", generator=rng)
    ids_BT = torch.from_numpy(documents_BT).cuda()
    record_documents(ids_BT, documents_BT)
    decoder.packed = packed
    decoder.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp):
        hidden_BTD = decoder.hidden(tokens_BT, ids_BT)
    upstream_BTD = torch.randn(hidden_BTD.shape, device="cuda", generator=rng)
    torch.autograd.backward(hidden_BTD, upstream_BTD.to(hidden_BTD.dtype))
    gradients = [p.grad.flatten() for p in decoder.parameters() if p.grad is not None]
    return hidden_BTD.detach().double(), torch.cat(gradients).double()


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=lambda c: f"{c.family}-{c.num_key_value_heads}")
@pytest.mark.parametrize("mean", [1, 3, 40, 10_000])
def test_packed_is_as_near_to_fp32_as_masked_is(shape: object, mean: int) -> None:
    decoder = new_decoder(shape, 0).cuda()  # type: ignore[arg-type]
    rng = np.random.default_rng(mean)
    ids_BT = np.cumsum(rng.random((3, 200)) < 1 / mean, axis=1).astype(np.int64)
    exact = answers(decoder, ids_BT, packed=True, amp=False)  # fp32 is masked always
    masked = answers(decoder, ids_BT, packed=False, amp=True)
    packed = answers(decoder, ids_BT, packed=True, amp=True)
    for found, other, truth in zip(packed, masked, exact, strict=True):
        # Both round bf16 products: one may be a little farther, not twice as far.
        assert gap(found, truth) < 1.3 * gap(other, truth) + 1e-3
        assert gap(found, other) < 0.08


def test_a_compiler_that_another_thread_still_imports_is_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo", ModuleType("torch._dynamo"))
    packing = attention._packing(torch.tensor([0, 3, 8], dtype=torch.int32), 5)
    assert packing.starts_S.tolist() == [0, 3, 8]
