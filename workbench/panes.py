"""The panes of a run: one table row each, read by the terminal's run screen and by the notebook.

A pane is added by a row of `PANES` and a function that makes its lines from a snapshot. The terminal gives
it a place, a key, a tab, and a line of help; the notebook gives it a part of the page.
The functions are pure; the sentences come from `engine.log.text`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from engine.log.events import IDLE, STEP_PHASES
from engine.log.identities import identity_lines
from engine.log.text import (
    OTHERS_DATA,
    OTHERS_KERNELS,
    OTHERS_RESULT,
    OTHERS_SAMPLES,
    alert_lines,
    check_lines,
    clock_text,
    command_lines,
    data_lines,
    decision_lines,
    device_lines,
    event_text,
    kernel_lines,
    result_lines,
    run_device_lines,
    sample_lines,
)
from engine.log.view import RunView
from engine.units import format_bytes, format_count, format_seconds
from workbench.feed import Snapshot
from workbench.paths import with_short_paths


def machine_words(snapshot: Snapshot, width: int, ascii_only: bool) -> list[str]:
    """Return the newest readings, with their age when they are not current; of a run that has ended those over the
    whole run."""
    view = snapshot.view
    if snapshot.has_ended and (lines := run_device_lines(view, width)):
        return ["over the whole run:", *lines]
    newest = [view.hosts.last("unix_s"), *(t.last("unix_s") for t in view.gpu_tables.values())]
    times = [unix_s for unix_s in newest if unix_s is not None]
    lines = device_lines(view, width)
    if times and snapshot.now_unix_s - max(times) > 10:
        age = format_seconds(max(0.0, snapshot.now_unix_s - max(times)))
        lines.append(f"read {age} ago, at {clock_text(max(times))}")
    return lines


PAGE_WIDTH = 100
"""Width of the notebook's page in characters."""
RECENT = 200
"""Number of the session's newest steps whose median and range of step times are shown."""


def speed_words(snapshot: Snapshot, width: int, ascii_only: bool) -> list[str]:
    """Return the pace, the phases of the newest step as bars, the share of the device's peak, and the phases of the
    session's start."""
    return [
        *_pace_lines(snapshot.view),
        *_step_bars(snapshot.view, width, ascii_only),
        *_peak_lines(snapshot.view),
        *start_words(snapshot.view, width, ascii_only),
    ]


def start_words(view: RunView, width: int, ascii_only: bool) -> list[str]:
    """Return the phases of the session's start that took 1 % of it or more as bars, in their order; nothing before its
    log is open."""
    seconds = view.start_s()
    total = sum(seconds.values())
    shown = {name: s for name, s in seconds.items() if s >= 0.01 * total > 0}
    if not shown:
        return []
    until = "to the first step" if view.first_step_unix_s is not None else "so far, no step yet"
    return [f"start  {format_seconds(total)} {until}", *_bars(shown, width, ascii_only)]


def _pace_lines(view: RunView) -> list[str]:
    begin = max(view.session_row, len(view.steps) - RECENT)
    times = sorted(
        s for s in view.steps.values("step_s", begin) if s is not None and 0 <= s < math.inf
    )
    pace = view.tokens_per_second()
    if not times and view.process is not None:
        return ["unknown: a process that is watched from outside does not report its steps"]
    if not times:
        if view.imported is not None:
            return ["the imported log has no times of steps"]
        return ["no step of this session timed yet"]
    typical = f"{format_seconds(times[len(times) // 2])} a step"
    span = f"{format_seconds(times[0])} to {format_seconds(times[-1])} in the last {len(times)}"
    rate = "" if pace is None else f"{format_count(pace)} tok/s, "
    return [f"{rate}{typical} (median; {span})"]


def _step_bars(view: RunView, width: int, ascii_only: bool) -> list[str]:
    if not 0 < sum(view.phases.values()) < math.inf:
        return [] if view.imported is not None else ["no phases of a step measured yet"]
    names = [name for name in (*STEP_PHASES, IDLE) if name in view.phases]
    if len(names) < len(view.phases):
        # The phases of a watched script have names of its own.
        names = list(view.phases)
    return _bars({name: view.phases[name] for name in names}, width, ascii_only)


def _bars(parts: Mapping[str, float], width: int, ascii_only: bool) -> list[str]:
    """Return a bar for each part of a whole, by its seconds."""
    names, total = list(parts), sum(parts.values())
    longest = max(len(name) for name in names)
    room = max(4, min(40, width - longest - 16))
    full, rest = ("#", ".") if ascii_only else ("█", "░")
    lines = []
    for name in names:
        seconds = parts[name]
        share = seconds / total if math.isfinite(seconds) else 0.0
        cells = min(room, round(share * room))
        bar = full * cells + rest * (room - cells)
        lines.append(f"{name:<{longest}} {bar} {format_seconds(seconds):>7} {share:>4.0%}")
    return lines


