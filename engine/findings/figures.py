"""The figures of a run, and of a flip: the same in a report and in a notebook.

    losses       loss, ce, kd and the held-out loss of the student, nats over steps
    step time    seconds over steps
    GPU          utilisation and tensor activity, percent over seconds
    memory       of GPU, trainer and host, bytes over seconds
    pairs        B over A of each pair of a flip, with the margin

A column that was never logged has no line, and a figure without any says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from engine.findings.chart import LIMIT, Row, Series, line_chart, thin
from engine.flips.judge import Pair
from engine.flips.plan import Plan
from engine.log.table import Table
from engine.log.view import RunView

LOSSES = ("loss", "ce", "kd")
GPU = {"gpu_util_pct": "utilisation", "tensor_util_pct": "tensor", "sm_util_pct": "SM busy"}


def run_figures(view: RunView, *, limit: int = LIMIT) -> list[str]:
    """The four figures of a run as SVG."""
    losses = [_of_steps(view, name, limit) for name in LOSSES]
    held = [(float(e.step), e.loss) for e in view.evals if e.subject == "student" and e.loss]
    rows: tuple[Row, ...] = tuple((x, y) for x, y in held if y is not None)
    losses.append(Series(name="held-out", rows=rows, marks=True))
    tables = sorted(view.gpu_tables.items())
    gpu = [
        _of_time(view, table, name, f"{words} {index}", limit)
        for index, table in tables
        for name, words in GPU.items()
    ]
    memory = [
        *(_of_time(view, t, "gpu_mem_used_bytes", f"GPU {i}", limit) for i, t in tables),
        _of_time(view, view.hosts, "trainer_rss_bytes", "trainer", limit),
        _of_time(view, view.hosts, "host_available_bytes", "available", limit),
    ]
    step_time = [_of_steps(view, "step_s", limit)]
    return [
        line_chart("losses, nats", losses, x_name="step"),
        line_chart("step time", step_time, x_name="step", unit="s"),
        line_chart("GPU", gpu, x_name="seconds", unit="%"),
        line_chart("memory", memory, x_name="seconds", unit="bytes"),
    ]


def flip_figure(plan: Plan, pairs: Sequence[Pair]) -> str:
    """B over A of each pair that can be compared, between the edges of the margin."""
    known = [(p.number, d) for p in pairs if p.complete and (d := p.difference) is not None]
    rows = tuple((float(number), math.exp(d)) for number, d in known)
    ends = (0.5, max([p.number for p in pairs], default=1) + 0.5)

    def level(name: str, y: float) -> Series:
        return Series(name=name, rows=tuple((x, y) for x in ends))

    series = [
        Series(name="B/A", rows=rows, marks=True),
        level("no difference", 1.0),
        level("1 + margin", 1 + plan.margin),
        level("1 / margin", 1 / (1 + plan.margin)),
    ]
    return line_chart(f"{plan.metric}, B over A", series, x_name="pair")


def _of_steps(view: RunView, name: str, limit: int) -> Series:
    table = view.steps
    return Series(name=name, rows=thin(table.values("step"), table.values(name), limit))


def _of_time(view: RunView, table: Table, name: str, words: str, limit: int) -> Series:
    begin = view.first_unix_s or 0.0
    rows = _since(begin, thin(table.values("unix_s"), table.values(name), limit))
    return Series(name=words, rows=tuple(rows))


def _since(begin: float, rows: Sequence[Row]) -> Iterator[Row]:
    return ((x - begin, y) for x, y in rows)
