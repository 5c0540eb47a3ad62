"""y = x W^T + b from packed weights, against the dequantised weight in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.errors import InternalError
from engine.kernels.dequantize import dequantize_gathered, dequantize_rows
from engine.kernels.linear import Scratch, packed_linear, packed_linear_many
from engine.quant.blocks import BLOCK_TYPES, LAYOUTS, WRITTEN
from engine.quant.planes import PackedMatrix, pack
from engine.quant.quantize import quantize
from engine.quant.tensor import QuantTensor
from tests.support.random_blocks import random_matrix

CPU = torch.device("cpu")
LIMIT = 3e-3
"""Relative RMS error in bf16, where rounding W and y alone gives 2.3e-3."""


def make(name: str, rows: int, columns: int, device: str = "cpu") -> QuantTensor:
    generator = torch.Generator().manual_seed(0)
    if name not in WRITTEN:
        return random_matrix(name, rows, columns).to(device)
    values = torch.randn(rows, columns, generator=generator) * 0.02
    return quantize(values.to(device), BLOCK_TYPES[name])


def scratch_for(
    weight: PackedMatrix, dtype: torch.dtype = torch.float32, limit_bytes: int = 1 << 30
) -> Scratch:
    scratch = Scratch(weight.device, dtype, limit_bytes=limit_bytes)
    scratch.reserve(*weight.shape)
    return scratch


def gap(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_product_is_that_of_the_dequantised_weight(name: str, rows: int) -> None:
    weight = make(name, 48, 512)
    packed = pack(weight)
    x, bias = torch.randn(2, rows, 512), torch.randn(48)
    found = packed_linear(x, packed, bias, scratch_for(packed))
    assert found.shape == (2, rows, 48)
    expected = F.linear(x.double(), weight.dequantize().double(), bias.double())
    assert gap(found, expected) < 1e-6
    without = packed_linear(x, packed, None, scratch_for(packed))
    assert gap(without, expected - bias.double()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_product_has_the_dtype_of_its_input(dtype: torch.dtype) -> None:
    weight = make("Q6_K", 48, 512)
    packed = pack(weight)
    x = torch.randn(9, 512).to(dtype)
    found = packed_linear(x, packed, None, scratch_for(packed, dtype))
    assert found.dtype == dtype
    assert gap(found, x.double() @ weight.dequantize().double().t()) < LIMIT


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [16, 33, 200])
def test_a_weight_larger_than_the_scratch_goes_through_it_in_parts(rows: int, bias: bool) -> None:
    weight = make("Q5_0", rows, 96)
    packed = pack(weight)
    x = torch.randn(5, 96)
    b = torch.randn(rows) if bias else None
    whole = packed_linear(x, packed, b, scratch_for(packed))
    small = scratch_for(packed, limit_bytes=40 * 96 * 4)
    assert small.nbytes == min(rows, 40) * 96 * 4
    torch.testing.assert_close(packed_linear(x, packed, b, small), whole)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_several_weights_of_one_input_give_the_product_of_each(bias: bool, together: bool) -> None:
    weights = [make("Q4_K", 48, 512), make("Q6_K", 16, 512), make("Q5_K", 33, 512)]
    packed = [pack(weight) for weight in weights]
    scratch = Scratch(CPU, torch.float32)
    scratch.reserve(97 if together else 48, 512)
    x = torch.randn(2, 5, 512)
    b = torch.randn(97) if bias else None
    found = packed_linear_many(x, packed, b, scratch)
    assert [part.shape for part in found] == [(2, 5, 48), (2, 5, 16), (2, 5, 33)]
    whole = torch.cat([weight.dequantize() for weight in weights])
    expected = F.linear(x.double(), whole.double(), None if b is None else b.double())
    assert gap(torch.cat(found, dim=-1), expected) < 1e-6
    shared = {part.untyped_storage().data_ptr() for part in found}
    assert len(shared) == (1 if together else 3)


@pytest.mark.parametrize("rows", [16, 33, 200, 18944])
def test_parts_cover_a_weight_begin_where_planes_are_aligned_and_fit(rows: int) -> None:
    scratch = Scratch(CPU, torch.float32, limit_bytes=100 * 96 * 4)
    scratch.reserve(rows, 96)
    step = scratch.fitting(rows, 96)
    assert step == rows or (step % 16 == 0 and step <= 100)
    # Parts are about as long as each other.
    parts = -(-rows // step)
    assert rows - (parts - 1) * step > 0
    assert parts == -(-rows // (96 if rows > 100 else rows))


def test_the_scratch_is_one_tensor_for_all_and_is_never_made_again() -> None:
    scratch = Scratch(CPU, torch.bfloat16)
    scratch.reserve(48, 512)
    scratch.reserve(16, 256)
    assert scratch.nbytes == 48 * 512 * 2
    first = scratch.take(48, 512)
    assert scratch.take(16, 256).data_ptr() == first.data_ptr()
    scratch.reserve(48, 512)
    with pytest.raises(AssertionError, match="cannot grow"):
        scratch.reserve(64, 512)
    with pytest.raises(AssertionError, match="64 x 2048 was not reserved"):
        scratch.fitting(64, 2048)
    assert scratch.take(48, 512).data_ptr() == first.data_ptr()


def test_a_row_limit_below_16_rows_still_holds_16() -> None:
    scratch = Scratch(CPU, torch.float32, limit_bytes=1)
    scratch.reserve(100, 64)
    assert scratch.fitting(100, 64) == 16


def test_a_scratch_made_in_inference_mode_works_outside_of_it() -> None:
    packed = pack(make("Q4_K", 16, 256))
    scratch = scratch_for(packed)
    with torch.inference_mode():
        packed_linear(torch.randn(2, 256), packed, None, scratch)
    packed_linear(torch.randn(2, 256), packed, None, scratch)


def test_an_input_that_wants_a_gradient_is_refused() -> None:
    packed = pack(make("Q4_K", 16, 256))
    x = torch.randn(2, 256, requires_grad=True)
    with pytest.raises(InternalError, match="inputs without gradient"):
        packed_linear(x, packed, None, scratch_for(packed))
    with torch.no_grad():
        packed_linear(x, packed, None, scratch_for(packed))


def test_shapes_and_dtypes_that_cannot_be_are_refused() -> None:
    packed = pack(make("Q4_K", 16, 256))
    scratch = scratch_for(packed)
    with pytest.raises(AssertionError):
        packed_linear(torch.randn(2, 255), packed, None, scratch)
    with pytest.raises(AssertionError):
        packed_linear(torch.randn(2, 256).bfloat16(), packed, None, scratch)
    with pytest.raises(AssertionError):
        dequantize_rows(packed, torch.empty(15, 256), 0, 16)


def test_looked_up_rows_are_those_of_the_dequantised_weight() -> None:
    weight = make("Q6_K", 40, 256)
    rows = torch.tensor([39, 3, 3, 0])
    out = torch.empty(4, 256)
    dequantize_gathered(pack(weight), rows, out)
    assert torch.equal(out, weight.dequantize()[rows])
    dequantize_gathered(pack(weight), rows[:0], out[:0])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 64, 2048])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_gpu_gives_the_product_of_the_dequantised_weight(name: str, rows: int) -> None:
    weight = make(name, 1056, 3584, "cuda")
    packed = pack(weight)
    x = torch.randn(rows, 3584, device="cuda").bfloat16()
    bias = torch.randn(1056, device="cuda").bfloat16()
    expected = F.linear(x.double(), weight.dequantize().double())
    for limit_bytes in (1 << 30, 2 << 20):
        scratch = scratch_for(packed, torch.bfloat16, limit_bytes)
        assert scratch.nbytes <= limit_bytes
        found = packed_linear(x, packed, None, scratch)
        assert gap(found, expected) <= LIMIT, limit_bytes
        found = packed_linear(x, packed, bias, scratch)
        assert gap(found, expected + bias.double()) <= LIMIT, limit_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 2048])
def test_a_gpu_gives_the_products_of_several_weights(rows: int) -> None:
    weights = [make("Q4_K", 1024, 3584, "cuda"), make("Q6_K", 512, 3584, "cuda")]
    scratch = Scratch(torch.device("cuda", 0), torch.bfloat16)
    scratch.reserve(1536, 3584)
    x = torch.randn(rows, 3584, device="cuda").bfloat16()
    found = packed_linear_many(x, [pack(weight) for weight in weights], None, scratch)
    for part, weight in zip(found, weights, strict=True):
        assert gap(part, x.double() @ weight.dequantize().double().t()) <= LIMIT


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_gpu_dequantises_to_the_bits_of_the_cpu(name: str, dtype: torch.dtype) -> None:
    type_ = BLOCK_TYPES[name]
    generator = torch.Generator().manual_seed(1)
    for rows, blocks in [(1, 1), (3, 14), (257, 74), (130, 7)]:
        size = (rows, blocks * type_.block_bytes)
        raw = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        weight = QuantTensor(blocks=raw, type=type_, shape=(rows, blocks * type_.block_size))
        packed = pack(weight.to("cuda"))
        first = rows // 3
        around = torch.full((rows - first + 2, packed.columns), 7.0, dtype=dtype, device="cuda")
        dequantize_rows(packed, around[1:-1], first, rows - first)
        found, expected = around[1:-1].cpu(), weight.dequantize(dtype)[first:]
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        same = found.view(bits) == expected.view(bits)
        assert (same | (found.isnan() & expected.isnan())).all(), (rows, blocks)
        assert (around[[0, -1]] == 7).all()


@pytest.mark.gpu
def test_a_captured_graph_replays_and_takes_no_memory_of_its_own() -> None:
    weight = make("Q6_K", 512, 3584, "cuda")
    packed = pack(weight)
    scratch = scratch_for(packed, torch.bfloat16)
    x = torch.randn(128, 3584, device="cuda").bfloat16()
    packed_linear(x, packed, None, scratch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = packed_linear(x, packed, None, scratch)
    x.normal_()
    scratch.take(512, 3584).zero_()
    graph.replay()
    assert gap(out, x.double() @ weight.dequantize().double().t()) <= LIMIT


@pytest.mark.gpu
def test_nothing_beside_the_result_is_allocated() -> None:
    weight = make("Q4_K", 1024, 3584, "cuda")
    packed = pack(weight)
    x = torch.randn(2048, 3584, device="cuda").bfloat16()
    for limit_bytes in (1 << 30, 4 << 20):
        scratch = scratch_for(packed, torch.bfloat16, limit_bytes)
        packed_linear(x, packed, None, scratch)
        # What was asked for: the allocator may hand out a cached block that is a megabyte larger.
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
        out = packed_linear(x, packed, None, scratch)
        used = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
        assert used <= out.numel() * 2 + (1 << 16), limit_bytes