def _peak_lines(view: RunView) -> list[str]:
    started, pace = view.started, view.tokens_per_second()
    if started is None or pace is None:
        return []
    if not started.flops_per_token:
        return ["bound  the FLOPs per token are not known"]
    rate = pace * started.flops_per_token
    if not started.peak_flops_per_s:
        why = started.peak_source or "the peak rate of this device is not known"
        return [f"bound  {rate / 1e12:.3g} TFLOP/s; {why}"]
    peak = started.peak_flops_per_s
    return [
        f"bound  {rate / peak:.0%} of the device's peak: {rate / 1e12:.3g} of {peak / 1e12:.4g} TFLOP/s "
        f"({started.peak_source})"
    ]


def decision_words(snapshot: Snapshot) -> list[str]:
    """Return every automatic choice with its reason, the rejected values, and how to override it; the command of a
    watched script."""
    if snapshot.command is not None:
        return command_lines(snapshot.view, snapshot.command)
    if not snapshot.view.decisions:
        return ["no decision logged yet"]
    return [line for decision in snapshot.view.decisions for line in decision_lines(decision)]


def check_words(snapshot: Snapshot) -> list[str]:
    """Return the first-minute checks: failed, then unknown, then passed, and below their counts whether the run was
    verified; the identities of a watched script."""
    if snapshot.command is not None:
        return identity_lines(snapshot.view)
    counts, *rest = check_lines(snapshot.view)
    return [counts, *filter(None, [snapshot.verification]), *rest]


def data_words(snapshot: Snapshot) -> list[str]:
    """Return what the run trains on, and which commands show its text."""
    if snapshot.view.imported is not None:
        return ["unknown: the imported log does not describe the data"]
    if snapshot.command is not None:
        return [OTHERS_DATA]
    lines = data_lines(snapshot.view)
    if not lines:
        return ["the data has not been read yet"]
    return [
        *lines,
        "",
        "decoded samples, lengths and copies: engine data SPEC",
        "what one step trained on: engine data RUN --step N",
    ]


def sample_words(snapshot: Snapshot) -> list[str]:
    """Return the text that the models wrote after one held-out prompt at each evaluation."""
    if snapshot.command is not None and not any(done.sample for done in snapshot.view.evals):
        return [OTHERS_SAMPLES]
    return sample_lines(snapshot.view)


def kernel_words(snapshot: Snapshot) -> list[str]:
    """Return the kernel caches: hits, misses, and each compile, newest first."""
    view = snapshot.view
    if snapshot.command is not None and not view.compiles:
        return [OTHERS_KERNELS]
    return kernel_lines(view)


ALERTS_SHOWN = 100
"""Number of alerts in a pane: thousands would take seconds to lay out, in the thread that handles keys and signals."""


def alert_words(snapshot: Snapshot) -> list[str]:
    """Return the active alerts."""
    return _alert_lines(snapshot) or ["no active alerts"]


def _alert_lines(snapshot: Snapshot) -> list[str]:
    alerts = snapshot.view.alerts
    hidden = len(alerts) - ALERTS_SHOWN
    newest = list(islice(reversed(alerts.values()), ALERTS_SHOWN))[::-1]
    lines = [f"and {hidden:,} earlier alerts, in the log"] if hidden > 0 else []
    return lines + [line for alert in newest for line in alert_lines(alert)]


def outcome_words(snapshot: Snapshot) -> list[str]:
    """Return the results of a run and its folder; how it ended is in the status above every pane."""
    view = snapshot.view
    lines = [] if snapshot.has_ended else ["still running; so far:"]
    if view.script_ended is not None and view.script_ended.exception is not None:
        lines.append(event_text(view.script_ended))
    if view.non_finite:
        first = view.non_finite[0]
        lines.append(
            f"NON-FINITE: {first.id} is {first.text} at step {first.step}"
            + (f", and {len(view.non_finite) - 1} more" if len(view.non_finite) > 1 else "")
        )
    lines += _alert_lines(snapshot)
    lines += result_lines(view) or [
        "no held-out loss was measured" if snapshot.command is None else OTHERS_RESULT
    ]
    if view.checkpoints and view.student is None:
        newest = view.checkpoints[-1]
        lines.append(
            f"newest checkpoint: {newest.path} "
            f"(step {newest.step}, {format_bytes(newest.size_bytes)})"
        )
    lines.append(f"run folder: {snapshot.run.path}")
    return lines


