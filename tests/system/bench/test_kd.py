"""Whole steps of this trainer: the same work for every arm, and a row for each."""

from __future__ import annotations

import pytest
import torch

from engine.plan.cost import flops_per_token
from evidence.bench.kd import ARMS, KdRow, KdShape, batches_of, row_of, run_arm, table

CPU = torch.device("cpu")
TINY = KdShape(teacher="tiny", student="tiny", rows=2, seq_len=16, steps=2, warm_up=1)


def test_a_dense_and_a_packed_teacher_give_the_same_losses() -> None:
    """They move, too: none is 0."""
    dense, packed = (ARMS[arm](TINY, CPU) for arm in ("engine", "engine packed"))
    assert dense["first_loss"] == pytest.approx(packed["first_loss"], rel=1e-4)
    assert dense["last_loss"] == pytest.approx(packed["last_loss"], rel=1e-3)
    assert dense["first_loss"] != dense["last_loss"] > 1
    for found in (dense, packed):
        assert len(found["step_s"]) == TINY.steps and all(s > 0 for s in found["step_s"])
        assert found["peak_bytes"] is None


def test_no_row_is_seen_twice_and_every_token_has_a_label() -> None:
    batches = batches_of(TINY)
    taken = [batches.batch_at(at) for at in range(TINY.warm_up + TINY.steps)]
    ids = [int(row) for batch in taken for row in batch.row_ids]
    assert len(set(ids)) == len(ids) == batches.rows_per_epoch
    assert all(batch.labelled == TINY.tokens for batch in taken)


def test_an_arm_that_breaks_or_hangs_is_a_row_with_its_reason() -> None:
    broke = run_arm("nobody", "cpu", TINY, flop_per_s=1.0, timeout_s=120)
    assert broke.state == "failed" and broke.why and "nobody" in broke.why
    hung = run_arm("engine", "cpu", TINY, flop_per_s=1.0, timeout_s=0.01)
    assert hung.state == "failed" and hung.why == "no answer in 0.01 s"


def test_a_row_has_the_rates_of_its_steps_and_a_table_the_reason_of_a_failure() -> None:
    shape = KdShape(teacher="tiny", student="tiny", rows=512, seq_len=16)
    teacher, student = shape.configs()
    found = {
        "ready_s": 1.0,
        "step_s": [0.25, 0.2, 0.15],
        "first_loss": 6.5,
        "last_loss": 6.4,
        "peak_bytes": 24 * 2**30,
    }
    flop_per_s = 8192 / 0.1 * flops_per_token(student, teacher, 16)
    row = row_of("engine", found, shape, flop_per_s)
    assert row.step_s == 0.2 and row.spread == pytest.approx(0.5)
    assert row.tokens_per_s == pytest.approx(40960) and row.share_of_bound == pytest.approx(0.5)
    lines = table([row, KdRow(arm="engine packed", state="failed", why="exit code 1")])
    assert lines[1].split() == ["engine", "41.0k", "50%", "200.0", "50%", "24.0", "GiB", "6.5000"]
    assert lines[-1] == "engine packed: failed: exit code 1"
