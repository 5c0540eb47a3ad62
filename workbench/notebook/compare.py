"""Compare: several runs in one figure that stays in the notebook.

The figure is made by plotly: static data, downsampled, no comm; it can be zoomed in a page and is part of the
notebook. Next to it, for pages without plotly, are the same lines as SVG and the runs as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import UsageError
from engine.log.folder import open_run
from engine.report.chart import COLOURS, compared_charts
from engine.terminal import as_html, printable
from workbench.feed import RunFeed
from workbench.notebook.frames import frame_of
from workbench.notebook.panel import still_html

if TYPE_CHECKING:
    import pandas
    from plotly.graph_objects import Figure

ACROSS = 2
"""Charts next to each other."""


class Compare:
    """Runs side by side, as they were when it was made."""

    def __init__(self, runs: Sequence[str | Path]) -> None:
        if isinstance(runs, str | Path) or not runs:
            raise UsageError(f"Compare: expected a list of run folders, found {runs!r}")
        self.snapshots = tuple(RunFeed(open_run(Path(run))).read_all() for run in runs)
        names = [snapshot.run.name for snapshot in self.snapshots]
        if len({*names}) < len(names):
            names = [str(snapshot.run.path) for snapshot in self.snapshots]
        self._charts, self._stills = compared_charts(names, [x.view for x in self.snapshots])

    def figure(self) -> Figure:
        """Return a figure of every metric that the runs have over steps, one colour per run; needs plotly."""
        from plotly.subplots import make_subplots

        charts, series = self._charts["charts"], self._charts["series"]
        rows = max(1, -(-len(charts) // ACROSS))
        titles = [", ".join(filter(None, [x["title"], x["unit"]])) for x in charts]
        figure = make_subplots(rows=rows, cols=ACROSS, subplot_titles=titles)
        for index, chart in enumerate(charts):
            for number, (key, name) in enumerate(chart["series"]):
                xs, ys = series[key]
                figure.add_scatter(
                    x=xs,
                    y=ys,
                    mode="lines+markers" if chart["points"] else "lines",
                    # Plotly interprets some HTML in names.
                    name=as_html(name),
                    legendgroup=str(number),
                    showlegend=index == 0,
                    line={"color": COLOURS[number % len(COLOURS)]},
                    row=index // ACROSS + 1,
                    col=index % ACROSS + 1,
                )
        figure.update_xaxes(title="step")
        figure.update_layout(height=300 * rows)
        return figure

    def frame(self, what: str = "steps") -> pandas.DataFrame:
        """Return the tables of all runs, one below the other; `run` says which."""
        frames = [frame_of(s.view, what).assign(run=s.run.name) for s in self.snapshots]
        import pandas

        return pandas.concat(frames, ignore_index=True)

    def lines(self) -> list[str]:
        return [printable(f"{s.run.name}: {s.status}") for s in self.snapshots]

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        bundle: dict[str, Any] = {
            "text/plain": "\n".join(self.lines()),
            "text/html": still_html("compare", self._stills, self.lines()),
        }
        try:
            bundle["application/vnd.plotly.v1+json"] = self.figure().to_plotly_json()
        except ImportError:
            bundle["text/plain"] += "\n(no plotly here: the figure is SVG only)"
        return bundle
