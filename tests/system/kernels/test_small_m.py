"""The kernels for few rows on a GPU, and the data that say how they are launched."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.bench.random_weights import random_blocks
from engine.kernels.small_m_table import (
    MAX_ROWS,
    MULTIPROCESSORS,
    TILE,
    TILES_AT_ONCE,
    config_for,
    tiles_of,
)
from engine.quant.blocks import BLOCK_TYPES
from engine.quant.planes import pack
from engine.quant.tensor import QuantTensor

TYPES = ("Q4_K", "Q5_K", "Q6_K")
ARCHS = (80, 89, 90, 100, 120, 121)


@given(
    name=st.sampled_from(TYPES),
    rows=st.integers(1, 300_000),
    blocks=st.integers(1, 256),
    m=st.integers(1, MAX_ROWS),
    arch=st.sampled_from(ARCHS),
)
def test_every_shape_has_a_config_whose_numbers_fit(
    name: str, rows: int, blocks: int, m: int, arch: int
) -> None:
    config = config_for(BLOCK_TYPES[name], rows, 256 * blocks, m, arch)
    for count in (config.padded, config.rows, config.warps):
        assert count & (count - 1) == 0
    assert config.padded >= m
    assert config.padded <= MAX_ROWS
    assert config.rows >= 16
    assert 1 <= config.splits <= blocks
    assert config.stages >= 2


@given(name=st.sampled_from(TYPES), rows=st.integers(1, 300_000), blocks=st.integers(1, 256))
def test_the_order_of_a_sum_is_that_of_one_row_up_to_eight(
    name: str, rows: int, blocks: int
) -> None:
    configs = [config_for(BLOCK_TYPES[name], rows, 256 * blocks, m, 90) for m in range(1, 9)]
    assert len({config.splits for config in configs}) == 1
    assert all(TILE % config.rows == 0 for config in configs)


@given(rows=st.lists(st.integers(1, 300_000), min_size=1, max_size=3), splits=st.integers(1, 8))
def test_tiles_are_no_higher_than_they_may_be_and_even_where_all_run_at_once(
    rows: list[int], splits: int
) -> None:
    tiles = tiles_of([*rows, 0], splits)
    assert tiles[-1] == 0
    for count, here in zip(rows, tiles, strict=False):
        edges = [tile * count // here for tile in range(here + 1)]
        assert edges[0] == 0 and edges[-1] == count
        assert all(0 < after - before <= TILE for before, after in pairwise(edges))
    least = sum(-(-count // TILE) for count in rows)
    if splits == 1 and MULTIPROCESSORS < least <= TILES_AT_ONCE * MULTIPROCESSORS:
        # Short of a whole round by less than one tile for each matrix.
        assert -(sum(tiles) % -MULTIPROCESSORS) < len(rows)


def on_gpu(name: str, rows: int, columns: int) -> QuantTensor:
    generator = torch.Generator(device="cuda").manual_seed(rows)
    return random_blocks(BLOCK_TYPES[name], (rows, columns), generator)


@pytest.mark.gpu
@pytest.mark.parametrize("name", TYPES)
def test_both_ways_to_unpack_codes_give_the_same_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.kernels import small_m
    from engine.kernels.small_m_inputs import as_integers

    weight, product = pack(on_gpu(name, 96, 1024)), small_m.product
    for m in (1, 2, 4, 8):
        config = dataclasses.replace(config_for(weight.type, 96, 1024, m, 90), splits=1)
        x = as_integers(torch.randn(m, 1024, device="cuda").bfloat16())
        found = []
        for plain in (False, True):
            monkeypatch.setattr(
                small_m, "product", lambda *a, plain=plain, **k: product(*a, plain=plain, **k)
            )
            found.append(torch.full((1, m, 96), torch.nan, device="cuda"))
            small_m.products(x, [weight], found[-1], config)
        assert not found[0].isnan().any()
        assert torch.equal(*found), m
