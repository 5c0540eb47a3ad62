"""What the charts of a run show: the numbers and their references, for the terminal, the report and the notebook.

The losses of training are means of an objective that mixes cross entropy and divergence, over the rows of one
step. Those on held-out text are cross entropies over the same rows each time, of student and teacher alike, so
only they can be compared with the teacher's: they have a chart of their own.

    gap closed    (start - student) / (start - teacher), each a held-out cross entropy
    lanes         readings as shares of what is full: utilisation of 100 %, memory of what there is
"""

# Shapes: C cells of a lane

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.log.table import Table
from engine.log.view import RunView

LOSSES = ("loss", "ce", "kd")
OF_STUDENT = ("untrained", "student")
LEAST_GAP = 1e-3
"""Nats between start and teacher, below which a share of the gap says nothing."""


def held_out(view: RunView) -> list[tuple[float, float]]:
    """Return step and loss, in nats, of each evaluation of the student on held-out text, the start's first; of
    several at one step the newest."""
    found = {
        float(done.step): done.loss
        for done in view.evals
        if done.subject in OF_STUDENT and done.loss is not None
    }
    return sorted(found.items())


def references(view: RunView) -> dict[str, float]:
    """Return the held-out losses that the student's are compared with: of the teacher, and of itself at the start."""
    found = {}
    for subject, name in (("teacher", "teacher"), ("untrained", "start")):
        done = view.eval_of(subject)
        if done is not None and done.loss is not None and math.isfinite(done.loss):
            found[name] = done.loss
    return found


def gap_closed(view: RunView) -> float | None:
    """Return how much of the way from its start to the teacher the student has come on held-out text; None where
    that is not known, or the teacher is no better than the start was."""
    known, losses = references(view), held_out(view)
    if len(losses) < 2 or len(known) < 2 or known["start"] - known["teacher"] < LEAST_GAP:
        return None
    newest = losses[-1][1]
    share = (known["start"] - newest) / (known["start"] - known["teacher"])
    return share if math.isfinite(share) else None


def gap_text(view: RunView) -> str:
    """Say how much of the gap is closed; empty where that is not known."""
    share = gap_closed(view)
    if share is None:
        return ""
    return f"gap closed: {share:.0%}" if share >= 0 else f"worse than at the start: {share:.0%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A reading over time as a share of what is full."""

    name: str
    table: Table
    column: str
    full: float

    @property
    def newest(self) -> float | None:
        """The newest reading as a share."""
        value = self.table.last(self.column)
        return None if value is None or not math.isfinite(value) else value / self.full

    def at(self, unix_s: float) -> float | None:
        """Return the reading at a time as a share."""
        return self.shares([unix_s, math.nextafter(unix_s, math.inf)])[0]

    def shares(self, edges_s: Sequence[float]) -> list[float | None]:
        """Return the mean share between each two of the C + 1 unix times, which do not decrease, (C,)."""
        means = self.table.means(self.column, "unix_s", edges_s)
        return [None if mean is None else mean / self.full for mean in means]


def lanes_of(view: RunView) -> list[Lane]:
    """Return the lanes of each GPU, what decides most first; without a GPU those of CPU and memory."""
    by_kind: list[list[Lane]] = [[], [], [], []]
    several = len(view.gpu_tables) > 1
    for index, table in sorted(view.gpu_tables.items()):
        of = str(index) if several else ""
        newest = view.gpus.get(index)
        busy = "SM" if table.last("sm_util_pct") is not None else "GPU"
        column = "sm_util_pct" if busy == "SM" else "gpu_util_pct"
        total = None if newest is None else newest.gpu_mem_total_bytes
        limit = None if newest is None else newest.gpu_power_limit_w
        for kind, name, column_, full in (
            (by_kind[0], busy, column, 100.0),
            (by_kind[1], "mem", "gpu_mem_used_bytes", total),
            (by_kind[2], "W", "gpu_power_w", limit),
            (by_kind[3], "TC", "tensor_util_pct", 100.0),
        ):
            if full and table.last(column_) is not None:
                kind.append(Lane(name=name + of, table=table, column=column_, full=full))
    lanes = [lane for kind in by_kind for lane in kind]
    if lanes or view.gpu_tables:
        return lanes
    host, cores = view.host, _cores(view)
    total = None if host is None else host.host_total_bytes
    for name, column, full in (
        ("CPU", "family_cpu_pct", None if cores is None else 100.0 * cores),
        ("mem", "trainer_rss_bytes", total),
    ):
        if full and view.hosts.last(column) is not None:
            lanes.append(Lane(name=name, table=view.hosts, column=column, full=full))
    return lanes


def _cores(view: RunView) -> float | None:
    facts = view.facts or {}
    found = facts.get("cpu_effective", facts.get("cpu_count"))
    return float(found) if isinstance(found, int | float) else None
