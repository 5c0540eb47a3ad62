"""The diffs of docs/extending.md, applied to a copy of the tree."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEW_FILE, AT_THE_END = " # ", ", at the end"


def diffs() -> Iterator[list[str]]:
    """Yield the lines of each diff that names the files it changes."""
    for part in (ROOT / "docs" / "extending.md").read_text().split("```diff\n")[1:]:
        lines = part.split("```")[0].splitlines()
        if lines[0].startswith(NEW_FILE):
            yield lines


def apply(tree: Path, lines: list[str]) -> None:
    """Put the added lines behind the line before them, or before the line after them where they come first."""
    parts: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith(NEW_FILE):
            parts.append((line.removeprefix(NEW_FILE), []))
        else:
            parts[-1][1].append(line)
    for name, body in parts:
        path = tree / name.removesuffix(AT_THE_END)
        text = path.read_text().splitlines()
        at = len(text) if name.endswith(AT_THE_END) else None
        waiting: list[str] = []
        for line in body:
            if line.startswith("+"):
                if at is None:
                    waiting.append(line[1:])
                else:
                    text.insert(at, line[1:])
                    at += 1
            else:
                place = text.index(line[1:])
                text[place:place] = waiting
                at, waiting = place + len(waiting) + 1, []
        path.write_text("\n".join(text) + "\n")


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    tree = tmp_path_factory.mktemp("extended")
    for package in ("engine", "workbench"):
        shutil.copytree(
            ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for lines in diffs():
        apply(tree, lines)

    def run(*words: str) -> str:
        command = [sys.executable, "-P", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, env={"PYTHONPATH": str(tree)}, cwd=tree
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return run


def test_a_setting_is_in_the_specs_and_has_a_decision(extended: Callable[..., str]) -> None:
    assert "fuse_norm" in extended("-m", "engine", "spec")
    code = "from engine.plan.knobs import KNOBS; k = KNOBS['train.fuse_norm']; "
    assert "off" in extended("-c", code + "print(k.choose('auto', device='cpu').choice)")


def test_what_is_judged_is_listed_and_has_a_function(extended: Callable[..., str]) -> None:
    code = (
        "from engine.cli.main import main; main(['checks', '--list', '--json']); "
        "main(['diagnose', '--list', '--json']); from engine.checks.runner import FUNCTIONS; "
        "from engine.audit.judge import BEFORE_UPDATE; "
        "from engine.catalogue import BY_ID; BY_ID['identity']['parameters_finite']; "
        "print(FUNCTIONS['rows_have_labels'].__name__, BEFORE_UPDATE['step_padding'].__name__)"
    )
    checks, alerts, functions = extended("-c", code).splitlines()
    assert {"rows_have_labels", "step_padding"} <= {one["id"] for one in json.loads(checks)}
    assert "loss_frozen" in {one["id"] for one in json.loads(alerts)}
    assert functions.split() == ["rows_have_labels", "step_padding"]


def test_a_family_and_a_pane_are_in_their_tables(extended: Callable[..., str]) -> None:
    code = (
        "from engine.model_families import FAMILIES; from workbench.panes import PANES; "
        "print('mymodel' in FAMILIES, 'energy' in [pane.id for pane in PANES])"
    )
    assert extended("-c", code).split() == ["True", "True"]
