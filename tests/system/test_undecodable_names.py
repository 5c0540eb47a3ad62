"""Names that are no UTF-8, of a run, its files, a finding, a model: each command works or refuses them in a line, and
what it writes can be read again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import engine.demo
from engine.cli.main import main
from tests.support.run_folders import killed

Says = Callable[..., int]
ODD = os.fsdecode(b"r\xff")
DEMO = Path(engine.demo.__path__[0]) / "teacher"


@pytest.fixture
def says(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Says:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> int:
        code = main([str(one) for one in arguments])
        printed = capfd.readouterr()
        assert code in (0, 1, 2, 64, 65), (arguments, printed.err)
        assert code < 64 or len(printed.err.splitlines()) <= 2, printed.err
        return code

    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = killed(tmp_path / "runs" / ODD).path
    for name in (b"\xffx", b"stacks/\xfe.txt", b"student/\xff.safetensors", b"checkpoints/\xff/a"):
        file = path / os.fsdecode(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    return path


def test_every_viewer_of_a_run(run: Path, says: Says) -> None:
    for command in ("tail", "runs", "diagnose"):
        assert says(command, run) in (0, 1)
        assert says(command, "--json", run) in (0, 1)
    assert says("checks", run) == 2
    assert says("evidence", "receipt", run) == 2
    assert says("report", run) == 0
    assert says("report", "--out", os.fsdecode(b"\xfe.html"), run) == 0
    assert says("stop", run) == 65


def test_a_finding_with_such_names_can_be_read_again(run: Path, tmp_path: Path, says: Says) -> None:
    assert says("why", "new", run, "--seen", "exit", "--slug", "slug") == 0
    # A text with a backslash where half a surrogate pair would stand is another text, and stays.
    assert says("why", "note", rf"c{ODD} \udcff") == 0
    assert says("why", "cause", ODD) == 65
    assert says("why", "new", ODD, "--slug", "other") == 65
    assert says("why", "show") == 0
    assert says("why", "check", "--all") == 0
    (found,) = (tmp_path / "evidence").glob("*slug")
    moved = found.rename(found.with_name(f"{ODD}-{found.name}"))
    (tmp_path / "evidence").rename(tmp_path / ODD)
    assert says("evidence", "list", ODD) == 0
    assert says("report", tmp_path / ODD / moved.name) == 0


def test_models_and_texts(tmp_path: Path, says: Says) -> None:
    model = tmp_path / ODD
    shutil.copytree(DEMO, model)
    assert says("inspect", model) == 0
    assert says("convert", "--quant", "f32", model, f"{ODD}-new") == 0
    assert says("convert", "--quant", "f32", "--format", "gguf", model, f"{ODD}.gguf") == 65
    assert says("generate", model, "--prompt", "a", "--max-tokens", "1") == 0
    assert says("generate", model, "--prompt", ODD, "--max-tokens", "1") == 65
