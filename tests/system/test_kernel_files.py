"""A file that the kernel makes up is refused in a line wherever a command reads a file: it may block, fail, or give
nothing where bytes are expected."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import engine.demo
from engine.cli.main import main
from tests.support.findings import hanging_run
from tests.support.kit import Kit
from tests.support.run_folders import completed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the file systems are Linux's")

MADE_UP = ("/proc/kmsg", "/proc/self/clear_refs", "/proc/self/status")
DEMO = Path(engine.demo.__path__[0])
Said = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Said:
    """Run a command, which crashes nowhere; its exit code, its lines of error, and its output."""
    state = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, list[str], str]:
        capsys.readouterr()
        code = main([str(one) for one in arguments])
        printed = capsys.readouterr()
        assert not state.exists() and "Traceback" not in printed.err, printed.err
        return code, printed.err.splitlines(), printed.out

    return run


@pytest.mark.parametrize("name", MADE_UP)
@pytest.mark.parametrize(
    "key",
    [
        "student.config",
        "teacher.path",
        "data.tokenizer",
        "data.corpus",
    ],
)
def test_no_setting_reads_it(key: str, name: str, kit: Kit, tmp_path: Path, said: Said) -> None:
    code, lines, _ = said("distill", "--check", kit.spec(tmp_path), "--set", f"{key}={name}")
    assert code == 65 and len(lines) == 1, lines
    assert Path(name).name in lines[0] and "a file of procfs, which the kernel makes up" in lines[0]


@pytest.mark.parametrize("name", MADE_UP)
def test_no_argument_reads_it(name: str, said: Said) -> None:
    for arguments in (
        ["distill", "--check", name],
        ["why", "new", name],
        ["inspect", name],
        ["convert", "--quant", "f32", name, "new"],
        ["eval", "ppl", DEMO / "teacher", "--data", name],
        ["generate", DEMO / "teacher", "--prompt-file", name],
    ):
        code, lines, _ = said(*arguments)
        assert code == 65 and len(lines) == 1, (arguments, lines)
    code, _, out = said("contracts", "validate", name)
    assert code == 1 and "which the kernel makes up" in out


@pytest.mark.parametrize("name", MADE_UP)
@pytest.mark.parametrize(
    "file",
    [
        *("events.jsonl", "device.jsonl", "watch.jsonl", "receipt.json", "effective.json"),
        *("spec.toml", "stderr.txt", "memory.held", "student/model.safetensors"),
    ],
)
def test_a_file_of_a_run_that_is_a_link_to_it(
    file: str, name: str, tmp_path: Path, said: Said
) -> None:
    run = completed(tmp_path / "run").path
    link = run / file
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    for arguments in (
        ["tail", run],
        ["runs", tmp_path],
        ["diagnose", run],
        ["checks", run],
        ["report", "--force", "--out", "page.html", run],
        ["evidence", "receipt", run],
    ):
        code, lines, _ = said(*arguments)
        assert code in (0, 1, 2, 65), (arguments, lines)
    code, lines, _ = said("why", "new", run)
    assert code in (0, 65) and len(lines) <= 2, lines


@pytest.mark.parametrize("name", MADE_UP)
def test_a_finding_that_is_a_link_to_it(name: str, tmp_path: Path, said: Said) -> None:
    assert said("why", "new", hanging_run(tmp_path / "runs" / "hang").path)[0] == 0
    (found,) = tmp_path.glob("evidence/*/finding.json")
    for target in (found, tmp_path / "evidence" / "LOG.md"):
        shutil.copytree(tmp_path / "evidence", tmp_path / "kept")
        target.unlink(missing_ok=True)
        target.symlink_to(name)
        for arguments in (
            ["evidence", "list"],
            ["why", "check", "--all"],
            ["why", "show"],
            ["report", "--force", "--out", "page.html", found.parent],
        ):
            code, lines, out = said(*arguments)
            assert code in (0, 1, 2, 65), (arguments, lines, out)
        shutil.rmtree(tmp_path / "evidence")
        (tmp_path / "kept").rename(tmp_path / "evidence")


@pytest.mark.parametrize("name", MADE_UP)
def test_a_file_of_a_published_folder_or_a_flip(name: str, tmp_path: Path, said: Said) -> None:
    flip = tmp_path / "flip"
    flip.mkdir()
    (flip / "plan.json").symlink_to(name)
    (flip / "flip.jsonl").write_text(json.dumps({}) + "\n")
    model = tmp_path / "model"
    shutil.copytree(DEMO / "teacher", model)
    (model / "config.json").unlink()
    (model / "config.json").symlink_to(name)
    for arguments in (["flips", tmp_path], ["report", flip], ["inspect", model]):
        code, lines, _ = said(*arguments)
        assert code in (0, 2, 65), (arguments, lines)
