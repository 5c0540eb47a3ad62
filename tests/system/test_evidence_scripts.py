"""Scripts of evidence/ still load beside the code of now, and each folder has its line in evidence/README.md."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.paths import EVIDENCE, ROOT

SCRIPTS = sorted(EVIDENCE.glob("*/*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(EVIDENCE)))
def test_a_script_loads_and_says_how_it_is_called(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script.read_text()
    asks = "argparse" in text
    if not asks and "__main__" not in text:
        compile(text, str(script), "exec")  # loading it would measure
        return
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(str(script.parent))
    try:
        # Without argparse an argument would be taken for a path: it is loaded and not started.
        runpy.run_path(str(script), run_name="__main__" if asks else "loaded")
    except SystemExit as end:
        assert asks and not end.code
        assert "usage:" in capsys.readouterr().out
    except ModuleNotFoundError as lacks:
        # A rival library that this machine has not: nothing of ours may be missing.
        assert lacks.name and find_spec(lacks.name.split(".")[0]) is None


def test_each_folder_has_its_line() -> None:
    listed = set(re.findall(r"^\| \[([^\]]+)\]", (EVIDENCE / "README.md").read_text(), re.M))
    tracked = subprocess.run(
        ["git", "ls-files", "evidence"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    assert listed == {name.split("/")[1] for name in tracked if name.count("/") > 1}
