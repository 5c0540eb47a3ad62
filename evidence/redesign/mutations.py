"""Where the product code can be mutated, and how: the same 300 places for everybody who has both trees and the seed.

A *place* is one statement in a function's body with one change of it:

    compare    `<` becomes `<=`, `==` becomes `!=`, `in` becomes `not in`, `is` becomes `is not`
    arithmetic `+` becomes `-`, `*` becomes `/`
    logic      `and` becomes `or`
    constant   a number grows by one
    negate     the condition of `if`, `while` or `x if c else y` is inverted
    return     `return x` returns None
    delete     a call, an augmented assignment, an assignment to an attribute or item, a `raise` is left out
    default    one keyword argument of a call is left out

Left alone: docstrings and all other strings, annotations, what is inside a `raise` or an f-string, imports,
code for type checkers, and Triton kernels.

Places are spread over packages in proportion to their executable statements. Code that a restructuring only moved is
compared in pairs: a function that is in both trees, equal but for docstrings, annotations, imports and the words
of messages, gets the same mutation in both. Code that is in one tree only gets places of its own, in
proportion too, so that rewritten code is not left out of the comparison.
"""

from __future__ import annotations

import ast
import copy
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PRODUCT = ("engine", "workbench")

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
BODIES = ("body", "orelse", "finalbody")


@dataclass(frozen=True)
class Change:
    """Put `new` where `old` is in the source."""

    operator: str
    old: ast.AST
    new: Callable[[], str]


@dataclass(frozen=True)
class Statement:
    """A statement that can be mutated. Its lines are those of its head: for `if`, the condition's."""

    lines: tuple[int, int]
    changes: list[Change]


@dataclass
class Function:
    """A function or method with everything inside it."""

    file: str
    name: str
    shape: str
    """Equal in both trees for a function that was only moved."""
    statements: list[Statement]
    executable: int

    @property
    def package(self) -> str:
        return str(Path(self.file).parent)


@dataclass(frozen=True)
class Place:
    """One mutant. `pair` is the number of the same mutant in the other tree's list, if it is there."""

    number: int
    paired: bool
    package: str
    file: str
    function: str
    lines: tuple[int, int]
    operator: str
    old: str
    new: str
    span: tuple[int, int] = field(repr=False)
    """From and to which byte of the file `new` goes."""

    def mutate(self, source: bytes) -> bytes:
        return source[: self.span[0]] + self.new.encode() + source[self.span[1] :]


def _with(node: ast.expr, **fields: object) -> Callable[[], str]:
    """The source of `node` with other fields; made when asked for, as few of the changes are drawn."""

    def source() -> str:
        other = copy.copy(node)
        for name, value in fields.items():
            setattr(other, name, value)
        return f"({ast.unparse(other)})"

    return source


def _inverted(node: ast.expr) -> Callable[[], str]:
    return lambda: f"(not ({ast.unparse(node)}))"


def _is(text: str) -> Callable[[], str]:
    return lambda: text


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions in `node`, outermost first, without what is inside an f-string."""
    if isinstance(node, ast.expr):
        yield node
    if isinstance(node, ast.JoinedStr):
        return
    for child in ast.iter_child_nodes(node):
        yield from _expressions(child)


def _of_expression(node: ast.expr) -> Iterator[Change]:
    match node:
        case ast.Compare():
            for index, operator in enumerate(node.ops):
                ops = list(node.ops)
                ops[index] = COMPARED[type(operator)]()
                yield Change("compare", node, _with(node, ops=ops))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in COMPUTED:
            # A text cannot be subtracted from a text: no test is needed to see that.
            if not _is_text(left) and not _is_text(right):
                yield Change("arithmetic", node, _with(node, op=COMPUTED[type(op)]()))
        case ast.BoolOp(op=op):
            swapped = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield Change("logic", node, _with(node, op=swapped))
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            yield Change("constant", node, _is(repr(value + 1)))
        case ast.IfExp(test=test):
            yield Change("negate", test, _inverted(test))
        case ast.Call(keywords=keywords):
            for index, keyword in enumerate(keywords):
                if keyword.arg is not None:
                    kept = keywords[:index] + keywords[index + 1 :]
                    yield Change("default", node, _with(node, keywords=kept))


def _of_statement(node: ast.stmt) -> tuple[list[ast.expr], list[Change]]:
    """The expressions of a statement's head, and the changes of the statement itself."""
    match node:
        case ast.If(test=test) | ast.While(test=test):
            return [test], [Change("negate", test, _inverted(test))]
        case ast.For(iter=iterated) | ast.AsyncFor(iter=iterated):
            return [iterated], []
        case ast.With(items=items) | ast.AsyncWith(items=items):
            return [item.context_expr for item in items], []
        case ast.Match(subject=subject):
            return [subject], []
        case ast.Return(value=value) if value is not None:
            nothing = isinstance(value, ast.Constant) and value.value is None
            return [value], [] if nothing else [Change("return", node, _is("return None"))]
        case ast.Assign(targets=targets, value=value):
            kept = any(isinstance(target, ast.Name | ast.Tuple | ast.List) for target in targets)
            return [value], [] if kept else [Change("delete", node, _is("pass"))]
        case ast.AnnAssign(value=value) if value is not None:
            return [value], []
        case ast.AugAssign(value=value):
            return [value], [Change("delete", node, _is("pass"))]
        case ast.Expr(value=ast.Call() as value):
            return [value], [Change("delete", node, _is("pass"))]
        case ast.Expr(value=value) if not isinstance(value, ast.Constant):
            return [value], []
        case ast.Raise():
            return [], [Change("delete", node, _is("pass"))]
    return [], []


