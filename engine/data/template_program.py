"""A chat template as a program: compiled by Jinja into its sandbox, as in Transformers.

A template is code written by the author of the tokenizer. The sandbox denies it access to files and to the interpreter.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine import limits

# Noncharacters: Unicode keeps them out of text that is exchanged.
OPEN, CLOSE = "\ufdd0", "\ufdd1"


class Unrenderable(Exception):
    """A template that refuses a conversation, or fails on it; the message says why, in one line."""


class NoTemplate(Exception):
    """A text that is not a Jinja template; the message says why, in one line."""


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
    """The sandbox of a template."""

    def __init__(self, extension: type[Extension], now: datetime) -> None:
        # Jinja's optimizer would run filters while it compiles.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[extension, loopcontrols],
            optimized=False,
        )
        self.filters["tojson"] = _to_json
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        # A method gives access to its class, and through it to other classes.
        self.globals["strftime_now"] = lambda form: now.strftime(form)


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
        environment = _Sandbox(_Marking if marking else _Unmarked, now)
        try:
            self._template = environment.from_string(text)
        except TemplateSyntaxError as error:
            raise NoTemplate(f"{one_line(error.message or '')} at line {error.lineno:,}") from None
        except (RecursionError, MemoryError):
            raise NoTemplate("nesting too deep") from None
        # Jinja generates Python code, and Python limits its nesting and size.
        except Exception as error:  # noqa: BLE001
            raise NoTemplate(f"{type(error).__name__}: {one_line(str(error))}") from None

    def run(self, inputs: dict[str, Any]) -> str:
        """Return the text. Raises Unrenderable if the template refuses or fails."""
        try:
            text = "".join(self._template.root_render_func(self._template.new_context(inputs)))
        except TemplateError as error:
            raise Unrenderable(one_line(error.message or type(error).__name__)) from None
        except (RecursionError, MemoryError) as error:
            raise Unrenderable(f"the template ends in a {type(error).__name__}") from None
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
