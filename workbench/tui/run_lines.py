"""Several runs as text: a heading, their results and the settings that differ. The functions are pure, fit any
width, and never drop a run.

              state      step    loss       a row per run, results in blocks
    A alpha0.1  completed  60/60  2.1991
    B alpha0.5     killed  30/60  2.8925

                held-out  best held-out
    A alpha0.1    2.6290         2.6290
    B alpha0.5         -              -
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from textual.content import Content

from workbench.plot.canvas import flow
from workbench.plot.series import series_style
from workbench.tui.names import distinct_names, shortened

GAP = "  "
"""The space between two columns."""
NAME_CELLS = (8, 28)
"""Minimum and maximum width of a name in a table of results, in cells; below it, names are left out."""
HEADING_CELLS = range(40, 5, -1)
"""Widths of a name in the heading, in cells, the best first."""


def of_run(slot: int, text: str) -> Content:
    """Return text in the colour of a run."""
    return Content.styled(text, f"bold {series_style(slot).colour}")


def result_lines(
    slots: Sequence[int], names: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> list[Content]:
    """Return rows of a label and one cell for each run, as blocks of lines of at most `width` cells, with a line
    for every run in each."""
    widths = [max(map(len, row)) for row in rows]
    least, most = NAME_CELLS
    shown = distinct_names(names, min(most, max(least, width // 4)))
    named = 1 + max(map(len, shown), default=0)
    if 1 + named + len(GAP) + max(widths, default=0) > width:
        shown, named = [""] * len(names), 0
    lines = []
    for block in flow([len(GAP) + wide for wide in widths], width - 1 - named, 0):
        if block.start:
            lines.append(Content())
        heads = "".join(f"{GAP}{rows[index][0]:>{widths[index]}}" for index in block)
        lines.append(Content.styled(" " * (1 + named) + heads, "bold"))
        for place, (slot, name) in enumerate(zip(slots, shown, strict=True)):
            who = f"{series_style(slot).letter} {name}".rstrip()
            cells = "".join(f"{GAP}{rows[i][place + 1]:>{widths[i]}}" for i in block)
            lines.append(of_run(slot, f"{who:<{1 + named}}") + shortened(cells, width))
    return lines


def setting_lines(
    slots: Sequence[int],
    settings: Sequence[tuple[str, Sequence[tuple[Sequence[int], str]]]],
    width: int,
) -> list[Content]:
    """Return each setting with its values, and before a value the letters of the runs that have it:
    `loss.alpha  AC 0.1  B 0.5`. A setting that is too wide for one line has several, so that no value is cut. Runs in
    `settings` are indices into `slots`."""
    lines: list[Content] = []
    longest = min(max((len(key) for key, _ in settings), default=0), width // 2)
    for key, values in settings:
        parts = []
        for places, value in values:
            who = Content(GAP)
            for at in places:
                who += of_run(slots[at], series_style(slots[at]).letter)
            parts.append((who, value or "(empty)"))
        line = Content.styled(f"{key:<{longest}}", "bold")
        for who, text in parts:
            line += who + f" {text}"
        if line.cell_length <= width:
            lines.append(line)
            continue
        lines += [Content.styled(row, "bold") for row in textwrap.wrap(key, width)]
        for who, text in parts:
            indent = who.cell_length + 1
            first, *rest = textwrap.wrap(text, max(1, width - indent))
            lines.append(who + f" {first}")
            lines += [Content(" " * indent + row) for row in rest]
    return lines


@dataclass(frozen=True, slots=True)
class HeadedRun:
    """A run in the heading: `name` and the current value of the metric, in the style of `slot`."""

    slot: int
    name: str
    value: str


def heading_lines(
    runs: Sequence[HeadedRun], width: int, *, first: Sequence[str], rows: int, ascii_only: bool
) -> list[Content]:
    """Return lines of `width` cells, at most `rows` of them unless the runs need more even without names. `first` is
    text before the runs; it is left out if the runs would otherwise lose their names."""
    lines: list[Content] = []
    names = [run.name for run in runs]
    for cells in (HEADING_CELLS, (0,)):
        for words in (first, ()):
            for most in cells:
                shown = distinct_names(names, most) if most else [""] * len(names)
                lines = _filled(runs, shown, words, width, ascii_only=ascii_only)
                if len(lines) <= rows:
                    return lines
    return lines


def _filled(
    runs: Sequence[HeadedRun],
    names: Sequence[str],
    first: Sequence[str],
    width: int,
    *,
    ascii_only: bool,
) -> list[Content]:
    """Return the heading with each line filled before the next begins."""
    items = [Content.styled(words, "bold") for words in first]
    for run, name in zip(runs, names, strict=True):
        style = series_style(run.slot)
        sign = "" if ascii_only else f" {style.marker}"
        who = f"{style.letter}{sign} {name}".rstrip()
        items.append(of_run(run.slot, who) + f" {run.value}")
    lengths = [item.cell_length for item in items]
    return [
        Content(GAP).join([items[at] for at in line]) for line in flow(lengths, width, len(GAP))
    ]
