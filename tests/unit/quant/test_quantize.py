"""Quantisation: its error against the best known quantizer's, and the inputs that break one.

The error limits are those of ggml's reference quantizers on the same kinds of data, measured on
524,288 values each; a sample of 65,536 is within 1 % of them.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.quant import quantize as quantize_module
from engine.quant.blocks import BLOCK_TYPES, LAYOUTS, WRITTEN, QuantError
from engine.quant.quantize import quantize

QUANTS = [name for name in LAYOUTS if name in WRITTEN]
SIGNED = [name for name in QUANTS if LAYOUTS[name].second is None]

# Relative RMS error of ggml's quantizers: Gaussian values, Student's t with 4 degrees of freedom.
KNOWN = {
    "Q5_0": (0.0427, 0.0584),
    "Q8_0": (0.00535, 0.00733),
    "Q4_K": (0.0714, 0.0871),
    "Q6_K": (0.01773, 0.02303),
}


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def heavy_tailed(*shape: int, seed: int = 0) -> Tensor:
    """Student's t, 4 degrees of freedom."""
    generator = torch.Generator().manual_seed(seed)
    squares = torch.randn(*shape, 4, generator=generator).square().mean(-1)
    return torch.randn(*shape, generator=generator) / squares.sqrt()


def restored(x: Tensor, name: str) -> Tensor:
    return quantize(x, BLOCK_TYPES[name]).dequantize()


def relative_error(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).norm() / x.double().norm())


@pytest.mark.parametrize("name", QUANTS)
def test_the_error_is_no_larger_than_that_of_the_best_known_quantizer(name: str) -> None:
    for x, known in zip((gaussian(64, 1024), heavy_tailed(64, 1024)), KNOWN[name], strict=True):
        assert relative_error(x, restored(x, name)) < 1.01 * known


@pytest.mark.parametrize("name", QUANTS)
def test_a_power_of_two_scales_every_value_exactly(name: str) -> None:
    x = gaussian(5, 512, seed=2)
    assert torch.equal(restored(64 * x, name), 64 * restored(x, name))


@pytest.mark.parametrize("name", QUANTS)
def test_another_scale_leaves_the_relative_error(name: str) -> None:
    x = gaussian(64, 512, seed=3)
    once = relative_error(x, restored(x, name))
    # Scales are rounded to half elsewhere: 2^-11 of a value, about 1 % of Q8_0's error.
    assert relative_error(0.37 * x, restored(0.37 * x, name)) == pytest.approx(once, rel=0.02)


@pytest.mark.parametrize("name", SIGNED)
def test_the_sign_changes_nothing_in_types_without_a_minimum(name: str) -> None:
    x = heavy_tailed(6, 512, seed=4)
    assert torch.equal(restored(-x, name), -restored(x, name))


@pytest.mark.parametrize("name", QUANTS)
def test_zeros_stay_zeros(name: str) -> None:
    assert not restored(torch.zeros(2, 256), name).any()
    x = gaussian(1, 256)
    x[:, 32:224] = 0
    y = restored(x, name)
    assert not y[:, 32:224].any()
    assert y.isfinite().all()


@pytest.mark.parametrize("name", QUANTS)
@pytest.mark.parametrize("value", [3.0, -3.0, 0.9, -700.0])
def test_a_constant_row_stays_one(name: str, value: float) -> None:
    y = restored(torch.full((2, 512), value), name)
    assert (y == y[0, 0]).all()
    # One half rounds the scale: 2^-11. A scale of Q6_K and Q4_K is 6 bits or more times that.
    assert y[0, 0].item() == pytest.approx(value, rel=2**-10)


@pytest.mark.parametrize("name", QUANTS)
@pytest.mark.parametrize("size", [1e3, -1e3])
def test_one_outlier_survives_and_spoils_its_own_group_only(name: str, size: float) -> None:
    x = gaussian(2, 512, seed=5)
    clean = restored(x, name)
    x[0, 70] = size
    y = restored(x, name)
    # An outlier beside values near 0 needs no more than a step of its own group's scale.
    assert y[0, 70].item() == pytest.approx(size, rel=0.02)
    assert torch.equal(y[1], clean[1])
    assert torch.equal(y[0, 256:], clean[0, 256:])
    if LAYOUTS[name].scales is None:
        assert torch.equal(y[0, :64], clean[0, :64])


@pytest.mark.parametrize("name", QUANTS)
def test_rows_of_one_sign_keep_it(name: str) -> None:
    for x in (-gaussian(16, 512, seed=6).abs(), gaussian(16, 512, seed=6).abs()):
        y = restored(x, name)
        assert relative_error(x, y) < 1.3 * KNOWN[name][0]
        half_a_step = 0.15 if LAYOUTS[name].levels == 15 else 0.08
        assert (y * x.sign() >= -half_a_step).all()


@pytest.mark.parametrize("name", QUANTS)
@pytest.mark.parametrize("scale", [1e-5, 1e-6, 1e-7, 1e-12, 1e-30, 1e-44])
def test_values_too_small_for_half_scales_stay_small(name: str, scale: float) -> None:
    x = scale * gaussian(8, 512, seed=7)
    y = restored(x, name)
    # The smallest half is 6e-8, and a code is up to 32 times that and its scale.
    assert y.abs().max() <= max(2 * x.abs().max().item(), 32 * 6e-8)


