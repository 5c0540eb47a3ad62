"""The words of the text panes of every surface, from a snapshot. Pure; the sentences themselves are
`engine.runlog.text`'s and `engine.runlog.summary`'s."""

from __future__ import annotations

from engine.runlog.summary import check_lines, kernel_lines
from engine.runlog.text import (
    alert_lines,
    clock_text,
    decision_lines,
    device_lines,
    host_lost_text,
    ledger_line,
    result_lines,
)
from engine.units import format_bytes, format_seconds
from workbench.feed import Snapshot


def device_words(snapshot: Snapshot) -> list[str]:
    """The newest readings, and how old they are when they are not of now."""
    view = snapshot.view
    newest = [view.hosts.last("unix_s"), *(t.last("unix_s") for t in view.gpu_tables.values())]
    times = [unix_s for unix_s in newest if unix_s is not None]
    lines = device_lines(view)
    if ledger := ledger_line(view):
        lines.append(ledger)
    if times and (snapshot.has_ended or snapshot.now_unix_s - max(times) > 10):
        age = format_seconds(max(0.0, snapshot.now_unix_s - max(times)))
        lines.append(f"read {age} ago, at {clock_text(max(times))}")
    return lines


def decision_words(snapshot: Snapshot) -> list[str]:
    """Every automatic choice with its reason, what was not chosen, and how to choose otherwise."""
    if not snapshot.view.decisions:
        return ["no decision logged yet"]
    return [line for decision in snapshot.view.decisions for line in decision_lines(decision)]


def check_words(snapshot: Snapshot) -> list[str]:
    """The first-minute checks: what failed, then what could not be told, then what holds."""
    return check_lines(snapshot.view)


def kernel_words(snapshot: Snapshot) -> list[str]:
    """The kernel caches: hits, misses, and each compile, newest first."""
    return kernel_lines(snapshot.view)


def alert_words(snapshot: Snapshot) -> list[str]:
    """The alerts that stand."""
    lines = [line for alert in snapshot.view.alerts.values() for line in alert_lines(alert)]
    return lines or ["no alert stands"]


def result_words(snapshot: Snapshot) -> list[str]:
    """How the run ended, what came of it, and where it is."""
    view = snapshot.view
    lines = []
    if not snapshot.has_ended:
        lines.append("the run is not over; so far:")
    elif view.finished is not None:
        lines.append(f"{view.finished.state} at step {view.finished.step}: {view.finished.reason}")
    elif view.exit is not None:
        lines.append(f"{snapshot.state}: {view.exit.sentence}")
    elif snapshot.state == "host_lost":
        lines.append(f"host lost: {host_lost_text(view)}")
    elif snapshot.state == "vanished":
        lines.append("vanished: no process of it exists and nobody recorded its end")
    else:
        lines.append(snapshot.state)
    if view.non_finite:
        first = view.non_finite[0]
        lines.append(
            f"NON-FINITE: {first.field} is {first.value} at step {first.step}"
            + (f", and {len(view.non_finite) - 1} more" if len(view.non_finite) > 1 else "")
        )
    for alert in view.alerts.values():
        lines += alert_lines(alert)
    lines += result_lines(view) or ["no held-out loss was measured"]
    if view.checkpoints and view.student is None:
        newest = view.checkpoints[-1]
        lines.append(
            f"newest checkpoint: {newest.path} "
            f"(step {newest.step}, {format_bytes(newest.size_bytes)})"
        )
    lines.append(f"run folder: {snapshot.run.path}")
    return lines
