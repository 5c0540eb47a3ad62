"""Rules that the tests themselves keep, asked of their source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support import lacks
from tests.support.paths import ROOT, TESTS

CLOCKS = {
    "monotonic",
    "perf_counter",
    "process_time",
    "thread_time",
    "time",
    "monotonic_ns",
    "perf_counter_ns",
}
APART = {"soak", "fuzz", "attack"}
"""Marks of tests that are not in the suite."""


def reads_a_clock(node: ast.AST) -> bool:
    return any(
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in CLOCKS
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "time"
        for call in ast.walk(node)
    )


def is_a_time_taken(node: ast.AST, taken: set[str]) -> bool:
    """Whether an expression holds a difference of clocks, or a name that was given one."""
    return any(
        (isinstance(one, ast.BinOp) and isinstance(one.op, ast.Sub) and reads_a_clock(one))
        or (isinstance(one, ast.Name) and one.id in taken)
        for one in ast.walk(node)
    )


def asserted_times(function: ast.AST) -> Iterator[int]:
    """Lines of a function that assert how long something took. A deadline of a loop that waits is none: it
    compares a clock with a point in time."""
    taken: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and is_a_time_taken(node.value, taken):
            taken |= {name.id for name in node.targets if isinstance(name, ast.Name)}
        # A function inside that returns a time it measured.
        if isinstance(node, ast.FunctionDef) and any(
            isinstance(one, ast.Return) and one.value and is_a_time_taken(one.value, set())
            for one in ast.walk(node)
        ):
            taken.add(node.name)
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) and any(
            isinstance(one, ast.Compare) and is_a_time_taken(one, taken)
            for one in ast.walk(node.test)
        ):
            yield node.lineno


def marks(node: ast.AST) -> set[str]:
    return {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}


def kept_apart(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets)
        and marks(node.value) & APART
        for node in tree.body
    )


def test_no_test_of_the_suite_asserts_a_time_but_through_the_one_door() -> None:
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text()
        if path.name == "perf.py" or "time." not in text:
            continue
        tree = ast.parse(text)
        if kept_apart(tree):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not any(
                marks(one) & APART for one in node.decorator_list
            ):
                found += [f"{path.relative_to(ROOT)}:{line}" for line in asserted_times(node)]
    assert not found, f"these belong to tests/support/perf.py: {sorted(set(found))}"


def test_that_rule_finds_the_forms_in_which_times_were_asserted() -> None:
    forms = (
        "assert time.monotonic() - begin < 0.2",
        "took_s = time.process_time() - begin\n    assert took_s < 3.0, took_s",
        "def timed():\n        begin = time.time()\n        return time.time() - begin\n"
        "    assert any(timed() / timed() < 2 for _ in range(5))",
    )
    for form in forms:
        (function,) = ast.parse(f"def test():\n    begin = 0\n    {form}\n").body
        assert list(asserted_times(function)), form
    waiting = "while True:\n        assert time.monotonic() < deadline"
    (function,) = ast.parse(f"def test():\n    {waiting}\n").body
    assert not list(asserted_times(function))


MODULE_DRAWS = {
    "random",
    "randint",
    "randrange",
    "choice",
    "choices",
    "shuffle",
    "sample",
    "uniform",
    "randbytes",
}


def imported(tree: ast.Module) -> set[str]:
    return {
        name.asname or name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for name in node.names
    }


def test_nothing_in_the_suite_is_drawn_without_a_seed() -> None:
    """`random.Random(seed)` and `default_rng(seed)` are the same each time; the module's own functions are not."""
    found = []
    names = MODULE_DRAWS | {"urandom", "default_rng", "Random", "SystemRandom"}
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text()
        if not any(word in text for word in ("random", "secrets", "default_rng")):
            continue
        tree = ast.parse(text)
        modules = imported(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr not in names and "secrets" not in modules:
                continue
            owner, name = ast.unparse(node.func.value), node.func.attr
            if (
                (owner == "random" and "random" in modules and name in MODULE_DRAWS)
                or (owner == "secrets" and "secrets" in modules)
                or (owner, name) == ("os", "urandom")
                or (
                    name in ("default_rng", "Random", "SystemRandom")
                    and not node.args
                    and not node.keywords
                )
            ):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not found, found


def test_each_skip_in_the_list_is_for_lack_of_something_that_one_can_get() -> None:
    listed = lacks.read_list(TESTS / "skips.tsv")
    assert listed and {what for _, what in listed} <= set(lacks.LACKS)
    for function, _ in listed:
        path, *names = function.split("::")
        text = Path(ROOT / path).read_text()
        assert not names or f"def {names[-1]}(" in text, (
            f"{function} is in tests/skips.tsv and gone"
        )


def test_each_test_that_waits_for_a_gpu_is_in_the_list_of_skips() -> None:
    """Said here in a second: the suite counts skips only when it is done."""
    listed = {function for function, _ in lacks.read_list(TESTS / "skips.tsv")}
    asked = [
        f"{path.relative_to(ROOT)}::{node.name}"
        for path in sorted((TESTS / "gpu").rglob("test_*.py"))
        if "pytestmark = pytest.mark.gpu" in (text := path.read_text())
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert asked and not set(asked) - listed
