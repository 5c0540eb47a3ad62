"""What tests of the workbench share: a real run that has ended, and commands of screens that start fast."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.forked import start_python
from tests.support.kit import Kit
from tests.support.made_once import made_once
from tests.support.running import engine
from workbench import engine_commands, jobs

POPEN = subprocess.Popen


@pytest.fixture(autouse=True)
def commands_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that a screen starts are forks of a process that has imported torch, unless a test says otherwise."""

    def started(words: list[str], **how: Any) -> subprocess.Popen[Any]:
        if subprocess.Popen is not POPEN or words[0] != sys.executable:
            return subprocess.Popen(words, **how)
        return start_python(*words[1:], **how)

    def ran(
        words: list[str], capture_output: bool, check: bool, **how: Any
    ) -> subprocess.CompletedProcess[Any]:
        assert capture_output and not check
        with started(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how) as process:
            out, err = process.communicate()
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    replaced = {**vars(subprocess), "Popen": started}
    monkeypatch.setattr(jobs, "subprocess", SimpleNamespace(**replaced))
    monkeypatch.setattr(engine_commands, "subprocess", SimpleNamespace(**replaced | {"run": ran}))


@pytest.fixture(scope="session")
def ended_run(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, alone in its folder. Nothing writes into it."""

    def make(folder: Path) -> None:
        spec = kit.spec(folder, train__steps=2, eval__every=0, checkpoint__every=0)
        done = engine("distill", spec, "--out", folder / "runs" / "first")
        assert done.returncode == 0, done.stderr

    return made_once(tmp_path_factory, "ended", make) / "runs" / "first"
