"""The learning-rate schedule: exact values at its ends, its shape between, and its refusals."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest

from engine.spec import TrainSection
from engine.train.schedule import learning_rate

SETTINGS: dict[str, Any] = {
    "lr": 1e-3,
    "warmup_steps": 10,
    "steps": 110,
    "schedule": "cosine",
    "final_lr_ratio": 0.1,
}


def rate(step: int, **changes: object) -> float:
    return learning_rate(step, TrainSection(**(SETTINGS | changes)))


def test_warmup_is_linear_and_starts_above_zero() -> None:
    assert rate(0) == 1e-3 / 10
    assert rate(4) == 1e-3 * 5 / 10
    assert rate(9) == 1e-3


def test_cosine_is_halfway_in_the_middle_and_exact_at_the_end() -> None:
    assert rate(59) == pytest.approx(1e-3 * (1 + 0.1) / 2, rel=1e-12)
    assert rate(109) == 1e-3 * 0.1
    assert rate(110) == rate(10_000) == 1e-3 * 0.1


def test_cosine_falls_at_every_step_after_the_warmup() -> None:
    rates = [rate(step) for step in range(9, 110)]
    assert all(later < earlier for earlier, later in itertools.pairwise(rates))


def test_cosine_can_end_at_zero_or_stay_at_the_peak() -> None:
    assert rate(109, final_lr_ratio=0) == 0
    assert rate(60, final_lr_ratio=1) == rate(109, final_lr_ratio=1) == 1e-3


def test_constant_holds_the_peak_after_the_warmup() -> None:
    assert rate(0, schedule="constant") == 1e-4
    assert {rate(step, schedule="constant") for step in (9, 10, 60, 109, 500)} == {1e-3}


def test_edges_without_a_warmup_or_without_anything_after_it() -> None:
    assert rate(0, warmup_steps=0) < 1e-3
    assert rate(0, warmup_steps=0, schedule="constant") == 1e-3
    assert rate(0, warmup_steps=0, steps=1) == 1e-3 * 0.1
    assert rate(109, warmup_steps=110) == 1e-3


def test_schedule_and_checkpoint_load_without_torch() -> None:
    code = (
        "import sys, engine.train.schedule, engine.train.checkpoint.write;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
