"""The first line of a comparison: every run with its letter, its name and a value, at any width.

Names make room for values, and a second line is taken where one does not hold the letters and the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.plot.series import series_style
from workbench.tui.names import told_apart
from workbench.tui.run_columns import Line, Piece

GAP = "  "
LONGEST, SHORTEST = 40, 6
"""Cells of a name."""


@dataclass(frozen=True, slots=True)
class Headed:
    """A run as it stands there."""

    slot: int
    name: str
    value: str


def heading_lines(
    runs: Sequence[Headed], width: int, *, first: Sequence[str], rows: int, ascii_only: bool
) -> list[Line]:
    """At most `rows` lines of `width` cells; `first` are words before the runs, which are left out where they
    would cost a line or the names."""
    names = tuple(run.name for run in runs)
    named = [told_apart(names, most) for most in range(LONGEST, SHORTEST - 1, -1)]
    unnamed = tuple("" for _ in runs)
    ways = [(words, shown, 1) for words in (first, ()) for shown in named]
    ways += [((), shown, 2) for shown in named[-10:]] if rows > 1 else []
    ways += [(first, unnamed, 1), ((), unnamed, 1)]
    for words, shown, most in ways:
        lines = _filled(runs, shown, words, width, ascii_only=ascii_only)
        if len(lines) <= most:
            return lines
    return _filled(runs, unnamed, (), width, ascii_only=ascii_only)


def _filled(
    runs: Sequence[Headed],
    names: Sequence[str],
    first: Sequence[str],
    width: int,
    *,
    ascii_only: bool,
) -> list[Line]:
    """Lines, each as full as it can be."""
    items: list[Line] = [(Piece(words, bold=True),) for words in first]
    for run, name in zip(runs, names, strict=True):
        style = series_style(run.slot)
        sign = "" if ascii_only else f" {style.marker}"
        who = f"{style.letter}{sign}{f' {name}' if name else ''}"
        items.append((Piece(who, run.slot, True), Piece(f" {run.value}")))
    lines: list[list[Piece]] = [[]]
    used = 0
    for item in items:
        needed = sum(len(piece.text) for piece in item)
        if used and used + len(GAP) + needed > width:
            lines.append([])
            used = 0
        if used:
            lines[-1].append(Piece(GAP))
            used += len(GAP)
        lines[-1] += item
        used += needed
    return [tuple(line) for line in lines]
