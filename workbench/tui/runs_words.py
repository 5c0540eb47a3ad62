"""What the list of runs says besides its rows: its heading, a run in full, and what to do without runs."""

from __future__ import annotations

from collections.abc import Collection

from engine.units import format_count, format_value
from workbench.plot.series import series_style
from workbench.runs_feed import RunRow, RunsSnapshot
from workbench.tui.names import shortened

NO_RUNS = """\
No run in {folders} yet.

Start one with n, or from another terminal:

  make demo                  the example run, with this screen on it
  apr-workbench demo         the same
  engine distill SPEC.toml   a run of your own

It appears here as soon as it has begun."""


def heading(
    snapshot: RunsSnapshot,
    width: int,
    *,
    shown: int | None,
    marked: Collection[int],
    read_only: bool,
) -> str:
    """The first line of the list, at most `width` cells where that is possible; `shown` is how many runs a
    filter leaves, `marked` the styles of marked runs."""
    every = len(snapshot.rows)
    counted = f"{every}" if shown is None else f"{shown} of {every}"
    parts = []
    going_on = sum(row.alive for row in snapshot.rows)
    parts += [f"{going_on} going on"] if going_on else []
    ill = sum(bool(row.alerts) and row.alive for row in snapshot.rows)
    parts += [f"! {ill} with alerts"] if ill else []
    if marked:
        parts.append(f"marked {''.join(series_style(slot).letter for slot in sorted(marked))}")
    parts += ["still reading"] if snapshot.behind else []
    parts += ["read-only"] if read_only else []
    parts += [snapshot.error] if snapshot.error else []
    counted += f" run{'' if every == 1 else 's'} in "
    # The folders are known best: they make room for what is not.
    room = width - len(counted) - sum(len(part) + 2 for part in parts) - 2
    return "  ".join([counted + shortened(_folders(snapshot), max(12, room)), *parts])


def nothing(snapshot: RunsSnapshot, pattern: str) -> str:
    """What is said where no run is shown."""
    if not snapshot.rows:
        return NO_RUNS.format(folders=_folders(snapshot))
    return f"None of the {len(snapshot.rows)} runs has {pattern!r} in it."


def _folders(snapshot: RunsSnapshot) -> str:
    return ", ".join(str(folder) for folder in snapshot.folders)


def told(row: RunRow) -> list[str]:
    """A run in full: where it is, how far, what is wrong."""
    lines = [str(row.path)]
    if row.total_steps is not None:
        words = [f"step {row.last_step}/{row.total_steps}"]
        words += [] if row.loss is None else [f"loss {format_value(row.loss)}"]
        words += [] if row.heldout is None else [f"held-out {format_value(row.heldout)}"]
        speed = row.tokens_per_second
        words += [] if speed is None else [f"{format_count(speed)} tok/s"]
        lines.append(", ".join(words))
    lines += [f"{severity}: {name}" for severity, name in row.alerts[:3]]
    if row.error is not None:
        lines.append(row.error)
    return lines
