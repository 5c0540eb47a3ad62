"""The command line of the workbench: what it prints, what it refuses, and what it never loads."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from pathlib import Path

import pytest
from textual import constants
from textual.drivers import linux_driver

from engine import child
from engine.log.folder import RunFolder
from engine.spec import load_spec
from engine.version import VERSION
from tests.support.paths import ROOT
from tests.support.run_folders import completed, corrupt, killed, running
from workbench import cli
from workbench.feed import RunFeed
from workbench.tui.app import EscapeSelector


def run_cli(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "workbench", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_workbench_loads_no_torch_and_no_notebook() -> None:
    unwanted = "torch numpy safetensors tokenizers ipywidgets anywidget IPython"
    code = (
        "import sys, workbench.cli, workbench.feed, workbench.tui.app; "
        f"print([m for m in '{unwanted}'.split() if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_command_line_loads_no_textual_until_it_draws() -> None:
    code = "import sys, workbench.cli; print('textual' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(("asked", "expected"), [(None, 25), ("70", 70)])
def test_an_escape_waits_as_long_as_was_asked_for(asked: str | None, expected: int) -> None:
    code = (
        "from workbench.cli import load_screen; load_screen(None); import textual.constants; "
        "print(round(1000 * textual.constants.ESCAPE_DELAY))"
    )
    environ = {name: value for name, value in os.environ.items() if name != "ESCDELAY"}
    environ |= {} if asked is None else {"ESCDELAY": asked}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) == expected


def test_the_wait_for_the_rest_of_a_sequence_ends_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Textual's input thread looks for its end when its selector returns."""
    assert vars(linux_driver)["selectors"].SelectSelector is EscapeSelector
    monkeypatch.setattr(constants, "ESCAPE_DELAY", 0.025)
    waits: list[float | None] = []
    selector, (read, write) = EscapeSelector(), os.pipe()
    selector.register(read, selectors.EVENT_READ)
    os.write(write, b"\x1b")
    assert selector.select(0.1)
    os.read(read, 1)

    def note(_: object, wait: float | None) -> list[object]:
        waits.append(wait)
        return []

    monkeypatch.setattr(selectors.SelectSelector, "select", note)
    selector.select(0.1)
    selector.select(0.1)
    assert waits == [0.025, 0.1]
    selector.close()
    os.close(read)
    os.close(write)


