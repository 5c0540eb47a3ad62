"""The kernel behind 8-bit feed-forward layers gives the codes of the plain form, and hides nothing."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from engine.errors import InternalError
from engine.models.fp8 import LARGEST_ROW, gated_rows_reference, quantise_rows

pytest.importorskip("triton")

from engine.kernels import fp8_quantise
from engine.kernels.fp8_quantise import to_fp8, variants

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")


@pytest.mark.parametrize("columns", [16, 48, 4864, 4096 + 16, 18944])
def test_rows_and_scales_are_those_of_the_plain_form(columns: int) -> None:
    torch.manual_seed(columns)
    joined_MG = 3 * torch.randn(3, 2 * columns)
    joined_MG[1] *= 1e-3
    joined_MG[2] = 0
    rows, scale = to_fp8(joined_MG, gated=True, codes=torch.float32)
    gate, up = joined_MG.chunk(2, dim=1)
    values = F.silu(gate) * up
    assert torch.allclose(scale, gated_rows_reference(joined_MG)[1], rtol=1e-6, atol=0)
    assert torch.allclose(rows * scale, values, rtol=1e-5, atol=1e-12)
    assert rows.abs().amax(1)[:2].tolist() == pytest.approx([448, 448]) and not rows[2].any()
    assert rows.abs().max() <= 448


def test_rows_without_a_gate_are_quantised_as_they_are() -> None:
    x_MK = torch.randn(3, 4096 + 48, generator=torch.Generator().manual_seed(1)).bfloat16()
    x_MK[1] = 0
    rows, scale = to_fp8(x_MK, codes=torch.float32)
    wanted_scale = quantise_rows(x_MK)[1]
    assert torch.allclose(scale, wanted_scale, rtol=1e-6, atol=0)
    assert torch.allclose(rows * scale, x_MK.float(), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("place", [0, 47])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_with_a_bad_number_answers_nan(bad: float, place: int) -> None:
    for columns in (48, 64):
        joined_MG = torch.ones(2, 2 * columns)
        joined_MG[1, columns + place] = bad
        rows, scale = to_fp8(joined_MG, gated=True, codes=torch.float32)
        assert (rows * scale).sum(1).isnan().tolist() == [False, True]


def test_other_layouts_are_refused() -> None:
    for joined in (torch.ones(2, 96)[:, :64], torch.ones(2, 40), torch.ones(1, 2 * 32784)):
        with pytest.raises(InternalError, match="multiple of 16"):
            to_fp8(joined, gated=True)


def test_the_widest_row_is_the_one_that_layers_know_of() -> None:
    assert fp8_quantise.LARGEST_ROW == LARGEST_ROW
    joined_MG = torch.ones(1, 2 * LARGEST_ROW)
    rows, scale = to_fp8(joined_MG, gated=True, codes=torch.float32)
    assert torch.allclose(rows * scale, torch.sigmoid(joined_MG[:, :LARGEST_ROW]))


def test_gpus_without_8_bit_floats_have_no_body() -> None:
    assert variants(80) == () and len(variants(90)) == 2
