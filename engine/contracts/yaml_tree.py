"""A YAML file as a tree in which each node knows its line and column, read strictly and within bounds.

A contract is data that people edit, so whatever a lenient reader would drop silently is rejected:

- the same key twice in a mapping (SCHEMA-020); parsing goes on with the first one;
- anchors, aliases and tags: nothing here needs them, and they are what bombs and gadgets are made of;
- directives, several documents, keys that are not plain words, NUL and other control characters;
- files that are larger, deeper or have more parts than any contract (`MAX_*`), before they cost time or memory.

Values follow the core schema of YAML 1.2: `yes`, `on`, `1_000`, `12:30` and `2026-01-01` are text, `0o17` is
15, and `true` is true. The parser is PyYAML's (libyaml if it was built with it), used for events alone: none
of its constructors runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from engine.errors import BadInput
from engine.files import open_regular

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_NODES = 50_000

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_DIRECTIVE = re.compile(r"^%", re.MULTILINE)
_CONSTANTS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER = re.compile(r"[-+]?[0-9]{1,300}|0o[0-7]{1,300}|0x[0-9a-fA-F]{1,300}")
_REAL = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


@dataclass(slots=True)
class Node:
    value: Any
    """A scalar, a list of Nodes, or a dict of Nodes by key."""
    line: int
    column: int
    key_line: int = 0
    """Line of the key, for a value of a mapping; this and `key_column` are 0 elsewhere."""
    key_column: int = 0


class Unreadable(Exception):
    """The file is not YAML of the kind that a contract may use; `text` says why and where."""

    def __init__(self, text: str, line: int = 1, column: int = 1) -> None:
        super().__init__(text)
        self.text, self.line, self.column = text, line, column


class Duplicate(NamedTuple):
    key: str
    place: tuple[int, int]
    first_line: int


def read_raw(path: Path) -> bytes:
    """Read the bytes of a file, at most one more than allowed. Raises Unreadable."""
    try:
        with open_regular(path, "contract") as file:
            return file.read(MAX_BYTES + 1)
    except BadInput as error:
        raise Unreadable(error.message.partition(" — ")[2]) from None
    except OSError as error:
        raise Unreadable(f"expected a file that can be read, found: {error.strerror}") from None


def parse_tree(raw: bytes) -> tuple[Node, list[Duplicate]]:
    """Parse a file into a tree, and list the keys that occur twice. Raises Unreadable."""
    if len(raw) > MAX_BYTES:
        raise Unreadable(f"expected at most {MAX_BYTES:,} bytes, found more")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise Unreadable(f"expected UTF-8, found other bytes at byte {error.start}", line) from None
    for pattern, what in ((_CONTROL, "a control character"), (_DIRECTIVE, "a directive")):
        if match := pattern.search(text):
            line, column = _place(text, match.start())
            raise Unreadable(f"expected text, found {what} ({match[0]!r})", line, column)
    loader = _LOADER(text)
    try:
        builder = _Builder(loader)
        return builder.document(), builder.duplicates
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        words = " ".join(part for part in (error.context, error.problem) if part)
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
        raise Unreadable(f"no YAML: {words}", line, column) from None
    except yaml.YAMLError as error:
        raise Unreadable(f"no YAML: {error}") from None
    finally:
        loader.dispose()


def _place(text: str, offset: int) -> tuple[int, int]:
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)


class _Builder:
    """Builds nodes from events. It recurses once per level, which MAX_DEPTH bounds."""

    def __init__(self, loader: Any) -> None:
        self.next_event: Callable[[], Any] = loader.get_event
        self.duplicates: list[Duplicate] = []
        self.nodes = 0

    def document(self) -> Node:
        root = None
        for event in self.until(yaml.StreamEndEvent):
            if isinstance(event, yaml.DocumentStartEvent) and root is not None:
                raise _unreadable(event, "expected one document, found another")
            if isinstance(event, yaml.NodeEvent):
                root = self.node(event, 0)
        if root is None:
            raise Unreadable("expected a contract, found an empty file")
        return root

    def until(self, end: type) -> Iterator[Any]:
        """Yield the events before the next `end`. A value starts with one event and consumes those that
        belong to it."""
        while not isinstance(event := self.next_event(), end):
            _refuse_references(event)
            yield event

    def node(self, event: Any, depth: int) -> Node:
        if not isinstance(event, yaml.ScalarEvent) and depth >= MAX_DEPTH:
            raise _unreadable(event, f"expected at most {MAX_DEPTH} levels, found more")
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise _unreadable(event, f"expected at most {MAX_NODES:,} values, found more")
        node = Node(None, *_place_of(event))
        if isinstance(event, yaml.ScalarEvent):
            node.value = event.value if event.style else resolve(event.value)
        elif isinstance(event, yaml.SequenceStartEvent):
            node.value = [self.node(item, depth + 1) for item in self.until(yaml.SequenceEndEvent)]
        else:
            node.value = self.mapping(depth)
        return node

    def mapping(self, depth: int) -> dict[str, Node]:
        nodes: dict[str, Node] = {}
        for key in self.until(yaml.MappingEndEvent):
            if not isinstance(key, yaml.ScalarEvent):
                raise _unreadable(key, "expected a word as key, found a list or a mapping")
            if not key.style and resolve(key.value) is None:
                raise _unreadable(key, "expected a word as key, found none")
            place, name = _place_of(key), key.value
            if name in nodes:
                self.duplicates.append(Duplicate(name, place, nodes[name].key_line))
            event = self.next_event()
            _refuse_references(event)
            node = self.node(event, depth + 1)
            node.key_line, node.key_column = place
            nodes.setdefault(name, node)
        return nodes


def _refuse_references(event: Any) -> None:
    if isinstance(event, yaml.AliasEvent):
        raise _unreadable(event, f"expected a value, found the alias *{event.anchor}")
    if getattr(event, "anchor", None) is not None:
        raise _unreadable(event, f"expected a value, found the anchor &{event.anchor}")
    if getattr(event, "tag", None) is not None:
        raise _unreadable(event, f"expected a value without a tag, found {event.tag}")


def _place_of(event: Any) -> tuple[int, int]:
    return event.start_mark.line + 1, event.start_mark.column + 1


def _unreadable(event: Any, text: str) -> Unreadable:
    return Unreadable(text, *_place_of(event))


def resolve(text: str) -> str | int | float | bool | None:
    """Resolve a plain scalar as in the core schema of YAML 1.2."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if text[0] not in "+-.0123456789":
        return text
    if _INTEGER.fullmatch(text):
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if _REAL.fullmatch(text):
        return float(text)
    if _SPECIAL.fullmatch(text):
        return float(text.replace(".", ""))
    return text
