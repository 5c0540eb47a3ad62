"""Which panes are on a screen of a given size: a pure function, so that it can be tried at every
size.

    status   below 40 x 10      the status line and nothing else
    single   below 18 rows      one pane, chosen by its digit
    tabs     below 100 x 36     the time line and one pane, chosen by its digit
    grid     from  100 x 36     the panes that are looked at most; the result when there is one, or
                                when it is chosen; alerts while one stands; checks, kernels or alerts
                                in the place of decisions and result when they are chosen, and checks
                                and kernels beside them from 52 rows

A zoomed pane is alone in every mode.
"""

from __future__ import annotations

from dataclasses import dataclass

PANES = ("loss", "pace", "device", "decisions", "log", "result", "checks", "kernels", "alerts")
"""In the order of their digits, from 1."""
PANE_LABELS = {"kernels": "JIT"}
"""Panes that are called otherwise than their id."""

SINGLE, TALL = 18, 52


@dataclass(frozen=True, slots=True)
class Layout:
    mode: str
    panes: frozenset[str]


def is_tiny(width: int, height: int) -> bool:
    """Whether a terminal has no room for anything but the first line of a screen."""
    return width < 40 or height < 10


def is_low(width: int, height: int) -> bool:
    """Whether a screen has room for one pane, and for that only as long as all else is short."""
    return height < SINGLE and not is_tiny(width, height)


def arrange(
    width: int, height: int, *, chosen: str, zoomed: bool, ended: bool, alerts: bool = False
) -> Layout:
    """The mode and the visible panes."""
    assert chosen in PANES, chosen
    if is_tiny(width, height):
        return Layout("status", frozenset())
    if height < SINGLE:
        return Layout("single", frozenset({chosen}))
    mode = "grid" if width >= 100 and height >= 36 else "tabs"
    if zoomed:
        return Layout(mode, frozenset({chosen}))
    if mode == "tabs":
        return Layout(mode, frozenset({"loss", chosen}))
    panes = set(PANES[:5])
    if ended or chosen == "result":
        panes.add("result")
    elif alerts:
        # A result names them itself.
        panes.add("alerts")
    if height >= TALL:
        panes |= {"checks", "kernels", chosen}
    elif chosen in ("checks", "kernels", "alerts"):
        panes = panes - {"decisions", "result"} | {chosen}
    return Layout(mode, frozenset(panes))
