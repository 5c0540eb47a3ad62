"""Names of the workbench's widgets that Textual has taken: one of them makes a screen hang without a
word, because the task that would report the error is the one that it breaks."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from functools import lru_cache

import pytest
from textual.dom import DOMNode

import workbench.tui


def classes() -> Iterator[type[DOMNode]]:
    """Every widget, screen and application of the workbench."""
    for module in pkgutil.walk_packages(workbench.tui.__path__, "workbench.tui."):
        for value in vars(importlib.import_module(module.name)).values():
            is_own = isinstance(value, type) and value.__module__ == module.name
            if is_own and issubclass(value, DOMNode):
                yield value


@lru_cache
def names_of(kind: type) -> frozenset[str]:
    """The names that the source of a class gives: attributes set on `self`, methods, variables."""
    tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(kind)))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                found.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
    return frozenset(found)


def taken_names(kind: type[DOMNode]) -> set[str]:
    """The private names of a class that a class of Textual below it gives, too."""
    below = [base for base in kind.__mro__ if base.__module__.startswith("textual.")]
    theirs = {name for base in below for name in names_of(base)}
    return {name for name in names_of(kind) & theirs if name.startswith("_") and name[1:2] != "_"}


@pytest.mark.parametrize("kind", list(classes()), ids=lambda kind: kind.__name__)
def test_no_private_name_of_textual_is_taken(kind: type[DOMNode]) -> None:
    assert taken_names(kind) == set()


def test_a_taken_name_is_noticed() -> None:
    class Screen(DOMNode):
        def __init__(self) -> None:
            super().__init__()
            self._context, self._bindings, self._own = 1, 2, 3

    assert taken_names(Screen) == {"_context", "_bindings"}
