"""Count the assertions that tests get past, and track the program's exceptions through them.

This module runs inside the judge's sandbox with the standard library alone. A test passes by reaching its
end, and it can reach the end without asserting anything: a `StopIteration` of the program ends the `map`
around its call, an `IndexError` ends a loop over `__getitem__`, and an empty return value ends the loop over
it. So the tests are rewritten before they run, and report their progress:

    assert x == 1             assert x == 1; <held>(3)             the fourth assertion of the tests held
    self.assertEqual(x, 1)    self.assertEqual(x, 1); <held>(4)    and so every call named `assert...`
    if x != 1: raise E        if x != 1: raise E; <held>(5)        and so each `if` that only raises
    with a(): b()             with a(): b(); <whole>()             and <held>(6) after it
    except E: c()             except E: <caught>(); c()

Only a handler in the tests may catch an exception of the program. An exception that disappears without one
was consumed by Python itself (as the end of an iteration, or an attribute that does not exist), and the
program fails.

The names in angle brackets cannot be written in Python, so no test can use them.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from typing import Any

_MOST_CONTEXTS = 100


class Ended(BaseException):
    """The tests are over before their end; the arguments are the outcome and its reason."""


# contract: eval-no-fake-pass-v1
class Watch:
    """Records what the tests have done so far."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        """The text of each assertion's first line."""
        self.held: list[int] = []
        """Number of times that each assertion held."""
        self._raised: BaseException | None = None
        self._end: tuple[str, str] | None = None

    def names(self) -> dict[str, Callable[..., None]]:
        """The functions that the rewritten tests call."""
        return {"<held>": self._held, "<whole>": self.go_on, "<caught>": self._caught}

    def end(self, outcome: str, reason: str) -> Ended:
        """Fix the outcome: no handler of the tests can change it from now on."""
        self._end = self._end or (outcome, reason)
        return Ended(*self._end)

    def raised(self, error: BaseException) -> BaseException:
        """Record an exception of the program before it is raised in the tests."""
        self._raised = error
        return error

    def go_on(self) -> None:
        """Raise `Ended` if the outcome is fixed, or if an exception of the program disappeared without a
        handler. It is called at each point that tests reach only while they go on."""
        if self._end is None and (lost := self._raised) is not None:
            text = f"{type(lost).__name__}: {lost}"[:300]
            self.end("fail", f"the program raises {text}, which no handler of the tests caught")
        if self._end is not None:
            raise Ended(*self._end)

    def _held(self, number: int) -> None:
        self.go_on()
        self.held[number] += 1

    def _caught(self, *, by_block: bool = False) -> None:
        """Called when a handler begins, or after a `with` block whose body did not reach its end."""
        if self._end is not None:
            raise Ended(*self._end)
        error = sys.exc_info()[1]
        for _ in range(_MOST_CONTEXTS):
            if by_block or error is None:
                break
            if error is self._raised:
                by_block = True
            error = error.__context__
        if by_block:
            self._raised = None

    def missed(self, counts: Sequence[int]) -> str | None:
        """Return the line of the first assertion that held less often than `wanted`; None when there is none."""
        for line, held, least in zip(self.lines, self.held, counts, strict=True):
            if held < least:
                return line
        return None


def watched(tree: ast.Module, watch: Watch, text: str) -> ast.Module:
    """Rewrite the tests so that they report to `watch`. `tree` is changed; `text` is its source."""
    rewritten: ast.Module = _Rewriter(watch, text).visit(tree)
    return ast.fix_missing_locations(rewritten)


class _Rewriter(ast.NodeTransformer):
    def __init__(self, watch: Watch, text: str) -> None:
        self._watch = watch
        self._text = text.splitlines()

    def _site(self, node: ast.stmt) -> ast.Expr:
        watch = self._watch
        watch.lines.append("".join(self._text[node.lineno - 1 : node.lineno]).strip()[:300])
        watch.held.append(0)
        return _call("<held>", node, ast.Constant(len(watch.lines) - 1))

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        return [node, self._site(node)]

    def visit_Expr(self, node: ast.Expr) -> ast.stmt | list[ast.stmt]:
        name = _called(node.value)
        if not name.startswith("assert"):
            return node
        # With a function to call as argument, it catches what that raises.
        caught = [_block_caught(node)] if name.startswith(("assertRaises", "assert_raises")) else []
        return [node, *caught, self._site(node)]

    def visit_If(self, node: ast.If) -> ast.stmt | list[ast.stmt]:
        only_raises = not node.orelse and isinstance(node.body[-1], ast.Raise)
        site = [self._site(node)] if only_raises else []
        self.generic_visit(node)
        return [node, *site]

    def visit_With(self, node: ast.With) -> list[ast.stmt]:
        return self._with(node)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> list[ast.stmt]:
        return self._with(node)

    def _with(self, node: ast.With | ast.AsyncWith) -> list[ast.stmt]:
        site = self._site(node)
        self.generic_visit(node)
        node.body.append(_call("<whole>", node.body[-1]))
        return [node, _block_caught(node), site]

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.ExceptHandler:
        self.generic_visit(node)
        node.body.insert(0, _call("<caught>", node.body[0]))
        return node


def _block_caught(site: ast.stmt) -> ast.Expr:
    statement = _call("<caught>", site)
    call: Any = statement.value
    call.keywords = [ast.keyword("by_block", ast.Constant(True))]
    return statement


def _call(name: str, site: ast.stmt, *arguments: ast.expr) -> ast.Expr:
    statement = ast.Expr(ast.Call(ast.Name(name, ast.Load()), list(arguments), []))
    return ast.copy_location(statement, site)


def _called(value: ast.expr) -> str:
    """The last part of the name of the called function; empty for anything but a call."""
    if isinstance(value, ast.Await):
        value = value.value
    if not isinstance(value, ast.Call):
        return ""
    if isinstance(value.func, ast.Attribute):
        return value.func.attr
    return value.func.id if isinstance(value.func, ast.Name) else ""
