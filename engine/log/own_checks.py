"""Find the checks by which a script ends itself, and the names that they read, in the script's syntax trees.

    if loss > LIMIT:                the check of this `raise` reads `loss` and LIMIT
        raise RuntimeError(loss)
    LIMIT = float(environ["MOST"])  and, as LIMIT is a constant, MOST

A change of a name that a check reads may end the failure without a change of the training. So it is not by itself a
cause.
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
"""Functions whose result is a constant of the script if their arguments are constants."""
_MOST_TEXT = 1 << 20
"""Maximum total size of the sources that are all searched, in characters: about a second of work."""
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class OwnCheck:
    reads: set[str] = field(default_factory=set)
    """Names, attributes and strings in the check's conditions, and those in the definitions of the constants among
    them."""
    constants: set[str] = field(default_factory=set)
    """The names in `reads` that no step assigns."""
    lines: set[tuple[str, int]] = field(default_factory=set)
    """Files and lines of the statements that raise, and of the enclosing statements that decide whether they run."""
    around: set[str] = field(default_factory=set)
    """Names of the functions and objects that the failed statement calls, and the lines, `FILE:LINE`, of it and of the
    statements around it that decide what happens on a failure."""
    loops: set[tuple[str, int]] = field(default_factory=set)
    """Files and lines of the loops around the statements that raise, and of functions that a library calls; empty if
    the check runs after all steps."""


def find_own_check(sources: Mapping[str, str], raised_at: tuple[str, int] | None) -> OwnCheck:
    """Return the check that raises at `raised_at`, a file name without folders and a line; without it, all checks
    that end the process. Empty if nothing in the script's `sources`, by path, raises there. If the sources are larger
    than `_MOST_TEXT`, only the file that raises is searched."""
    if sum(map(len, sources.values())) > _MOST_TEXT:
        name = raised_at[0] if raised_at else ""
        sources = {file: text for file, text in sources.items() if PurePath(file).name == name}
    return _Finder(sources).find(raised_at)


def parse_line(line: str) -> list[ast.Module]:
    """Return a list with the syntax tree of a line; an empty list if the line is not Python."""
    for text in (line.strip(), f"{line.strip()} pass"):
        with contextlib.suppress(SyntaxError, ValueError, RecursionError):
            return [ast.parse(text)]
    return []


def assigned_names(line: str) -> set[str]:
    """Return the names that a line assigns, defines or imports; for an attribute or a key, its last component."""
    nodes = [node for tree in parse_line(line) for node in ast.walk(tree)]
    bound = {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    bound |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    kinds = (ast.Name, ast.Attribute, ast.Subscript)
    stored = [node for node in nodes if isinstance(node, kinds) and type(node.ctx) is ast.Store]
    return bound | {
        ast.unparse(node).rstrip("'\"]").replace("['", ".").rpartition(".")[2] for node in stored
    }


def changed_names(was: str, now: str) -> set[str]:
    """Return the names whose assignment a change of a line alters: its targets, or only the keys and keywords whose
    values differ. Also return the functions that it calls differently without using their results."""
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
    """Return the code of an assignment without the values of its value's entries."""
    text = ast.dump(node)
    for _, value in _entries(getattr(node, "value", None)):
        text = text.replace(ast.dump(value), "_")
    return text


def _options_in(value: ast.AST | None) -> set[str]:
    """Return the attribute names under which an `add_argument` call's parser stores its options."""
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
            if raised_at is not None and isinstance(node, ast.stmt):
                self._add_around(node, file, raised_at)
        self._add_constants()
        return self._found

    def _add_around(self, node: ast.stmt, file: str, place: tuple[str, int]) -> None:
        is_simple = not hasattr(node, "body")
        if not _is_at(node, file, place) or not (
            is_simple or isinstance(node, (ast.With, ast.Try, ast.If))
        ):
            return
        self._found.around.add(f"{file}:{node.lineno}")
        for one in ast.walk(node) if is_simple else ():
            # What a loader yields may end the failure by itself, as with another number of workers.
            if isinstance(one, ast.Call) and _name_of(one) != "next":
                self._found.around.update(
                    inner.id for inner in ast.walk(one.func) if isinstance(inner, ast.Name)
                )

    def _add(self, node: ast.AST) -> None:
        """Add the conditions that decide whether a node runs: those around it, and around the calls of its
        function."""
        below = node
        while node not in self._seen and not isinstance(node, ast.Module):
            self._seen.add(node)
            self._read_condition(node, below)
            if isinstance(node, _FUNCTIONS):
                for call in self._calls.get(node.name, ()):
                    self._read_arguments(call)
                    self._add(self._parents[call])
                if node.name not in self._calls:
                    # A library calls the function, perhaps in each step.
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
                # The handler raises the exception again.
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
        """Add the statements that raise in the script's functions that a call names."""
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
        """Add the names in the definitions of the constants, and the arguments that are passed for the parameters."""
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
        """Return whether no step assigns the node's name: the assignment is in no loop, and only functions of _PLAIN
        are called in it."""
        value = getattr(node, "value", None)
        calls = [one for one in ast.walk(value) if isinstance(one, ast.Call)] if value else []
        parent: ast.AST | None = node
        while parent is not None and not isinstance(parent, _LOOPS):
            parent = self._parents.get(parent)
        return parent is None and all(_name_of(call) in _PLAIN for call in calls)


def _name_of(node: ast.AST | None) -> str:
    """Return the last name of a called or raised expression; empty if it has none."""
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
