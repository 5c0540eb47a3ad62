"""The status line: which run, how far, and its state in words. The one thing that is on every
screen, however small."""

from __future__ import annotations

import math

from textual.content import Content
from textual.reactive import reactive
from textual.widgets import Static

from engine.units import format_seconds
from workbench.feed import Snapshot

WIDE, NARROW = 100, 60


def shortened(text: str, width: int) -> str:
    """Text cut in its middle: the beginning and the end of a run's name both tell."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def bar_text(done: int, total: int, cells: int, *, ascii_only: bool) -> str:
    """Progress as a bar and a percentage."""
    share = min(1.0, done / total) if total > 0 else 0.0
    filled = int(share * cells)
    full, rest = ("#", ".") if ascii_only else ("━", "╌")
    return f"{full * filled}{rest * (cells - filled)} {math.floor(share * 100)}%"


def heading(snapshot: Snapshot, width: int, *, ascii_only: bool) -> list[str]:
    """What stands beside the name of the run."""
    view = snapshot.view
    parts = []
    if view.total_steps is not None:
        cells = 20 if width >= WIDE else 10 if width >= NARROW else 5
        parts.append(bar_text(view.last_step, view.total_steps, cells, ascii_only=ascii_only))
    if view.first_unix_s is not None and width >= NARROW:
        until = view.last_unix_s if snapshot.has_ended else snapshot.now_unix_s
        parts.append(f"{format_seconds(max(0.0, (until or 0.0) - view.first_unix_s))} elapsed")
    if view.sessions > 1:
        parts.append(f"session {view.sessions}")
    if view.non_finite:
        parts.append(f"× {len(view.non_finite)}{' not finite' if width >= NARROW else ''}")
    problems = sum(note.level in ("warning", "error") for note in view.notes)
    if problems:
        words = f" warning{'s' if problems > 1 else ''}" if width >= NARROW else ""
        parts.append(f"! {problems}{words}")
    return parts


class StatusLine(Static):
    """Draws the status of a snapshot."""

    DEFAULT_CSS = """
    StatusLine { height: auto; max-height: 6; padding: 0 1; background: $panel; }
    """

    snapshot: reactive[Snapshot | None] = reactive(None, repaint=False)
    paused: reactive[bool] = reactive(False)
    replay: reactive[str] = reactive("")
    """Where a replay is; empty when the run is shown as it is."""

    def __init__(self, name: str, *, ascii_only: bool, read_only: bool, id: str) -> None:
        super().__init__(Content(f"{name}: reading its log"), id=id, markup=False)
        self._words = Content()
        self._rows: tuple[int, ...] = ()
        self._run_name, self._ascii_only, self._read_only = name, ascii_only, read_only

    def on_resize(self) -> None:
        self._write()

    def watch_snapshot(self) -> None:
        self._write()

    def watch_paused(self) -> None:
        self._write()

    def watch_replay(self) -> None:
        self._write()

    def _write(self) -> None:
        snapshot = self.snapshot
        if snapshot is None:
            return
        width = self.size.width
        parts = heading(snapshot, width, ascii_only=self._ascii_only)
        if self.paused:
            parts.insert(0, "SCREEN PAUSED (space goes on)")
        if self.replay:
            parts.insert(0, self.replay)
        if self._read_only:
            parts.append("read-only")
        name = (
            self._run_name
            if width >= WIDE
            else shortened(self._run_name, 24 if width >= NARROW else 16)
        )
        first = Content.assemble((name, "bold"), *(f"  {part}" for part in parts))
        state, *rest = snapshot.status.split(" | ")
        second = Content.assemble((state, "bold reverse"), *(f" | {part}" for part in rest))
        lines = [first, second]
        if snapshot.error is not None:
            lines += [Content(line) for line in snapshot.error.splitlines()]
        # Laying a screen out draws all of it again: only lines that need other rows are worth that.
        rows = tuple(-(-line.cell_length // max(1, width - 2)) for line in lines)
        words = Content("\n").join(lines)
        if words != self._words:
            self.update(words, layout=rows != self._rows)
        self._words, self._rows = words, rows
