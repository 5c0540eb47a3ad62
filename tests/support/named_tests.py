"""Find test functions by `package/file::function` (without `test_` and `.py`), for tables that name the tests
that prove a claim. A test may move between `unit`, `system` and `gpu` without changing its name."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.support.paths import TESTS


@cache
def _functions(file: Path) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the test functions of a file, as pytest would collect them."""
    return {
        node.name: node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    }


def marks_of(test: str) -> set[str] | None:
    """Return the decorators of a test as source text; None where there is no such test."""
    place, name = test.split("::")
    package, _, file = place.rpartition("/")
    for path in sorted(TESTS.glob(f"*/{package}/test_{file}.py")):
        found = _functions(path).get(f"test_{name}")
        if found is not None:
            return {ast.unparse(mark) for mark in found.decorator_list}
    return None
