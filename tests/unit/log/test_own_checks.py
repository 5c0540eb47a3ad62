"""What a check of a script reads, and what a change of a line changes."""

from __future__ import annotations

import pytest

from engine.log.own_checks import changed_names, find_own_check

SCRIPT = """\
import os, sys
LIMIT = float(os.environ.get("MOST", 5))
RATE = 0.1
model = Net()
for step in range(10):
    loss = model(x)
    if loss > LIMIT:
        raise RuntimeError("diverged")
"""
CLASSES = """\
class Guard:
    def __init__(self, bound):
        self.bound = bound
    def after(self, trainer):
        if trainer.loss > self.bound:
            raise ArithmeticError("too large")

class Trainer:
    settings = {"bound": 20.0, "rate": 0.1}
    def __init__(self):
        self.guard = Guard(self.settings["bound"])
    def fit(self):
        for batch in batches:
            self.loss = criterion(batch)
            self.guard.after(self)
"""
AGAIN = """\
def check(loss, most):
    if loss > most:
        raise ValueError("too large")

for step in range(10):
    loss = model(x)
    try:
        check(loss, MOST)
    except ValueError as error:
        raise RuntimeError("diverged") from error
"""
EXITS = """\
for step in range(10):
    loss = model(x)
    if loss > LIMIT:
        sys.exit("diverged")
if broken:
    raise ValueError
"""
LATER = """\
for step in range(10):
    loss = model(x)
if loss > FOLDER:
    raise RuntimeError("no folder")
"""


@pytest.mark.parametrize(
    ("script", "line", "reads", "constants"),
    [
        (SCRIPT, 8, {"loss", "LIMIT", "MOST"}, {"LIMIT", "MOST"}),
        (CLASSES, 6, {"loss", "bound"}, {"bound"}),
        (AGAIN, 10, {"loss", "MOST"}, {"MOST"}),
        (SCRIPT.replace("raise ", "gone.throw(") + ")", 8, {"loss", "LIMIT"}, {"LIMIT", "MOST"}),
        (EXITS, None, {"loss", "LIMIT"}, {"LIMIT"}),
        (LATER, 4, {"FOLDER"}, {"FOLDER"}),
    ],
)
def test_a_check_reads_its_conditions_and_what_their_constants_are_made_of(
    script: str, line: int | None, reads: set[str], constants: set[str]
) -> None:
    found = find_own_check({"src/train.py": script}, line and ("train.py", line))
    assert reads <= found.reads and constants <= found.constants
    assert "loss" not in found.constants
    assert not {"RATE", "rate", "broken"} & found.reads


def test_a_check_of_settings_alone_has_no_limit() -> None:
    script = 'import os\nMODE = os.environ["MODE"]\nif MODE != "good":\n    raise ValueError\n'
    found = find_own_check({"train.py": script}, ("train.py", 4))
    assert "MODE" in found.reads and not found.constants


def test_a_check_after_the_steps_is_in_no_loop() -> None:
    assert not find_own_check({"train.py": LATER}, ("train.py", 4)).loops
    assert find_own_check({"train.py": SCRIPT}, ("train.py", 8)).loops == {("train.py", 5)}


def test_a_check_that_a_library_calls_may_be_in_its_loop() -> None:
    script = "class Rows:\n    def __getitem__(self, at):\n        if at > 5:\n            raise ValueError\n"
    assert find_own_check({"train.py": script}, ("train.py", 4)).loops == {("train.py", 2)}


def test_the_lines_of_a_check_are_its_condition_and_what_raises() -> None:
    assert find_own_check({"train.py": SCRIPT}, ("train.py", 8)).lines == {
        ("train.py", 7),
        ("train.py", 8),
    }


def test_what_a_library_raises_is_no_check_of_the_script() -> None:
    found = find_own_check({"train.py": SCRIPT}, ("functional.py", 8))
    assert not found.lines and not found.reads


@pytest.mark.parametrize(
    ("was", "now", "names"),
    [
        ("LIMIT = 5", "LIMIT = 1e9", {"LIMIT"}),
        ('of = {"bound": 5, "rate": 1}', 'of = {"bound": 5, "rate": 2}', {"rate"}),
        ("opt = SGD(params, lr=1)", "opt = SGD(params, lr=2)", {"lr"}),
        ('add("--max-norm", default=1)', 'add("--max-norm", default=9)', {"max_norm", "default"}),
        ("a = 1; b = 2", "a = 1; b = 3", {"b"}),
        ("opt.step()", "opt.step(); opt.zero_grad()", {"zero_grad"}),
        ("own.manual_seed(13)", "own.manual_seed(14)", {"manual_seed"}),
        ("self.at = 1", "self.at = 2", {"at"}),
    ],
)
def test_a_change_names_only_what_it_assigns_otherwise(was: str, now: str, names: set[str]) -> None:
    assert changed_names(was, now) == names


def test_what_is_around_a_failed_call_is_found_and_what_feeds_it_is_not() -> None:
    source = """\
with suppress():
    tools.log(x, rates[step])
row = next(rows)
for batch in loader:
    pass
"""
    around = {at: find_own_check({"a.py": source}, ("a.py", at)).around for at in (2, 3, 4)}
    assert around == {2: {"a.py:1", "a.py:2", "tools"}, 3: {"a.py:3"}, 4: set()}
