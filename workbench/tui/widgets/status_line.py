"""The status line: the run, its progress and its state. The screen of a run shows it at every size."""

from __future__ import annotations

import math

from textual.content import Content
from textual.reactive import reactive
from textual.widgets import Static

from engine.log.folder import WatchedCommand
from engine.log.text import has_ended, one_line
from engine.units import format_seconds
from engine.watch.verdict_line import (
    ENDED,
    HEALTHY,
    NO_FAULT,
    SUSPECT,
    UNDECIDED,
    WRONG,
    RunVerdict,
    verdict_of,
)
from workbench.feed import Snapshot
from workbench.tui.layout import is_low, is_tiny
from workbench.tui.names import cut_at_end, shortened

WIDE, NARROW = 100, 60
VERDICT_ROWS = 3
"""Maximum number of rows of a verdict on a narrow terminal."""
TODO_ROWS = 2
"""Maximum number of rows of what to do, below a verdict of one row."""


def bar_text(done: int, total: int, cells: int, *, ascii_only: bool) -> str:
    """Return progress as a bar and a percentage."""
    share = min(1.0, done / total) if total > 0 else 0.0
    filled = int(share * cells)
    full, rest = ("#", ".") if ascii_only else ("━", "╌")
    return f"{full * filled}{rest * (cells - filled)} {math.floor(share * 100)}%".strip()


def heading(snapshot: Snapshot, width: int, *, ascii_only: bool) -> tuple[str, list[str]]:
    """Return the progress, shown next to the name of the run, and the flags after it."""
    view = snapshot.view
    share, parts = "", []
    if view.total_steps is not None:
        cells = 20 if width >= WIDE else 10 if width >= NARROW else 0
        share = bar_text(view.last_step, view.total_steps, cells, ascii_only=ascii_only)
    if view.first_unix_s is not None and width >= NARROW:
        until = view.last_unix_s if snapshot.has_ended else snapshot.now_unix_s
        elapsed_s = (until or 0.0) - view.first_unix_s
        # An imported log without times has none.
        parts += [f"{format_seconds(elapsed_s)} elapsed"] if elapsed_s > 0 else []
    if view.sessions > 1:
        parts.append(f"session {view.sessions}")
    if view.non_finite:
        parts.append(f"× {len(view.non_finite)}{' not finite' if width >= NARROW else ''}")
    problems = sum(note.level in ("warning", "error") for note in view.notes)
    if problems:
        words = f" warning{'s' if problems > 1 else ''}" if width >= NARROW else ""
        parts.append(f"! {problems}{words}")
    return share, parts


COMMAND_CELLS = 16
"""Minimum width of a command, in cells; where less is left, none is shown."""


def with_command(top: str, command: WatchedCommand | None, width: int) -> str:
    """Return a line with the command of a watched script and its commit, as far as they fit."""
    if command is None:
        return top
    commit = f"  {command.commit}" if command.commit else ""
    room = width - len(top) - 2 - len(commit)
    if room < COMMAND_CELLS:
        return top
    return f"{top}  {one_line(shortened(command.short, room))}{commit}"


def what_to_press(verdict: RunVerdict, snapshot: Snapshot) -> str:
    """Return the next action of a verdict, with the keys of the screen instead of commands."""
    if snapshot.view.imported is not None:
        return one_line(verdict.action)
    resume = f"engine distill --resume {snapshot.run.path}"
    todo = verdict.action.replace(resume, "press R to resume it")
    if todo.startswith("test it: "):
        todo = f"press F to test {todo.removeprefix('test it: ')}"
    elif verdict.id.startswith("identity "):
        todo = f"press F to test the change: {todo}"
    return one_line(todo)


