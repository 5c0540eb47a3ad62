"""The benchmark of packed linear layers runs every arm on the same work, on any device."""

from __future__ import annotations

import pytest
import torch

from engine.machine.rates import Rates
from evidence.bench.rows import table
from evidence.kernels.linear import StackShape, stack_rows

SMALL = StackShape(name="small", width=256, key_width=32, inner=512, layers=2, repeats=1)
CPU = torch.device("cpu")


def test_every_arm_of_a_stack_is_measured_and_compared_with_the_faster_bf16_one() -> None:
    rows = stack_rows(CPU, SMALL, 3, rounds=2)
    assert [row.arm for row in rows] == [
        *("bf16", "bf16 joined", "packed", "packed joined", "dequantise")
    ]
    dense, joined, packed, packed_joined, dequantise = rows
    values = 2 * 256 * 256 + 2 * 32 * 256 + 3 * 512 * 256
    assert dense.flop == joined.flop == packed.flop == 2 * 3 * values
    assert dequantise.flop == 0
    assert dequantise.ratio is None
    assert max(dense.ratio or 0, joined.ratio or 0) == pytest.approx(1)
    assert packed.ratio == pytest.approx(min(dense.seconds, joined.seconds) / packed.seconds)
    # Q4_K and Q6_K where the other arms read four bytes of a value.
    assert packed.bytes < 0.5 * dense.bytes
    assert packed_joined.bytes == packed.bytes
    assert len(table(rows, Rates(1e11, 1e10))) == 6
