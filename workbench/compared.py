"""Compare several runs: the metrics, the x axes, and the texts.

Each run has its own feed, and its columns are read in place, so a run of a million steps costs no more to
draw than a short one. The x axis is one of:

    step     optimizer steps
    tokens   tokens that went through the model so far
    time     seconds since the first line of the run's log, start-up included; a clock that was
             set back counts as stopped until it has caught up
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from engine.log.downsample import GAP, Trace, buckets, equal_widths
from engine.log.folder import RunFolder, WatchedCommand
from engine.log.table import is_absent, numbers
from engine.log.view import RunView
from engine.report.compared import METRICS, Difference, Metric, all_settings, differing
from engine.units import format_count, format_seconds
from engine.watch.runs_feed import READ_BUDGET_S
from workbench.feed import RunFeed, Snapshot
from workbench.paths import path_text

if TYPE_CHECKING:
    from engine.log.table import Numbers

AXES = ("step", "tokens", "time")
MAX_PAUSE_S = 60.0
"""Pause between two steps, in seconds, that a line still joins: an evaluation or a checkpoint takes less. Twice the
longest step is added to it."""


def axis_text(axis: str, x: float) -> str:
    """Format a value of an x axis."""
    return {"step": lambda: f"{x:.0f}", "tokens": lambda: format_count(round(x))}.get(
        axis, lambda: format_seconds(x)
    )()


@dataclass(frozen=True, kw_only=True, eq=False)
class Compared:
    """One of the compared runs at one poll."""

    slot: int
    """The index of its style: letter, colour and marker."""
    snapshot: Snapshot
    settings: Mapping[str, str]
    """Every effective setting; for `auto`, with the value it resolved to."""

    @property
    def view(self) -> RunView:
        return self.snapshot.view

    @property
    def state(self) -> str:
        return self.snapshot.state

    @property
    def command(self) -> WatchedCommand | None:
        return self.snapshot.command

    @cached_property
    def tokens(self) -> Numbers:
        """Tokens up to and including each step."""
        tokens = self.view.steps.column("tokens").copy()
        # An absent number is a NaN, which alone is not equal to itself, and counts as none.
        tokens[tokens != tokens] = 0.0
        return tokens.cumsum()

    @property
    def total_tokens(self) -> float | None:
        return float(self.tokens[-1]) if len(self.tokens) else None

    def _xs(self, axis: str) -> Numbers:
        """Return the x of each step."""
        if axis == "tokens":
            return self.tokens
        if axis == "time":
            return self.view.steps.column("clock_s") - (self.view.first_unix_s or 0.0)
        return self.view.steps.column("step")

    def _series(self, metric: Metric, axis: str) -> tuple[Numbers, Numbers]:
        """Return x and value of each step, or for the held-out loss of each evaluation of the student, the one before
        the first step included."""
        xs, steps = self._xs(axis), self.view.steps
        if metric.column:
            return xs, steps.column(metric.column)
        evals = [done for done in self.view.evals if done.subject in ("student", "untrained")]
        rows = [steps.find("step", done.step + 0.5) - 1 for done in evals]
        places = [
            float(done.step) if axis == "step" else float(xs[row]) if row >= 0 else 0.0
            for done, row in zip(evals, rows, strict=True)
        ]
        return numbers(places), numbers([done.loss for done in evals])

    def has(self, metric: Metric) -> bool:
        """Return whether the run has a value of the metric, finite or not."""
        if not metric.column:
            return not is_absent(self._series(metric, "step")[1]).all()
        span = self.view.steps.range(metric.column)
        return span.low is not None or span.non_finite

    def extent(self, metric: Metric, axis: str) -> tuple[float, float] | None:
        """Return the lowest and the highest x; None before there is any."""
        xs, _ = self._series(metric, axis)
        return (float(xs[0]), float(xs[-1])) if len(xs) else None

    def trace(self, metric: Metric, axis: str, low: float, high: float, count: int) -> Trace:
        """Return the metric in at most `count` buckets of equal width on [low, high]."""
        xs, ys = self._series(metric, axis)
        found = buckets(xs, ys, equal_widths(xs, low, high, count))
        if axis != "tokens":
            # Empty buckets are dropped: only the distance between two neighbours decides whether they are joined.
            found = [bucket for bucket in found if bucket.low is not None or bucket.non_finite]
        return Trace(
            name=self.snapshot.run.name,
            buckets=tuple(found),
            last=_entry(ys, len(ys) - 1),
            gap=self._gap(metric, axis),
        )

    def _gap(self, metric: Metric, axis: str) -> float:
        """Return the largest x distance at which two neighbours are joined by a line: a missing step, or a long time
        without steps, breaks it. A metric that is logged only every N steps may have gaps of about N steps."""
        steps = self.view.steps
        if axis == "tokens" or not metric.column:
            return math.inf
        if axis == "step":
            return GAP * max(1.0, steps.spacing(metric.column, "step"))
        longest = steps.range("step_s").high or 0.0
        return max(MAX_PAUSE_S + 2 * longest, GAP * steps.spacing(metric.column, "clock_s"))

    def value_at(self, metric: Metric, axis: str, x: float) -> float | None:
        """Return the newest value at or before x; None before the run's first one, where it is absent, or, except for
        the held-out loss, after its last step."""
        xs, ys = self._series(metric, axis)
        if not len(xs) or (metric.column and x > xs[-1]):
            return None
        return _entry(ys, bisect_right(xs, x) - 1)


def _entry(column: Numbers, row: int) -> float | None:
    """Return one entry of a column; None where it is absent, or before the first."""
    return None if row < 0 or is_absent(column[row : row + 1])[0] else float(column[row])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """The compared runs as of one poll, ordered by slot, so by the letters that label them."""

    runs: tuple[Compared, ...]
    behind: bool

    def extent(self, metric: Metric, axis: str) -> tuple[float, float] | None:
        """Return the x range that covers all runs."""
        extents = [x for run in self.runs if (x := run.extent(metric, axis)) is not None]
        return (min(x[0] for x in extents), max(x[1] for x in extents)) if extents else None

    def metrics(self) -> tuple[Metric, ...]:
        """Return the metrics that at least one of the runs has; the first of METRICS if none has any."""
        logged = [x for x in METRICS if any(run.has(x) for run in self.runs)]
        return tuple(logged) or METRICS[:1]


class CompareFeed:
    """Polls the runs; `chosen` maps each slot (the index of a style) to its run."""

    def __init__(self, chosen: Mapping[int, RunFolder]) -> None:
        budget_s = READ_BUDGET_S / max(1, len(chosen))
        self._feeds = {
            slot: RunFeed(run, budget_s=budget_s) for slot, run in sorted(chosen.items())
        }

    def poll(self) -> Comparison:
        """Return the runs as they are now."""
        runs = tuple(map(_compared, self._feeds, self._feeds.values()))
        return Comparison(runs=runs, behind=any(run.snapshot.behind for run in runs))


def _compared(slot: int, feed: RunFeed) -> Compared:
    snapshot = feed.poll()
    settings = all_settings(feed.run, snapshot.view, snapshot.command)
    return Compared(slot=slot, snapshot=snapshot, settings=settings)


# Texts.


def differences(runs: Sequence[Compared], here: Path | None = None) -> list[Difference]:
    """Return the settings that differ; paths are shown relative to `here`, by default the current folder, where that
    is shorter."""
    return differing(runs, lambda value: path_text(value, here))
