"""Docstrings, comments and messages are in plain English: the words of STYLE.md's table do not come back.

A docstring of a function begins with a verb, one of a constant or a class with a noun. Directories in CLEAN have no
finding. The others have an upper bound, which only goes down: lower it when you rewrite a file, and move a directory to
CLEAN at 0.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

OPENER = re.compile(r"(Of|That|How|By|Beside|Behind|What|Which|From which|Why|Those|These)\b")
"""First words of a docstring that leave out its noun or its verb."""

WORDS = re.compile(
    r"\b(told|is said|are said|was said|said of|said to|says nothing|beside|behind|by heart|somebody"
    r"|nobody|let be|stands|held against|in front of|foretells?|whole numbers|memory in pieces"
    r"|made (?:again|anew)|answers? otherwise|passes over the data|anew|is another than"
    r"|looked at|whose turn it)\b",
    re.IGNORECASE,
)
"""Words of the table in STYLE.md and their relatives."""

CLEAN = frozenset(
    {
        "engine",
        "engine/agent",
        "engine/attach",
        "engine/audit",
        "engine/checks",
        "engine/contracts",
        "engine/data",
        "engine/drills",
        "engine/evaluate",
        "engine/findings",
        "engine/flips",
        "engine/generation",
        "engine/kernels",
        "engine/loss",
        "engine/machine",
        "engine/models",
        "engine/notify",
        "engine/receipts",
        "engine/report",
        "engine/serve",
        "engine/teachers",
        "engine/train",
        "engine/verify",
        "workbench/notebook",
        "workbench/plot",
    }
)
BOUNDS = {
    "engine/bench": 9,
    "engine/cli": 34,
    "engine/demo": 6,
    "engine/export": 9,
    "engine/formats": 27,
    "engine/interchange": 11,
    "engine/log": 11,
    "engine/plan": 44,
    "engine/quant": 5,
    "engine/runtime": 5,
    "engine/spec": 14,
    "engine/watch": 14,
    "workbench": 5,
    "workbench/tui": 12,
}
"""Maximum number of findings of the directories that are not clean yet."""


class Finding(NamedTuple):
    line: int
    text: str


def openers(tree: ast.AST) -> Iterator[Finding]:
    """Yield docstrings, and strings after an assignment, that begin with one of OPENER."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
            and OPENER.match(node.value.value)
        ):
            yield Finding(node.lineno, node.value.value.split("\n")[0])


def words(source: str) -> Iterator[Finding]:
    """Yield the lines of comments, docstrings and other strings that hold one of WORDS."""
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        # A string without a space is a name or a key.
        if token.type in kinds and " " in token.string:
            for number, text in enumerate(token.string.split("\n")):
                yield from (
                    Finding(token.start[0] + number, f"{found[0]}: {text.strip()}")
                    for found in WORDS.finditer(text)
                )


def directory_of(path: Path) -> str:
    """Return the package of a file: `engine/audit`, `workbench/tui`, or `engine` for a module of the top level."""
    parts = path.relative_to(ROOT).parts[:-1]
    return "/".join(parts[:2])


def findings() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for root in ("engine", "workbench"):
        for path in sorted((ROOT / root).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            here = found.setdefault(directory_of(path), [])
            for one in (*openers(ast.parse(source)), *words(source)):
                here.append(f"{path.relative_to(ROOT)}:{one.line}: {one.text}")
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return findings()


def test_every_directory_is_clean_or_has_a_bound(found: dict[str, list[str]]) -> None:
    assert set(found) == CLEAN | set(BOUNDS)
    assert not CLEAN & set(BOUNDS)


def test_clean_directories_stay_clean(found: dict[str, list[str]]) -> None:
    again = [one for name in sorted(CLEAN) for one in found.get(name, [])]
    assert not again, "\n".join(again)


def test_the_others_only_get_better(found: dict[str, list[str]]) -> None:
    more = {
        name: len(found.get(name, []))
        for name, most in BOUNDS.items()
        if len(found.get(name, [])) > most
    }
    assert not more, f"more findings than BOUNDS allows: {more}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('A = 1\n"""Of what is told of a step."""', 2),
        ('A = 1\n"""Number of steps, from 1."""', 0),
        ("# What stands beside the run.", 2),
        ('text = f"{name} is held against the record"', 1),
        ('key = "told"', 0),
        ('def f():\n    """Return the learning rate."""', 0),
    ],
)
def test_the_rule_itself(source: str, expected: int) -> None:
    count = Counter(one.text for one in (*openers(ast.parse(source)), *words(source)))
    assert count.total() == expected, count
