"""A chat template as a program: compiled by Jinja into a sandbox, and run with a budget.

The sandbox keeps a template from files and from the interpreter. The budget ends one that takes too long or too much
memory, whether it writes something or not. It has three amounts (`engine.limits`), all counted, so that a conversation
is refused on every machine or on none:

    steps        nodes of the template that are run, and a share of what an operation reads
    characters   of every text that is made, kept or not
    items        of every list that is made, 8 bytes each

A long conversation has more of each. The clock of the thread is read every few thousand steps, for a machine that is
slower than the steps say.

What counts, so that no operation costs more than it is charged for:

- The compiler puts a charge at the beginning of every round of a loop, of a macro, of a block and of the template, with
  the nodes of it. A condition of a loop is charged too.
- Operators, comparisons, slices, `~` and what is written go through functions here. So does every call, and every
  filter and test that reads a value as a whole. One whose arguments say how much it makes (`center`, `replace`, `%`,
  `round`, ...) is charged before it begins.
- A list that holds the same list twice, which holds a third twice, and so on, has millions of nodes in the memory of a
  few. Every value is therefore walked and charged before it is written, compared or hashed.
- Methods that no such function knows are refused, and filters that are random or search HTML do not exist.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from types import BuiltinFunctionType, MethodType
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace, _PassArg

from engine import limits

# Noncharacters: Unicode keeps them out of text that is exchanged.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
_DEPTH = 2 * limits.JSON_DEPTH.most
_CHECK_EVERY = 20_000
"""Steps between two readings of the clock: a few milliseconds."""
_READ_SHIFT = 6
"""Binary logarithm of the number of characters that are read in a step."""
_MAX_WIDTH = 10_000
"""The largest width or precision of a number or text that is formatted."""
_MAX_DIGITS = 4300
"""Most digits of an integer in text: Python's own limit."""
_MAX_NAME = 1000
"""Most characters of an attribute's name or of a time format."""
_MAX_SLOW_TEXT = 1 << 16
"""Most characters that a filter of quadratic time may read."""


class Unrenderable(Exception):
    """A template that refuses a conversation, or fails on it; the text says why, in one line."""


class OverBudget(Unrenderable):
    """A template that does more for a conversation than its budget allows."""


class NoTemplate(Exception):
    """A text that is not a Jinja template; the text says why, in one line."""


