"""Texts in narrow columns: names of runs are cut in the middle and still distinguishable, lines are wrapped."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Sequence

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


LABEL = re.compile(r"\s*(?:\d\d:\d\d:\d\d |\S+(?: \S+){0,2} {2,})(?=\S)")
"""The time of a log line, or the label of a line in columns, up to the text."""
MIN_WIDTH = 16


def wrapped(line: str, width: int) -> list[str]:
    """Wrap a line to rows of a width, at its spaces. Rows after the first begin where the text after a label begins,
    or are indented by two more cells; by at most four where either would take more than half of the width."""
    width = max(width, MIN_WIDTH)
    if cell_len(line) > len(line):
        # Some of its characters are two cells wide.
        width //= 2
    label = LABEL.match(line)
    hang = len(line) - len(line.lstrip()) + 2 if label is None else label.end()
    indent = " " * (hang if hang <= width // 2 else min(hang, 4))
    return textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [""]


def distinct_names(names: Sequence[str], width: int) -> list[str]:
    """Return each name in at most `width` cells, cut in the middle. Names that would look alike are cut after their
    common beginning: in 9 cells `sweep-lr1-seed0` and `sweep-lr2-seed0` are `…1-seed0` and `…2-seed0`."""
    shown = [shortened(name, width) for name in names]
    alike: dict[str, list[str]] = {}
    for name, text in zip(names, shown, strict=True):
        alike.setdefault(text, []).append(name)
    for place, (name, text) in enumerate(zip(names, shown, strict=True)):
        if any(other != name for other in alike[text]):
            # Of characters, which is what is wanted here.
            common = len(os.path.commonprefix(alike[text]))  # noqa: RUF071
            shown[place] = shortened(CUT + name[common:], width)
    return shown
