"""Charts of whole traces, for tests of the drawing."""

from __future__ import annotations

import string
from collections.abc import Sequence

from engine.log.downsample import Trace
from workbench.plot.chart import Chart, Line


def chart_of(traces: Sequence[Trace], x_name: str = "step") -> Chart:
    """Return a chart of whole traces over each other."""
    letters = string.ascii_uppercase if len(traces) > 1 else [""]
    xs = [x for trace in traces for b in trace.buckets for x in (b.x_first, b.x_last)]
    return Chart(
        low=min(xs, default=0.0),
        high=max(xs, default=1.0),
        lines=tuple(
            Line(trace=t, slot=n, letter=letter)
            for n, (t, letter) in enumerate(zip(traces, letters, strict=False))
        ),
        x_name=x_name,
    )
