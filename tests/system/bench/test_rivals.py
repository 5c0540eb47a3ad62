"""Other libraries on this trainer's work: the same for all, and a row for each that was asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evidence.bench.kd import table
from evidence.distill import rivals
from tests.support.paths import ROOT
from tests.system.bench.test_kd import CPU, TINY


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return rivals.ARMS["transformers"](TINY, CPU)


@pytest.mark.parametrize("arm", ["engine", "both-by-transformers"])
def test_ours_and_the_plain_loop_do_the_same_work(arm: str, plain: dict[str, Any]) -> None:
    """Equal weights, rows and objective give an equal loss before the first update, and equal
    optimizers nearly equal ones after it."""
    ours = rivals.ARMS[arm](TINY, CPU)
    assert ours["first_loss"] == pytest.approx(plain["first_loss"], rel=1e-4)
    assert ours["last_loss"] == pytest.approx(plain["last_loss"], rel=1e-3)
    assert len(plain["step_s"]) == TINY.steps and all(s > 0 for s in plain["step_s"])


@pytest.mark.parametrize("rival", ["liger", "trl"])
def test_a_rival_that_is_installed_runs_and_one_that_is_not_says_what_is_missing(
    rival: str, plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(rivals.kd, "ARMS", {})
    for name, value in rivals.QUIET.items():
        monkeypatch.setenv(name, value)
    [row] = rivals.steps([rival], "cpu", TINY, flop_per_s=1.0, timeout_s=300)
    if rivals.missing(rival) is not None:
        assert row.state == "absent" and row.why
        assert row.why.startswith("not installed: ") and "(pip install " in row.why
        return
    assert row.state == "measured", row.why
    if rival == "liger":
        assert row.first_loss == pytest.approx(plain["first_loss"], rel=1e-3)


def test_a_rival_that_is_not_installed_has_a_row_and_one_that_nobody_knows_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(rivals.NEEDS, "liger", ("no_such_module",))
    monkeypatch.setattr(rivals.kd, "ARMS", {})
    rows = rivals.steps(["liger"], "cpu", TINY, flop_per_s=1.0, timeout_s=1.0)
    assert [(row.arm, row.state) for row in rows] == [("liger", "absent")]
    assert table(rows)[-1] == (
        "liger: absent: not installed: no_such_module (pip install no_such_module)"
    )
    with pytest.raises(SystemExit):
        rivals.main(["steps", "--against", "trl,nemo"])
    assert "found nemo" in capsys.readouterr().err


@pytest.mark.soak
def test_the_script_keeps_one_value_with_every_arm(tmp_path: Path) -> None:
    shape = "--teacher tiny --student tiny --rows 1 --seq-len 16 --steps 1 --warm-up 1"
    out = tmp_path / "kd.json"
    words = f"steps --device cpu {shape} --against transformers,trl --out {out}"
    command = [sys.executable, "-m", "evidence.distill.rivals", *words.split()]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    found = json.loads(out.read_text())
    assert [row["arm"] for row in found["rows"]] == [
        *("engine", "engine packed", "transformers", "trl")
    ]
    assert found["work"]["seq_len"] == 16
    assert all(row["tokens_per_s"] > 0 for row in found["rows"] if row["state"] == "measured")
