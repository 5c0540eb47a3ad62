"""What README and tutorial show is what their commands print, on the demo made small."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from docs.transcripts import PAGES, Command, as_printed, commands, form, run
from engine.cli.main import build_parser
from tests.support.made_once import made_once
from tests.support.running import engine_here

SMALL = {
    "train.steps": 8,
    "train.warmup_steps": 2,
    "train.rows": 2,
    "data.max_bytes": 400_000,
    "eval.rows": 4,
    "eval.every": 4,
    "compute.device": "cpu",
}
"""Settings of a demo that takes seconds."""

SHOWN = re.compile(r"^(?:\$ )?(engine (?!\w+:).+?)(?:\s{2,}#.*)?$|`(engine [^`]+)`", re.MULTILINE)
"""Commands in blocks, tables and sentences, and no message of one."""


def played(command: Command, folder: Path) -> list[str]:
    """What a command prints; the demo is made small."""
    words = command.words()
    if words[:2] == ["apr-workbench", "demo"]:
        words += [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    return run(words, folder)


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the first command of the README has run, and what it printed."""

    def make(folder: Path) -> None:
        (folder / "printed.txt").write_text("\n".join(played(commands(PAGES[0])[0], folder)))

    return made_once(tmp_path_factory, "pages", make)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_print_lines_of_the_form_that_is_shown(
    page: Path, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(demo, tmp_path, dirs_exist_ok=True)
    shown = commands(page)
    assert len(shown) > 3
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for command in shown:
        if command.text.startswith("apr-workbench demo"):
            printed = (demo / "printed.txt").read_text().splitlines()
        else:
            done = engine_here(*command.words()[1:])
            printed = (done.stdout + done.stderr).splitlines()
        as_printed(command.excerpt, printed)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_have_the_arguments_that_are_shown(page: Path) -> None:
    found = [one or two for one, two in SHOWN.findall(page.read_text())]
    assert len(found) > 5
    for command in found:
        build_parser().parse_args(shlex.split(command, comments=True)[1:])


def test_the_form_of_a_line_leaves_numbers_units_and_dates_out() -> None:
    shown = "step 12/250, 1.5 ms, 3.2k tok/s, 2m06s left: 20261123-094905"
    assert form(shown) == form("step 3/8, 653 µs, 812 tok/s, 36s left: 20270101-000000")
    assert form(shown) != form(shown.replace("left", "right"))


def test_a_line_that_is_not_printed_is_named() -> None:
    with pytest.raises(ValueError, match=r"not printed behind .*27 passed"):
        as_printed(["27 passed"], ["27 failed"])
