"""The kernel behind 8-bit feed-forward layers gives the codes of the plain form, and hides nothing."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from engine.models.fp8 import LARGEST_ROW, gated_rows_reference, quantise_rows

pytest.importorskip("triton")

from engine.kernels import fp8_quantise
from engine.kernels.fp8_quantise import norm_to_fp8, to_fp8, variants

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


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("columns", [16, 896, 3584])
def test_norms_are_quantised_as_if_they_had_been_written(columns: int, add: bool) -> None:
    generator = torch.Generator().manual_seed(columns)
    # In fp32: the interpreter truncates where a GPU rounds to bf16.
    y_MK, x_MK = torch.randn(2, 4, columns, generator=generator)
    weight_K = torch.rand(columns, generator=generator)
    x_MK[1], y_MK[1] = 0, 0
    x_MK[2, columns // 2] = float("nan")
    kept_MK = torch.empty_like(x_MK) if add else x_MK
    rows, scale = norm_to_fp8(
        y_MK if add else None, x_MK, weight_K, 1e-6, kept_MK, codes=torch.float32
    )
    sum_MK = x_MK + y_MK if add else x_MK
    assert torch.equal(kept_MK.nan_to_num(7), sum_MK.nan_to_num(7))
    healthy = [0, 1, 3]
    wanted = F.rms_norm(sum_MK, (columns,), weight_K, 1e-6)[healthy]
    assert torch.allclose((rows * scale)[healthy], wanted, rtol=1e-5, atol=1e-12)
    assert torch.allclose(scale[healthy], quantise_rows(wanted)[1], rtol=1e-5, atol=0)
    assert rows[2].isnan().all()


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
        with pytest.raises(AssertionError):
            to_fp8(joined, gated=True)


def test_the_widest_row_is_the_one_that_layers_know_of() -> None:
    assert fp8_quantise.LARGEST_ROW == LARGEST_ROW
    joined_MG = torch.ones(1, 2 * LARGEST_ROW)
    rows, scale = to_fp8(joined_MG, gated=True, codes=torch.float32)
    assert torch.allclose(rows * scale, torch.sigmoid(joined_MG[:, :LARGEST_ROW]))


def test_gpus_without_8_bit_floats_have_no_body() -> None:
    assert variants(80) == () and len(variants(90)) == 4
