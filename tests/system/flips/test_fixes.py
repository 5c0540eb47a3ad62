"""The proposed change of one line ends what a real run of a script showed."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from engine.flips.flip_folder import read_pairs
from tests.support.fixable_scripts import FIXABLE
from tests.support.running import engine

IN_CI = ("label_shift",)


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock of its own, so that tests beside this one may flip too."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.parametrize(
    "id", [pytest.param(id, marks=[pytest.mark.soak] * (id not in IN_CI)) for id in FIXABLE]
)
def test_the_first_proposal_ends_what_the_script_showed(tmp_path: Path, id: str) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    folder.joinpath("train.py").write_text(FIXABLE[id].script)
    run = tmp_path / "runs" / "a"
    watched = engine(
        "watch", "--runs", run.parent, "--name", "a", "--", sys.executable, "train.py", cwd=folder
    )
    assert watched.returncode == 0, watched.stderr
    assert f"train.py:{_line(id)}=" in watched.stderr.replace("\n           ", " ")
    first = json.loads(engine("flip", run, "--propose", "--json").stdout)[0]
    assert first["ends"] == f"identity {id}"
    done = engine("flip", run, *first["options"], "--out", tmp_path / "flip", "--share")
    assert done.returncode == 0, shlex.join(first["options"]) + done.stdout + done.stderr
    verdict = json.loads(tmp_path.joinpath("flip", "verdict.json").read_text())
    assert verdict["verdict"] == "B_ENDS_IT"
    assert len(read_pairs(tmp_path / "flip")) == 3


def _line(id: str) -> int:
    lines = [one.strip() for one in FIXABLE[id].script.splitlines()]
    return len(lines) - lines[::-1].index(FIXABLE[id].line)
