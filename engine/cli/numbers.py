"""Numbers of a command line: whole or real, finite, and in a range.

    parser.add_argument("--jobs", type=whole(1024))
    parser.add_argument("--timeout", type=real(86400))

A number beyond its range is a slip that costs the machine. What is below the lower end that a command has
for a reason of its own is said by that command, so here both ends are as far from 0.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from engine.terminal import clipped

_SHOWN = 40


def whole(most: int) -> Callable[[str], int]:
    """Whole numbers up to `most`, and down to -`most`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:  # no number, or thousands of digits
            raise _wrong("a whole number", text) from None
        if abs(value) > most:
            raise _wrong(f"a number of at most {most:,}", text)
        return value

    return parse


def positive(most: int) -> Callable[[str], int]:
    """Whole numbers from 1 to `most`."""
    parse = whole(most)

    def parse_positive(text: str) -> int:
        value = parse(text)
        if value < 1:
            raise argparse.ArgumentTypeError("at least 1")
        return value

    return parse_positive


def real(most: float) -> Callable[[str], float]:
    """Finite numbers up to `most`, and down to -`most`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise _wrong("a number", text) from None
        if not math.isfinite(value) or abs(value) > most:
            raise _wrong(f"a number of at most {most:,.0f}", text)
        return value

    return parse


def _wrong(expected: str, text: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"expected {expected}, found {clipped(text, _SHOWN)!r}")
