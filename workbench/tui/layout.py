"""Which panes are on a screen of a given size: a pure function, so that it can be tried at every
size.

    status   below 40 x 10      the status line and nothing else
    single   below 18 rows      one pane, chosen by its digit
    tabs     below 100 x 36     the loss plot and one pane, chosen by its digit
    grid     from  100 x 36     all panes; the result when there is one, or when it is chosen

A zoomed pane is alone in every mode.
"""

from __future__ import annotations

from dataclasses import dataclass

PANES = ("loss", "pace", "device", "decisions", "log", "result")
"""In the order of their digits, from 1."""


@dataclass(frozen=True, slots=True)
class Layout:
    mode: str
    panes: frozenset[str]


def arrange(width: int, height: int, *, chosen: str, zoomed: bool, ended: bool) -> Layout:
    """The mode and the visible panes."""
    assert chosen in PANES, chosen
    if width < 40 or height < 10:
        return Layout("status", frozenset())
    if height < 18:
        return Layout("single", frozenset({chosen}))
    mode = "grid" if width >= 100 and height >= 36 else "tabs"
    if zoomed:
        return Layout(mode, frozenset({chosen}))
    if mode == "tabs":
        return Layout(mode, frozenset({"loss", chosen}))
    return Layout(mode, frozenset(PANES if ended or chosen == "result" else PANES[:-1]))
