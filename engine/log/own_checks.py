"""The checks by which a script ends itself: what they read, found in its syntax trees.

    if loss > LIMIT:                the check of this `raise` reads `loss` and LIMIT
        raise RuntimeError(loss)
    LIMIT = float(environ["MOST"])  and, as LIMIT is a constant, MOST

A change of what a check reads may end the failure without a change of the training. So it is no cause by itself.
"""

from __future__ import annotations

import ast
import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

_ENDS = frozenset({"exit", "_exit", "abort", "kill", "quit", "raise_signal"})
"""Functions that end the process."""
_PLAIN = frozenset(
    {"int", "float", "bool", "str", "abs", "min", "max", "len", "index", "get", "getenv"}
    | {"parse_args", "open", "load", "loads", "read", "read_text", "Path"}
)
"""Functions whose result is a constant of the script where their arguments are."""
_MOST_TEXT = 1 << 20
"""Largest size of all sources that are searched, in characters: a second."""
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class OwnCheck:
    reads: set[str] = field(default_factory=set)
    """Names, attributes and texts in its conditions, and those of which the constants among them are made."""
    constants: set[str] = field(default_factory=set)
    """The part of `reads` that no step assigns."""
    lines: set[tuple[str, int]] = field(default_factory=set)
    """Files and lines of what raises and of the statements around it that decide whether it does."""
    loops: set[tuple[str, int]] = field(default_factory=set)
    """Files and lines of the loops around what raises, and of functions that a library calls; none if it raises after
    all steps."""


def find_own_check(sources: Mapping[str, str], raised_at: tuple[str, int] | None) -> OwnCheck:
    """Return the check that raises at a line of a file, given by its name without folders; without a line, all that end
    the process. Empty where the script's `sources`, by their paths, raise nothing there. Of more than `_MOST_TEXT`, the
    file that raises alone."""
    if sum(map(len, sources.values())) > _MOST_TEXT:
        name = raised_at[0] if raised_at else ""
        sources = {file: text for file, text in sources.items() if PurePath(file).name == name}
    return _Finder(sources).find(raised_at)


def parse_line(line: str) -> list[ast.Module]:
    """Return the syntax tree of a line in a list; an empty one if it is not Python."""
    for text in (line.strip(), f"{line.strip()} pass"):
        with contextlib.suppress(SyntaxError, ValueError, RecursionError):
            return [ast.parse(text)]
    return []


