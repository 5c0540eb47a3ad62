"""Dequantisation equals the `gguf` package bit by bit, on any bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.quant import reference
from engine.quant.blocks import BLOCK_TYPES, LAYOUTS, BlockType
from engine.quant.reference import dequantize

# NaN (quiet, signalling, negative), infinities, subnormals, zeros, the largest and a plain half
HALVES = (
    *(0x7E00, 0x7C01, 0xFE00, 0x7C00, 0xFC00, 0x0001, 0x8001, 0x03FF, 0x83FF),
    *(0x0000, 0x8000, 0x7BFF, 0xFBFF, 0x0400, 0x1419, 0xFFFF),
)


def random_blocks(type_: BlockType, rows: int, blocks: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, blocks * type_.block_bytes)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def oracle(blocks: Tensor, type_: BlockType) -> Tensor:
    with np.errstate(all="ignore"):  # infinity times zero is meant
        known = gguf.GGMLQuantizationType[type_.name]
        return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), known))


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    """Equal bits, the sign of zero too; NaN equals NaN, whose payload no standard fixes."""
    assert found.dtype == expected.dtype == torch.float32
    assert found.shape == expected.shape
    same = found.view(torch.int32) == expected.view(torch.int32)
    different = ~(same | (found.isnan() & expected.isnan()))
    assert not different.any(), (
        f"{different.sum()} of {different.numel()} values differ, the first is "
        f"{found[different][0]} for {expected[different][0]}"
    )


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_random_blocks_give_the_bits_of_the_gguf_package(name: str) -> None:
    type_ = BLOCK_TYPES[name]
    blocks = random_blocks(type_, rows=33, blocks=7 if type_.block_size > 1 else 1000)
    assert_same_bits(dequantize(blocks, type_), oracle(blocks, type_))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("fill", ["random", "zeros", "ones"])
def test_adversarial_scales_give_the_bits_of_the_gguf_package(name: str, fill: str) -> None:
    type_, layout = BLOCK_TYPES[name], LAYOUTS[name]
    count = len(HALVES)
    blocks = random_blocks(type_, count * count, 1, seed=1)
    if fill != "random":
        blocks.fill_(0 if fill == "zeros" else 255)
    halves = torch.tensor(HALVES, dtype=torch.int32).to(torch.int16)
    blocks[:, layout.d : layout.d + 2] = halves.repeat(count)[:, None].view(torch.uint8)
    if layout.second is not None:
        other = halves.repeat_interleave(count)[:, None].view(torch.uint8)
        blocks[:, layout.second : layout.second + 2] = other
    assert_same_bits(dequantize(blocks, type_), oracle(blocks, type_))


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_every_16_bit_float_gives_the_bits_of_the_gguf_package(name: str) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)[None]
    blocks = every.view(torch.uint8)
    assert_same_bits(dequantize(blocks, BLOCK_TYPES[name]), oracle(blocks, BLOCK_TYPES[name]))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_working_in_small_chunks_changes_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_ = BLOCK_TYPES[name]
    blocks = random_blocks(type_, rows=11, blocks=3)
    whole = dequantize(blocks, type_)
    monkeypatch.setitem(reference.CHUNK_VALUES, "cpu", 2 * 3 * type_.block_size)
    assert_same_bits(dequantize(blocks, type_), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q5_1", "F32"])
def test_another_dtype_is_float32_rounded_once(name: str, dtype: torch.dtype) -> None:
    type_ = BLOCK_TYPES[name]
    blocks = random_blocks(type_, rows=9, blocks=4, seed=2)
    expected = dequantize(blocks, type_).to(dtype)
    found = dequantize(blocks, type_, dtype=dtype)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_views_at_odd_bytes_and_leading_dimensions_are_read(name: str) -> None:
    type_ = BLOCK_TYPES[name]
    count = 2 * type_.block_bytes
    blocks = random_blocks(type_, rows=6, blocks=2, seed=3)
    file = torch.zeros(1 + 6 * (count + 3), dtype=torch.uint8)
    view = file[1:].view(6, count + 3)[:, :count]
    view.copy_(blocks)
    expected = dequantize(blocks, type_)
    assert_same_bits(dequantize(view, type_), expected)
    found = dequantize(blocks.view(2, 3, count), type_)
    assert_same_bits(found, expected.view(2, 3, -1))


@pytest.mark.parametrize("name", ["F32", "Q4_K"])
def test_the_result_is_a_new_tensor(name: str) -> None:
    type_ = BLOCK_TYPES[name]
    blocks = torch.zeros(2, type_.block_bytes, dtype=torch.uint8)
    dequantize(blocks, type_).fill_(1)
    assert not blocks.any()


def test_no_rows_give_no_values() -> None:
    blocks = torch.empty(0, 288, dtype=torch.uint8)
    assert dequantize(blocks, BLOCK_TYPES["Q4_K"]).shape == (0, 512)


def test_rows_that_are_not_whole_blocks_are_refused_with_the_rest() -> None:
    blocks = torch.zeros(3, 40319, dtype=torch.uint8)
    with pytest.raises(AssertionError, match="40319 bytes"):
        dequantize(blocks, BLOCK_TYPES["Q4_K"])


@pytest.mark.parametrize("blocks", [torch.zeros(2, 144), torch.zeros((), dtype=torch.uint8)])
def test_what_is_no_rows_of_bytes_is_refused(blocks: Tensor) -> None:
    with pytest.raises(AssertionError):
        dequantize(blocks, BLOCK_TYPES["Q4_K"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_a_gpu_gives_the_same_bits(name: str) -> None:
    type_ = BLOCK_TYPES[name]
    blocks = random_blocks(type_, rows=257, blocks=5, seed=4)
    expected = dequantize(blocks, type_)
    assert_same_bits(dequantize(blocks.cuda(), type_).cpu(), expected)
    found = dequantize(blocks.cuda(), type_, dtype=torch.bfloat16).cpu()
    rounded = expected.to(torch.bfloat16)
    assert torch.equal(found.isnan(), rounded.isnan())
    assert torch.equal(found.nan_to_num(), rounded.nan_to_num())
