"""The dequantisation kernels write the bits of the reference, on any bytes and in any shape."""

from __future__ import annotations

import pytest
import torch

from engine.quant.blocks import BLOCK_TYPES, LAYOUTS
from engine.quant.planes import PackedMatrix, pack
from engine.quant.reference import dequantize
from engine.quant.tensor import QuantTensor

pytest.importorskip("triton")

from engine.kernels.dequantize_triton import TUNINGS, dequantize_blocks, variants

HALVES = (0x7E00, 0x7C00, 0xFC00, 0x0001, 0x83FF, 0x0000, 0x8000, 0x7BFF, 0xFBFF, 0x1419)
"""NaN, infinities, subnormals, zeros, the largest and a plain one"""
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


def random_matrix(name: str, rows: int, columns: int) -> QuantTensor:
    type_ = BLOCK_TYPES[name]
    blocks = rows * columns // type_.block_size
    raw = torch.randint(0, 256, (blocks, type_.block_bytes), dtype=torch.uint8)
    layout = LAYOUTS[name]
    for start in (layout.d, layout.second):
        if start is not None:
            halves = torch.tensor(HALVES, dtype=torch.int32).to(torch.int16)
            chosen = halves[torch.randint(0, len(HALVES), (blocks, 1))]
            raw[:, start : start + 2] = chosen.view(torch.uint8)
    return QuantTensor(blocks=raw.view(rows, -1), type=type_, shape=(rows, columns))


def assert_equals_the_reference(packed: PackedMatrix, weight: QuantTensor, first: int) -> None:
    count = packed.rows - first
    # One row more on each side, which must stay as it is.
    around = torch.full((count + 2, packed.columns), 7.0)
    found = around[1:-1]
    expected = dequantize(weight.blocks[first:], weight.type)
    dequantize_blocks(packed, found, first, count)
    same = found.view(torch.int32) == expected.view(torch.int32)
    different = ~(same | (found.isnan() & expected.isnan()))
    assert not different.any(), (
        f"{different.sum()} of {different.numel()} values differ, the first is "
        f"{found[different][0]} for {expected[different][0]}"
    )
    assert (around[[0, -1]] == 7).all()


SHAPES = [(1, 256), (17, 512), (3, 3584), (1, 18944)]
SHAPES_32 = [(1, 32), (67, 96), (3, 896), (2, 29568)]
"""Rows that fill no program, and those of Qwen2.5, 7B and 0.5B"""


@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [
        # Long rows are as shorter ones, but for their number of programs.
        pytest.param(name, rows, columns, marks=pytest.mark.soak if columns > 512 else ())
        for name in TUNINGS
        for rows, columns in (SHAPES if BLOCK_TYPES[name].block_size == 256 else SHAPES_32)
    ],
)
def test_values_have_the_bits_of_the_reference(name: str, rows: int, columns: int) -> None:
    torch.manual_seed(rows)
    weight = random_matrix(name, rows, columns)
    assert_equals_the_reference(pack(weight), weight, 0)


@pytest.mark.parametrize("name", TUNINGS)
def test_rows_in_the_middle_are_those(name: str) -> None:
    torch.manual_seed(0)
    weight = random_matrix(name, 21, 256)
    assert_equals_the_reference(pack(weight), weight, 5)


def test_every_type_has_a_variant_of_its_own_for_each_dtype() -> None:
    assert set(TUNINGS) == {"Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "Q5_0"}
    assert len(set(variants())) == 3 * len(TUNINGS)
    assert not any(variant.fp_fusion for variant in variants())
