"""Texts in narrow columns: names of runs are cut in the middle and still distinguishable, values are broken
over several rows and lose nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

CUT = "…"


def shortened(text: str, width: int) -> str:
    """Cut a text in the middle, because the beginning and the end of a run's name are both informative."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}{CUT}{text[len(text) - tail :]}"


def broken(text: str, width: int) -> list[str]:
    """Break a value into rows of a width: behind a space, a slash or a comma, where that is not enough behind any
    other sign, and inside a word only where the word alone is wider than the row."""
    rows = [""]
    for part in re.findall(r"[^\s/,]*[\s/,]|[^\s/,]+", text):
        if len(rows[-1]) + len(part.rstrip()) <= width:
            rows[-1] += part
        elif len(part.rstrip()) <= width:
            rows.append(part)
        else:
            for word in re.findall(r"\w*\W|\w+", part):
                if len(rows[-1]) + len(word.rstrip()) > width and rows[-1]:
                    rows.append("")
                rows[-1] += word
                while len(rows[-1].rstrip()) > width:
                    rows[-1:] = [rows[-1][:width], rows[-1][width:]]
    return [row.rstrip() for row in rows]


@lru_cache(maxsize=16)
def told_apart(names: tuple[str, ...], width: int) -> tuple[str, ...]:
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
