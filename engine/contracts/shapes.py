"""What a value of a contract may look like, and the walk that reads a tree by it.

A `Block` is a mapping with known keys, each with a shape and perhaps other spellings; `Named` is a
mapping with free keys; `Many` is a list; `Either` decides by whether the value is a mapping, a list or
a scalar. The walk gives plain values under their canonical names, text without the white space around
it: what is checked later is what is stored. It remembers where everything stood and goes on after each
problem, so that all of them are told at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.contracts.problems import ERROR, Problem, dotted, nearest
from engine.contracts.yaml_tree import Node

FORM = "W-FORM"
KEY = "W-KEY"
DUPLICATE = "SCHEMA-020"


@dataclass(frozen=True, slots=True)
class Text:
    allowed: frozenset[str] | None = None
    verbatim: bool = False
    """White space around it counts."""


@dataclass(frozen=True, slots=True)
class Real:
    """A number; an integer is one."""


@dataclass(frozen=True, slots=True)
class Whole:
    least: int | None = 0


@dataclass(frozen=True, slots=True)
class Flag:
    pass


@dataclass(frozen=True, slots=True)
class Anything:
    """Blocks whose inside upstream does not say."""


@dataclass(frozen=True, slots=True)
class Many:
    item: Shape


@dataclass(frozen=True, slots=True)
class Named:
    item: Shape


@dataclass(frozen=True, slots=True)
class Either:
    scalar: Shape | None = None
    many: Many | None = None
    mapping: Shape | None = None


@dataclass(frozen=True, slots=True)
class Block:
    fields: dict[str, Shape]
    aliases: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    is_open: bool = False
    """Other keys are taken as they are: rows that upstream documents in part."""


Shape = Text | Real | Whole | Flag | Anything | Many | Named | Either | Block
Path = tuple[str | int, ...]


class Walk:
    """Reads one tree; `problems`, `marks` and `broken` are filled on the way."""

    def __init__(self, file: str, at_the_top: Callable[[str], tuple[str, str] | None]) -> None:
        self.file = file
        self.at_the_top = at_the_top
        """The rule and the words for an unknown key of the outermost block, where it has its own."""
        self.problems: list[Problem] = []
        self.marks: dict[Path, tuple[int, int]] = {}
        self.broken: set[Path] = set()
        """Values that had a problem of form: nothing more is said of them."""

    def at(self, path: Path) -> tuple[int, int]:
        """Line and column of a value, or of what it would be in."""
        while path and path not in self.marks:
            path = path[:-1]
        return self.marks.get(path, (1, 1))

    def add(
        self,
        rule: str,
        path: Path,
        text: str,
        severity: str = ERROR,
        place: tuple[int, int] | None = None,
    ) -> None:
        line, column = place or self.at(path)
        self.problems.append(
            Problem(
                file=self.file,
                line=line,
                column=column,
                rule=rule,
                severity=severity,
                path=dotted(path),
                text=text,
            )
        )

    def read(self, node: Node, shape: Shape, path: Path = ()) -> Any:
        """The plain value; None for one that is absent or has a problem."""
        self.marks[path] = (node.key_line or node.line, node.key_column or node.column)
        value = node.value
        if value is None:
            return None
        match shape:
            case Either():
                return self._either(node, shape, path)
            case Block() if isinstance(value, dict):
                return self._block(node, shape, path)
            case Named(item) if isinstance(value, dict):
                return {key: self.read(inner, item, (*path, key)) for key, inner in value.items()}
            case Many(item) if isinstance(value, list):
                read = [self.read(inner, item, (*path, i)) for i, inner in enumerate(value)]
                return [self._entry(entry, (*path, i)) for i, entry in enumerate(read)]
            case Text(allowed, verbatim) if isinstance(value, str):
                text = value if verbatim else value.strip()
                if allowed is not None and text not in allowed:
                    return self._bad(path, f"expected a known word, found {text!r}", text, allowed)
                return text
            case Real() if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
            case Whole(least) if isinstance(value, int) and not isinstance(value, bool):
                if least is not None and value < least:
                    return self._bad(path, f"expected {least} or more, found {value}")
                return value
            case Flag() if isinstance(value, bool):
                return value
            case Anything():
                return _plain(node)
        return self._bad(path, f"expected {_words(shape)}, found {_found(value)}")

    def _entry(self, entry: Any, path: Path) -> Any:
        """Lists hold no nothing: a dash with nothing behind it is a mistake."""
        if entry is None and path not in self.broken:
            self._bad(path, "expected a value, found nothing")
        return entry

    def _either(self, node: Node, shape: Either, path: Path) -> Any:
        kind: Shape | None = shape.scalar
        if isinstance(node.value, dict):
            kind = shape.mapping
        elif isinstance(node.value, list):
            kind = shape.many
        if kind is None:
            return self._bad(path, f"expected {_words(shape)}, found {_found(node.value)}")
        return self.read(node, kind, path)

    def _block(self, node: Node, shape: Block, path: Path) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, inner in node.value.items():
            name = shape.aliases.get(key, key)
            if name not in shape.fields:
                if not shape.is_open:
                    self.marks[(*path, key)] = (inner.key_line, inner.key_column)
                    self._unknown(key, shape, path)
                continue
            here = (*path, name)
            if name in out or here in self.broken:
                text = f"{key} is another name of {name}, which is here too"
                self.marks[(*path, key)] = (inner.key_line, inner.key_column)
                self.add(DUPLICATE, (*path, key), text)
                continue
            value = self.read(inner, shape.fields[name], here)
            if value is not None:
                out[name] = value
        for name in shape.needs:
            if name not in out and (*path, name) not in self.broken:
                self.add(FORM, (*path, name), "expected a value, found none")
        return out

    def _unknown(self, key: str, shape: Block, path: Path) -> None:
        special = self.at_the_top(key) if not path else None
        if special is not None:
            self.add(special[0], (key,), special[1])
            return
        known = {*shape.fields, *shape.aliases}
        self.add(KEY, (*path, key), f"a key that is not known{nearest(key, known)}")

    def _bad(
        self, path: Path, text: str, word: str = "", allowed: frozenset[str] | None = None
    ) -> None:
        self.broken.add(path)
        self.add(FORM, path, text + (nearest(word, allowed) if allowed else ""))


def _plain(node: Node) -> Any:
    if isinstance(node.value, dict):
        return {key: _plain(inner) for key, inner in node.value.items()}
    if isinstance(node.value, list):
        return [_plain(inner) for inner in node.value]
    return node.value


def _words(shape: Shape) -> str:
    match shape:
        case Text():
            return "text"
        case Real():
            return "a number"
        case Whole():
            return "a whole number"
        case Flag():
            return "true or false"
        case Many():
            return "a list"
        case Either(scalar, many, mapping):
            kinds = [kind for kind in (scalar, many, mapping) if kind is not None]
            return " or ".join(_words(kind) for kind in kinds)
    return "a mapping"


def _found(value: Any) -> str:
    match value:
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case str():
            return f"the text {value[:40]!r}"
    return (
        f"{'true' if value is True else 'false' if value is False else value} (text needs quotes)"
    )
