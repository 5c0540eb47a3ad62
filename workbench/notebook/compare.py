"""Compare: several runs in one figure that stays in the notebook.

The figure is made by plotly: static data, downsampled, no comm; it can be zoomed in a page and is part of the
notebook. Next to it, for pages without plotly, are the same lines as SVG and the runs as text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import UsageError
from engine.log.downsample import Row, points
from engine.log.folder import open_run
from engine.report.chart import COLOURS, LIMIT, Series, line_chart
from engine.report.compared import Metric
from engine.terminal import as_html, printable
from workbench.compared import (
    Compared,
    CompareFeed,
    differences,
    groupings,
    groups_by,
)
from workbench.groups import Spread, band_words, spread_of
from workbench.notebook.frames import frame_of
from workbench.notebook.panel import still_html

if TYPE_CHECKING:
    import pandas
    from plotly.graph_objects import Figure

ACROSS = 2
"""Charts next to each other."""


class Compare:
    """Runs side by side, as they were when it was made. With `by`, a setting such as `train.lr`, the runs of each
    of its values are one line, their mean, in a band: their standard deviation, or of fewer than three runs their
    range."""

    def __init__(self, runs: Sequence[str | Path], by: str = "") -> None:
        if isinstance(runs, str | Path) or not runs:
            raise UsageError(f"Compare: expected a list of run folders, found {runs!r}")
        feed = CompareFeed({n: open_run(Path(run)) for n, run in enumerate(runs)})
        self.comparison = feed.read_all()
        self.snapshots = tuple(run.snapshot for run in self.comparison.runs)
        differing_settings = differences(self.comparison.runs)
        if by and by not in groupings(differing_settings):
            shared = ", ".join(groupings(differing_settings)) or "none"
            raise UsageError(
                f"Compare: expected a setting that several runs share, found {by!r}: {shared}"
            )
        self._by = by
        self._groups = groups_by(self.comparison.runs, differing_settings, by) if by else ()

    def curves(self, metric: Metric) -> list[Curve]:
        """Return a metric over steps: a line for each run or group."""
        if not self._groups:
            return [_curve(run.snapshot.run.name, run, metric) for run in self.comparison.runs]
        low, high = self.comparison.extent(metric, "step") or (0.0, 0.0)
        # A column for each step, as far as a figure has so many.
        columns = min(LIMIT, int(high - low) + 1)
        curves = []
        for group in self._groups:
            count = len(group.runs)
            name = f"{group.value} ({count} run{'s' if count > 1 else ''})"
            if count == 1:
                curves.append(_curve(name, group.runs[0], metric))
                continue
            samples = [run.samples(metric, "step") for run in group.runs]
            curves.append(_band_curve(name, spread_of(samples, low, high, columns)))
        return curves

    def figure(self) -> Figure:
        """Return a figure of every metric that the runs have over steps, one colour per run; needs plotly."""
        from plotly.subplots import make_subplots

        metrics = self.comparison.metrics()
        rows = -(-len(metrics) // ACROSS)
        figure = make_subplots(rows=rows, cols=ACROSS, subplot_titles=[x.title for x in metrics])
        for index, metric in enumerate(metrics):
            position = {"row": index // ACROSS + 1, "col": index % ACROSS + 1}
            for number, curve in enumerate(self.curves(metric)):
                for part, style in _drawn_parts(curve, COLOURS[number % len(COLOURS)]):
                    figure.add_scatter(
                        x=[x for x, _ in part],
                        # A non-finite value leaves a gap in the line.
                        y=[y if y is not None and math.isfinite(y) else None for _, y in part],
                        mode="lines",
                        # Plotly interprets some HTML in names.
                        name=as_html(curve.name),
                        legendgroup=str(number),
                        showlegend=index == 0 and part is curve.rows,
                        **style,
                        **position,
                    )
        figure.update_xaxes(title="step")
        figure.update_layout(height=300 * rows)
        if self._by:
            figure.update_layout(legend_title_text=as_html(self._grouping_words()))
        return figure

    def _grouping_words(self) -> str:
        """Describe the grouping of the runs, and the line and band of a group."""
        return f"{self._by}: {band_words(len(group.runs) for group in self._groups)}"

    def frame(self, what: str = "steps") -> pandas.DataFrame:
        """Return the tables of all runs, one below the other; `run` says which."""
        frames = [frame_of(s.view, what).assign(run=s.run.name) for s in self.snapshots]
        import pandas

        return pandas.concat(frames, ignore_index=True)

    def lines(self) -> list[str]:
        return [printable(f"{s.run.name}: {s.status}") for s in self.snapshots]

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        drawn = []
        for metric in self.comparison.metrics():
            curves = self.curves(metric)
            series = [Series(name=curve.name, rows=curve.rows) for curve in curves]
            # After the names of all groups, because a legend counts the names that do not fit.
            series += [
                Series(name=f"{words} of {curve.name}", rows=rows)
                for curve in curves
                for words, rows in (("low", curve.low), ("high", curve.high))
                if rows is not None
            ]
            grouping = f" by {self._grouping_words()}" if self._by else ""
            drawn.append(line_chart(f"{metric.title}{grouping}", series, x_name="step"))
        bundle: dict[str, Any] = {
            "text/plain": "\n".join(self.lines()),
            "text/html": still_html("compare", drawn, self.lines()),
        }
        try:
            bundle["application/vnd.plotly.v1+json"] = self.figure().to_plotly_json()
        except ImportError:
            bundle["text/plain"] += "\n(no plotly here: the figure is SVG only)"
        return bundle


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a figure, and the band around it."""

    name: str
    rows: tuple[Row, ...]
    low: tuple[Row, ...] | None = None
    high: tuple[Row, ...] | None = None


def _curve(name: str, run: Compared, metric: Metric) -> Curve:
    samples = run.samples(metric, "step")
    return Curve(name, points(samples.xs, samples.ys, LIMIT))


def _band_curve(name: str, spread: Spread) -> Curve:
    """Return mean and band. A column without a value has None, and one with a value that is not finite has NaN as
    its mean, which a figure marks."""

    mean, band = spread.mean_trace(name).buckets, spread.band_trace(name).buckets
    return Curve(
        name,
        tuple((x.x_first, math.nan if x.non_finite else x.low) for x in mean),
        tuple((x.x_first, x.low) for x in band),
        tuple((x.x_first, x.high) for x in band),
    )


def _drawn_parts(curve: Curve, colour: str) -> Iterator[tuple[tuple[Row, ...], dict[str, Any]]]:
    """Yield the lines of plotly for a curve: the edges of its band, which it fills, and itself."""
    edge = {"line": {"width": 0}, "hoverinfo": "skip"}
    if curve.low is not None and curve.high is not None:
        yield curve.low, edge
        yield curve.high, edge | {"fill": "tonexty", "fillcolor": f"{colour}33"}
    yield curve.rows, {"line": {"color": colour}}