def test_what_the_screen_imports_is_in_no_collection_and_garbage_still_is() -> None:
    code = (
        "import gc, workbench.cli; workbench.cli.load_screen(None); "
        "print(gc.isenabled(), gc.get_freeze_count() > 10_000)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "True True"


def test_version_is_the_packages() -> None:
    assert run_cli("--version").stdout.strip() == f"apr-workbench {VERSION}"


@pytest.mark.parametrize("arguments", [("--help",), ("demo", "--help")])
def test_help_names_every_option(arguments: tuple[str, ...]) -> None:
    done = run_cli(*arguments)
    assert done.returncode == 0
    wanted = ["--read-only", "--ascii", "--version"]
    wanted += (
        ["--chat", "--on-policy", "--set", "--out"]
        if "demo" in arguments
        else ["RUNS", "demo", "NO_COLOR"]
    )
    assert all(option in done.stdout for option in wanted)


def test_a_path_that_does_not_exist_is_refused_in_words(tmp_path: Path) -> None:
    done = run_cli(str(tmp_path / "nothing"))
    assert done.returncode == 65
    assert "expected a run, found nothing there" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_terminal_it_names_the_command_that_prints(tmp_path: Path) -> None:
    done = run_cli(str(tmp_path))
    assert done.returncode == 64
    assert "expected a terminal" in done.stderr
    assert "engine tail" in done.stderr
    assert done.stdout == ""


def test_an_unknown_option_is_a_usage_error() -> None:
    done = run_cli("--colour")
    assert done.returncode == 64
    assert "--colour" in done.stderr


@pytest.mark.parametrize("name", ["demo", "chat", "on_policy"])
def test_the_packaged_demo_is_a_spec_that_the_engine_accepts(name: str) -> None:
    # The student of the on-policy demo is that of another run.
    sets = [f"student.path={cli.demo_spec().parent / 'teacher'}"] if name == "on_policy" else []
    spec, _ = load_spec(cli.demo_spec(name), sets)
    assert spec.train.steps > 0


class Became(BaseException):
    """Stands where this process ends because it has become another."""


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines that this process has become."""
    lines: list[list[str]] = []

    def execve(path: str, arguments: list[str], environment: dict[str, str]) -> None:
        assert path == arguments[0] == sys.executable and child.ASIDE in environment
        lines.append(arguments)
        raise Became

    monkeypatch.setattr(os, "execve", execve)
    return lines


@pytest.mark.parametrize("chat", [False, True])
def test_a_demo_without_a_terminal_becomes_the_engine(
    tmp_path: Path, became: list[list[str]], chat: bool
) -> None:
    arguments = ["--chat"] if chat else []
    with pytest.raises(Became):
        cli.main(["demo", *arguments, "--set", "train.steps=3", "--out", str(tmp_path / "run")])
    assert became == [
        [
            *child.command("engine", "distill", str(cli.demo_spec("chat" if chat else "demo"))),
            *("--set", "train.steps=3", "--out", str(tmp_path / "run")),
        ]
    ]


@pytest.mark.soak
def test_the_on_policy_demo_ends_with_what_the_student_writes_before_and_after(
    tmp_path: Path,
) -> None:
    short = ("data.seq_len=64", "rollout.max_new_tokens=8", "train.steps=2", "eval.rows=4")
    sets = [word for one in short for word in ("--set", one)]
    once = ("train.steps=2", "train.warmup_steps=0", *short[:1])
    first = run_cli(
        "demo",
        *(word for one in once for word in ("--set", one)),
        *("--out", str(tmp_path / "first")),
    )
    assert first.returncode == 0, first.stderr
    student = f"student.path={tmp_path / 'first' / 'student'}"
    done = run_cli("demo", "--on-policy", *sets, "--set", student, "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert "before on-policy steps\n" in done.stdout and "after on-policy steps\n" in done.stdout
    assert "nats per token before" in done.stdout.splitlines()[-1]


def test_the_default_folder_of_a_demo_is_named_for_its_time(became: list[list[str]]) -> None:
    for arguments, begin in ((["demo"], "demo-2"), (["demo", "--chat"], "chat-2")):
        with pytest.raises(Became):
            cli.main(arguments)
        out = Path(became[-1][-1])
        assert out.parent == Path("runs")
        assert out.name.startswith(begin)


def farewell_of(run: RunFolder) -> str:
    return "\n".join(cli.farewell(RunFeed(run).read_all()))


def test_the_farewell_of_a_completed_run_is_its_result(tmp_path: Path) -> None:
    text = farewell_of(completed(tmp_path / "run"))
    assert text.startswith("✓ HEALTHY: completed 60 steps") and "\nCOMPLETED | step 60/60" in text
    assert "held-out loss of the student at step 60: 2.6290 nats/token" in text
    assert f"run folder: {tmp_path / 'run'}" in text
    assert "reattach" not in text


def test_the_farewell_of_a_run_that_goes_on_says_how_to_reach_it(tmp_path: Path) -> None:
    scene = running(tmp_path / "run")
    text = farewell_of(scene.run)
    scene.close()
    path = scene.run.path
    for command in (f"apr-workbench {path}", f"engine tail {path}", f"engine stop {path}"):
        assert command in text


def test_the_farewell_of_a_killed_run_tells_the_cause(tmp_path: Path) -> None:
    assert "killed by SIGKILL, sender not known" in farewell_of(killed(tmp_path / "run"))


def test_the_farewell_of_an_unreadable_run_tells_the_fault(tmp_path: Path) -> None:
    text = farewell_of(corrupt(tmp_path / "run"))
    assert text.startswith("UNREADABLE")
    assert "expected line number 20" in text
