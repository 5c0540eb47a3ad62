"""Who may hold the trainer's log: the composition root alone. Everybody else returns what is to be logged, or
is given a function for it, so that what a run says, and in which order, can be read in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from engine.decision import Decision
from engine.log.events import Phase
from engine.log.fold import Follower
from engine.log.folder import create_run
from engine.log.write import LogWriter
from engine.train.to_events import write
from tests.support.paths import ROOT

TRAINER_SIDE = (
    *("plan", "train", "loss", "teachers", "models", "data"),
    *("formats", "quant", "runtime", "kernels", "checks"),
)
HOLDERS = {
    "engine/train/run.py": "puts a run together",
    "engine/train/to_events.py": "writes for it",
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


def test_what_is_logged_is_in_the_log_before_the_work_goes_on(tmp_path: Path) -> None:
    """A silent run is stuck in the phase that its log names last."""
    run = create_run(tmp_path / "run", "", {})
    with LogWriter(run.events, writer="trainer") as writer:
        log = partial(write, writer)
        for name in ("reading", "loading"):
            log(Phase(name=name))
            assert Follower(run).read_all().phase.name == name
        log(Decision(knob="student.graphs", choice="off", reason="it is short"))
        assert len(Follower(run).read_all().decisions) == 1
