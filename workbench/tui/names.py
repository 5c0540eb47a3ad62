"""Texts in narrow columns: names of runs are cut in the middle and still distinguishable, values are broken
over several rows and lose nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from rich.cells import cell_len

CUT = "…"


def shortened(text: str, width: int) -> str:
    """Cut a text in the middle, because the beginning and the end of a run's name are both informative."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}{CUT}{text[len(text) - tail :]}"


def cut_at_end(text: str, width: int) -> str:
    """Cut a sentence after a word, because it begins with what matters; inside a word only where that is the
    first."""
    if len(text) <= width:
        return text
    kept = text[: width - 1]
    if text[width - 1] != " ":
        kept = kept.rpartition(" ")[0] or kept
    return f"{kept.rstrip()}{CUT}"


def broken(text: str, width: int, first: int | None = None) -> list[str]:
    """Break a value into rows of a width, the first of the width `first`: after a space, a slash or a comma; if
    that is not enough, after any other sign, and inside a word only if the word alone is wider than the row."""
    rows = [""]

    def room() -> int:
        return (width if first is None or len(rows) > 1 else first) - len(rows[-1])

    for part in re.findall(r"[^\s/,]*[\s/,]|[^\s/,]+", text):
        if len(part.rstrip()) <= room():
            rows[-1] += part
        elif len(part.rstrip()) <= width:
            rows.append(part)
        else:
            for word in re.findall(r"[^\W_]*[\W_]|[^\W_]+", part):
                if len(word.rstrip()) > room() and (rows[-1] or first is not None):
                    rows.append("")
                rows[-1] += word
                while len(rows[-1].rstrip()) > (full := room() + len(rows[-1])):
                    rows[-1:] = [rows[-1][:full], rows[-1][full:]]
    return [row.rstrip() for row in rows]


LABEL = re.compile(r"\s*(?:\d\d:\d\d:\d\d |\S+(?: \S+){0,2} {2,})(?=\S)")
"""The time of a log line, or the label of a line in columns, up to the text."""
MIN_WIDTH = 16


def wrapped(line: str, width: int) -> list[str]:
    """Wrap a line to rows of a width, at its spaces; a path that is wider than a row after its slashes. Rows after the
    first begin where the text after a label begins, or are indented by two more cells."""
    if cell_len(line) <= width:
        return [line]
    width = max(width, MIN_WIDTH)
    label = LABEL.match(line)
    hang = len(line) - len(line.lstrip()) + 2 if label is None else label.end()
    indent = " " * (hang if hang <= width // 2 else min(hang, 4))
    rows = [""]
    for space, word in re.findall(r"(\s*)(\S+)", line):
        if cell_len(rows[-1] + space + word) <= width:
            rows[-1] += space + word
        elif cell_len(indent + word) <= width:
            rows.append(indent + word)
        else:
            begun = rows[-1] + space
            parts = broken(word, width - len(indent), max(0, width - cell_len(begun)))
            rows[-1] = (begun + parts[0]).rstrip()
            rows += [indent + part for part in parts[1:]]
    return [row for row in rows if row.strip()] or [""]


@lru_cache(maxsize=16)
def distinct_names(names: tuple[str, ...], width: int) -> tuple[str, ...]:
    """Return each name in at most `width` cells; different names stay different where possible.

    Names that would look alike are all cut at the same other places, so that their difference stays visible:
    in 9 cells `sweep-lr1-seed0` and `sweep-lr2-seed0` are `…eep-lr1…` and `…eep-lr2…`.
    """
    short = [shortened(name, width) for name in names]
    shown: dict[str, str] = {}
    for text in set(short):
        alike = sorted({name for name, cut in zip(names, short, strict=True) if cut == text})
        shown |= zip(alike, _windows(alike, width), strict=True)
    return tuple(shown[name] for name in names)


def _windows(names: Sequence[str], width: int) -> list[str]:
    """Return the same window of each name: the first that distinguishes most of them, counted from the beginning
    and then from the end."""
    room = width - 2
    best = [shortened(name, width) for name in names]
    if room < 1 or len(names) < 2:
        return best
    longest = max(len(name) for name in names)
    for begin in (*range(1, longest), *range(-longest, 0)):
        cut = [_window(name, begin, room) for name in names]
        if len(set(cut)) > len(set(best)):
            best = cut
    return best


def _window(name: str, begin: int, room: int) -> str:
    """Return `room` characters of a name from `begin` on, with a sign where something is left out."""
    first = max(0, min(begin if begin >= 0 else len(name) + begin, len(name) - room))
    left, right = first > 0, first + room < len(name)
    return f"{CUT if left else ''}{name[first : first + room]}{CUT if right else ''}"
