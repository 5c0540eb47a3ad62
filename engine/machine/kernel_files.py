"""Read kernel text files as Readings: a number with its file, or the reason why there is none. Nothing here
raises for a file that is missing or malformed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.machine.reading import Reading, absent, measured


def read_text(path: Path) -> str | Reading:
    """Return the whole text, or why it cannot be read."""
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        return absent(f"not readable: {error.strerror}", str(path))


@dataclass(frozen=True, slots=True)
class Table:
    """A file of `key value` or `key: value` lines."""

    path: Path
    rows: dict[str, list[str]]
    missing: str | None

    def number(self, key: str) -> Reading:
        """Return the first word of the line `key` as a number, in bytes if the file gives it in KiB."""
        source = f"{self.path} {key}"
        if self.missing is not None:
            return absent(self.missing, source)
        words = self.rows.get(key)
        if not words:
            return absent(f"the file has no line {key!r}", source)
        if not words[0].isdecimal():
            return absent(f"expected a number, found {words[0]!r}", source)
        return measured(int(words[0]) * (1024 if words[1:2] == ["kB"] else 1), source)

    def word(self, key: str, pattern: str, convert: Callable[[str], float | str]) -> Reading:
        """Return the first group of `pattern` in the rest of the line `key`."""
        source = f"{self.path} {key}"
        if self.missing is not None:
            return absent(self.missing, source)
        match = re.search(pattern, " ".join(self.rows.get(key, [])))
        if match is None:
            return absent(f"the file has no line {key!r} of the expected form", source)
        return measured(convert(match[1]), source)


def read_table(path: Path) -> Table:
    """Read a file once, so that all its lines are of one moment."""
    text = read_text(path)
    if isinstance(text, Reading):
        return Table(path, {}, text.absent)
    lines = (line.replace(":", " ", 1).split() for line in text.splitlines())
    return Table(path, {words[0]: words[1:] for words in lines if words}, None)


def read_first(path: Path, pattern: str, convert: Callable[[str], float | int | str]) -> Reading:
    """Return the first group of `pattern` at the beginning of a file."""
    text = read_text(path)
    if isinstance(text, Reading):
        return text
    match = re.match(pattern, text)
    if match is None:
        return absent("the file is not of the expected form", str(path))
    return measured(convert(match[1]), str(path))
