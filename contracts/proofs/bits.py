"""Bits of the block formats. Six-bit numbers: all of them, by the code. Nibbles: a model in z3, compared
with the code over all bytes.
"""

from __future__ import annotations

import torch

from contracts.proofs.methods import unsatisfiable
from engine.contracts.proving import PROVED, REFUTED, Proved
from engine.quant.blocks import BLOCK_TYPES
from engine.quant.reference import _six_bits, _twelve_bytes, pack, unpack

CASES = 1 << 24
PART = 1 << 20


def six_bits() -> Proved:
    """Sub-block j shares its three bytes with sub-block j + 4 alone, so all values of those four numbers
    are all there is; each row asks four of them."""
    for first in range(0, CASES, 4 * PART):
        case_N4 = torch.arange(first, first + 4 * PART).view(-1, 4)
        sc, sc_late, mn, mn_late = ((case_N4 >> 6 * i & 63).to(torch.uint8) for i in range(4))
        scale_NS, min_NS = torch.cat([sc, sc_late], 1), torch.cat([mn, mn_late], 1)
        found = _six_bits(_twelve_bytes(scale_NS, min_NS))
        for expected_NS, found_NS in zip((scale_NS, min_NS), found, strict=True):
            if not torch.equal(expected_NS, found_NS):
                row = int((expected_NS != found_NS).any(1).nonzero()[0])
                text = f"expected {expected_NS[row].tolist()}, found {found_NS[row].tolist()}"
                return Proved(result=REFUTED, cases=CASES, detail=text)
    return Proved(result=PROVED, cases=CASES, detail=f"all of {CASES:,} cases, by the code itself")


def nibbles() -> Proved:
    import z3

    low, high = z3.BitVecs("low high", 8)
    joined = low | high << 4
    small = z3.And(z3.ULT(low, 16), z3.ULT(high, 16))
    apart = z3.And(joined & 15 == low, z3.LShR(joined, 4) == high)
    others = [z3.BitVec(f"n{i}", 8) for i in range(8)]
    word = z3.ZeroExt(24, others[0])
    for i, nibble in enumerate(others[1:], start=1):
        word = word | z3.ZeroExt(24, nibble) << 4 * i
    all_small = z3.And(*(z3.ULT(nibble, 16) for nibble in others))
    all_apart = z3.And(
        *(z3.Extract(4 * i + 3, 4 * i, word) == z3.Extract(3, 0, n) for i, n in enumerate(others))
    )
    return unsatisfiable(
        {
            "two nibbles of a byte": z3.And(small, z3.Not(apart)),
            "eight nibbles of a word": z3.And(all_small, z3.Not(all_apart)),
        },
        limit_s=30,
        agrees=_bytes_that_agree(),
    )


def _bytes_that_agree() -> int:
    """Bytes whose two nibbles the code reads as the model says; 0 where one is read otherwise."""
    type_ = BLOCK_TYPES["Q4_0"]
    blocks_NB = torch.zeros(256, type_.block_bytes, dtype=torch.uint8)
    blocks_NB[:, 2:] = torch.arange(256, dtype=torch.uint8)[:, None]
    parts = unpack(blocks_NB, type_)
    low_N, high_N = parts.code_NE[:, 0].long(), parts.code_NE[:, 16].long()
    byte_N = torch.arange(256)
    sound = torch.equal(low_N, byte_N & 15) and torch.equal(high_N, byte_N >> 4)
    return 256 if sound and torch.equal(pack(parts, type_), blocks_NB) else 0
