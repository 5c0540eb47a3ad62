"""Compare: several runs in one figure that stays in the notebook.

The figure is made by plotly: static data, thinned, no comm; it can be zoomed in a page and is part of the
notebook. Beside it, for pages without plotly, are the same losses as SVG and the runs as text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import UsageError
from engine.findings.chart import LIMIT, Row, Series, line_chart, thin
from engine.log.folder import open_run
from engine.terminal import as_html, printable
from workbench.feed import RunFeed, Snapshot
from workbench.notebook.frames import frame_of
from workbench.notebook.panel import still_html

if TYPE_CHECKING:
    import pandas
    from plotly.graph_objects import Figure

COLUMNS = ("loss", "step_s")


class Compare:
    """Runs side by side, as they were when it was made."""

    def __init__(self, runs: Sequence[str | Path]) -> None:
        if isinstance(runs, str | Path) or not runs:
            raise UsageError(f"Compare: expected a list of run folders, found {runs!r}")
        self.snapshots: tuple[Snapshot, ...] = tuple(
            RunFeed(open_run(Path(run))).read_all() for run in runs
        )

    def figure(self) -> Figure:
        """Return a figure of loss and step time over steps, one colour per run; needs plotly."""
        from plotly.subplots import make_subplots

        figure = make_subplots(rows=1, cols=2, subplot_titles=("loss, nats", "step time, s"))
        for number, snapshot in enumerate(self.snapshots):
            for place, name in enumerate(COLUMNS, start=1):
                rows = _rows(snapshot, name)
                figure.add_scatter(
                    x=[x for x, _ in rows],
                    # A non-finite value leaves a gap in the line.
                    y=[y if y is not None and math.isfinite(y) else None for _, y in rows],
                    mode="lines",
                    # Plotly interprets some HTML in names.
                    name=as_html(snapshot.run.name),
                    legendgroup=snapshot.run.name,
                    showlegend=place == 1,
                    line={"color": _colour(number)},
                    row=1,
                    col=place,
                )
        figure.update_xaxes(title="step")
        return figure

    def frame(self, what: str = "steps") -> pandas.DataFrame:
        """Return the tables of all runs, one below the other; `run` says which."""
        frames = [frame_of(s.view, what).assign(run=s.run.name) for s in self.snapshots]
        import pandas

        return pandas.concat(frames, ignore_index=True)

    def lines(self) -> list[str]:
        return [printable(f"{s.run.name}: {s.status}") for s in self.snapshots]

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        drawn = []
        for title, name in zip(("loss, nats", "step time"), COLUMNS, strict=True):
            series = [Series(name=s.run.name, rows=_rows(s, name)) for s in self.snapshots]
            drawn.append(line_chart(title, series, x_name="step"))
        bundle: dict[str, Any] = {
            "text/plain": "\n".join(self.lines()),
            "text/html": still_html("compare", drawn, self.lines()),
        }
        try:
            bundle["application/vnd.plotly.v1+json"] = self.figure().to_plotly_json()
        except ImportError:
            bundle["text/plain"] += "\n(no plotly here: the figure is SVG only)"
        return bundle


def _rows(snapshot: Snapshot, name: str) -> tuple[Row, ...]:
    steps = snapshot.view.steps
    return thin(steps.values("step"), steps.values(name), LIMIT)


def _colour(number: int) -> str:
    colours = ("#1f77b4", "#d2691e", "#2e9e4f", "#9467bd", "#b8860b", "#555555")
    return colours[number % len(colours)]
