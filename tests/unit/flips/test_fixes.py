"""The change of one line that is proposed for what a watched script shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.flips.fixes import fixes_of
from engine.log.events import Watched
from engine.log.folder import WatchedCommand
from engine.log.view import RunView
from tests.support.fixable_scripts import FIXABLE
from tests.support.judged import identity_event
from tests.support.run_events import fold_events, numbered

TEXTS = {
    "clipping": "gradients are clipped after steps 1 and 2 of SGD",
    "schedule": "StepLR is called 2 times for each step",
    "accumulated_mean": "a step sums the gradients of 4 losses, each a mean, and nothing divides them",
}
NUMBERS = {
    "accumulated_mean": {"passes": 4.0},
    "label_shift": {"shift_0": 1.0, "shift_1": 0.5, "shift_2": 0.0, "shift_3": 0.0},
    "temperature_squared": {"temperature": 4.0},
}
NAMES = {
    "model": "model",
    "teacher": "teacher",
    "schedule": "schedule",
    "optimizer_model": "model",
}


def fixes(folder: Path, id: str, text: str, places: dict[str, str]) -> list[tuple[str, str]]:
    watched = Watched(
        pid=1,
        python="3",
        executable="p",
        torch="2",
        optimizer="SGD",
        device="cpu",
        parameters=1,
        places=places,
        names=NAMES,
    )
    seen = identity_event(id, "suspicion", 3, text, numbers=NUMBERS.get(id, {}))
    view = fold_events(RunView(), "events", numbered([watched, seen]))
    command = WatchedCommand(arguments=("python", "train.py"), folder=str(folder), commit=None)
    return [(one.ends, one.assignment) for one in fixes_of(view, command)]


def proposed(folder: Path, id: str, script: str) -> list[tuple[str, str]]:
    """The fixes of a script in which an identity is suspected, with the places that a probe would see."""
    folder.joinpath("train.py").write_text(script)
    lines = script.splitlines()
    parts = {"backward": ".backward()", "step": "optimizer.step(", "optimizer": "torch.optim."}
    places = {
        key: f"train.py:{next(n for n, line in enumerate(lines, 1) if part in line)}"
        for key, part in parts.items()
    }
    return fixes(folder, id, TEXTS.get(id, "seen"), places)


@pytest.mark.parametrize("id", FIXABLE)
def test_the_line_that_causes_it_is_replaced(tmp_path: Path, id: str) -> None:
    script, line, by = FIXABLE[id]
    lines = [each.strip() for each in script.splitlines()]
    number = len(lines) - lines[::-1].index(line) if id == "schedule" else lines.index(line) + 1
    assert proposed(tmp_path, id, script) == [(f"identity {id}", f"train.py:{number}={by}")]


@pytest.mark.parametrize(
    ("id", "old", "new"),
    [
        ("temperature_squared", "loss = F.kl_div", "F.kl_div(flat, wanted); loss = F.kl_div"),
        ("double_softmax", "for step", "F.softmax(torch.ones(2), 0)\n    for step"),
        ("label_shift", "logits.view(-1, 50)", "reshaped(logits)"),
        ("kept_gradients", "optimizer.step()", "if step: optimizer.step(  # no Python"),
        ("training_mode", "    optimizer.zero_grad()", "    if step:\n        pass"),
    ],
    ids=["two calls", "two softmaxes", "an unknown form", "a broken file", "a branch first"],
)
def test_no_fix_is_proposed_where_no_line_can_be_named(
    tmp_path: Path, id: str, old: str, new: str
) -> None:
    script = FIXABLE[id].script.replace(old, new)
    assert script != FIXABLE[id].script
    assert proposed(tmp_path, id, script) == []


def test_a_script_that_is_gone_has_no_fix(tmp_path: Path) -> None:
    assert fixes(tmp_path, "kept_gradients", "seen", {"step": "train.py:11"}) == []