def _typing_only(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements below `body` that are executed, in order, without docstrings."""
    for node in body:
        documentation = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if documentation or _typing_only(node):
            continue
        yield node
        for name in BODIES:
            yield from _statements(getattr(node, name, []))
        for part in getattr(node, "handlers", []) + getattr(node, "cases", []):
            yield from _statements(part.body)


def _statement(node: ast.stmt) -> Statement:
    heads, changes = _of_statement(node)
    for head in heads:
        for expression in _expressions(head):
            changes.extend(_of_expression(expression))
    last = node.end_lineno or node.lineno
    if getattr(node, "body", None):
        last = max([node.lineno, *(head.end_lineno or head.lineno for head in heads)])
    return Statement((node.lineno, last), changes)


class _Shape(ast.NodeTransformer):
    """A function without what a restructuring may change: docstrings, annotations, imports, words of messages."""

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            node.body = [
                one
                for one in node.body
                if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
            ] or [ast.Pass()]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        if isinstance(node, ast.Import | ast.ImportFrom):
            return ast.Pass()
        # A message is one with its number of holes left out: words around them may have changed.
        if isinstance(node, ast.JoinedStr):
            return ast.Constant("text")
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            return ast.Constant("text")
        return self.generic_visit(node)


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def _definitions(
    body: list[ast.stmt], prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not _is_kernel(node):
                yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _definitions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If | ast.Try) and not _typing_only(node):
            yield from _definitions(node.body, prefix)
            yield from _definitions(node.orelse, prefix)


def product_files(tree: Path) -> list[Path]:
    return sorted(path for top in PRODUCT for path in (tree / top).rglob("*.py"))


def functions(tree: Path) -> list[Function]:
    """Every function of the product code in `tree`, in the order of files and lines."""
    found = []
    for path in product_files(tree):
        source = path.read_bytes()
        file = path.relative_to(tree).as_posix()
        # Taking the shape changes the tree: it has one of its own.
        for (name, node), (_, twin) in zip(
            _definitions(ast.parse(source).body),
            _definitions(ast.parse(source).body),
            strict=True,
        ):
            inner = list(_statements(node.body))
            statements = [_statement(one) for one in inner]
            shape = ast.dump(_Shape().visit(twin))
            found.append(Function(file, name, shape, statements, len(inner)))
    return found


def _pairs(before: list[Function], after: list[Function]) -> list[tuple[Function, Function]]:
    """Functions of one shape in both trees. Of several alike, those whose file is called the same."""
    alike: dict[str, tuple[list[Function], list[Function]]] = defaultdict(lambda: ([], []))
    for side, all_functions in enumerate((before, after)):
        for function in all_functions:
            alike[function.shape][side].append(function)
    pairs = []
    for left, right in alike.values():
        for one in right:
            same = [
                other
                for other in left
                if len(left) == len(right) == 1 or Path(other.file).name == Path(one.file).name
            ]
            if len(same) == 1:
                pairs.append((same[0], one))
    kinds = [
        [[change.operator for change in one.changes] for one in function.statements]
        for pair in pairs
        for function in pair
    ]
    return [
        pair for pair, old, new in zip(pairs, kinds[::2], kinds[1::2], strict=True) if old == new
    ]


def shares(weights: dict[str, int], total: int) -> dict[str, int]:
    """`total` spread over the keys in proportion to the weights; the largest remainders are rounded up."""
    all_weights = sum(weights.values())
    exact = {key: total * weight / all_weights for key, weight in weights.items()}
    given = {key: int(value) for key, value in exact.items()}
    by_remainder = sorted(exact, key=lambda key: (given[key] - exact[key], key))
    for key in by_remainder[: total - sum(given.values())]:
        given[key] += 1
    return given


class _Sources:
    """The bytes of a tree's files and where their lines begin."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self.known: dict[str, tuple[bytes, list[int]]] = {}

    def place(
        self, number: int, paired: bool, function: Function, statement: int, change: int
    ) -> Place:
        if function.file not in self.known:
            source = (self.tree / function.file).read_bytes()
            begins = [0]
            for line in source.splitlines(keepends=True):
                begins.append(begins[-1] + len(line))
            self.known[function.file] = source, begins
        source, begins = self.known[function.file]
        one = function.statements[statement]
        made = one.changes[change]
        node = made.old
        span = (
            begins[node.lineno - 1] + node.col_offset,
            begins[node.end_lineno - 1] + node.end_col_offset,
        )
        place = Place(
            number,
            paired,
            function.package,
            function.file,
            function.name,
            one.lines,
            made.operator,
            source[span[0] : span[1]].decode(),
            made.new(),
            span,
        )
        ast.parse(place.mutate(source))
        return place


Spot = tuple[int, int]
"""A function's index in its list, and a statement's in the function."""


def _drawn(
    choice: random.Random, candidates: list[tuple[str, Spot]], wanted: dict[str, int]
) -> list[Spot]:
    """So many spots of each package as are wanted; the first of a shuffled list."""
    by_package: dict[str, list[Spot]] = defaultdict(list)
    for package, spot in candidates:
        by_package[package].append(spot)
    drawn = []
    for package in sorted(wanted):
        spots = by_package[package]
        choice.shuffle(spots)
        drawn += spots[: wanted[package]]
    return drawn


def _change(choice: random.Random, statement: Statement) -> int:
    """An operator that the statement allows, each as likely, then one of its changes."""
    operators = sorted({change.operator for change in statement.changes})
    operator = choice.choice(operators)
    return choice.choice(
        [index for index, one in enumerate(statement.changes) if one.operator == operator]
    )


def _candidates(functions: list[Function]) -> list[tuple[str, Spot]]:
    return [
        (function.package, (index, number))
        for index, function in enumerate(functions)
        for number, statement in enumerate(function.statements)
        if statement.changes
    ]


def sample(before: Path, after: Path, seed: int, count: int) -> dict[str, list[Place]]:
    """`count` places in each tree; those of the same number and `paired` are the same mutant."""
    found = {"before": functions(before), "after": functions(after)}
    pairs = _pairs(found["before"], found["after"])
    paired = {"before": [one for one, _ in pairs], "after": [other for _, other in pairs]}
    ids = {arm: {id(function) for function in paired[arm]} for arm in paired}
    own = {arm: [one for one in found[arm] if id(one) not in ids[arm]] for arm in found}

    weights = Counter[str]()
    for function in found["after"]:
        weights[f"{id(function) in ids['after']} {function.package}"] += function.executable
    after_shares = shares(weights, count)
    moved, rewritten = (
        {key.removeprefix(kind): n for key, n in after_shares.items() if key.startswith(kind)}
        for kind in ("True ", "False ")
    )
    sources = {"before": _Sources(before), "after": _Sources(after)}
    places: dict[str, list[Place]] = {"before": [], "after": []}

    choice = random.Random(f"{seed} paired")
    for number, (index, statement) in enumerate(
        _drawn(choice, _candidates(paired["after"]), moved)
    ):
        change = _change(choice, paired["after"][index].statements[statement])
        for arm in places:
            function = paired[arm][index]
            places[arm].append(sources[arm].place(number, True, function, statement, change))

    old_weights = Counter[str]()
    for function in own["before"]:
        old_weights[function.package] += function.executable
    remaining = count - len(places["after"])
    for arm, wanted in (("before", shares(old_weights, remaining)), ("after", rewritten)):
        choice = random.Random(f"{seed} {arm}")
        spots = _drawn(choice, _candidates(own[arm]), wanted)
        for index, statement in spots:
            function = own[arm][index]
            change = _change(choice, function.statements[statement])
            places[arm].append(
                sources[arm].place(len(places[arm]), False, function, statement, change)
            )
    return places
