"""Packing moves bytes and changes none; what kernels read starts where they need it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.quant.blocks import BLOCK_TYPES, LAYOUTS, QuantError
from engine.quant.planes import (
    ALIGNMENT_BYTES,
    PackedMatrix,
    dequantize_rows_reference,
    fields,
    pack,
    packed_bytes,
    take_rows,
    unpack,
)
from engine.quant.reference import unpack as parts_of
from engine.quant.tensor import QuantTensor

matrices = given(
    name=st.sampled_from(list(LAYOUTS)),
    rows=st.integers(1, 35),
    blocks=st.integers(1, 9),
    seed=st.integers(0, 2**31),
)


def random_matrix(name: str, rows: int, blocks: int, seed: int = 0) -> QuantTensor:
    type_ = BLOCK_TYPES[name]
    generator = torch.Generator().manual_seed(seed)
    size = (rows, blocks * type_.block_bytes)
    raw = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    return QuantTensor(blocks=raw, type=type_, shape=(rows, blocks * type_.block_size))


def same(found: Tensor, expected: Tensor) -> bool:
    """Equal bits; NaN equals NaN."""
    bits = {4: torch.int32, 2: torch.int16, 1: torch.int8}[found.dtype.itemsize]
    equal = found.view(bits) == expected.view(bits)
    return bool((equal | (found.isnan() & expected.isnan())).all())


@matrices
def test_unpacking_gives_the_bytes_that_were_packed(
    name: str, rows: int, blocks: int, seed: int
) -> None:
    weight = random_matrix(name, rows, blocks, seed)
    packed = pack(weight)
    assert torch.equal(unpack(packed).blocks, weight.blocks)
    # Whole groups of rows, a few bytes between planes, and nothing else.
    group = packed.group_rows
    least = weight.nbytes // rows * (-(-rows // group) * group)
    assert least <= packed.nbytes < least + 16 * len(fields(weight.type))


@matrices
def test_a_range_of_rows_unpacks_and_dequantises_alone(
    name: str, rows: int, blocks: int, seed: int
) -> None:
    weight = random_matrix(name, rows, blocks, seed)
    packed = pack(weight)
    first = seed % rows
    count = (rows - first + 1) // 2
    chosen = slice(first, first + count)
    assert torch.equal(unpack(packed, first, count).blocks, weight.blocks[chosen])
    out = torch.full((count, packed.columns), 7.0)
    dequantize_rows_reference(packed, out, first, count)
    assert same(out, weight.dequantize()[chosen])


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("blocks", [1, 3, 14])
def test_planes_start_at_multiples_of_16_bytes_and_have_whole_groups(
    name: str, blocks: int
) -> None:
    packed = pack(random_matrix(name, rows=37, blocks=blocks))
    shape = (3, blocks, 16) if packed.type.block_size == 256 else (37, blocks, 1)
    for plane in packed.planes().values():
        assert plane.data_ptr() % ALIGNMENT_BYTES == 0
        assert plane.is_contiguous()
        assert plane.shape[:3] == shape


def test_a_group_has_the_same_block_of_all_its_rows_side_by_side() -> None:
    weight = random_matrix("Q6_K", rows=20, blocks=3)
    blocks_RNB = weight.blocks.view(20, 3, -1)
    scales_SNGE = pack(weight).planes()["scales"].view(torch.uint8)
    for row, block in ((0, 0), (15, 2), (16, 0), (19, 1)):
        found = scales_SNGE[row // 16, block, row % 16]
        assert torch.equal(found, blocks_RNB[row, block, 192:208]), (row, block)
    assert not scales_SNGE[1, :, 4:].any()


@pytest.mark.parametrize("name", LAYOUTS)
def test_planes_hold_the_fields_of_the_blocks(name: str) -> None:
    weight = random_matrix(name, rows=5, blocks=3)
    packed = pack(weight)
    planes = {
        name: plane.transpose(1, 2).flatten(0, 1)[:5].contiguous()
        for name, plane in packed.planes().items()
    }
    parts = parts_of(weight.blocks.view(15, -1), weight.type)
    blocks = weight.blocks.view(15, -1)
    if name in ("Q4_K", "Q5_K"):
        assert torch.equal(planes["header"].view(torch.uint8).view(15, 16), blocks[:, :16])
        nibbles = planes["low"].view(15, 4, 1, 32)
        codes = torch.cat([nibbles & 15, nibbles >> 4], dim=2).flatten(1)
        assert torch.equal(codes, parts.code_NE & 15)
        return
    if name == "IQ4_XS":
        assert torch.equal(planes["header"].view(torch.uint8).view(15, 8), blocks[:, :8])
        assert torch.equal(planes["low"].view(15, 128), blocks[:, 8:])
        return
    if name == "Q3_K":
        assert torch.equal(planes["scales"].view(torch.uint8).view(15, 12), blocks[:, 96:108])
        assert same(planes["d"].flatten(), parts.d_N)
        return
    if name == "Q2_K":
        assert torch.equal(planes["scales"].view(15, 16), blocks[:, :16])
        assert same(planes["second"].flatten(), blocks[:, 82:].contiguous().view(torch.half)[:, 0])
        return
    assert same(planes["d"].flatten(), parts.d_N)
    if parts.second_N is not None:
        assert same(planes["second"].flatten(), parts.second_N)
    if parts.scale_NS is not None:
        assert torch.equal(planes["scales"].flatten(), parts.scale_NS.flatten())
    if name == "Q8_0":
        assert torch.equal(planes["low"].flatten(), parts.code_NE.flatten())
    if name == "Q5_0":
        bits = planes["high"].view(15, 1) >> torch.arange(32, dtype=torch.int32) & 1
        assert torch.equal(bits.to(torch.uint8), parts.code_NE >> 4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_looked_up_rows_stay_packed(name: str) -> None:
    weight = random_matrix(name, rows=19, blocks=2)
    rows = torch.tensor([18, 0, 0, 7])
    taken = take_rows(pack(weight), rows)
    assert torch.equal(unpack(taken).blocks, weight.blocks[rows])
    assert take_rows(pack(weight), rows[:0]).shape == (0, taken.columns)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_a_view_at_an_odd_byte_of_a_file_is_packed(name: str) -> None:
    weight = random_matrix(name, rows=6, blocks=2)
    count = weight.blocks.shape[1]
    file = torch.zeros(3 + 6 * count, dtype=torch.uint8)
    file[3:] = weight.blocks.flatten()
    packed = pack(QuantTensor(blocks=file[3:].view(6, -1), type=weight.type, shape=weight.shape))
    assert packed.data.data_ptr() % ALIGNMENT_BYTES == 0
    assert torch.equal(unpack(packed).blocks, weight.blocks)


@pytest.mark.parametrize("name", LAYOUTS)
def test_planes_have_memory_of_their_own(name: str) -> None:
    weight = random_matrix(name, rows=6, blocks=2)
    packed = pack(weight)
    before = packed.data.clone()
    weight.blocks.zero_()
    assert torch.equal(packed.data, before)
    moved = packed.to("meta")
    assert moved.device.type == "meta"
    assert moved.nbytes == packed.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_rounded_once(dtype: torch.dtype) -> None:
    weight = random_matrix("Q6_K", rows=9, blocks=2)
    out = torch.empty(9, 512, dtype=dtype)
    dequantize_rows_reference(pack(weight), out)
    assert same(out, weight.dequantize().to(dtype))


def test_bytes_and_shapes_that_do_not_fit_are_refused() -> None:
    q6 = BLOCK_TYPES["Q6_K"]
    with pytest.raises(AssertionError):
        PackedMatrix(q6, 4, 256, torch.zeros(840, dtype=torch.uint8))
    with pytest.raises(AssertionError):
        packed_bytes(BLOCK_TYPES["BF16"], 4, 256)
    with pytest.raises(QuantError, match="hint: Q8_0 fits this row"):
        packed_bytes(q6, 4, 224)
    packed = pack(random_matrix("Q6_K", rows=4, blocks=1))
    with pytest.raises(AssertionError):
        unpack(packed, 3, 2)
    with pytest.raises(AssertionError):
        dequantize_rows_reference(packed, torch.empty(4, 255))
