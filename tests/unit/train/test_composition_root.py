"""Who may hold the trainer's log: the composition root alone. Everybody else returns or yields what is to
be logged, so that what a run says, and in which order, can be read in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT

TRAINER_SIDE = (
    *("plan", "train", "loss", "teachers", "models", "data"),
    *("formats", "quant", "runtime", "kernels", "checks"),
)
HOLDERS = {
    "engine/train/run.py": "puts a run together",
    "engine/train/session.py": "its loop: what a step shows decides what comes next",
    "engine/train/record.py": "writes for both",
    "engine/train/prepare.py": "the same for `engine prepare`",
}


def names(path: Path) -> Iterator[str]:
    """Every name that a module imports or reads."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id


def test_no_module_of_the_trainer_but_its_composition_root_has_a_log_writer() -> None:
    paths = [p for package in TRAINER_SIDE for p in (ROOT / "engine" / package).rglob("*.py")]
    assert len(paths) > 50
    found = {str(p.relative_to(ROOT)) for p in paths if "LogWriter" in names(p)}
    assert found == HOLDERS.keys()
