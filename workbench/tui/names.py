"""Shorten names of runs for narrow columns: cut in the middle, and still distinguishable."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

CUT = "…"


def shortened(text: str, width: int) -> str:
    """Cut a text in the middle, because the beginning and the end of a run's name are both informative."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}{CUT}{text[len(text) - tail :]}"


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
