"""A command that fails says one line, ends with the code of its error, and keeps the rest in a report."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine import crash
from engine.crash import run_command, trace_of
from engine.errors import BadInput, NoAnswer


def _raising(error: BaseException) -> Callable[[], int]:
    def command() -> int:
        raise error

    return command


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "apr-workbench" / "reports"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (BadInput.expected("spec", "a.toml", "x", "y"), 65, "spec: a.toml — expected x, found y"),
        (NoAnswer("none"), 2, "none"),
        (MemoryError(), 65, "memory: of this process — expected enough for its input"),
        (OSError(errno.EACCES, "Permission denied", "/a/b"), 65, "found Permission denied"),
        (OSError(errno.EROFS, "Read-only file system", "/a/b"), 65, "Read-only file system"),
    ],
)
def test_what_the_user_gave_is_said_in_one_line_and_has_no_report(
    error: Exception, code: int, said: str, reports: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("engine tail", _raising(error)) == code
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said in err
    assert not reports.exists()


def _deeper() -> None:
    _deeper()


def _nested() -> Exception:
    try:
        _deeper()
    except RecursionError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    "error",
    [
        TypeError("wrong " * 100_000),
        KeyError("\x1b[2J"),
        OSError("without a file"),
        ExceptionGroup("many", [ValueError("x" * 10_000)] * 100),
        _nested(),
    ],
)
def test_what_is_our_mistake_leaves_a_bounded_report(
    error: Exception, reports: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("engine tail", _raising(error)) == 70
    out, err = capsys.readouterr()
    assert out == "" and len(err) < 1000 and "\x1b" not in err
    first, second = err.splitlines()
    assert first.startswith(f"engine tail: internal error: {type(error).__name__}")
    report = Path(second.removeprefix("report: "))
    assert report.parent == reports
    assert report.stat().st_size < 2 * crash.REPORT_CHARACTERS
    assert type(error).__name__ in report.read_text()
    assert report.stat().st_mode & 0o077 == 0


def test_a_report_holds_no_secret(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "grün-4711-geheim")
    monkeypatch.setattr(sys, "argv", ["engine", "tail", "--token", "abc"])
    run_command("engine tail", _raising(TypeError("found grün-4711-geheim")))
    text = next(reports.iterdir()).read_text()
    assert "geheim" not in text and "abc" not in text.split("command:")[1].split("\n")[0]


def test_only_the_newest_reports_are_kept(reports: Path) -> None:
    reports.mkdir(parents=True)
    for number in range(30):
        old = reports / f"engine-20200101-0000{number:02}-1.txt"
        old.write_text("old")
        os.utime(old, (number, number))
    run_command("engine tail", _raising(TypeError()))
    names = sorted(file.name for file in reports.iterdir())
    assert len(names) == crash.KEPT
    assert names[0] == "engine-20200101-000011-1.txt"


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(TypeError):
        run_command("engine tail", _raising(TypeError()), debug=True)


def test_a_reader_of_a_pipe_that_goes_away_is_no_error() -> None:
    ran = subprocess.run(
        f"{sys.executable} -m engine spec | head -n 1; echo ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.splitlines()[1:] == ["0"] and ran.stderr == ""


def test_a_trace_that_never_ends_keeps_its_beginning_and_its_end() -> None:
    try:
        raise ValueError("a" * 200_000) from TypeError("the cause")
    except ValueError as error:
        text = trace_of(error)
    assert len(text) < crash.REPORT_CHARACTERS + 100
    assert "the cause" in text and text.rstrip().endswith("a")
