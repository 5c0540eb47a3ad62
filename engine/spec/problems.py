"""Every problem of a spec at once, each with the place its key was set."""

from __future__ import annotations

import dataclasses
import difflib
import re

from engine import limits
from engine.errors import SpecError
from engine.spec.sections import KEYS, RunSpec
from engine.spec.values import shown

# No two neighbours match the same character: a line of spaces costs no more than another.
_HEADER = re.compile(r"\s*\[([A-Za-z0-9_.\-\s]+)\]\s*(?:#.*)?$")
_KEY = re.compile(r"\s*([A-Za-z0-9_\-]+(?:\s*\.\s*[A-Za-z0-9_\-]+)*)\s*=")


def key_lines(text: str) -> dict[str, int]:
    """Line number of each dotted key and section of a TOML text. (`tomllib` parses but does not
    say where things were.)
    """
    lines: dict[str, int] = {}
    section = ""
    closing: str | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if closing is not None:
            if closing in line:
                closing = None
            continue
        if header := _HEADER.match(line):
            section = re.sub(r"\s", "", header[1])
            lines.setdefault(section, number)
        elif key := _KEY.match(line):
            name = re.sub(r"\s", "", key[1])
            lines.setdefault(f"{section}.{name}" if section else name, number)
            for quote in ('"""', "'''"):
                if line.count(quote) == 1:
                    closing = quote
    return lines


class Problems:
    """Collects every problem, each with the place its key was set."""

    def __init__(self, file: str, lines: dict[str, int], from_sets: set[str]) -> None:
        self.file, self.lines, self.from_sets = file, lines, from_sets
        self.found: list[tuple[int, str]] = []
        self._named: set[str] = set()

    def add(self, key: str, text: str) -> None:
        if key in self._named:
            return  # the first thing wrong with a key is the one to mend first
        self._named.add(key)
        if key in self.from_sets:
            self.found.append((10**9, f"--set {shown(key)}: {text}"))
            return
        line = self.lines.get(key) or self.lines.get(key.split(".")[0])
        place = f"{self.file}:{line}" if line else self.file
        self.found.append((line or 0, f"{place}: {shown(key)}: {text}"))

    def raise_if_any(self) -> None:
        if self.found:
            self.found.sort(key=lambda item: item[0])
            texts = [text for _, text in self.found]
            if (more := len(texts) - limits.SPEC_PROBLEMS.most) > 0:
                texts = [*texts[:-more], f"{self.file}: {more:,} more problems"]
            raise SpecError(texts)


def nearest(key: str) -> str:
    close = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.5)
    if not close:
        last = key.rsplit(".", 1)[-1]
        close = [k for k in KEYS if k.rsplit(".", 1)[-1] == last][:1]
    return (
        f"; did you mean {close[0]}?" if close else f"; known sections are {', '.join(sections())}"
    )


def sections() -> list[str]:
    return [f.name for f in dataclasses.fields(RunSpec)]