def assigned_names(line: str) -> set[str]:
    """Return the names that a line assigns, defines or imports; of an attribute or a key, its last part."""
    nodes = [node for tree in parse_line(line) for node in ast.walk(tree)]
    bound = {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    bound |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    kinds = (ast.Name, ast.Attribute, ast.Subscript)
    stored = [node for node in nodes if isinstance(node, kinds) and type(node.ctx) is ast.Store]
    return bound | {
        ast.unparse(node).rstrip("'\"]").replace("['", ".").rpartition(".")[2] for node in stored
    }


def changed_names(was: str, now: str) -> set[str]:
    """Return the names that a change of a line assigns otherwise: its targets, or only the keys and keywords whose
    values differ; and the functions that it calls otherwise, whose result it does not use."""
    before, after = (
        [node for tree in parse_line(text) for node in tree.body] for text in (was, now)
    )
    kept = {ast.dump(node) for node in before} & {ast.dump(node) for node in after}
    before, after = (
        [node for node in nodes if ast.dump(node) not in kept] for nodes in (before, after)
    )
    if len(before) == len(after) == 1:
        values = [getattr(nodes[0], "value", None) for nodes in (before, after)]
        named = [{ast.unparse(key): ast.dump(of) for key, of in _entries(one)} for one in values]
        rest = [_without_entries(nodes[0]) for nodes in (before, after)]
        if any(named) and rest[0] == rest[1]:
            differ = {key for key, _ in named[0].items() ^ named[1].items()}
            return {key.strip("'\"") for key in differ} | _options_in(values[0])
    called = {_name_of(node.value) for node in (*before, *after) if isinstance(node, ast.Expr)}
    return called | {
        name for node in (*before, *after) for name in assigned_names(ast.unparse(node))
    }


def _entries(value: ast.AST | None) -> Iterator[tuple[ast.AST, ast.AST]]:
    if isinstance(value, ast.Dict):
        yield from ((key, of) for key, of in zip(value.keys, value.values, strict=True) if key)
    elif isinstance(value, ast.Call):
        yield from ((ast.Name(one.arg), one.value) for one in value.keywords if one.arg)


def _without_entries(node: ast.AST) -> str:
    """Return code without the values of the entries of its value."""
    text = ast.dump(node)
    for _, value in _entries(getattr(node, "value", None)):
        text = text.replace(ast.dump(value), "_")
    return text


def _options_in(value: ast.AST | None) -> set[str]:
    """Return the options that `add_argument` defines, as its parser names their values."""
    words = value.args if isinstance(value, ast.Call) else []
    return {
        word.value.lstrip("-").replace("-", "_")
        for word in words
        if isinstance(word, ast.Constant) and isinstance(word.value, str)
    }


class _Finder:
    def __init__(self, sources: Mapping[str, str]) -> None:
        self._trees: dict[str, ast.Module] = {}
        for file, text in sources.items():
            with contextlib.suppress(SyntaxError, ValueError, RecursionError):
                self._trees[file] = ast.parse(text)
        self._nodes = [
            (file, node) for file, tree in self._trees.items() for node in ast.walk(tree)
        ]
        self._parents = {
            child: node for _, node in self._nodes for child in ast.iter_child_nodes(node)
        }
        self._files = {node: file for file, node in self._nodes}
        self._calls: dict[str, list[ast.Call]] = defaultdict(list)
        self._functions: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = defaultdict(list)
        for _, node in self._nodes:
            if isinstance(node, ast.Call):
                self._calls[_name_of(node)].append(node)
            elif isinstance(node, _FUNCTIONS):
                self._functions[node.name].append(node)
        self._found = OwnCheck()
        self._seen: set[ast.AST] = set()

    def find(self, raised_at: tuple[str, int] | None) -> OwnCheck:
        for file, node in self._nodes:
            if raised_at is None:
                ends = isinstance(node, ast.Call) and _name_of(node) in _ENDS
                ends |= isinstance(node, ast.Raise) and _name_of(node.exc) == "SystemExit"
            else:
                raises = isinstance(node, (ast.Raise, ast.Assert)) or _name_of(node) == "throw"
                ends = raises and _is_at(node, file, raised_at)
            if ends:
                self._add(node)
        self._add_constants()
        return self._found

    def _add(self, node: ast.AST) -> None:
        """Add what decides whether a node runs: conditions around it, and around the calls of its function."""
        below = node
        while node not in self._seen and not isinstance(node, ast.Module):
            self._seen.add(node)
            self._read_condition(node, below)
            if isinstance(node, _FUNCTIONS):
                for call in self._calls.get(node.name, ()):
                    self._read_arguments(call)
                    self._add(self._parents[call])
                if node.name not in self._calls:
                    # A library calls it, perhaps in each step.
                    self._found.loops.add((self._files[node], node.lineno))
            below, node = node, self._parents[node]

    def _read_condition(self, node: ast.AST, below: ast.AST) -> None:
        match node:
            case ast.If() | ast.IfExp() | ast.Assert():
                self._read(node.test)
            case ast.BoolOp():
                self._read(node)
            case ast.For() | ast.AsyncFor() | ast.While():
                self._found.loops.add((self._files[node], node.lineno))
                return
            case ast.Try() if any(below is handler for handler in node.handlers):
                # The handler raises again what was raised here.
                for one in (inner for statement in node.body for inner in ast.walk(statement)):
                    if isinstance(one, (ast.If, ast.Assert, ast.Raise)):
                        self._add(one)
                    elif isinstance(one, ast.Call):
                        self._enter(one)
            case ast.Raise() | ast.With() | ast.Try():
                pass
            case ast.Call() if below is node:
                pass
            case _:
                return
        last = node.lineno if hasattr(node, "body") else node.end_lineno or node.lineno
        self._found.lines.update((self._files[node], at) for at in range(node.lineno, last + 1))

    def _enter(self, call: ast.Call) -> None:
        """Add what raises in the functions of the script that a call names."""
        for function in self._functions.get(_name_of(call), ()):
            for inner in ast.walk(function):
                if isinstance(inner, (ast.Raise, ast.Assert)):
                    self._add(inner)

    def _read(self, *expressions: ast.AST) -> None:
        called = {
            node.func for one in expressions for node in ast.walk(one) if isinstance(node, ast.Call)
        }
        for node in (inner for one in expressions for inner in ast.walk(one)):
            if isinstance(node, ast.Name) and node not in called:
                self._found.reads.add(node.id)
            elif isinstance(node, ast.Attribute) and node not in called:
                self._found.reads.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self._found.reads.add(node.value)
            elif isinstance(node, ast.Call):
                for function in self._functions.get(_name_of(node), ()):
                    if function not in self._seen:
                        self._seen.add(function)
                        self._read(*function.body)

    def _read_arguments(self, call: ast.Call) -> None:
        self._read(*call.args, *(keyword.value for keyword in call.keywords))

    def _add_constants(self) -> None:
        """Add what the constants are made of, and the arguments of which the parameters are."""
        reads, count = self._found.reads, -1
        assigns = [node for _, node in self._nodes if isinstance(node, ast.Assign)]
        constants = [node for node in assigns if self._is_constant(node)]
        while len(reads) != count:
            count = len(reads)
            for node in constants:
                if reads.isdisjoint(name for to in node.targets for name in _names_in(to)):
                    continue
                entries = [*_entries(node.value)] if isinstance(node.value, ast.Dict) else []
                read = [of for key, of in entries if reads & {ast.unparse(key).strip("'\"")}]
                self._read(*(read if entries else [node.value]))
            for function in (one for several in self._functions.values() for one in several):
                parameters = {
                    one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)
                }
                if (parameters - {"self"}) & reads:
                    owner = self._parents.get(function)
                    is_made = function.name == "__init__" and isinstance(owner, ast.ClassDef)
                    name = owner.name if is_made else function.name  # type: ignore[union-attr]
                    for call in self._calls.get(name, ()):
                        self._read_arguments(call)
        varying = {
            name
            for _, node in self._nodes
            if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign))
            and not self._is_constant(node)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            for name in _names_in(target)
        }
        varying |= {
            name
            for _, node in self._nodes
            if isinstance(node, _LOOPS[:2])
            for name in _names_in(node.target)
        }
        # A check that reads constants alone judges the settings themselves.
        if reads & varying:
            self._found.constants.update(reads - varying)

    def _is_constant(self, node: ast.AST) -> bool:
        """Whether no step assigns it: it is in no loop, and its value is made by plain functions alone."""
        value = getattr(node, "value", None)
        calls = [one for one in ast.walk(value) if isinstance(one, ast.Call)] if value else []
        parent: ast.AST | None = node
        while parent is not None and not isinstance(parent, _LOOPS):
            parent = self._parents.get(parent)
        return parent is None and all(_name_of(call) in _PLAIN for call in calls)


def _name_of(node: ast.AST | None) -> str:
    """Return the last name of what is called or raised; empty if it has none."""
    if isinstance(node, ast.Call):
        return _name_of(node.func)
    return getattr(node, "attr", getattr(node, "id", ""))


def _names_in(target: ast.AST) -> Iterable[str]:
    return (
        _name_of(node) for node in ast.walk(target) if isinstance(node, (ast.Name, ast.Attribute))
    )


def _is_at(node: ast.AST, file: str, place: tuple[str, int]) -> bool:
    begin, end = getattr(node, "lineno", 0), getattr(node, "end_lineno", None) or 0
    return PurePath(file).name == place[0] and begin <= place[1] <= end