class StatusLine(Static):
    """Draws the status of a snapshot."""

    DEFAULT_CSS = """
    StatusLine { height: auto; max-height: 6; padding: 0 1; background: $panel; }
    """

    snapshot: reactive[Snapshot | None] = reactive(None, repaint=False)

    def __init__(self, name: str, *, ascii_only: bool, read_only: bool, id: str) -> None:
        super().__init__(Content(f"{name}: reading its log"), id=id, markup=False)
        self._words = Content()
        self._rows: tuple[int, ...] = ()
        self._run_name, self._ascii_only, self._read_only = name, ascii_only, read_only

    def watch_snapshot(self) -> None:
        self._write()

    on_resize = watch_snapshot

    def _verdict(self, verdict_of_run: RunVerdict, snapshot: Snapshot, width: int) -> list[Content]:
        """Return the verdict in the colour of its level, and what to do in the same row, or below it on a screen
        that is not low."""
        line = verdict_of_run.signed(ascii_only=self._ascii_only)
        style = f"bold $text-{LEVEL_ROLES[verdict_of_run.level]}"
        styled = Content.styled(cut_at_end(line, VERDICT_ROWS * width), style)
        todo = (
            one_line(verdict_of_run.action)
            if self._read_only
            else what_to_press(verdict_of_run, snapshot)
        )
        if not todo:
            return [styled]
        if len(line) + len(todo) + 6 <= width:
            return [Content.assemble(styled, "  ", ("do:", "bold"), f" {todo}")]
        if is_low(*self.app.size) or is_tiny(*self.app.size):
            return [styled]
        rows = TODO_ROWS if len(line) <= width else 1
        cut = cut_at_end(todo, rows * width - 6)
        return [styled, Content.assemble("  ", ("do:", "bold"), f" {cut}")]

    def _write(self) -> None:
        snapshot = self.snapshot
        if snapshot is None:
            return
        width = self.size.width
        after = ["read-only"] if self._read_only else []
        share, flags = heading(snapshot, width, ascii_only=self._ascii_only)
        name, verdict, low = self._run_name, None, is_low(*self.app.size)
        if snapshot.error is None and not snapshot.behind:
            verdict = verdict_of(snapshot.view, snapshot.state, snapshot.run.path)
            if low and verdict.level == HEALTHY:
                # A row of its own would be missed by the chart.
                name = f"{verdict.sign(ascii_only=self._ascii_only)} {name}"
        if width < WIDE:
            name = shortened(name, 24 if width >= NARROW else 16)
        top = "  ".join([name, *([share] if share else []), *flags, *after])
        top = with_command(top, snapshot.command, width - 2)
        lines = [
            _bold_to(top, "  ", "bold"),
            _bold_to(snapshot.status, " | ", f"bold reverse $text-{state_role(snapshot.state)}"),
        ]
        if verdict is not None and (not low or verdict.level != HEALTHY):
            lines = [*self._verdict(verdict, snapshot, max(1, width - 2)), *lines]
        if snapshot.error is not None:
            lines += [Content(line) for line in snapshot.error.splitlines()]
        # A layout redraws the whole screen, so it is requested only when the row count changes.
        rows = tuple(-(-line.cell_length // max(1, width - 2)) for line in lines)
        words = Content("\n").join(lines)
        if words != self._words:
            self.update(words, layout=rows != self._rows)
        self._words, self._rows = words, rows


LEVEL_ROLES = {
    HEALTHY: "success",
    SUSPECT: "warning",
    WRONG: "error",
    ENDED: "error",
    UNDECIDED: "muted",
}
"""The role of each level's colour in a theme."""


def state_role(state: str) -> str:
    """Return the role of the colour of a run's state: running, ended without a fault, unknown, or with a fault."""
    if state in ("imported", "unwatched"):
        return "muted"
    if not has_ended(state):
        return "primary"
    return "success" if state in NO_FAULT else "error"


def _bold_to(line: str, end: str, style: str) -> Content:
    """Return a line whose words before `end` have a style."""
    first, sign, rest = line.partition(end)
    return Content.assemble((first, style), f"{sign}{rest}")
