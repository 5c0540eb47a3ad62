"""One block of each type, byte by byte, and the values it must give.

Scales are powers of two here, so that every expected value is exact and can be worked out by hand
from the table in `engine/quant/blocks.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.quant.blocks import BLOCK_TYPES, LAYOUTS
from engine.quant.reference import dequantize, pack, unpack

# float16: 1 = 3c00, 1/2 = 3800, 1/4 = 3400, -1 = bc00, 2^-10 = 1400, 2^-9 = 1800
ONE, HALF, QUARTER, MINUS_ONE = b"\x00\x3c", b"\x00\x38", b"\x00\x34", b"\x00\xbc"
TWO_TO_MINUS_10, TWO_TO_MINUS_9 = b"\x00\x14", b"\x00\x18"

# sc = 63 10 20 30 40 50 5 33, mn = 7 60 21 2 61 48 17 9
TWELVE = bytes.fromhex("bfca149e c7fc5502 d8021591")


def values(name: str, block: bytes) -> Tensor:
    type_ = BLOCK_TYPES[name]
    assert len(block) == type_.block_bytes
    raw = torch.tensor(list(block), dtype=torch.uint8)[None]
    return dequantize(raw, type_)[0]


def with_bytes(count: int, fill: int, changed: dict[int, int]) -> bytes:
    found = bytearray([fill] * count)
    for index, byte in changed.items():
        found[index] = byte
    return bytes(found)


def test_q4_0_by_hand() -> None:
    # w = d (q - 8): byte l holds value l in its low nibble, value l + 16 in its high one
    w = values("Q4_0", HALF + with_bytes(16, 0x88, {0: 0x1F, 15: 0xA0}))
    assert w[0] == 0.5 * (15 - 8)
    assert w[16] == 0.5 * (1 - 8)
    assert w[15] == 0.5 * (0 - 8)
    assert w[31] == 0.5 * (10 - 8)
    assert w.count_nonzero() == 4


def test_q5_0_by_hand() -> None:
    # w = d (q - 16): bit l of the integer at byte 2 is the top bit of value l
    w = values("Q5_0", QUARTER + b"\x01\x00\x01\x80" + with_bytes(16, 0x00, {0: 0xF3, 15: 0x40}))
    assert w[0] == 0.25 * (16 + 3 - 16)
    assert w[16] == 0.25 * (16 + 15 - 16)
    assert w[31] == 0.25 * (16 + 4 - 16)
    assert w[15] == 0.25 * (0 - 16)
    assert (w == -4).sum() == 29


def test_q5_1_by_hand() -> None:
    # w = d q + m
    block = HALF + MINUS_ONE + b"\x02\x00\x00\x80" + with_bytes(16, 0x00, {1: 0x75, 15: 0x1F})
    w = values("Q5_1", block)
    assert w[1] == 0.5 * (16 + 5) - 1
    assert w[17] == 0.5 * 7 - 1
    assert w[15] == 0.5 * 15 - 1
    assert w[31] == 0.5 * (16 + 1) - 1
    assert (w == -1).sum() == 28


def test_q4_1_by_hand() -> None:
    # w = d q + m
    w = values("Q4_1", HALF + MINUS_ONE + with_bytes(16, 0x00, {0: 0x2F, 15: 0xA0}))
    assert w[0] == 0.5 * 15 - 1
    assert w[16] == 0.5 * 2 - 1
    assert w[31] == 0.5 * 10 - 1
    assert (w == -1).sum() == 29


def test_iq4_nl_by_hand() -> None:
    # w = d book[q]
    w = values("IQ4_NL", HALF + with_bytes(16, 0x88, {0: 0x0F, 15: 0x7A}))
    assert w[0] == 0.5 * 113
    assert w[16] == 0.5 * -127
    assert w[15] == 0.5 * 25
    assert w[31] == 0.5 * -10
    assert (w == 0.5).sum() == 28


def test_q8_0_by_hand() -> None:
    w = values("Q8_0", QUARTER + with_bytes(32, 0, {0: 0x80, 1: 0x7F, 2: 0xFF, 31: 0x01}))
    assert w[[0, 1, 2, 31]].tolist() == [-32.0, 31.75, -0.25, 0.25]
    assert w.count_nonzero() == 4


def test_q2_k_by_hand() -> None:
    # Byte 32 h + l of qs holds values 128 h + 32 g + l in bits 2 g; low nibbles of the scales are
    # sc, high ones mn
    scales = with_bytes(16, 0x11, {0: 0x3F, 13: 0x02})
    qs = with_bytes(64, 0, {2: 0b00_00_00_11, 32 + 17: 0b00_10_00_00})
    w = 1024 * values("Q2_K", scales + qs + TWO_TO_MINUS_10 + TWO_TO_MINUS_9)
    assert w[2] == 15 * 3 - 2 * 3
    assert w[128 + 64 + 17] == 2 * 2 - 2 * 0
    assert w[::16].tolist() == [-2 * m for m in (3, *[1] * 12, 0, 1, 1)]


def test_q3_k_by_hand() -> None:
    # bit g of byte l of the mask is bit 2 of value 32 g + l; scale 12 has its nibble in the high
    # half of byte 4, its top bits in bits 6 and 7 of byte 8
    mask = with_bytes(32, 0xFF, {3: 0b1111_1110, 8: 0b1011_1111})
    qs = with_bytes(64, 0, {3: 0b00_00_00_01, 32 + 8: 0b00_11_00_00})
    scales = bytes([1] + [1] * 3 + [0xF1] + [1] * 3 + [0b11_10_10_10] + [0b10_10_10_10] * 3)
    w = values("Q3_K", mask + qs + scales + HALF)
    assert w[3] == 0.5 * (32 + 1 - 32) * (1 - 4)
    assert w[192 + 8] == 0.5 * (48 + 15 - 32) * (3 - 4)
    assert w.count_nonzero() == 2


def test_iq4_xs_by_hand() -> None:
    # sub-block 5: the high nibble of byte 2 of the low scales, bits 10 and 11 of the high ones
    high = (0b10_10_11_10_10_10_10_10).to_bytes(2, "little")
    qs = with_bytes(128, 0x88, {5 * 16 + 3: 0x0F})
    w = values("IQ4_XS", HALF + high + bytes([0, 0, 0x70, 0]) + qs)
    assert w[5 * 32 + 3] == 0.5 * (48 + 7 - 32) * 113
    assert w[5 * 32 + 19] == 0.5 * (48 + 7 - 32) * -127
    # The others are of scale 0, or code 8, whose number is 1.
    assert w.count_nonzero() == 32 and (w == 11.5).sum() == 30


def test_q4_k_by_hand() -> None:
    # d = 1/1024, dmin = 2/1024; byte 32 c + l of qs holds values 64 c + l and 64 c + 32 + l
    qs = with_bytes(128, 0, {0: 0x2D, 67: 0x93})
    w = 1024 * values("Q4_K", TWO_TO_MINUS_10 + TWO_TO_MINUS_9 + TWELVE + qs)
    assert w[0] == 63 * 13 - 2 * 7
    assert w[32] == 10 * 2 - 2 * 60
    assert w[128 + 3] == 40 * 3 - 2 * 61
    assert w[128 + 32 + 3] == 50 * 9 - 2 * 48
    # where q is 0 only the minimum is left, once for each sub-block
    assert w[31::32].tolist() == [-2 * m for m in (7, 60, 21, 2, 61, 48, 17, 9)]


def test_q5_k_by_hand() -> None:
    # bit j of byte l of qh is the top bit of value l of sub-block j
    qh = with_bytes(32, 0, {0: 0b0000_0011, 3: 0b0010_0000})
    qs = with_bytes(128, 0, {0: 0x2D, 67: 0x93})
    w = 1024 * values("Q5_K", TWO_TO_MINUS_10 + TWO_TO_MINUS_9 + TWELVE + qh + qs)
    assert w[0] == 63 * (16 + 13) - 2 * 7
    assert w[32] == 10 * (16 + 2) - 2 * 60
    assert w[128 + 3] == 40 * 3 - 2 * 61
    assert w[128 + 32 + 3] == 50 * (16 + 9) - 2 * 48
    assert w[31::32].tolist() == [-2 * m for m in (7, 60, 21, 2, 61, 48, 17, 9)]


def test_q6_k_by_hand() -> None:
    # w = d sc (q - 32); half h, group g of 32, lane l: low nibbles of ql for g < 2, high ones for
    # the others, bits 2 g of qh
    ql = with_bytes(128, 0, {49: 0x0F, 64 + 8: 0x10})
    qh = with_bytes(64, 0b10_10_10_10, {17: 0b10_10_11_10})
    scales = with_bytes(16, 1, {3: 0x80, 12: 0xFF})  # -128 for values 48..63, -1 for 192..207
    w = values("Q6_K", ql + qh + scales + HALF)
    assert w[49] == 0.5 * -128 * (48 + 15 - 32)
    assert w[200] == 0.5 * -1 * (32 + 1 - 32)
    assert w.count_nonzero() == 2


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_bit_of_a_block_survives_unpacking_and_packing(name: str) -> None:
    type_ = BLOCK_TYPES[name]
    generator = torch.Generator().manual_seed(len(name))
    blocks = torch.randint(0, 256, (67, type_.block_bytes), dtype=torch.uint8, generator=generator)
    parts = unpack(blocks, type_)
    assert parts.code_NE.shape == (67, type_.block_size)
    assert torch.equal(pack(parts, type_), blocks)
