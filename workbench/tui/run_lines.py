"""Several runs as text: a heading, their results and the settings that differ. The functions are pure, fit any
width, and never drop a run.

Wide enough: a column per run.              Otherwise: a row per run, results in blocks.

                    A          B              state      step    loss
    run       …alpha0.1  …alpha0.5            A  completed  60/60  2.1991
    state     completed     killed            B     killed  30/60  2.8925
    step          60/60      30/60
    loss         2.1991     2.8925               held-out  best held-out
                                              A    2.6290         2.6290
                                              B         -              -
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workbench.plot.canvas import flow
from workbench.plot.series import series_style
from workbench.tui.names import broken, distinct_names, shortened

GAPS = ("  ", " ")
"""The space between two columns; the narrow one where the wide one does not fit."""
NAME_CELLS = 8
"""Minimum width of a name in a table of results, in cells; where it does not fit, names are left out."""
MAX_NAME_CELLS = 28
"""Maximum width of a name in a table of results, in cells."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text in the colour of a run, or in that of the pane."""

    text: str
    slot: int | None = None
    bold: bool = False


Line = tuple[Piece, ...]


def result_lines(
    slots: Sequence[int], names: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> list[Line]:
    """Return rows of a label and one cell for each run, as lines of at most `width` cells."""
    for gap in GAPS:
        shown = _fitting_names(names, rows, width, len(gap))
        if shown is not None:
            return _as_columns(slots, shown, rows, gap)
    return list(_as_rows(slots, names, rows, width))


def wanted_width(names: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return the width at which every run is a column with a readable name."""
    cells = _cell_widths(rows)
    return _label_width(rows) + sum(
        len(GAPS[0]) + max(cell, min(len(name), 2 * NAME_CELLS))
        for cell, name in zip(cells, names, strict=True)
    )


def _label_width(rows: Sequence[Sequence[str]]) -> int:
    return max((len(row[0]) for row in rows), default=0)


def _cell_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in list(zip(*rows, strict=True))[1:]]


def _fitting_names(
    names: Sequence[str], rows: Sequence[Sequence[str]], width: int, gap: int
) -> tuple[str, ...] | None:
    """Return the names, as long as leaves a column for every run; None where the columns do not fit."""
    cells = _cell_widths(rows)
    room = width - _label_width(rows) - gap * len(names)
    for most in range(MAX_NAME_CELLS, NAME_CELLS - 1, -1):
        shown = distinct_names(tuple(names), most)
        if sum(max(len(name), cell) for name, cell in zip(shown, cells, strict=True)) <= room:
            return shown
    return None


def _as_columns(
    slots: Sequence[int], names: Sequence[str], rows: Sequence[Sequence[str]], gap: str
) -> list[Line]:
    label = _label_width(rows)
    cells = _cell_widths(rows)
    widths = [max(len(name), cell) for name, cell in zip(names, cells, strict=True)]

    def line(first: str, texts: Sequence[str], *, is_head: bool) -> Line:
        pieces = [Piece(f"{first:<{label}}", bold=is_head)]
        for slot, text, wide in zip(slots, texts, widths, strict=True):
            pieces.append(Piece(f"{gap}{text:>{wide}}", slot if is_head else None, is_head))
        return tuple(pieces)

    letters = [series_style(slot).letter for slot in slots]
    head = [line("", letters, is_head=True), line("run", names, is_head=True)]
    return head + [line(row[0], row[1:], is_head=False) for row in rows]


def _as_rows(
    slots: Sequence[int], names: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> Iterator[Line]:
    """Yield blocks of results, each with a row for every run."""
    gap = GAPS[0]
    widths = [max(map(len, row)) for row in rows]
    shown = distinct_names(tuple(names), min(MAX_NAME_CELLS, max(NAME_CELLS, width // 4)))
    named = 1 + max(map(len, shown), default=0)
    if 1 + named + len(gap) + max(widths, default=0) > width:
        shown, named = tuple("" for _ in names), 0
    for block in flow([len(gap) + wide for wide in widths], width - 1 - named, 0):
        if block.start:
            yield (Piece(""),)
        heads = "".join(f"{gap}{rows[index][0]:>{widths[index]}}" for index in block)
        yield (Piece(" " * (1 + named) + heads, bold=True),)
        for place, (slot, name) in enumerate(zip(slots, shown, strict=True)):
            who = f"{series_style(slot).letter}{f' {name}' if name else ''}"
            cells = "".join(f"{gap}{rows[i][place + 1]:>{widths[i]}}" for i in block)
            yield (Piece(f"{who:<{1 + named}}", slot, True), Piece(shortened(cells, width)))


def setting_lines(
    slots: Sequence[int],
    settings: Sequence[tuple[str, Sequence[tuple[Sequence[int], str]]]],
    width: int,
) -> list[Line]:
    """Return each setting with its values, and before a value the letters of the runs that have it:
    `loss.alpha  AC 0.1  B 0.5`. A setting that is too wide for one line has several, so that no value is cut. Runs in
    `settings` are indices into `slots`."""
    lines: list[Line] = []
    longest = min(max((len(key) for key, _ in settings), default=0), width // 2)
    for key, values in settings:
        letters = ["".join(series_style(slots[at]).letter for at in places) for places, _ in values]
        texts = [value or "(empty)" for _, value in values]
        together = sum(
            len(GAPS[0]) + len(x) + 1 + len(y) for x, y in zip(letters, texts, strict=True)
        )
        is_one = max(longest, len(key)) + together <= width
        if not is_one:
            lines += [(Piece(row, bold=True),) for row in broken(key, width)]
        line = [Piece(f"{key:<{longest}}", bold=True)] if is_one else []
        for (places, _), who, text in zip(values, letters, texts, strict=True):
            head = [Piece(GAPS[0])]
            head += [Piece(x, slots[at], True) for at, x in zip(places, who, strict=True)]
            if is_one:
                line += [*head, Piece(f" {text}")]
                continue
            indent = len(GAPS[0]) + len(who) + 1
            first, *rest = broken(text, max(1, width - indent))
            lines.append((*head, Piece(f" {first}")))
            lines += [(Piece(" " * indent + row),) for row in rest]
        if is_one:
            lines.append(tuple(line))
    return lines


LONGEST, SHORTEST = 40, 6
"""Maximum and minimum width of a name in the heading, in cells."""


@dataclass(frozen=True, slots=True)
class HeadedRun:
    """A run in the heading: `name` and the current value of the metric, in the style of `slot`."""

    slot: int
    name: str
    value: str


def heading_lines(
    runs: Sequence[HeadedRun], width: int, *, first: Sequence[str], rows: int, ascii_only: bool
) -> list[Line]:
    """Return at most `rows` lines of `width` cells. `first` is text before the runs; it is left out if the runs would
    otherwise need a second line or lose their names."""
    names = tuple(run.name for run in runs)
    named = [distinct_names(names, cells) for cells in range(LONGEST, SHORTEST - 1, -1)]
    unnamed = tuple("" for _ in runs)
    layouts = [(words, shown, 1) for words in (first, ()) for shown in named]
    layouts += [((), shown, 2) for shown in named[-10:]] if rows > 1 else []
    layouts += [(first, unnamed, 1), ((), unnamed, 1)]
    for words, shown, max_lines in layouts:
        lines = _filled(runs, shown, words, width, ascii_only=ascii_only)
        if len(lines) <= max_lines:
            return lines
    return _filled(runs, unnamed, (), width, ascii_only=ascii_only)


def _filled(
    runs: Sequence[HeadedRun],
    names: Sequence[str],
    first: Sequence[str],
    width: int,
    *,
    ascii_only: bool,
) -> list[Line]:
    """Return the heading with each line filled before the next begins."""
    items: list[Line] = [(Piece(words, bold=True),) for words in first]
    for run, name in zip(runs, names, strict=True):
        style = series_style(run.slot)
        sign = "" if ascii_only else f" {style.marker}"
        who = f"{style.letter}{sign}{f' {name}' if name else ''}"
        items.append((Piece(who, run.slot, True), Piece(f" {run.value}")))
    gap = Piece(GAPS[0])
    lengths = [sum(len(piece.text) for piece in item) for item in items]
    return [
        tuple(piece for at in line for piece in (gap, *items[at]))[1:]
        for line in flow(lengths, width, len(GAPS[0]))
    ]
