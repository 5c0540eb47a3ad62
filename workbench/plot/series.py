"""Styles that distinguish runs in one figure: by letter, by marker, and last by colour.

A run keeps its style for as long as it is chosen, whatever other runs are chosen. The colours are those of
Okabe and Ito, which people with any form of colour blindness can distinguish; orange, sky blue and purple are
darker than in the original, so that each of the six has a contrast of 3:1 to a dark ground and to a light
one.

Source: M. Okabe, K. Ito, "Color Universal Design", 2002.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SeriesStyle:
    """One style of `SERIES`; any two styles differ in every field."""

    letter: str
    """The name of the run in ASCII, in legends and in tables."""
    marker: str
    """A shape, one cell wide."""
    colour: str
    """`#RRGGBB`, for dark and light grounds."""


SERIES = (
    SeriesStyle("A", "●", "#0072B2"),
    SeriesStyle("B", "■", "#D55E00"),
    SeriesStyle("C", "▲", "#009E73"),
    SeriesStyle("D", "○", "#C46A9C"),
    SeriesStyle("E", "□", "#B58900"),
    SeriesStyle("F", "▼", "#3D97CC"),
)


def series_style(index: int) -> SeriesStyle:
    """Return the style of the index-th run, from 0; there are six."""
    if not 0 <= index < len(SERIES):
        raise IndexError(f"series {index}: expected 0 to {len(SERIES) - 1}")
    return SERIES[index]
