"""Layers in 8-bit floats: how near a number is kept, what is one product, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import BadInput, WeightsError
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, FeedForward
from engine.models.fp8 import (
    DTYPE,
    Fp8FeedForward,
    Fp8Linear,
    Fp8Together,
    dequantise_rows,
    fp8_linear,
    matmul,
    quantise_rows,
    round_head,
    round_layer,
    to_codes,
)
from engine.models.frozen import freeze
from engine.models.head import OwnMatmul, logits_of, project
from engine.models.load import load_decoder, save_decoder
from engine.models.load_fp8 import load_fp8_decoder, refuse_sides
from engine.models.packed import head_of
from tests.support.packed_models import lively, make_config, random_tokens, write


def rounded(config: ModelConfig) -> Decoder:
    decoder = freeze(lively(config))
    for layer in decoder.layers:
        round_layer(layer)
    return decoder


@given(st.integers(0, 2**32), st.floats(1e-9, 1e9))
def test_a_number_is_kept_within_a_sixteenth(seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x_MK = size * torch.randn(5, 48, generator=generator)
    codes_MK, scale_M1 = quantise_rows(x_MK)
    assert codes_MK.dtype == DTYPE and scale_M1.shape == (5, 1)
    error_MK = (dequantise_rows(codes_MK, scale_M1, torch.float32) - x_MK).abs()
    # Half a step of three bits of mantissa; below 2^-6 of the format, half of its smallest step.
    allowed_MK = torch.maximum(x_MK.abs() / 16, scale_M1 * 2.0**-10)
    assert (error_MK <= 1.001 * allowed_MK).all()
    assert (codes_MK.float().abs().amax(1) == 448).all()


def test_a_row_has_its_own_scale() -> None:
    x_MK = torch.ones(3, 32)
    x_MK[0] *= 1e4
    x_MK[1] = 0
    codes_MK, scale_M1 = quantise_rows(x_MK)
    found_MK = dequantise_rows(codes_MK, scale_M1, torch.float32)
    assert torch.allclose(found_MK, x_MK, rtol=1e-6, atol=0) and not codes_MK[1].float().any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_number_makes_its_row_nan_and_no_other(bad: float) -> None:
    layer = fp8_linear(torch.randn(16, 32), None)
    x_MK = torch.randn(3, 32)
    wanted_MN = layer(x_MK)
    x_MK[1, 5] = bad
    found_MN = layer(x_MK)
    assert found_MN[1].isnan().all()
    assert torch.equal(found_MN[[0, 2]], wanted_MN[[0, 2]])


def test_a_product_is_that_of_the_values_that_codes_stand_for() -> None:
    x_MK, weight_NK, bias_N = torch.randn(7, 64), torch.randn(32, 64), torch.randn(32)
    (a, s), (b, t) = quantise_rows(x_MK), quantise_rows(weight_NK)
    found_MN = matmul(a, s, b, t.squeeze(1), bias_N, torch.float32)
    values_MK, values_NK = (dequantise_rows(*each, torch.float64) for each in ((a, s), (b, t)))  # type: ignore[misc]
    wanted_MN = values_MK @ values_NK.t() + bias_N.double()
    assert torch.allclose(found_MN.double(), wanted_MN, rtol=1e-5, atol=1e-5)
    # What rounding costs: e4m3 is off by some 2.6 % of a number, in both operands.
    exact_MN = x_MK @ weight_NK.t() + bias_N
    assert 0.01 < (found_MN - exact_MN).norm() / exact_MN.norm() < 0.06


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_joined_layers_are_the_layers_apart(family: str) -> None:
    decoder = rounded(make_config(family))
    attention = decoder.layers[0].attention
    first, x_MK = attention.q, torch.randn(2, 5, 256)
    assert isinstance(first, Fp8Together)
    found = first.together(x_MK, [attention.k, attention.v])
    for layer, y in zip((attention.q, attention.k, attention.v), found, strict=True):
        assert isinstance(layer, Fp8Linear)
        assert torch.equal(layer(x_MK), y)
    # The values exist once: each layer's are a part of what is multiplied.
    assert (
        attention.k.codes.untyped_storage().data_ptr() == first.codes.untyped_storage().data_ptr()
    )


def test_the_feed_forward_layer_is_its_three_products() -> None:
    mlp = rounded(make_config()).layers[0].mlp
    assert isinstance(mlp, Fp8FeedForward)
    x_BTD = torch.randn(2, 5, 256)
    gate, up = mlp.gate(x_BTD), mlp.up(x_BTD)
    wanted_BTD = mlp.down(torch.nn.functional.silu(gate) * up)
    assert torch.allclose(mlp(x_BTD), wanted_BTD, rtol=1e-5, atol=1e-5)
    codes, scale = to_codes(torch.cat([gate, up], -1).flatten(0, 1), gated=True)
    assert codes.shape == (10, 512) and scale.shape == (10, 1)


@torch.no_grad()
def test_another_activation_than_the_kernels_keeps_its_layer() -> None:
    config = make_config("gemma3_text")
    decoder, exact = rounded(config), lively(config)
    tokens_BT = random_tokens(2, 37)
    mlp = decoder.layers[0].mlp
    assert isinstance(mlp, FeedForward) and isinstance(mlp.down, Fp8Linear)
    error = float((decoder(tokens_BT) - exact(tokens_BT)).norm() / exact(tokens_BT).norm())
    assert error < 0.15, error


def test_names_and_values_of_weights_stay_visible() -> None:
    config = make_config()
    exact, decoder = freeze(lively(config)), rounded(config)
    for name in ("layers.1.attention.k", "layers.0.mlp.up", "layers.1.mlp.down"):
        wanted_NK = exact.get_buffer(f"{name}.weight")
        found_NK = decoder.get_submodule(name).weight
        assert isinstance(found_NK, torch.Tensor) and found_NK.shape == wanted_NK.shape
        assert (found_NK.float() - wanted_NK).norm() / wanted_NK.norm() < 0.04
    assert not list(decoder.parameters())
    codes = sum(b.numel() for n, b in decoder.named_buffers() if n.endswith("codes"))
    assert codes == sum(b.numel() for b in exact.layers.buffers() if b.ndim == 2)


@pytest.mark.parametrize("blocks", ["", "Q4_K"])
def test_a_file_is_loaded_layer_by_layer_to_what_rounding_it_whole_gives(
    blocks: str, tmp_path: Path
) -> None:
    config = make_config(num_hidden_layers=3)
    path = tmp_path / "model"
    if blocks:
        path = write(tmp_path / "m.gguf", lively(config), blocks)
    else:
        save_decoder(lively(config), path, torch.float32)
    seen: list[tuple[str, str]] = []

    class Watcher:
        def before(self, decoder: Decoder, layer: torch.nn.Module) -> None:
            seen.append(("before", type(layer.attention.o).__name__))
            assert decoder.embed.weight.device.type == "cpu"

        def after(self, decoder: Decoder, layer: torch.nn.Module) -> None:
            seen.append(("after", type(layer.attention.o).__name__))

    found = load_fp8_decoder(path, torch.float32, "cpu", watcher=Watcher())
    assert seen == [("before", "Linear"), ("after", "Fp8Linear")] * 3
    wanted = freeze(load_decoder(path))
    for layer in wanted.layers:
        round_layer(layer)
    assert {n for n, _ in found.named_buffers()} == {n for n, _ in wanted.named_buffers()}
    for name, buffer in wanted.named_buffers():
        assert torch.equal(found.get_buffer(name), buffer), name
    tokens_BT = random_tokens(2, 20)
    with torch.no_grad():
        assert torch.equal(found.hidden(tokens_BT), wanted.hidden(tokens_BT))


def test_a_file_with_nan_is_refused(tmp_path: Path) -> None:
    decoder = lively(make_config())
    with torch.no_grad():
        decoder.layers[1].mlp.down.weight[3, 4] = torch.nan
    save_decoder(decoder, tmp_path / "model", torch.float32)
    with pytest.raises(WeightsError, match=r"down_proj\.weight: 1 of"):
        load_fp8_decoder(tmp_path / "model", torch.float32, "cpu")


def test_sides_that_the_matrix_unit_does_not_take_are_refused() -> None:
    refuse_sides(make_config())
    with pytest.raises(BadInput, match=r"multiples of 16, found intermediate_size 520") as caught:
        refuse_sides(make_config(intermediate_size=520))
    assert "teacher.precision=bf16" in str(caught.value)


@pytest.mark.gpu
def test_the_gpu_multiplies_the_same_codes() -> None:
    x_MK, weight_NK = torch.randn(33, 256), torch.randn(512, 256)
    bias_N = torch.randn(512)
    on_cpu = fp8_linear(weight_NK, bias_N)
    on_gpu = fp8_linear(weight_NK.cuda(), bias_N.cuda().bfloat16())
    assert torch.equal(on_gpu.codes.cpu(), on_cpu.codes)
    x_MK = x_MK.bfloat16()
    wanted_MN = on_cpu(x_MK.float())
    found_MN = on_gpu(x_MK.cuda()).float().cpu()
    assert (found_MN - wanted_MN).norm() / wanted_MN.norm() < 3e-3  # the sum rounded to bf16, twice
    # Half-way between two codes as often as bf16 is: both devices decide alike.
    assert torch.equal(quantise_rows(x_MK.cuda())[0].cpu().float(), quantise_rows(x_MK)[0].float())


@pytest.mark.gpu
def test_the_kernel_of_the_feed_forward_layer_writes_the_codes_of_the_plain_form() -> None:
    from engine.models.fp8 import gated_rows_reference

    for columns in (48, 4864, 18944):
        joined_MG = (3 * torch.randn(65, 2 * columns, device="cuda")).bfloat16()
        joined_MG[3] = 0
        codes, scale = to_codes(joined_MG, gated=True)
        wanted, wanted_scale = gated_rows_reference(joined_MG)
        assert torch.allclose(scale, wanted_scale, rtol=1e-6, atol=0)
        far = (codes.float() - wanted.float()).abs() > 0
        assert far.float().mean() < 1e-4, columns  # exponentials differ in their last bit
        assert not codes[3].float().any()
        # The reductions of a GPU skip NaN; the interpreter's do not.
        joined_MG[5, 7], joined_MG[6, columns + 9] = torch.nan, torch.inf
        codes, scale = to_codes(joined_MG, gated=True)
        assert (codes.float() * scale).sum(1).isnan().nonzero().flatten().tolist() == [5, 6]
        codes, scale = to_codes(joined_MG[8:])
        wanted, wanted_scale = quantise_rows(joined_MG[8:])
        assert torch.equal(codes.float(), wanted.float()) and torch.equal(scale, wanted_scale)


@pytest.mark.parametrize("columns", [96, 75])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_a_rounded_head_are_those_of_its_weight_and_of_what_it_reads(
    dtype: torch.dtype, columns: int
) -> None:
    decoder = freeze(lively(make_config(vocab_size=96)).to(dtype))
    exact = head_of(decoder)
    round_head(decoder)
    head, weight_VD = head_of(decoder), decoder.head_weight
    assert weight_VD is not None and (head.vocab_size, head.width) == tuple(weight_VD.shape)
    # The largest that the last norm can return.
    hidden_ND = decoder.norm(torch.randn(9, head.width, dtype=dtype))
    hidden_ND[0] = 0
    hidden_ND[1] = decoder.norm(torch.eye(head.width, dtype=dtype)[3])
    slices = head.slices(columns, dtype)
    assert isinstance(slices, OwnMatmul)
    read_ND = slices.operand(hidden_ND)
    rows = torch.cat([rows_RD for _, rows_RD in slices])
    assert torch.equal(rows, weight_VD[:columns].to(dtype))
    found_NV = logits_of(hidden_ND, head, columns)
    wanted_NV = read_ND.double() @ weight_VD[:columns].double().t()
    assert found_NV.isfinite().all()
    assert torch.allclose(found_NV.double(), wanted_NV, rtol=1e-5, atol=1e-5)
    near = logits_of(hidden_ND, exact, columns)
    assert float((found_NV - near).norm()) <= float(near.norm()) / 16
    halved_NV = torch.empty_like(found_NV)
    halved = head.slices(columns, torch.float32)
    project(halved_NV, hidden_ND.float(), halved, scale=0.5)
    assert torch.allclose(halved_NV * 2, found_NV, rtol=1e-6)


def test_a_tied_head_and_sides_that_the_tensor_cores_do_not_take_stay_floats() -> None:
    for config in (make_config(tied=True), make_config(vocab_size=97)):
        decoder = freeze(lively(config))
        before = decoder.head
        round_head(decoder)
        assert decoder.head is before
