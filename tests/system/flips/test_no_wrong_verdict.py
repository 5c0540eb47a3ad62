"""Flips of a real script with a known truth, several times each: a verdict may be that it cannot be decided on this
machine, and never a wrong one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from engine.flips.flip import run_flip
from engine.flips.plan import make_command_plan
from tests.support.attached import BEGIN
from tests.support.attached_scripts import LOADED

NOT_DECIDED = {"INCONCLUSIVE", "INVALID"}
"""It cannot be decided, or the pairs disturb each other."""
TIMES = range(6)
pytestmark = pytest.mark.soak


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(BEGIN + LOADED)


def flip(
    words: str, b: dict[str, str | None], a: dict[str, str | None], seed: int, margin: float
) -> dict[str, Any]:
    plan = make_command_plan(
        (sys.executable, "train.py", *words.split()),
        a,
        b,
        order_seed=seed,
        steps=60,
        pairs_max=8,
        margin=margin,
        budget_s=400.0,
    )
    verdict = run_flip(plan, Path("flips/1"), use_controls="skip")
    print(verdict["verdict"], verdict["reason"])
    if verdict["verdict"] == "INVALID":
        assert verdict["diagnostics"]["findings"], verdict["reason"]
    return verdict


@pytest.mark.parametrize("seed", TIMES)
def test_workers_that_read_from_a_slow_place_are_faster(seed: int) -> None:
    verdict = flip("--transform 0.005", {"loader.workers": "4"}, {}, seed, 0.05)
    assert verdict["verdict"] in {"B_FASTER"} | NOT_DECIDED, verdict["reason"]
    if verdict["verdict"] == "B_FASTER":
        # Four read at the same time, beside the step: 10 of 40 ms of reading are left, of at most 45 ms in all.
        assert verdict["effect"] is not None and verdict["effect"] > 0.22, verdict["reason"]


@pytest.mark.parametrize("seed", TIMES)
def test_a_sleep_of_a_twentieth_of_a_step_is_slower(seed: int) -> None:
    words = "--transform 0 --step-sleep {}"
    verdict = flip(words, {"{}": "0.0735"}, {"{}": "0.07"}, seed, 0.02)
    assert verdict["verdict"] in {"B_SLOWER"} | NOT_DECIDED, verdict["reason"]


@pytest.mark.parametrize("seed", TIMES)
def test_a_command_against_itself_is_the_same(seed: int) -> None:
    verdict = flip("--transform 0 --step-sleep 0.05", {"X": "1"}, {"X": "2"}, seed, 0.05)
    assert verdict["verdict"] in {"EQUIVALENT"} | NOT_DECIDED, verdict["reason"]