Words = Callable[[Snapshot], list[str]]
"""The lines of a pane. A line without leading space is a heading of the indented lines below it."""
LAST = 99
LEAST_WIDTH = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Pane:
    """One pane of a run."""

    id: str
    title: str
    title_of_watched: str = ""
    """Title for a watched script; empty if it is the same."""
    words: Words | None = None
    """Function that returns the lines; None for the timeline and the log, which have their own widgets."""
    fitted: Callable[[Snapshot, int, bool], list[str]] | None = None
    """Instead of `words`: lines made for a width in cells, in ASCII only if asked."""
    label: str = ""
    """Name in tabs and keys; the id is used if it is empty."""
    help: str = ""
    """Help in Markdown: a heading and a description."""
    column: Literal["left", "right", "below"] = "right"
    """Position on a large terminal."""
    letter: str = ""
    """Second key of a pane whose first key, such as F10, many terminals reserve for themselves."""
    when: Literal["always", "ended", "alerts", "tall", "chosen"] = "chosen"
    """Condition on which a large terminal shows it without being chosen: always, at the end of the run, with an active
    alert, or with many rows."""
    page: int | None = LAST
    """Rank on the notebook's page; None if the page does not show it."""

    @property
    def name(self) -> str:
        """The name in tabs and keys."""
        return self.label or self.id

    @property
    def key(self) -> str:
        """The key that chooses it: its position in the table as a digit, and F10 and so on after the ninth."""
        place = 1 + [pane.id for pane in PANES].index(self.id)
        return str(place) if place <= 9 else f"f{place}"

    @property
    def shown_key(self) -> str:
        """The key in tabs and titles."""
        return self.letter or self.key

    @property
    def has_lines(self) -> bool:
        return self.words is not None or self.fitted is not None

    def lines(self, snapshot: Snapshot, ascii_only: bool, width: int) -> list[str]:
        """Return its lines for a width in cells."""
        if self.fitted is not None:
            return self.fitted(snapshot, max(width, LEAST_WIDTH), ascii_only)
        return [] if self.words is None else [*map(with_short_paths, self.words(snapshot))]

    def numbered_title(self, *, watched: bool = False) -> str:
        """Return the title after the key; for a watched script if `watched`."""
        return f"{self.shown_key} {(watched and self.title_of_watched) or self.title}"


SPEED_HELP = """# Throughput and step time

Tokens per second and the time of a step, then the phases of the newest step by the device's clock: the
time of each. `idle` is time in which the device had no work. The bound compares the arithmetic of
the run with the matrix rate in the datasheet.
"""
DEVICE_HELP = """# GPUs and host

A row for each GPU: utilisation, memory of the trainer with its descendants and of other processes, power and its
limit, temperature and clock; a `!` marks a clock that is held down by heat or a power brake. Below are the reasons of
low
clocks and the processes, once for all GPUs that have the same. Once the run has ended, the numbers are of all of it.
"""
DATA_HELP = """# Data

What the run trains on: documents, tokens, what has labels, and what was left out and why. The digests are of the
tokens as they stand in rows: a resumed run must find the same.
"""
SAMPLES_HELP = """# Samples of text

One prompt of the held-out text, and what teacher and student find most likely after it, token by token, at each
evaluation: what a loss means. `eval.sample_tokens` sets the number of tokens; 0 turns samples off.

With `rollout.share`, first what a model wrote for training: lengths, the share of rows that ended by themselves,
entropy, the divergence from the teacher, and the newest text.
"""
PANES: tuple[Pane, ...] = (
    Pane(
        id="loss",
        title="loss, nats per token",
        title_of_watched="loss",
        column="left",
        when="always",
        page=None,
    ),
    Pane(
        id="pace",
        title="throughput and step time",
        label="step time",
        fitted=speed_words,
        help=SPEED_HELP,
        column="left",
        when="always",
        page=6,
    ),
    Pane(
        id="device",
        title="device and host",
        fitted=machine_words,
        help=DEVICE_HELP,
        when="always",
        page=7,
    ),
    Pane(
        id="decisions",
        title="decisions",
        title_of_watched="command",
        words=decision_words,
        when="always",
        page=4,
    ),
    Pane(id="log", title="log", column="below", when="always", page=None),
    Pane(
        id="result",
        title="result",
        words=outcome_words,
        when="ended",
        page=2,
    ),
    Pane(
        id="checks",
        title="checks",
        title_of_watched="identities",
        words=check_words,
        when="tall",
        page=3,
    ),
    Pane(id="kernels", title="JIT", words=kernel_words, label="JIT", when="tall", page=5),
    Pane(id="alerts", title="alerts", words=alert_words, when="alerts", page=1),
    Pane(
        id="data",
        letter="d",
        title="data",
        words=data_words,
        help=DATA_HELP,
        page=8,
    ),
    Pane(
        id="samples",
        letter="s",
        title="samples of text",
        words=sample_words,
        help=SAMPLES_HELP,
        page=9,
    ),
)
"""Panes in the order of their keys."""


def pane_of(id_: str) -> Pane:
    """Return the pane with that id."""
    return next(pane for pane in PANES if pane.id == id_)


def page_panes() -> dict[str, Pane]:
    """Return the panes of the notebook's page in order."""
    shown = sorted(
        (p.page, n, p) for n, p in enumerate(PANES) if p.page is not None and p.has_lines
    )
    return {pane.id: pane for _, _, pane in shown}
