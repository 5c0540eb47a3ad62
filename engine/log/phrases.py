"""Words that every text of a run is made of: one line, a number, a loss, a time of day."""

from __future__ import annotations

import math
import time

from engine.limits import PRINTED_LINE
from engine.terminal import clipped
from engine.units import NOT_MEASURED, format_value


def one_line(text: str) -> str:
    """`text` on one line that a terminal prints as it stands: no line breaks, no control
    characters, and cut where it is longer than any line that is printed."""
    text = clipped(text, PRINTED_LINE.most)
    if text.isprintable():
        return text
    spaced = " ".join(line.strip() for line in text.splitlines() if line.strip())
    return "".join(c if c.isprintable() else " " if c.isspace() else ascii(c)[1:-1] for c in spaced)


def number_text(value: float | None, spec: str) -> str:
    """A number by a format of Python's own; absent and non-finite ones read as everywhere."""
    if value is None or not math.isfinite(value):
        return format_value(value)
    return format(value, spec)


def nats_text(loss: float | None) -> str:
    """A loss with its unit."""
    return NOT_MEASURED if loss is None else f"{format_value(loss)} nats/token"


def clock_text(unix_s: float) -> str:
    """Local wall time."""
    return time.strftime("%H:%M:%S", time.localtime(unix_s))