class Budget:
    """Remaining budget of a rendering."""

    __slots__ = (
        "_check_at",
        "_deadline_s",
        "_inputs",
        "_steps_granted",
        "characters",
        "items",
        "steps",
    )

    def __init__(self) -> None:
        self.begin({})

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """Start the budget of a new rendering."""
        self.steps = self._steps_granted = limits.TEMPLATE_STEPS.most
        self.characters = limits.TEMPLATE_CHARACTERS.most
        self.items = limits.TEMPLATE_ITEMS.most
        self._check_at = self.steps - _CHECK_EVERY
        self._deadline_s = 0.0
        self._inputs: Mapping[str, Any] | None = inputs

    @property
    def spent(self) -> int:
        """Number of steps spent."""
        return self._steps_granted - max(self.steps, 0)

    def charge(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < self._check_at:
            self._check()

    def _check(self) -> None:
        now_s = time.thread_time()
        # The time limit begins at the first check, which most renderings end before.
        self._deadline_s = self._deadline_s or now_s + limits.TEMPLATE_TIME.most
        if now_s > self._deadline_s:
            raise OverBudget(f"the template takes longer than {_amount(limits.TEMPLATE_TIME)}")
        if self.steps < 0:
            self._extend(limits.TEMPLATE_STEPS)
        self._check_at = max(self.steps - _CHECK_EVERY, 0)

    def _extend(self, limit: limits.Limit) -> None:
        """Add the allowance of a conversation of this size; only the first call adds it."""
        if self._inputs is not None:
            characters, count = _size_of(self._inputs)
            self._inputs = None
            extra = 16 * (characters + 64 * count)
            self.steps += extra
            self._steps_granted += extra
            self.characters += 8 * characters
            self.items += 16 * count
        if self.steps < 0 or self.characters < 0 or self.items < 0:
            raise OverBudget(f"the template takes more than {_amount(limit)} for a conversation")

    def make(self, characters: int) -> None:
        """Charge for a text."""
        self.characters -= characters
        if self.characters < 0:
            self._extend(limits.TEMPLATE_CHARACTERS)

    def make_items(self, count: int) -> None:
        """Charge for a list."""
        self.items -= count
        if self.items < 0:
            self._extend(limits.TEMPLATE_ITEMS)
        self.charge(count >> _READ_SHIFT)

    def made(self, value: Any) -> Any:
        """Charge for a new value and return it."""
        if isinstance(value, str):
            self.make(len(value))
        elif isinstance(value, list | tuple | dict):
            self.make_items(len(value))
        return value

    def read(self, value: Any) -> Any:
        """Charge for reading a whole value and return it."""
        if type(value) is str:
            if len(value) > 256:
                self.charge(len(value) >> _READ_SHIFT)
        elif value is not None and type(value) not in _SCALARS:
            self.weigh(value)
        return value

    def weigh(self, value: Any, depth: int = 0) -> int:
        """Charge for a value and everything in it; return its approximate length as text."""
        if isinstance(value, str):
            self.charge(1 + (len(value) >> _READ_SHIFT))
            return len(value) + 2
        if isinstance(value, dict):
            children: Iterable[Any] = (child for pair in value.items() for child in pair)
        elif isinstance(value, list | tuple):
            children = value
        else:
            self.charge(1)
            return 24
        if depth > _DEPTH:
            raise OverBudget(f"the template nests lists and tables more than {_DEPTH} levels deep")
        self.charge(4 + 4 * len(value))
        return 4 + sum(2 + self.weigh(child, depth + 1) for child in children)

    def text(self, value: Any) -> str:
        """Return a value as the text that is rendered."""
        if type(value) is not str:
            if type(value) not in _SCALARS:
                self.weigh(value)
            value = str(value)
        text: str = value
        self.characters -= len(text)
        if self.characters < 0:
            self._extend(limits.TEMPLATE_CHARACTERS)
        return text

    def joined(self, values: tuple[Any, ...]) -> str:
        """Return the result of `~`."""
        return "".join([self.text(value) for value in values])

    def plus(self, value: Any, *others: Any) -> Any:
        for other in others:
            value = value + other
        if type(value) is str:
            self.characters -= len(value)
            if self.characters < 0:
                self._extend(limits.TEMPLATE_CHARACTERS)
            return value
        return self.made(value)

    def contains(self, value: Any, container: Any) -> bool:
        """Return the result of `in`."""
        if isinstance(container, str):
            self.charge(1 + (len(container) >> _READ_SHIFT))
        elif isinstance(container, list | tuple | range):
            self.compare(value, len(container))
        else:
            self.read(value)
        return value in container

    def compare(self, value: Any, count: int) -> None:
        """Charge for comparing a value with others."""
        steps_before = self.steps
        self.read(value)
        self.charge(count * (1 + steps_before - self.steps))


_SCALARS = frozenset({int, float, bool, type(None)})


def _size_of(inputs: Any) -> tuple[int, int]:
    """Return the number of characters and of values in a template's input, which contains no value twice."""
    characters = count = 0
    waiting = [inputs]
    while waiting:
        value = waiting.pop()
        count += 1
        if isinstance(value, str):
            characters += len(value)
        elif isinstance(value, Mapping):
            waiting += [*value.values()]
            characters += sum(len(key) for key in value if isinstance(key, str))
        elif isinstance(value, list | tuple):
            waiting += value
    return characters, count


class _Counted(Iterator[Any]):
    """Iterates lazily over the values of a filter, and charges for each."""

    def __init__(self, inner: Iterator[Any], budget: Budget, steps: int, depth: int) -> None:
        self._next, self._charge, self._steps = inner.__next__, budget.charge, steps
        self.depth = depth

    def __next__(self) -> Any:
        self._charge(self._steps)
        return self._next()


_FUNCTIONS = ("charge", "read", "made", "text", "joined", "plus", "contains")
"""Functions of the budget that the compiled program calls."""


class _Code(CodeGenerator):
    """Generates the program with charges to the budget in it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bodies: set[int] = set()

    def write_commons(self) -> None:
        super().write_commons()
        self.writeline(f"{', '.join(_FUNCTIONS)} = environment.functions")

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        self._bodies |= {id(node.body), *(id(block.body) for block in node.find_all(nodes.Block))}
        super().visit_Template(node, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        self._bodies.add(id(node.body))
        super().visit_For(node, frame)

    def macro_body(self, node: Any, frame: Frame) -> Any:
        self._bodies.add(id(node.body))
        return super().macro_body(node, frame)

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        if id(nodes) in self._bodies:
            self.writeline(f"charge({2 + _steps_of(nodes)})")
        super().blockvisit(nodes, frame)

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        # a + b + c + d in one call; the work between two charges is no longer than the operands together.
        operands: list[nodes.Node] = [node.right]
        left = node.left
        while isinstance(left, nodes.Add) and len(operands) < 7:
            operands.append(left.right)
            left = left.left
        self.write("plus(")
        self._visit_all([left, *reversed(operands)], frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        if not frame.eval_ctx.volatile and not frame.eval_ctx.autoescape:
            self.write("joined((")
            self._visit_all(node.nodes, frame)
            self.write(",))")
            return
        self.write("made(markup_join((")
        for child in node.nodes:
            self._visit_read(child, frame)
            self.write(", ")
        self.write(")))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        first_operation = node.ops[0]
        if len(node.ops) == 1 and first_operation.op in ("in", "notin"):
            # Searching a literal list takes no longer than the literal is.
            is_literal = isinstance(first_operation.expr, nodes.List | nodes.Tuple) and all(
                isinstance(operation, nodes.Const) for operation in first_operation.expr.items
            )
            if not is_literal:
                self.write("(not contains(" if first_operation.op == "notin" else "(contains(")
                self._visit_all([node.expr, first_operation.expr], frame)
                self.write("))")
                return
        # With a constant a comparison takes no longer than the constant is.
        constant = len(node.ops) == 1 and (
            isinstance(node.expr, nodes.Const) or isinstance(first_operation.expr, nodes.Const)
        )
        self.write("(")
        visit = self.visit if constant else self._visit_read
        visit(node.expr, frame)
        for operation in node.ops:
            self.write(f" {_COMPARISONS[operation.op]} ")
            if len(node.ops) > 1:
                self._visit_read(operation.expr, frame)
            else:
                self.visit(operation.expr, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("made(")
        super().visit_Getitem(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("{")
        for item in node.items:
            self._visit_read(item.key, frame)
            self.write(": ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("}")

    def _visit_all(self, values: Iterable[nodes.Node], frame: Frame) -> None:
        for index, value in enumerate(values):
            if index:
                self.write(", ")
            self.visit(value, frame)

    def _visit_read(self, node: nodes.Node, frame: Frame) -> None:
        self.write("read(" if not isinstance(node, nodes.Const) else "(")
        self.visit(node, frame)
        self.write(")")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        text = "".join(group)
        return f"text({text!r})" if len(text) > 256 else repr(text)

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        # Jinja runs filters while it compiles.
        if not isinstance(node, nodes.TemplateData | nodes.Const):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if frame.eval_ctx.volatile:
            self.write("made((escape if context.eval_ctx.autoescape else str)(read(")
        elif frame.eval_ctx.autoescape:
            self.write("made(escape(read(")
        else:
            self.write("text(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(")))" if frame.eval_ctx.volatile or frame.eval_ctx.autoescape else ")")


_COMPARISONS = {
    "eq": "==",
    "ne": "!=",
    "gt": ">",
    "gteq": ">=",
    "lt": "<",
    "lteq": "<=",
    "in": "in",
    "notin": "not in",
}


def _steps_of(body: Iterable[nodes.Node]) -> int:
    """Return the nodes that run at most once per run of a body, without nested bodies that have their own charges."""
    steps = 0
    waiting = [*body]
    while waiting:
        node = waiting.pop()
        steps += 1
        if isinstance(node, nodes.TemplateData):
            steps += min(len(node.data), 256) >> 3
        bodies = ("body",) if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock) else ()
        waiting += node.iter_child_nodes(exclude=bodies)
    return steps


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


class _Formatter(SandboxedFormatter):
    """Formats text, with charges for what is read and made."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        value, first = super().get_field(field_name, args, kwargs)
        self._env.budget.charge(4)  # type: ignore[attr-defined]
        return self._env.budget.read(value), first  # type: ignore[attr-defined]

    def format_field(self, value: Any, format_spec: str) -> Any:
        _refuse_widths(format_spec)
        return self._env.budget.made(super().format_field(value, format_spec))  # type: ignore[attr-defined]


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox with a budget. Work that the generated code does not count is counted here."""

    code_generator_class = _Code
    intercepted_binops = frozenset({"*", "**", "%", "-"})

    def __init__(self, extension: type[Extension], now: datetime) -> None:
        # Jinja's optimizer would run filters while it compiles.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[extension, loopcontrols],
            optimized=False,
        )
        self.budget = Budget()
        self.functions = tuple(getattr(self.budget, name) for name in _FUNCTIONS)
        self.filters["tojson"] = _to_json
        for name in _NO_FILTERS:
            del self.filters[name]
        self.filters = {
            name: self._filter(name, function) for name, function in self.filters.items()
        }
        self.filters[_CONDITION] = self._condition
        for name in _COMPARING_TESTS:
            self.tests[name] = self._test(self.tests[name])  # type: ignore[arg-type]
        self.tests["in"] = self.budget.contains
        del self.globals["lipsum"]
        self.globals["raise_exception"] = self._raise_exception
        self.globals["strftime_now"] = lambda form: now.strftime(_time_format(form))
        # The class itself would lead to others.
        self.globals["dict"] = lambda *pairs, **named: self.budget.made(dict(*pairs, **named))
        self.globals["namespace"] = _Namespace

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for loop in [*source.find_all(nodes.For)]:
            if loop.test is not None:
                steps = nodes.Const(1 + _steps_of([loop.test]))
                loop.test = nodes.Filter(loop.test, _CONDITION, [steps], [], None, None)
        return super()._generate(source, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        # The key of a message, without the exceptions that looking for an attribute would raise.
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(argument) is str:
            if type(obj) is dict and argument in obj:
                return obj[argument]
        elif type(argument) is not int:
            self.budget.read(argument)
        elif type(obj) is list and -1 <= argument < len(obj) != 0:
            return obj[argument]
        return super().getitem(obj, argument)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        kind = type(obj)
        if kind is BuiltinFunctionType or (kind is MethodType and isinstance(owner, str)):
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return self._call_method(obj, owner, obj.__name__, args, kwargs)
        self.budget.charge(4 + len(args) + len(kwargs))
        if kind is not Macro and kind is not LoopContext:
            for argument in args:
                self.budget.read(argument)
        return super().call(context, obj, *args, **kwargs)

    def _call_method(
        self, method: Any, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        budget = self.budget
        known = next((names for kind, names in _METHODS.items() if isinstance(owner, kind)), {})
        if name not in known:
            called = f"{type(owner).__name__}.{name}"
            raise SecurityError(f"{called} is a method that a chat template may not call")
        budget.charge(2 + len(args))
        if name == "join":
            # What a filter yields is read once, and its length is needed before it is joined.
            args = tuple(
                [*argument] if isinstance(argument, Iterator) else argument for argument in args
            )
        for argument in (*args, *kwargs.values()):
            budget.read(argument)
        if isinstance(owner, str):
            budget.charge(len(owner) >> _READ_SHIFT)
        measure = known[name]
        if measure is not None:
            measure(budget, owner, *args, **kwargs)
        return budget.made(method(*args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text, is_map = value.__self__, value.__name__ == "format_map"

        def formatted(*args: Any, **kwargs: Any) -> str:
            if is_map:
                args, kwargs = (), dict(*args)
            self.budget.charge(len(text) >> 2)
            result: str = type(text)(_Formatter(self).vformat(text, args, kwargs))
            return result

        return formatted

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            if isinstance(left, str):
                _measure_percent(self.budget, left, right)
        elif operator == "-":
            if not isinstance(left, int | float):
                self.budget.read(left)
                self.budget.read(right)
        elif operator == "**":
            if isinstance(right, int) and isinstance(left, int) and right > 0:
                _refuse_digits(left.bit_length() * right, f"{left} ** {right}")
        elif isinstance(left, int) and isinstance(right, int):
            _refuse_digits(left.bit_length() + right.bit_length(), "a product")
        else:
            for value, count in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(count, int) and count > 0:
                    _refuse_long(len(value) * count)
        return self.budget.made(super().call_binop(context, operator, left, right))

    def _filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that charges for what it reads and makes."""
        budget = self.budget
        value_index = 0 if _PassArg.from_obj(function) is None else 1
        measure, shallow, lazy = _MEASURED.get(name), name in _SHALLOW, name in _LAZY

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            arguments = args[value_index:]
            budget.charge(2)
            if shallow:
                for argument in (*arguments[1:], *kwargs.values()):
                    budget.read(argument)
            else:
                for argument in (*arguments, *kwargs.values()):
                    budget.read(argument)
            if measure is not None:
                value = arguments[0]
                if isinstance(value, Iterator):
                    value = [*value]
                    budget.make_items(8 * len(value))
                    budget.read(value)
                    args = (*args[:value_index], value, *arguments[1:])
                measure(budget, value, *arguments[1:], **kwargs)
            result = function(*args, **kwargs)
            if lazy and isinstance(result, Iterator):
                depth = 1 + getattr(arguments[0], "depth", 0)
                if depth > _DEPTH:
                    raise OverBudget(f"the template nests filters more than {_DEPTH} levels deep")
                options = [*arguments[1:], *kwargs.values()]
                steps = sum(len(argument) for argument in options if isinstance(argument, str))
                return _Counted(result, budget, 4 + steps, depth)
            return budget.made(result)

        return run

    def _test(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any) -> Any:
            for argument in args:
                self.budget.read(argument)
            return function(*args)

        return run

    def _condition(self, value: Any, steps: int) -> Any:
        self.budget.charge(steps)
        return value

    def _raise_exception(self, message: object) -> NoReturn:
        raise TemplateError(self.budget.text(message))


def _refuse_long(size: int) -> None:
    if size > limits.TEMPLATE_CHARACTERS.most:
        raise SecurityError(f"a text of {size:,} characters is more than a chat template may make")


def _refuse_digits(bits: int, what: str) -> None:
    if bits > 3 * _MAX_DIGITS:
        raise SecurityError(f"{what} is more than a chat template may compute")


def _refuse_widths(form: str) -> None:
    widths = [int(digits[:9]) for digits in re.findall("[0-9]+", form)]
    if max(widths, default=0) > _MAX_WIDTH:
        raise SecurityError(f"a width of {max(widths):,} is more than a chat template may fill")


def _time_format(form: object) -> str:
    if isinstance(form, str) and len(form) <= _MAX_NAME:
        return form
    raise SecurityError(f"a form of the time has at most {_MAX_NAME:,} characters")


# What a method or filter makes, charged before it begins: each gets the value and the arguments.


def _measure_width(budget: Budget, value: Any, width: Any = 80, *rest: Any, **named: Any) -> None:
    _refuse_long(_int(named.get("width", width)))


def _measure_tabs(budget: Budget, value: str, tabsize: Any = 8) -> None:
    budget.make(value.count("\t") * max(_int(tabsize), 0))


def _measure_replace(
    budget: Budget, value: Any, old: Any = "", new: Any = "", count: Any = None
) -> None:
    value, old, new = budget.text(value), budget.text(old), budget.text(new)
    count_found = value.count(old)
    budget.make(count_found * len(new))


def _measure_join(budget: Budget, value: Any, d: Any = "", attribute: Any = None) -> None:
    size = budget.weigh([*value] if isinstance(value, str) else value)
    count = len(value) if isinstance(value, str | list | tuple | dict | range) else 0
    budget.make(size + count * (len(d) if isinstance(d, str) else budget.weigh(d)))


def _measure_text_join(budget: Budget, value: str, items: Any) -> None:
    _measure_join(budget, items, value)


def _measure_split(budget: Budget, value: str, sep: Any = None, maxsplit: Any = -1) -> None:
    pieces = value.count(sep) if isinstance(sep, str) and sep else len(value) // 2
    budget.make_items(8 * (pieces if _int(maxsplit) < 0 else min(pieces, _int(maxsplit))))


def _measure_split_right(budget: Budget, value: str, sep: Any = None, maxsplit: Any = -1) -> None:
    _measure_split(budget, value, sep, maxsplit)
    _measure_right(budget, value, sep)


def _measure_right(budget: Budget, value: str, sep: Any = "", *rest: Any) -> None:
    # Python searches from the right by trying each place.
    budget.charge(len(value) * (len(sep) if isinstance(sep, str) else 1) >> _READ_SHIFT)


def _measure_lines(budget: Budget, value: str, *rest: Any, **named: Any) -> None:
    budget.make_items(len(value))


def _measure_strip(budget: Budget, value: Any, chars: Any = None) -> None:
    if isinstance(value, str) and isinstance(chars, str):
        budget.charge(len(value) * len(chars) >> _READ_SHIFT)


def _measure_find(budget: Budget, value: Any, sought: Any, *rest: Any) -> None:
    budget.compare(sought, len(value))


def _measure_percent(budget: Budget, form: str, values: Any) -> None:
    _refuse_widths(form)
    if "*" in form:
        raise SecurityError("a chat template may not give a width as an argument")
    budget.make(len(form) + form.count("%") * (_MAX_WIDTH if re.search("[0-9]{2}", form) else 0))
    # A format may write each value as often as it names it.
    count = form.count("%(") or 1
    budget.make(count * budget.weigh(values))


def _measure_format(budget: Budget, value: Any, *args: Any, **named: Any) -> None:
    _measure_percent(budget, budget.text(value), args or named)


def _measure_indent(
    budget: Budget, value: Any, width: Any = 4, first: bool = False, blank: bool = False
) -> None:
    text = value if isinstance(value, str) else budget.text(value)
    indent = len(width) if isinstance(width, str) else max(_int(width), 0)
    _refuse_long(indent)
    budget.make((1 + text.count("\n")) * indent)
    _measure_lines(budget, text)


def _measure_list(budget: Budget, value: Any) -> None:
    budget.make_items(8 * _length(value))


def _measure_batch(budget: Budget, value: Any, linecount: Any, fill_with: Any = None) -> None:
    budget.make_items(8 * max(_int(linecount), 0))


def _measure_slice(budget: Budget, value: Any, slices: Any, fill_with: Any = None) -> None:
    budget.make_items(8 * max(_int(slices), 0))


def _measure_round(budget: Budget, value: Any, precision: Any = 0, method: Any = "common") -> None:
    if abs(_int(precision)) > 300:
        raise SecurityError("a chat template rounds to at most 300 digits")


def _measure_number(budget: Budget, value: Any, *rest: Any, **named: Any) -> None:
    if isinstance(value, str) and len(value) > _MAX_DIGITS:
        raise SecurityError(f"a number has at most {_MAX_DIGITS:,} digits")


def _measure_sort(budget: Budget, value: Any, *rest: Any, **named: Any) -> None:
    _refuse_names(rest, named)
    steps_before = budget.steps
    budget.read(value)
    budget.charge((10 + steps_before - budget.steps) * 32)
    budget.make_items(4 * _length(value))


def _measure_sum(budget: Budget, value: Any, attribute: Any = None, start: Any = 0) -> None:
    _refuse_names((attribute,), {})
    if not isinstance(start, int | float):
        # Each addition copies the sum of all lists before it.
        budget.make_items(_length(value) * (budget.weigh(value) + budget.weigh(start)))


def _measure_names(budget: Budget, value: Any, *rest: Any, **named: Any) -> None:
    _refuse_names(rest, named)


def _measure_slow(budget: Budget, value: Any, *rest: Any, **named: Any) -> None:
    if budget.weigh(value) > _MAX_SLOW_TEXT:
        raise SecurityError(f"a text of more than {_MAX_SLOW_TEXT:,} characters is not wrapped")
    budget.charge(64 * budget.weigh(value))


def _measure_words(budget: Budget, value: Any) -> None:
    budget.make_items(4 * _length(value))


def _measure_escape(budget: Budget, value: Any) -> None:
    budget.make(6 * _length(value))


def _measure_json(
    budget: Budget,
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> None:
    _refuse_long(_int(indent) if indent is not None else 0)
    steps_before = budget.steps
    size = budget.weigh(value)
    node_count = steps_before - budget.steps
    per_node = sum(map(len, separators)) if isinstance(separators, list | tuple) else 0
    per_node += _DEPTH * max(_int(indent), 0) if indent is not None else 0
    budget.make((size if ensure_ascii else 0) + node_count * per_node)


def _refuse_names(values: Iterable[Any], named: Mapping[str, Any]) -> None:
    for name in (*values, *named.values()):
        if isinstance(name, str) and len(name) > _MAX_NAME:
            raise SecurityError(f"the name of an attribute has at most {_MAX_NAME:,} characters")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict | range) else 0


def _int(value: Any) -> int:
    return value if isinstance(value, int) else 0


_NO_FILTERS = ("random", "striptags", "urlize", "xmlattr")
"""Filters that are not available: they are random, or search HTML in quadratic time."""
_CONDITION = "condition of a loop"
_COMPARING_TESTS = (
    *(
        "eq",
        "==",
        "equalto",
        "ne",
        "!=",
        "gt",
        ">",
        "greaterthan",
        "ge",
        ">=",
        "lt",
        "<",
        "lessthan",
    ),
    *("le", "<=", "lower", "upper"),
)
_SHALLOW = frozenset(
    {
        *(
            "abs",
            "attr",
            "batch",
            "count",
            "d",
            "default",
            "first",
            "float",
            "int",
            "items",
            "last",
        ),
        *("length", "list", "map", "reject", "rejectattr", "reverse", "round", "select"),
        *("selectattr", "slice"),
    }
)
"""Filters that do not read the contents of their values."""
_LAZY = frozenset(
    (
        "batch",
        "items",
        "map",
        "reject",
        "rejectattr",
        "select",
        "selectattr",
        "slice",
        "unique",
        "reverse",
    )
)
_MEASURED: dict[str, Callable[..., None]] = {
    "batch": _measure_batch,
    "center": _measure_width,
    "dictsort": _measure_sort,
    "e": _measure_escape,
    "escape": _measure_escape,
    "float": _measure_number,
    "forceescape": _measure_escape,
    "format": _measure_format,
    "groupby": _measure_sort,
    "indent": _measure_indent,
    "int": _measure_number,
    "join": _measure_join,
    "list": _measure_list,
    "map": _measure_names,
    "max": _measure_sort,
    "min": _measure_sort,
    "pprint": _measure_slow,
    "reject": _measure_names,
    "rejectattr": _measure_names,
    "replace": _measure_replace,
    "round": _measure_round,
    "select": _measure_names,
    "selectattr": _measure_names,
    "slice": _measure_slice,
    "sort": _measure_sort,
    "sum": _measure_sum,
    "title": _measure_words,
    "tojson": _measure_json,
    "trim": _measure_strip,
    "unique": _measure_names,
    "urlencode": _measure_escape,
    "wordcount": _measure_words,
    "wordwrap": _measure_slow,
}
_UNMEASURED = (
    *("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha"),
    *("isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable"),
    *("isspace", "istitle", "isupper", "lower", "partition", "removeprefix", "removesuffix"),
    *("startswith", "swapcase", "title", "upper"),
)
_METHODS: dict[type, dict[str, Callable[..., None] | None]] = {
    str: {
        **dict.fromkeys(_UNMEASURED),
        **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _measure_width),
        **dict.fromkeys(("lstrip", "rstrip", "strip"), _measure_strip),
        **dict.fromkeys(("rfind", "rindex", "rpartition"), _measure_right),
        "expandtabs": _measure_tabs,
        "join": _measure_text_join,
        "replace": _measure_replace,
        "rsplit": _measure_split_right,
        "split": _measure_split,
        "splitlines": _measure_lines,
    },
    dict: dict.fromkeys(("copy", "get", "items", "keys", "values")),
    list: {"copy": None, "count": _measure_find, "index": _measure_find},
    tuple: {"count": _measure_find, "index": _measure_find},
    int: dict.fromkeys(("bit_length", "conjugate")),
    float: dict.fromkeys(("is_integer", "conjugate")),
}
"""Methods that a template may call; each function charges for more than reading the value and the arguments."""
_DICT_ATTRIBUTES = frozenset(dir(dict))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without the escapes for HTML that Jinja's own filter adds."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Namespace(Namespace):
    """A namespace without names that begin with an underscore, which lead to the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # `namespace(self=...)` is allowed.
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template cannot name {name!r} in a namespace")


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

    @property
    def spent(self) -> int:
        """Steps of the last rendering."""
        return self._environment.budget.spent

    def run(self, inputs: dict[str, Any]) -> str:
        """Return the text. Raises Unrenderable if the template refuses or fails, OverBudget for too much work."""
        self._environment.budget.begin(inputs)
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


def _amount(limit: limits.Limit) -> str:
    return f"{limit.most:,} {limit.unit}"


def one_line(text: str) -> str:
    line = " ".join(text[:4000].split())[:200]
    # A template can refuse with half of a surrogate pair, which no file or terminal takes.
    return line.encode("utf-8", "backslashreplace").decode()
