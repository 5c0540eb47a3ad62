"""The part of a run that a timeline shows: a window on x, and a cursor in it. Pure values.

x is the step, or the time. A window without an end follows the newest row; zooming keeps the cursor (or,
without one, the end) where it is on the screen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

SMALLEST = 8.0
"""The smallest window, in steps or seconds."""


@dataclass(frozen=True, slots=True)
class Window:
    """The visible part; when `span` is None, the whole run."""

    span: float | None = None
    end: float | None = None
    """The largest x that is shown; None follows the newest."""
    cursor: float | None = None

    def bounds(self, first: float, last: float) -> tuple[float, float]:
        """Return the lowest and highest x on the screen, for a run from `first` to `last`."""
        if self.span is None or self.span >= last - first:
            return first, last
        end = last if self.end is None else min(max(self.end, first + self.span), last)
        return end - self.span, end

    def zoomed(self, factor: float, first: float, last: float) -> Window:
        """Return a window of `factor` times this one's width."""
        low, high = self.bounds(first, last)
        width = (high - low) * factor
        if width >= last - first:
            return Window(cursor=self.cursor)
        width = max(width, min(SMALLEST, last - first))
        fixed = high if self.cursor is None else min(max(self.cursor, low), high)
        share = (fixed - low) / (high - low) if high > low else 1.0
        return self._ending(fixed + width * (1 - share), width, last)

    def moved(self, to: float, first: float, last: float) -> Window:
        """Return the window with the cursor at `to`, moved if necessary to show it."""
        to = min(max(to, first), last)
        low, high = self.bounds(first, last)
        if self.span is not None and not low <= to <= high:
            end = to if to > high else to + self.span
            return replace(self._ending(end, self.span, last), cursor=to)
        return replace(self, cursor=to)

    def _ending(self, end: float, span: float, last: float) -> Window:
        return Window(span, None if end >= last else end, self.cursor)
