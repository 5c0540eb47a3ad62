"""Docstrings, comments and messages are in plain English: the words of STYLE.md's table do not come back.

A docstring of a function begins with a verb, one of a constant or a class with a noun.
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


def test_no_file_has_a_finding() -> None:
    found = []
    for root in ("engine", "workbench"):
        for path in sorted((ROOT / root).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            found += [
                f"{path.relative_to(ROOT)}:{one.line}: {one.text}"
                for one in (*openers(ast.parse(source)), *words(source))
            ]
    assert not found, "\n".join(found)


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
