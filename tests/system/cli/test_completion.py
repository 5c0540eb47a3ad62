"""`engine completion`: what each shell offers, asked of the shell itself."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from engine.cli.main import COMMANDS, build_parser
from tests.support.lacks import needs
from tests.support.run_folders import completed
from tests.support.running import engine_here

HOSTILE = "$(touch hacked) `touch hacked`; touch hacked"
ASK = {
    "bash": '''
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _engine; printf "%s\\n" "${COMPREPLY[@]}"''',
    "zsh": """
compdef() { }
compadd() { print -rl -- "${(@M)found:#$words[CURRENT]*}" }
_files() { }
source "$1"; shift
words=("$@"); CURRENT=$#; _engine""",
    "fish": """
source $argv[1]
complete -C (string join " " -- $argv[2..])""",
}
CHECK = {"bash": "-n", "zsh": "-n", "fish": "--no-execute"}
SHELLS = [
    "bash",
    pytest.param("zsh", marks=needs("zsh", shutil.which("zsh"))),
    pytest.param("fish", marks=needs("fish", shutil.which("fish"))),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("completion")
    completed(root / "runs" / "kd-1")
    completed(root / "runs" / HOSTILE)
    for shell in CHECK:
        done = engine_here("completion", shell)
        assert done.returncode == 0, done.stderr
        (root / shell).write_text(done.stdout)
    return root


def offered(shell: str, folder: Path, *typed: str) -> list[str]:
    """Return what a shell offers for the last of the words, without the descriptions that fish adds."""
    options = ["--no-config"] if shell == "fish" else ["-f"] if shell == "zsh" else ["--norc"]
    name = [] if shell == "fish" else ["-"]
    done = subprocess.run(
        [shell, *options, "-c", ASK[shell], *name, str(folder / shell), "engine", *typed],
        capture_output=True,
        text=True,
        cwd=folder,
        check=True,
    )
    assert not done.stderr
    return [line.partition("\t")[0] for line in done.stdout.splitlines()]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_one_that_its_shell_can_read(folder: Path, shell: str) -> None:
    done = subprocess.run([shell, CHECK[shell], folder / shell], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", SHELLS)
def test_commands_actions_options_choices_and_runs_are_offered(folder: Path, shell: str) -> None:
    assert {one.name for one in COMMANDS} <= set(offered(shell, folder, ""))
    assert offered(shell, folder, "diag") == ["diagnose"]
    assert {"new", "check", "close"} <= set(offered(shell, folder, "why", ""))
    assert offered(shell, folder, "why", "new", "--se") == ["--seen"]
    assert set(offered(shell, folder, "diagnose", "--f")) == {"--fail-on"}
    assert set(offered(shell, folder, "diagnose", "--fail-on", "")) == {"wrong", "suspect"}
    assert "runs/kd-1" in offered(shell, folder, "tail", "runs/k")
    assert set(CHECK) <= set(offered(shell, folder, "completion", ""))


@pytest.mark.parametrize("shell", SHELLS)
def test_the_name_of_a_run_is_offered_and_never_carried_out(folder: Path, shell: str) -> None:
    found = [one for one in offered(shell, folder, "tail", "runs/") if "hacked" in one]
    assert found and not (folder / "hacked").exists()


def test_every_command_is_in_every_script(folder: Path) -> None:
    parser = build_parser()
    assert parser.get_default("root") is parser
    for shell in CHECK:
        script = (folder / shell).read_text()
        assert [one.name for one in COMMANDS if one.name not in script] == []