def test_a_scale_below_the_smallest_half_is_not_lost() -> None:
    # The largest scale over 63 is under half of the smallest half: rounded to nearest, all is 0.
    x = 63 * 2.0**-26 * torch.linspace(0, 15, 256)[None].round()
    assert relative_error(x, restored(x, "Q4_K")) < 0.1


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused_where_they_are(name: str, value: float) -> None:
    x = torch.zeros(5, 256)
    x[3, 17] = value
    with pytest.raises(ValueError, match=rf"found {value:g} in row 3, column 17$") as caught:
        quantize(x, BLOCK_TYPES[name], name="blk.0.ffn_up.weight")
    assert isinstance(caught.value, QuantError)
    assert "blk.0.ffn_up.weight of shape (5, 256)" in str(caught.value)


def test_a_refused_value_is_found_in_a_later_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(quantize_module.CHUNK_VALUES, "cpu", 512)
    x = torch.zeros(9, 256)
    x[7, 200] = float("nan")
    with pytest.raises(ValueError, match="in row 7, column 200"):
        quantize(x, BLOCK_TYPES["Q4_K"])


@pytest.mark.parametrize("name", [*QUANTS, "F16"])
def test_values_up_to_the_largest_fit_and_larger_ones_are_refused(name: str) -> None:
    largest = BLOCK_TYPES[name].largest
    assert largest is not None
    x = gaussian(2, 256, seed=8)
    x[0, 3], x[1, 40] = largest, -largest
    y = restored(x, name)
    assert y.isfinite().all()
    assert y[0, 3].item() == pytest.approx(largest, rel=0.02)
    assert y[1, 40].item() == pytest.approx(-largest, rel=0.02)
    x[0, 3] = 1.01 * largest
    with pytest.raises(ValueError, match="finite values of size up to"):
        quantize(x, BLOCK_TYPES[name])


def test_rows_that_blocks_do_not_fill_are_refused_with_the_fallback_named() -> None:
    with pytest.raises(ValueError, match="multiple of 256 values, found 896\nhint: Q5_0 fits"):
        quantize(torch.zeros(4, 896), BLOCK_TYPES["Q4_K"])


@pytest.mark.parametrize("name", [name for name in BLOCK_TYPES if name not in WRITTEN])
def test_a_type_that_is_only_read_is_refused_with_those_that_are_written(name: str) -> None:
    with pytest.raises(QuantError, match=rf"one of F32, .*, found {name}, which is only read"):
        quantize(torch.zeros(4, 256), BLOCK_TYPES[name])


@pytest.mark.parametrize("tensor", [torch.zeros(2, 256, dtype=torch.int32), torch.tensor(1.0)])
def test_what_is_no_rows_of_floats_is_refused(tensor: Tensor) -> None:
    with pytest.raises(QuantError, match="expected rows of floats"):
        quantize(tensor, BLOCK_TYPES["Q4_K"])


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_float_types_round_once(name: str) -> None:
    x = gaussian(3, 7, seed=9)
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
    assert torch.equal(restored(x, name), x.to(dtype).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_float_inputs_and_leading_dimensions_are_taken(dtype: torch.dtype) -> None:
    x = gaussian(2, 3, 256).to(dtype)
    made = quantize(x.requires_grad_(), BLOCK_TYPES["Q6_K"])
    assert made.blocks.shape == (2, 3, 210)
    assert torch.equal(
        made.blocks.view(6, 210),
        quantize(x.detach().float().view(6, 256), BLOCK_TYPES["Q6_K"]).blocks,
    )


def test_a_transposed_tensor_is_quantized_as_it_reads() -> None:
    x = gaussian(256, 9).t()
    type_ = BLOCK_TYPES["Q4_K"]
    assert torch.equal(quantize(x, type_).blocks, quantize(x.contiguous(), type_).blocks)


def test_no_rows_make_an_empty_tensor() -> None:
    made = quantize(torch.empty(0, 512), BLOCK_TYPES["Q4_K"])
    assert made.blocks.shape == (0, 288)
    assert made.dequantize().shape == (0, 512)


@pytest.mark.parametrize("name", QUANTS)
def test_a_block_depends_on_its_own_values_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = gaussian(13, 768, seed=10)
    type_ = BLOCK_TYPES[name]
    whole = quantize(x, type_).blocks
    monkeypatch.setitem(quantize_module.CHUNK_VALUES, "cpu", 2 * 768)
    assert torch.equal(quantize(x, type_).blocks, whole)
    # A single block, where a sum over one column could be another sum.
    alone = quantize(x[7, : type_.block_size], type_).blocks
    assert torch.equal(alone, whole[7, : type_.block_bytes])


@pytest.mark.gpu
@pytest.mark.parametrize("name", QUANTS)
def test_a_gpu_writes_the_same_bytes(name: str) -> None:
    x = torch.cat([heavy_tailed(256, 1024, seed=11), 1e-5 * gaussian(64, 1024)])
    x[3, 40:200] = 0
    here = quantize(x, BLOCK_TYPES[name]).blocks
    there = quantize(x.cuda(), BLOCK_TYPES[name]).blocks.cpu()
    different = (here != there).sum().item()
    assert different == 0, f"{different} of {here.numel()} bytes differ"
