"""A YAML file as a tree in which each node knows its line and column, read strictly and within bounds.

A contract is data that people edit, so whatever a lenient reader would drop without a word is refused:

- the same key twice in a mapping (SCHEMA-020); the first one counts from there on;
- anchors, aliases and tags: nothing here needs them, and they are what bombs and gadgets are made of;
- directives, several documents, keys that are not plain words, NUL and other control characters;
- what is larger, deeper or of more parts than any contract (`MAX_*`), before it costs time or memory.

Values are those of the core schema of YAML 1.2: `yes`, `on`, `1_000`, `12:30` and `2026-01-01` are
text, `0o17` is 15, and `true` is true. The parser is PyYAML's (libyaml where it was built with it),
asked for events alone: none of its constructors runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """Where the key stands, for a value of a mapping; both 0 elsewhere."""
    key_column: int = 0


class Unreadable(Exception):
    """The file is no YAML that a contract may be; `text` says why and where."""

    def __init__(self, text: str, line: int = 1, column: int = 1) -> None:
        super().__init__(text)
        self.text, self.line, self.column = text, line, column


@dataclass(frozen=True, slots=True)
class Duplicate:
    key: str
    line: int
    column: int
    first_line: int


def read_raw(path: Path) -> bytes:
    """The bytes of a file, one more than allowed at most. Raises Unreadable."""
    try:
        with open_regular(path, "contract") as file:
            return file.read(MAX_BYTES + 1)
    except BadInput as error:
        raise Unreadable(error.message.partition(" — ")[2]) from None
    except OSError as error:
        raise Unreadable(f"expected a file that can be read, found: {error.strerror}") from None


def parse_tree(raw: bytes) -> tuple[Node, list[Duplicate]]:
    """The tree of a file, with the keys that are there twice. Raises Unreadable."""
    if len(raw) > MAX_BYTES:
        raise Unreadable(f"expected at most {MAX_BYTES:,} bytes, found more")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise Unreadable(f"expected UTF-8, found other bytes at byte {error.start}", line) from None
    for pattern, what in ((_CONTROL, "a control character"), (_DIRECTIVE, "a directive")):
        if found := pattern.search(text):
            line, column = _place(text, found.start())
            raise Unreadable(f"expected text, found {what} ({found[0]!r})", line, column)
    loader = _LOADER(text)
    try:
        return _Builder().build(loader)
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
    """Events to nodes, with an own stack: depth is a number to be bounded, not a recursion."""

    def __init__(self) -> None:
        self.duplicates: list[Duplicate] = []
        self.stack: list[Node] = []
        self.keys: list[tuple[str, int, int] | None] = []
        self.root: Node | None = None
        self.nodes = 0

    def build(self, loader: Any) -> tuple[Node, list[Duplicate]]:
        documents = 0
        while True:
            event = loader.get_event()
            if event is None or isinstance(event, yaml.StreamEndEvent):
                break
            self._refuse_references(event)
            if isinstance(event, yaml.ScalarEvent):
                self._scalar(event)
            elif isinstance(event, yaml.MappingStartEvent):
                self._open(event, {})
            elif isinstance(event, yaml.SequenceStartEvent):
                self._open(event, [])
            elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
                self.stack.pop()
                self.keys.pop()
            elif isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise _unreadable(event, "expected one document, found another")
        if self.root is None:
            raise Unreadable("expected a contract, found an empty file")
        return self.root, self.duplicates

    def _refuse_references(self, event: Any) -> None:
        if isinstance(event, yaml.AliasEvent):
            raise _unreadable(event, f"expected a value, found the alias *{event.anchor}")
        if getattr(event, "anchor", None) is not None:
            raise _unreadable(event, f"expected a value, found the anchor &{event.anchor}")
        if getattr(event, "tag", None) is not None:
            raise _unreadable(event, f"expected a value without a tag, found {event.tag}")

    def _scalar(self, event: Any) -> None:
        if self.stack and isinstance(self.stack[-1].value, dict) and self.keys[-1] is None:
            mark = event.start_mark
            if not event.style and resolve(event.value) is None:
                raise _unreadable(event, "expected a word as key, found none")
            self.keys[-1] = (event.value, mark.line + 1, mark.column + 1)
            return
        self._add(event, event.value if event.style else resolve(event.value))

    def _open(self, event: Any, value: Any) -> None:
        if self.stack and isinstance(self.stack[-1].value, dict) and self.keys[-1] is None:
            raise _unreadable(event, "expected a word as key, found a list or a mapping")
        if len(self.stack) >= MAX_DEPTH:
            raise _unreadable(event, f"expected at most {MAX_DEPTH} levels, found more")
        self.stack.append(self._add(event, value))
        self.keys.append(None)

    def _add(self, event: Any, value: Any) -> Node:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise _unreadable(event, f"expected at most {MAX_NODES:,} values, found more")
        mark = event.start_mark
        node = Node(value, mark.line + 1, mark.column + 1)
        if not self.stack:
            self.root = node
            return node
        parent = self.stack[-1].value
        if isinstance(parent, list):
            parent.append(node)
            return node
        key = self.keys[-1]
        assert key is not None  # a value follows its key
        name, node.key_line, node.key_column = key
        self.keys[-1] = None
        if name in parent:
            first = parent[name].key_line
            self.duplicates.append(Duplicate(name, node.key_line, node.key_column, first))
        else:
            parent[name] = node
        return node


def _unreadable(event: Any, text: str) -> Unreadable:
    return Unreadable(text, event.start_mark.line + 1, event.start_mark.column + 1)


def resolve(text: str) -> str | int | float | bool | None:
    """A plain scalar as the core schema of YAML 1.2 reads it."""
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
