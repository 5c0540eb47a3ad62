"""The words of the text panes of every surface, from a snapshot. Pure; the sentences themselves are
`engine.log.text`'s and `engine.log.summary`'s."""

from __future__ import annotations

import math

from engine.log.summary import check_lines, kernel_lines
from engine.log.text import (
    alert_lines,
    clock_text,
    decision_lines,
    device_lines,
    host_lost_text,
    ledger_line,
    result_lines,
)
from engine.log.view import RunView
from engine.units import format_bytes, format_count, format_seconds
from workbench.feed import Snapshot


def device_words(snapshot: Snapshot) -> list[str]:
    """The newest readings, and where the newest step spent its time."""
    ledger = ledger_line(snapshot.view)
    return [*machine_words(snapshot), *([ledger] if ledger else [])]


def machine_words(snapshot: Snapshot) -> list[str]:
    """The newest readings, and how old they are when they are not of now."""
    view = snapshot.view
    newest = [view.hosts.last("unix_s"), *(t.last("unix_s") for t in view.gpu_tables.values())]
    times = [unix_s for unix_s in newest if unix_s is not None]
    lines = device_lines(view)
    if times and (snapshot.has_ended or snapshot.now_unix_s - max(times) > 10):
        age = format_seconds(max(0.0, snapshot.now_unix_s - max(times)))
        lines.append(f"read {age} ago, at {clock_text(max(times))}")
    return lines


RECENT = 200
"""So many of the newest steps of this session tell how long a step takes."""
PHASES = ("data", "teacher", "student", "loss", "backward", "optimizer", "idle")
"""In the order in which a step goes through them."""


def ledger_words(snapshot: Snapshot, width: int, *, ascii_only: bool) -> list[str]:
    """Pace, the phases of the newest step as bars, and the share of the bound."""
    return [
        *_pace_lines(snapshot.view),
        *_bars(snapshot.view, width, ascii_only),
        *_bound(snapshot.view),
    ]


def _pace_lines(view: RunView) -> list[str]:
    begin = max(view.session_row, len(view.steps) - RECENT)
    times = sorted(
        s for s in view.steps.values("step_s", begin) if s is not None and 0 <= s < math.inf
    )
    pace = view.tokens_per_second()
    if not times:
        return ["no step of this session was timed yet"]
    typical = f"{format_seconds(times[len(times) // 2])} a step"
    around = f"{format_seconds(times[0])} to {format_seconds(times[-1])} in the last {len(times)}"
    rate = "" if pace is None else f"{format_count(pace)} tok/s, "
    return [f"{rate}{typical} (median; {around})"]


def _bars(view: RunView, width: int, ascii_only: bool) -> list[str]:
    total = sum(view.phases.values())
    if not 0 < total < math.inf:
        return ["no phases were measured: the ledger is empty"]
    names = [n for n in PHASES if n in view.phases] + [n for n in view.phases if n not in PHASES]
    longest = max(len(name) for name in names)
    room = max(4, min(40, width - longest - 16))
    full, rest = ("#", ".") if ascii_only else ("█", "░")
    lines = []
    for name in names:
        seconds = view.phases[name]
        share = seconds / total if math.isfinite(seconds) else 0.0
        cells = min(room, round(share * room))
        bar = full * cells + rest * (room - cells)
        lines.append(f"{name:<{longest}} {bar} {format_seconds(seconds):>7} {share:>4.0%}")
    return lines


def _bound(view: RunView) -> list[str]:
    started, pace = view.started, view.tokens_per_second()
    if started is None or pace is None:
        return []
    if not started.flops_per_token:
        return ["bound  the operations of a token are not known"]
    rate = pace * started.flops_per_token
    if not started.peak_flops_per_s:
        why = started.peak_source or "no rate is known for this device"
        return [f"bound  {rate / 1e12:.3g} TFLOP/s of its own arithmetic; {why}"]
    peak = started.peak_flops_per_s
    return [
        f"bound  {rate / peak:.0%} of what the device could: {rate / 1e12:.3g} of {peak / 1e12:.4g} TFLOP/s "
        f"({started.peak_source})"
    ]


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
