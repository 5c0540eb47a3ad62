"""The panes on a screen of a given size: a pure function, so that it can be tested at every size.

    status   below 40 x 10      the status line and nothing else
    single   below 18 rows      one pane, chosen by its key
    tabs     below 100 x 36     the timeline and one pane, chosen by its key
    grid     from  100 x 36     the main panes; the result once the run has ended, or when it is
                                 chosen; alerts while one is active and the result is not shown; other panes replace
                                 decisions, result and kernels
                                when they are chosen; checks and kernels as well from 52 rows

A zoomed pane is alone in every mode. The table `workbench.panes` says when the grid shows a pane.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.panes import PANES, pane_of

SINGLE, TALL = 18, 52
GIVING_WAY = frozenset({"decisions", "result", "kernels"})
"""The panes that a chosen pane replaces, if it is not shown anyway."""


@dataclass(frozen=True, slots=True)
class Layout:
    mode: str
    panes: frozenset[str]


def is_tiny(width: int, height: int) -> bool:
    """Return whether only the first line of a screen fits the terminal."""
    return width < 40 or height < 10


def is_low(width: int, height: int) -> bool:
    """Return whether one pane fits the screen, and only if everything else is short."""
    return height < SINGLE and not is_tiny(width, height)


def arrange(
    width: int, height: int, *, chosen: str, zoomed: bool, ended: bool, alerts: bool = False
) -> Layout:
    """Return the mode and the visible panes."""
    shown_when = pane_of(chosen).when
    if is_tiny(width, height):
        return Layout("status", frozenset())
    if height < SINGLE:
        return Layout("single", frozenset({chosen}))
    mode = "grid" if width >= 100 and height >= 36 else "tabs"
    if zoomed:
        return Layout(mode, frozenset({chosen}))
    if mode == "tabs":
        return Layout(mode, frozenset({PANES[0].id, chosen}))
    is_tall = height >= TALL
    # The result pane lists the alerts as well.
    has_result = ended or shown_when == "ended"
    reasons = {
        "always": True,
        "ended": has_result,
        "alerts": alerts and not has_result,
        "tall": is_tall,
        "chosen": False,
    }
    panes = {pane.id for pane in PANES if reasons[pane.when]}
    if chosen not in panes:
        panes -= GIVING_WAY
    return Layout(mode, frozenset(panes | {chosen}))
