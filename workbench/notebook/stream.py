"""Send a run as messages to a page: what is new in each snapshot, as binary rows and changed text.

    clear   {"kind": "clear", "series": [...] or None}    forget these series, or all
    rows    {"kind": "rows", "series": [names]}           and one buffer for each: float32, all x, then all y
    words   {"kind": "words", "panes": {name: text}}      only those that changed

Its only state is how many rows of each table were sent. `reset` clears that, so that the next messages are
the whole run again; a view that was opened or reloaded requests it. History is thinned to HISTORY buckets per
series, later additions to LIVE buckets per tick, so that neither a long run nor a fast one floods the page:
at most 6 KB per series to open and 600 bytes per tick later.

x is the step, or seconds since the run began. As float32, steps are exact up to 16 million. An absent value
is not sent; NaN and infinity are sent as they are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.findings.chart import Row, thin
from engine.log.events import Compiled
from engine.log.table import Table
from engine.log.view import LineKey
from engine.terminal import printable
from workbench.feed import Snapshot
from workbench.panes import page_panes

HISTORY, LIVE = 256, 24
PANE_CHARACTERS = 6000
STEPS = ("loss", "ce", "kd", "step_s")
HOST = ("host_available_bytes", "trainer_rss_bytes")
GPU = ("gpu_util_pct", "tensor_util_pct", "gpu_mem_used_bytes")
PANES = page_panes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a comm: JSON content and binary buffers."""

    content: dict[str, Any]
    buffers: tuple[bytes, ...] = ()


@dataclass(slots=True)
class _Sent:
    """What was sent of one table: its storage, and the number of rows."""

    storage: object
    rows: int = 0


@dataclass(slots=True)
class _Batch:
    cleared: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    buffers: list[bytes] = field(default_factory=list)

    def add(self, name: str, rows: tuple[Row, ...]) -> None:
        if rows:
            xs, ys = zip(*rows, strict=True)
            self.names.append(name)
            self.buffers.append(array("f", xs).tobytes() + _floats(ys).tobytes())


class _Since(Sequence[float | None]):
    """The rows of a column from `start` on, minus an origin; thinning reads only a few of very many."""

    def __init__(self, table: Table, name: str, start: int, begin: float) -> None:
        self._table, self._name, self._start, self._begin = table, name, start, begin

    def __len__(self) -> int:
        return len(self._table) - self._start

    def __getitem__(self, index: Any) -> Any:
        value = self._table.value(self._name, self._start + index)
        return None if value is None else value - self._begin


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
        self._evals = 0
        self._compiled: LineKey | None = None
        self._begin_unix_s: float | None = None
        self._is_new = True

    def messages(self, snapshot: Snapshot) -> Iterator[Message]:
        """Yield what is new for a page that has received all messages so far."""
        if self._is_new:
            self._is_new = False
            yield Message(content={"kind": "clear", "series": None})
        # The rows of a long log arrive in parts while it is being read; they are thinned once, together.
        if not snapshot.behind:
            batch = self._rows(snapshot)
            if batch.cleared:
                yield Message(content={"kind": "clear", "series": batch.cleared})
            if batch.names:
                content = {"kind": "rows", "series": batch.names}
                yield Message(content=content, buffers=tuple(batch.buffers))
        words = self._changed_words(snapshot)
        if words:
            yield Message(content={"kind": "words", "panes": words})

    def _changed_words(self, snapshot: Snapshot) -> dict[str, str]:
        status = (
            snapshot.status if snapshot.error is None else f"{snapshot.status} | {snapshot.error}"
        )
        found = {"status": _cut(f"{snapshot.run.name}: {status}")}
        found |= {name: _cut("\n".join(PANES[name](snapshot))) for name in self._panes}
        changed = {name: text for name, text in found.items() if self._words.get(name) != text}
        self._words |= changed
        return changed

    def _rows(self, snapshot: Snapshot) -> _Batch:
        view, batch = snapshot.view, _Batch()
        if self._begin_unix_s is None:
            self._begin_unix_s = view.first_unix_s
        begin = self._begin_unix_s or 0.0
        self._table(batch, "steps", view.steps, "step", {name: name for name in STEPS}, 0.0)
        self._table(batch, "host", view.hosts, "unix_s", {name: name for name in HOST}, begin)
        for index, table in sorted(view.gpu_tables.items()):
            names = {f"gpu{index}.{name}": name for name in GPU}
            self._table(batch, f"gpu{index}", table, "unix_s", names, begin)
        if len(view.evals) < self._evals:
            batch.cleared.append("held-out")
            self._evals = 0
        evals = [e for e in view.evals[self._evals :] if e.subject == "student"]
        self._evals = len(view.evals)
        batch.add("held-out", tuple((float(e.step), e.loss) for e in evals if e.loss is not None))
        compiled = [
            line
            for line in view.lines
            if isinstance(line.event, Compiled)
            and (self._compiled is None or line.key > self._compiled)
        ]
        if compiled:
            self._compiled = compiled[-1].key
            # Compiles after warm-up, which delay a step, are drawn high.
            rows = [
                (line.unix_s - begin, 90.0 if line.event.after_warm_up else 10.0)
                for line in compiled
                if isinstance(line.event, Compiled)
            ]
            batch.add("compile", thin([x for x, _ in rows], [y for _, y in rows], self._history))
        return batch

    def _table(
        self,
        batch: _Batch,
        key: str,
        table: Table,
        x: str,
        names: Mapping[str, str],
        begin: float,
    ) -> None:
        """Send the unsent rows of a table; all of them when it was cut back, as a resume does."""
        sent = self._sent.get(key)
        if sent is not None and (sent.storage is not table.columns or len(table) < sent.rows):
            batch.cleared += names
            sent = None
        if sent is None:
            sent = self._sent[key] = _Sent(table.columns)
        if sent.rows == len(table):
            return
        limit = LIVE if sent.rows else self._history
        xs = _Since(table, x, sent.rows, begin)
        for name, column in names.items():
            batch.add(name, thin(xs, table.values(column, sent.rows), limit))
        sent.rows = len(table)


def _cut(text: str) -> str:
    """Truncate a text and drop its control characters; the log has the rest."""
    text = printable(text)
    if len(text) <= PANE_CHARACTERS:
        return text
    return f"{text[:PANE_CHARACTERS]}\n... and {len(text) - PANE_CHARACTERS} characters more in the log"
