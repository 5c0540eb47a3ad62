"""A chat template as a program: compiled by Jinja into its sandbox, as in Transformers, and ended if it takes too much.

A template is a program of whoever made the tokenizer. The sandbox keeps it from files and from the interpreter. In each
round of a loop, of a macro and of a block, the processor time and the memory since its begin are compared with their
limits. An operation that alone would take much more is refused: a huge number as an argument, a factor or an exponent.
"""

from __future__ import annotations

import functools
import json
import resource
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine import limits

# Noncharacters: Unicode keeps them out of text that is exchanged.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
_LARGEST = 1_000_000
"""Largest number that a function, a filter or an operator other than `+` and `-` may be given."""
_CHECK_S = 0.02
"""Processor time between two readings of the memory, in seconds."""


class Unrenderable(Exception):
    """A template that refuses a conversation, or fails on it; the text says why, in one line."""


class OverBudget(Unrenderable):
    """A template that takes more time or memory for a conversation than it may."""


class NoTemplate(Exception):
    """A text that is not a Jinja template; the text says why, in one line."""


class _Budget:
    """Time and memory of a rendering."""

    def begin(self) -> None:
        now_s = time.thread_time()
        self._check_at_s, self._end_s = now_s + _CHECK_S, now_s + limits.TEMPLATE_TIME.most
        self._begin_bytes: int | None = None

    def round(self) -> None:
        """Compare what the template has taken with its limits. Raises OverBudget."""
        now_s = time.thread_time()
        if now_s < self._check_at_s:
            return
        self._check_at_s = now_s + _CHECK_S
        if now_s > self._end_s:
            raise OverBudget(f"the template takes longer than {limits.TEMPLATE_TIME}")
        used = _used_bytes()
        # What a rendering takes before its first check is little.
        self._begin_bytes = used if self._begin_bytes is None else self._begin_bytes
        if used - self._begin_bytes > limits.TEMPLATE_MEMORY.most:
            raise OverBudget(f"the template takes more than {limits.TEMPLATE_MEMORY}")


def _used_bytes() -> int:
    """Return the memory of this process without the files that it maps, in bytes."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * resource.getpagesize()


class _Code(CodeGenerator):
    """Generates the program with a check of the budget in each round."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bodies: set[int] = set()

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        repeated = nodes.Block, nodes.For, nodes.Macro, nodes.CallBlock
        self._bodies = {
            id(part.body) for part in node.find_all(nodes.Node) if isinstance(part, repeated)
        }
        super().visit_Template(node, frame)

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        if id(nodes) in self._bodies:
            self.writeline("environment.budget.round()")
        super().blockvisit(nodes, frame)


class _Unmarked(Extension):
    """Parses `{% generation %}` as its content only."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)
    marks = ("", "")

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call, as in Transformers: a variable that is set inside is not seen outside.
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Macro) -> str:
        open_mark, close_mark = self.marks
        return f"{open_mark}{caller()}{close_mark}"


class _Marking(_Unmarked):
    marks = (OPEN, CLOSE)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox of a template, with its budget."""

    code_generator_class = _Code
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, extension: type[Extension], now: datetime) -> None:
        # Jinja's optimizer would run filters while it compiles.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[extension, loopcontrols],
            optimized=False,
        )
        self.budget = _Budget()
        self.filters["tojson"] = _to_json
        self.filters = {name: _bounded(function) for name, function in self.filters.items()}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        # A method would lead to its class, and that to others.
        self.globals["strftime_now"] = lambda form: now.strftime(form)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _refuse_large((*args, *kwargs.values()))
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        both_large = all(isinstance(n, int) and abs(n) > _LARGEST for n in (left, right))
        if operator == "**" or both_large or not isinstance(left, int | float):
            _refuse_large((right,))
        if not isinstance(right, int | float):
            _refuse_large((left,))
        return super().call_binop(context, operator, left, right)


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that refuses large numbers."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        # The value itself may be a large number.
        _refuse_large((*args[1:], *kwargs.values()))
        return function(*args, **kwargs)

    return run


def _refuse_large(arguments: Iterable[Any]) -> None:
    for number in arguments:
        if isinstance(number, int | float) and abs(number) > _LARGEST:
            raise SecurityError(f"a chat template computes with numbers up to {_LARGEST:,}")


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Write JSON without the escapes for HTML that Jinja's own filter adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


class Program:
    """A compiled template. Raises NoTemplate for a text that is not a template."""

    def __init__(self, text: str, now: datetime, *, marking: bool) -> None:
        if len(text) > limits.CHAT_TEMPLATE.most:
            raise NoTemplate(f"{len(text):,} characters, and a template has {limits.CHAT_TEMPLATE}")
        self._environment = _Sandbox(_Marking if marking else _Unmarked, now)
        try:
            self._template = self._environment.from_string(text)
        except TemplateSyntaxError as error:
            raise NoTemplate(f"{one_line(error.message or '')} at line {error.lineno:,}") from None
        except (RecursionError, MemoryError):
            raise NoTemplate("nesting too deep") from None
        # Jinja writes a program of Python, which has limits of its own.
        except Exception as error:  # noqa: BLE001
            raise NoTemplate(f"{type(error).__name__}: {one_line(str(error))}") from None

    def run(self, inputs: dict[str, Any]) -> str:
        """Return the text. Raises Unrenderable if the template refuses or fails, OverBudget for too much work."""
        self._environment.budget.begin()
        try:
            text = "".join(self._template.root_render_func(self._template.new_context(inputs)))
        except TemplateError as error:
            raise Unrenderable(one_line(error.message or type(error).__name__)) from None
        except (RecursionError, MemoryError) as error:
            raise Unrenderable(f"the template ends in a {type(error).__name__}") from None
        except Unrenderable:
            raise
        # A template can raise anything, as on a missing key or a text where it expects a number.
        except Exception as error:  # noqa: BLE001
            raise Unrenderable(f"{type(error).__name__}: {one_line(str(error))}") from None
        if len(text) > limits.CORPUS_DOCUMENT.most:
            raise Unrenderable(f"the template renders more than {limits.CORPUS_DOCUMENT}")
        try:
            if not text.isascii():
                text.encode()
        except UnicodeEncodeError:
            raise Unrenderable(
                "the template writes a lone surrogate, which is no Unicode text"
            ) from None
        return text


def one_line(text: str) -> str:
    line = " ".join(text[:4000].split())[:200]
    # A template can refuse with half of a surrogate pair, which no file or terminal takes.
    return line.encode("utf-8", "backslashreplace").decode()
