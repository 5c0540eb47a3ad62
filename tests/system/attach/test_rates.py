"""The verdict on watched scripts by their learning rate: far too high, or healthy in different ways."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.support.rate_scripts import HEALTHY_RATES, RATE_100_TIMES_TOO_HIGH
from tests.support.running import engine, engine_here


def verdicts(folder: Path, script: str) -> list[dict[str, Any]]:
    """The verdict on each training of a script, in their order."""
    (folder / "train.py").write_text(script)
    script = (sys.executable, folder / "train.py")
    engine(
        "watch", "--runs", folder / "runs", "--name", "run", "--quiet", "--", *script
    ).check_returncode()
    listed = json.loads(engine_here("runs", folder / "runs", "--json").stdout)
    return [one["verdict"] for one in sorted(listed, key=lambda one: str(one["run"]))]


def test_a_rate_100_times_too_high_is_wrong_since_the_first_step_and_its_size_is_named(
    tmp_path: Path,
) -> None:
    (found,) = verdicts(tmp_path, RATE_100_TIMES_TOO_HIGH)
    assert (found["level"], found["since_step"]) == ("wrong", 1)
    assert "not below ln V = 4.700, the loss of guessing" in found["text"]
    assert found["action"] == "set a learning rate 10 times lower in the script"
    sizes = next(one for one in found["others"] if one["id"] == "alert update_too_large")
    assert sizes["since_step"] == 1 and "of their size, and nothing is learnt" in sizes["text"]


def test_healthy_rates_are_left_alone(tmp_path: Path) -> None:
    found = verdicts(tmp_path, HEALTHY_RATES)
    assert [one["level"] for one in found] == ["healthy"] * 4, found
