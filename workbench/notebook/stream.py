"""Send a run as messages to a page: what is new in each snapshot, as binary rows and changed text.

    clear   {"kind": "clear", "series": [...] or None}    forget these series, or all
    charts  {"kind": "charts", "charts": [...]}           the charts of `engine.log.figures`, when they changed
    rows    {"kind": "rows", "series": [names]}           and one buffer for each: float32, all x, then all y
    words   {"kind": "words", "panes": {name: text}}      only those that changed

Its only state is how many rows of each table were sent. `reset` clears that, so that the next messages are
the whole run again; a view that was opened or reloaded requests it. History is downsampled to HISTORY buckets per
series, later additions to LIVE buckets per tick, so that neither a long run nor a fast one floods the page:
at most 6 KB per series to open and 600 bytes per tick later.

x is seconds since the run began, and the series `step` has the step that was done at each, so that a page can
draw over either. As float32, seconds are exact to a tenth for a week. An absent value is not sent; NaN and
infinity are sent as they are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.log.downsample import points
from engine.log.figures import Curve, Figure, figures_of
from engine.report.chart import described, series_key
from engine.terminal import printable
from engine.watch.verdict_line import verdict_of
from workbench.feed import Snapshot
from workbench.panes import PAGE_WIDTH, page_panes

HISTORY, LIVE = 256, 24
PANE_CHARACTERS = 6000
PANES = page_panes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a comm: JSON content and binary buffers."""

    content: dict[str, Any]
    buffers: tuple[bytes, ...] = ()


@dataclass(slots=True)
class _Sent:
    """The part of one column that was sent: its storage, and the number of rows."""

    storage: object
    rows: int = 0


def _floats(values: tuple[float, ...]) -> array[float]:
    """Convert to float32; values too large for it become infinite instead of raising."""
    limit = 3.4028234e38
    inf = float("inf")
    return array(
        "f", [y if -limit <= y <= limit or y != y else inf if y > 0 else -inf for y in values]
    )


class Stream:
    """Turns successive snapshots of one run into messages. Used from one thread at a time."""

    def __init__(self, *, history: int = HISTORY, panes: Iterable[str] = tuple(PANES)) -> None:
        self._history, self._panes = history, tuple(panes)
        self.reset()

    def reset(self) -> None:
        """Make the next messages the whole run."""
        self._sent: dict[str, _Sent] = {}
        self._words: dict[str, str] = {}
        self._charts: list[dict[str, Any]] = []
        self._begin_unix_s: float | None = None
        self._is_new = True

    def messages(self, snapshot: Snapshot) -> Iterator[Message]:
        """Yield what is new for a page that has received all messages so far."""
        if self._is_new:
            self._is_new = False
            yield Message(content={"kind": "clear", "series": None})
        # The rows of a long log arrive in parts while it is being read; they are downsampled once, together.
        if not snapshot.behind:
            if self._begin_unix_s is None:
                self._begin_unix_s = snapshot.view.first_unix_s
            figures = figures_of(snapshot.view)
            charts = [described(figure, self._begin_unix_s or 0.0) for figure in figures]
            if charts != self._charts:
                self._charts = charts
                yield Message(content={"kind": "charts", "charts": charts})
            cleared, buffers = self._rows(snapshot, figures)
            if cleared:
                yield Message(content={"kind": "clear", "series": cleared})
            if buffers:
                content = {"kind": "rows", "series": [*buffers]}
                yield Message(content=content, buffers=tuple(buffers.values()))
        words = self._changed_words(snapshot)
        if words:
            yield Message(content={"kind": "words", "panes": words})

    def _changed_words(self, snapshot: Snapshot) -> dict[str, str]:
        status = (
            snapshot.status if snapshot.error is None else f"{snapshot.status} | {snapshot.error}"
        )
        lines = [f"{snapshot.run.name}: {status}"]
        if snapshot.error is None and not snapshot.behind:
            verdict = verdict_of(snapshot.view, snapshot.state, snapshot.run.path)
            lines.insert(0, verdict.signed())
        found = {"status": _cut("\n".join(lines))}
        found |= {
            name: _cut("\n".join(PANES[name].lines(snapshot, False, PAGE_WIDTH)))
            for name in self._panes
        }
        changed = {name: text for name, text in found.items() if self._words.get(name) != text}
        self._words |= changed
        return changed

    def _rows(
        self, snapshot: Snapshot, figures: Sequence[Figure]
    ) -> tuple[list[str], dict[str, bytes]]:
        """Return the series to forget, those of a table that was cut back, as a resume does, or replaced; and the
        unsent rows of each series."""
        curves = {"step": Curve(name="step", table=snapshot.view.steps, column="step")}
        curves |= {
            series_key(figure, curve): curve for figure in figures for curve in figure.curves
        }
        cleared, buffers = [], {}
        for key, curve in curves.items():
            table, sent = curve.table, self._sent.get(key)
            if sent is not None and sent.storage is not table.columns and sent.rows == len(table):
                # Rebuilt for each view, of rows that are never changed.
                sent.storage = table.columns
            if sent is not None and (sent.storage is not table.columns or len(table) < sent.rows):
                cleared.append(key)
                sent = None
            if sent is None:
                sent = self._sent[key] = _Sent(table.columns)
            xs = table.column(curve.times, sent.rows) - (self._begin_unix_s or 0.0)
            ys = table.column(curve.column, sent.rows)
            rows = points(xs, ys, LIVE if sent.rows else self._history)
            sent.rows = len(table)
            if rows:
                drawn = tuple(curve.drawn(y) for _, y in rows if y is not None)
                buffers[key] = array("f", [x for x, _ in rows]).tobytes() + _floats(drawn).tobytes()
        return cleared, buffers


def _cut(text: str) -> str:
    """Truncate a text and drop its control characters; the log has the rest."""
    text = printable(text)
    if len(text) <= PANE_CHARACTERS:
        return text
    return f"{text[:PANE_CHARACTERS]}\n... and {len(text) - PANE_CHARACTERS} characters more in the log"
