"""No module imports itself by way of others, imports inside functions included: what a circle joins is one
concept in pieces, and none of them can be read, tested or moved alone. Imports for types alone do not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT

PACKAGES = ("engine", "workbench")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def statements(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import below `node` but those under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        yield from statements(child)


def imports(root: Path = ROOT) -> dict[str, set[str]]:
    files = {module_name(path): path for top in PACKAGES for path in (root / top).rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        found: set[str] = set()
        for statement in statements(ast.parse(path.read_text())):
            if isinstance(statement, ast.Import):
                found |= {alias.name for alias in statement.names}
            elif statement.module and not statement.level:
                for alias in statement.names:
                    whole = f"{statement.module}.{alias.name}"
                    found.add(whole if whole in files else statement.module)
        graph[name] = (found & files.keys()) - {name}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module (Tarjan, 1972), each sorted."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            component = []
            while component[-1:] != [name]:
                component.append(stack.pop())
            if len(component) > 1:
                found.append(sorted(component))

    for name in graph:
        if name not in index:
            visit(name)
    return sorted(found)


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert circles(imports()) == []


def test_a_circle_is_found_and_what_hangs_on_it_is_not_part_of_it() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a"}}
    assert circles(graph) == [["b", "c"]]
