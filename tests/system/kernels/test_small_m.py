"""The kernels for few rows on a GPU, and the data that say how they are launched."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.bench.random_weights import random_blocks
from engine.kernels.small_m_table import (
    MAX_ROWS,
    MULTIPROCESSORS,
    TILE,
    TILES_AT_ONCE,
    config_for,
    crossover_rows,
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
    assert config.padded <= 8 if config.family == "codes" else config.padded >= 16
    assert config.rows >= 16
    assert 1 <= config.splits <= blocks
    assert config.stages >= 2


@given(name=st.sampled_from(TYPES), rows=st.integers(1, 300_000), blocks=st.integers(1, 256))
def test_the_order_of_a_sum_is_that_of_one_row_up_to_eight(
    name: str, rows: int, blocks: int
) -> None:
    configs = [config_for(BLOCK_TYPES[name], rows, 256 * blocks, m, 90) for m in range(1, 9)]
    assert len({(config.splits, config.family) for config in configs}) == 1
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


@pytest.mark.parametrize("arch", ARCHS)
def test_the_crossover_is_within_what_the_kernels_take(arch: int) -> None:
    for name in TYPES:
        for rows, columns in ((512, 3584), (37888, 3584), (3584, 18944), (152064, 3584)):
            assert 0 <= crossover_rows(BLOCK_TYPES[name], rows, columns, arch) <= MAX_ROWS


@pytest.mark.parametrize(
    ("arch", "dtype", "m"),
    [
        (80, torch.bfloat16, 1),
        (89, torch.float16, 4),
        (90, torch.bfloat16, 64),
        (90, torch.float32, 1),
        (90, torch.float32, 16),
        (100, torch.bfloat16, 32),
        (120, torch.bfloat16, 64),
        (121, torch.bfloat16, 2),
    ],
)
# One of them compiles with every other kernel in `test_aot`.
@pytest.mark.soak
def test_variants_compile_for_every_architecture(arch: int, dtype: torch.dtype, m: int) -> None:
    pytest.importorskip("triton")
    from engine.kernels.registry import compile_for
    from engine.kernels.small_m import variants

    for name in TYPES:
        found = variants(BLOCK_TYPES[name], 512, 3584, dtype, torch.float32, arch=arch, m=(m,))
        for variant in found:
            body, _ = compile_for(variant, arch)
            # What the smallest of these architectures has for a program.
            assert body.metadata.shared <= 99 << 10, variant


SHAPES = [
    ("Q4_K", 37888, 3584),
    ("Q4_K", 3584, 3584),
    ("Q4_K", 512, 3584),
    ("Q6_K", 512, 3584),
    ("Q6_K", 3584, 18944),
    ("Q5_K", 3584, 18944),
    ("Q4_K", 37, 256),
    ("Q6_K", 5, 512),
]
LIMIT = 3e-3
"""Of the relative error with bf16 results: their own rounding is 1.7e-3, that of weights rounded
once to bf16 as much again."""


def on_gpu(name: str, rows: int, columns: int) -> QuantTensor:
    generator = torch.Generator(device="cuda").manual_seed(rows)
    return random_blocks(BLOCK_TYPES[name], (rows, columns), generator)


def error(y_MN: Tensor, expected: Tensor) -> float:
    return float((y_MN.double() - expected).norm() / expected.norm())


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "rows", "columns"), SHAPES)
def test_few_rows_agree_with_the_dequantised_product(name: str, rows: int, columns: int) -> None:
    from engine.kernels.small_m import fused_linear

    weight = on_gpu(name, rows, columns)
    packed, dense_NK = pack(weight), weight.dequantize().double()
    for m in (1, 2, 3, 8, 9, 16, 33, 64):
        for dtype in (torch.bfloat16, torch.float16):
            x_MK = torch.randn(m, columns, device="cuda").to(dtype)
            bias_N = torch.randn(rows, device="cuda")
            out_MN = torch.full((m, rows), torch.nan, device="cuda", dtype=dtype)
            y_MN = fused_linear(x_MK, packed, bias_N, out_MN)
            expected = x_MK.double() @ dense_NK.t() + bias_N.double()
            assert error(y_MN, expected) < LIMIT, (m, dtype)
            assert torch.equal(y_MN, fused_linear(x_MK, packed, bias_N)), "not the same bits again"


@pytest.mark.gpu
@pytest.mark.parametrize("name", TYPES)
def test_float32_inputs_lose_nothing(name: str) -> None:
    from engine.kernels.small_m import fused_linear

    weight = on_gpu(name, 100, 1024)
    for m in (1, 2, 5, 16, 40):
        x_MK = torch.randn(m, 1024, device="cuda")
        y_MN = fused_linear(x_MK, pack(weight), None)
        assert error(y_MN, x_MK.double() @ weight.dequantize().double().t()) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_ways_to_unpack_give_the_same_bits(name: str, dtype: torch.dtype) -> None:
    from engine.kernels import small_m
    from engine.kernels.registry import launch

    weight = pack(on_gpu(name, 96, 1024))
    for m in (16, 64):
        config = dataclasses.replace(config_for(weight.type, 96, 1024, m, 90), splits=1)
        x_MK = torch.randn(m, 1024, device="cuda").to(dtype)
        found = []
        for plain in (False, True):
            y_MN = torch.full((m, 96), torch.nan, device="cuda", dtype=dtype)
            launch(
                small_m._tile(weight.type, config, dtype, dtype, None, plain=plain),
                (-(-96 // config.rows), 1),
                x_MK,
                *(weight.planes()[plane] for plane, _ in small_m._PLANES[name]),
                x_MK,
                y_MN,
                96,
                4,
                m,
                4,
            )
            found.append(y_MN)
        assert not found[0].isnan().any()
        assert torch.equal(*found), m


@pytest.mark.gpu
@pytest.mark.parametrize("name", TYPES)
def test_both_ways_to_unpack_codes_give_the_same_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.kernels import small_m

    weight, product = pack(on_gpu(name, 96, 1024)), small_m.product
    for m in (1, 2, 4, 8):
        config = dataclasses.replace(config_for(weight.type, 96, 1024, m, 90), splits=1)
        x = small_m.as_integers(torch.randn(m, 1024, device="cuda").bfloat16())
        found = []
        for plain in (False, True):
            monkeypatch.setattr(
                small_m, "product", lambda *a, plain=plain, **k: product(*a, plain=plain, **k)
            )
            found.append(torch.full((1, m, 96), torch.nan, device="cuda"))
            small_m.products(x, [weight], found[-1], config)
        assert not found[0].isnan().any()
        assert torch.equal(*found), m


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "rows", "columns"), SHAPES)
def test_a_row_is_the_same_bits_whatever_is_beside_it(name: str, rows: int, columns: int) -> None:
    from engine.kernels.small_m import fused_linear

    weight = pack(on_gpu(name, rows, columns))
    x_MK = torch.randn(8, columns, device="cuda").bfloat16()
    together_MN = fused_linear(x_MK, weight, None)
    for m in range(1, 8):
        assert torch.equal(fused_linear(x_MK[:m].contiguous(), weight, None), together_MN[:m]), m
