"""Two to six runs compared: one metric over one x axis, their results side by side, and the settings that differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.events import DescendantFocus, Resize
from textual.reactive import reactive
from textual.widgets import Static

from engine.log.folder import RunFolder
from engine.report.compared import Metric, results_table, settings_note
from workbench.compared import (
    AXES,
    Compared,
    CompareFeed,
    Comparison,
    axis_text,
    differences,
)
from workbench.plot.chart import Chart, Line
from workbench.plot.series import SERIES, series_style
from workbench.tui.context import Context
from workbench.tui.run_lines import HeadedRun, heading_lines, result_lines, setting_lines
from workbench.tui.screens.polling import Polled, PollingScreen
from workbench.tui.widgets.chart_view import ChartView
from workbench.tui.widgets.key_bar import KeyBar
from workbench.tui.widgets.pane_tabs import PaneTabs, pane_keys
from workbench.tui.widgets.text_pane import TextPane

PANES = ("plot", "results", "settings")
TABS = {name: (str(n), name) for n, name in enumerate(PANES, start=1)}
GRID, SINGLE = (100, 30), 18
"""Size (columns, rows) from which all panes are shown, and number of rows below which only one is. Between them the
plot and one other pane are shown."""
FAR = 10
"""Columns of dots that the cursor moves with shift or comma and full stop."""


class MetricChart(ChartView, can_focus=True):
    """Draws the chart of the chosen metric."""

    chart: reactive[Chart] = reactive(Chart())

    def redraw_key(self) -> tuple[object, ...]:
        return (self.chart,)

    def current_chart(self) -> Chart:
        return self.chart


class CompareScreen(PollingScreen):
    """Draws the polls of one CompareFeed."""

    NOTES = (
        "Every run keeps its letter, marker and colour.",
        "",
        "Signs in the plot",
        "  A to F                   on a line and at its end: which run it is",
        "  × (X in ASCII)           NaN or infinite; the letter below names the run",
        "  a gap in a line          missing steps, or by time more than a minute without one",
        "  ▾ (v in ASCII)           0 or less, on a logarithmic axis",
        "",
        "x is steps, tokens so far, or seconds since the run's first line, start-up included.",
        "Settings are the effective ones: `auto: bf16` is auto, resolved to bf16.",
    )

    AUTO_FOCUS = "#plot"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "app.help", "help", tooltip="this help"),
        Binding("escape,q", "back", "back", tooltip="remove the cursor, or back to the runs"),
        *pane_keys(TABS),
        Binding("m", "metric", "metric", tooltip="the next metric"),
        Binding("x", "axis", "x axis", tooltip="x by step, tokens or wall time"),
        Binding("l", "log_y", "log y", tooltip="logarithmic y axis on or off"),
        Binding("left", "move(-1)", "cursor", tooltip="a cursor that shows each run's value"),
        Binding("right", "move(1)", "cursor", show=False, tooltip="the cursor to the right"),
        Binding(
            "comma,shift+left", f"move(-{FAR})", "far", show=False, tooltip="the cursor far left"
        ),
        Binding(
            "full_stop,shift+right",
            f"move({FAR})",
            "far",
            show=False,
            tooltip="the cursor far right",
        ),
        Binding("r", "refresh", "refresh", show=False, tooltip="refresh now"),
    ]
    CSS = """
    CompareScreen {
        #head { height: auto; max-height: 2; padding: 0 1; background: $panel; text-wrap: nowrap; }
        #plot { height: 5fr; }
        #below { height: 4fr; layout: horizontal; }
        .pane { border: round $foreground 40%; padding: 0 1; }
        .pane:focus, .pane:focus-within { border: heavy $primary; }
        #results, #settings { width: 1fr; height: 1fr; }
        #results Static, #settings Static { text-wrap: nowrap; }
    }
    CompareScreen.-grid PaneTabs { display: none; }
    CompareScreen.-single .pane, CompareScreen.-single .pane:focus {
        border: none; border-top: heavy $primary; padding: 0;
    }
    """

    def __init__(self, context: Context, chosen: Mapping[int, RunFolder]) -> None:
        """`chosen` maps each slot (the index of a style) to its run."""
        super().__init__(context)
        assert 2 <= len(chosen) <= len(SERIES), chosen
        self._feed = CompareFeed(chosen)
        self._comparison: Comparison | None = None
        self._metric: Metric | None = None
        """Chosen metric; None for the first that the runs have."""
        self._axis, self._log_y = 0, False
        self._cursor: float | None = None
        self._pane = PANES[0]

    def compose(self) -> ComposeResult:
        yield Static("reading runs", id="head", markup=False)
        with Vertical(id="body"):
            yield MetricChart(ascii_only=self.context.ascii_only, id="plot", classes="pane")
            with Horizontal(id="below"):
                yield TextPane("2 results", id="results")
                yield TextPane("3 settings that differ", id="settings")
        yield PaneTabs(TABS)
        yield KeyBar()

    def poll(self) -> Polled:
        return Polled(self._feed.poll())

    @on(Polled)
    def show(self, message: Polled) -> None:
        """Pass the runs to the widgets."""
        self._comparison = message.snapshot
        runs: tuple[Compared, ...] = message.snapshot.runs
        slots = [run.slot for run in runs]
        names = [run.snapshot.run.name for run in runs]
        rows, letters = results_table(runs), [series_style(slot).letter for slot in slots]
        settings = [(found.key, found.values) for found in differences(runs)]
        notes = [*filter(None, [settings_note(runs, letters)])]
        for run, letter in zip(runs, letters, strict=True):
            notes += [f"{letter}: {run.snapshot.error}"] if run.snapshot.error else []

        def settings_at(width: int) -> list[Content | str]:
            return [*setting_lines(slots, settings, width), *notes]

        with self.app.batch_update():
            self._draw_plot()
            self.lay_out()
            self.query_one("#results", TextPane).show(
                lambda width: result_lines(slots, names, rows, width)
            )
            self.query_one("#settings", TextPane).show(settings_at)

    @on(ChartView.Resized)
    def _draw_plot(self) -> None:
        comparison = self._comparison
        if comparison is None:
            return
        axis, plot, metric = (
            AXES[self._axis],
            self.query_one("#plot", MetricChart),
            self._chosen(comparison),
        )
        plot.border_title = f"1 {metric.name} by {axis}{', log y' if self._log_y else ''}"
        plot.chart = self._chart(comparison, metric, plot.dots)
        self.query_one("#head", Static).update(self._heading(comparison))

    def _chosen(self, comparison: Comparison) -> Metric:
        """Return the metric that is shown."""
        metrics = comparison.metrics()
        return self._metric if self._metric in metrics else metrics[0]

    def _chart(self, comparison: Comparison, metric: Metric, dots: int) -> Chart:
        """Return a metric of every run over the axis."""
        axis = AXES[self._axis]
        low, high = comparison.extent(metric, axis) or (0.0, 1.0)
        return Chart(
            title=metric.name,
            low=low,
            high=high,
            lines=tuple(
                Line(
                    slot=run.slot,
                    letter=series_style(run.slot).letter,
                    trace=run.trace(metric, axis, low, high, dots),
                )
                for run in comparison.runs
            ),
            cursor=self._cursor,
            log_y=self._log_y,
            x_name=axis,
            x_text=lambda x: axis_text(axis, x),
        )

    def _value(self, run: Compared, metric: Metric) -> float | None:
        """Return the metric at the cursor, or the newest value."""
        axis = AXES[self._axis]
        if self._cursor is None:
            return run.trace(metric, axis, 0.0, 0.0, 1).last
        return run.value_at(metric, axis, self._cursor)

    def _heading(self, comparison: Comparison) -> Content:
        metric, axis = self._chosen(comparison), AXES[self._axis]
        runs = []
        for run in comparison.runs:
            value = self._value(run, metric)
            value_text = "no value" if value is None else metric.text(value)
            runs.append(HeadedRun(run.slot, run.snapshot.run.name, value_text))
        first = [f"compare {metric.name}"]
        if self._cursor is not None:
            first = [f"{axis} {axis_text(axis, self._cursor)}", metric.name]
        if comparison.behind:
            first.append("still reading")
        lines = heading_lines(
            runs,
            max(1, self.size.width - 2),
            first=first,
            rows=2 if self.size.height >= SINGLE else 1,
            ascii_only=self.context.ascii_only,
        )
        return Content("\n").join(lines)

    # Layout.

    @on(Resize)
    def lay_out(self) -> None:
        """Show the panes that belong on a screen of this size."""
        width, height = self.size
        is_grid = width >= GRID[0] and height >= GRID[1]
        below = {name for name in PANES[1:] if is_grid or name == self._pane}
        has_plot = is_grid or self._pane == "plot" or height >= SINGLE
        if height >= SINGLE and not below:
            below = {"results"}
        self.set_class(is_grid, "-grid")
        self.set_class(height < SINGLE, "-single")
        self.query_one("#plot").display = has_plot
        self.query_one("#below").display = bool(below)
        for name in PANES[1:]:
            self.query_one(f"#{name}").display = name in below
        self.query_one(PaneTabs).chosen = self._pane

    def action_pane(self, name: str) -> None:
        self._pane = name
        self.lay_out()
        self.query_one(f"#{name}").focus()

    @on(DescendantFocus)
    def choose_focused(self, event: DescendantFocus) -> None:
        if event.widget.id in PANES and event.widget.id != self._pane:
            self._pane = event.widget.id
            self.lay_out()

    # Keys.

    def action_metric(self) -> None:
        if self._comparison is not None:
            metrics = self._comparison.metrics()
            at = metrics.index(self._chosen(self._comparison))
            self._metric = metrics[(at + 1) % len(metrics)]
            self._draw_plot()

    def action_axis(self) -> None:
        self._axis = (self._axis + 1) % len(AXES)
        self._cursor = None
        self._draw_plot()

    def action_log_y(self) -> None:
        self._log_y = not self._log_y
        self._draw_plot()

    def action_move(self, by: int) -> None:
        """Move the cursor by dot columns; the first move puts it at the end it enters from."""
        if self._comparison is None:
            return
        axis = AXES[self._axis]
        chosen = self._chosen(self._comparison)
        low, high = self._comparison.extent(chosen, axis) or (0.0, 0.0)
        width = (high - low) / max(1, self.query_one("#plot", MetricChart).dots - 1)
        if axis == "step":
            # At least one step, because there is nothing between two steps.
            width = max(1.0, width)
        before = self._cursor
        if before is None:
            before = high if by < 0 else low
        else:
            before += by * width
        before = min(high, max(low, before))
        self._cursor = float(round(before)) if axis == "step" else before
        self._draw_plot()

    def action_back(self) -> None:
        if self._cursor is not None:
            self._cursor = None
            self._draw_plot()
        else:
            self.app.pop_screen()
