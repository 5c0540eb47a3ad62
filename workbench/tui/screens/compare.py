"""Two to six runs over each other: one metric over one x axis, their results side by side, the
settings they differ in, and the alerts of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.events import DescendantFocus, Resize
from textual.style import Style
from textual.widgets import Static

from engine.runlog.folder import RunFolder
from workbench.compared import (
    AXES,
    METRICS,
    CompareFeed,
    Comparison,
    alerts_words,
    axis_text,
    results_table,
    settings_table,
)
from workbench.tui.context import Context
from workbench.tui.messages import ComparePolled
from workbench.tui.screens.help import HelpScreen
from workbench.tui.screens.polling import PollingScreen
from workbench.tui.series import SERIES, series_style
from workbench.tui.widgets.key_bar import KeyBar, bindings_of
from workbench.tui.widgets.overlay_plot import OverlayPlot
from workbench.tui.widgets.table_pane import TablePane

PANES = ("plot", "results", "settings", "alerts")
PANE_KEYS = Binding.Group("pane")
GRID, SINGLE = (100, 30), 18
"""From this size all panes are shown; below so many rows only one is; else the plot and one."""
FAR = 10
NOTES = (
    "Every run keeps its letter, its form of line and its colour.",
    "",
    "Signs in the plot",
    "  A to F                   on its line: which run; at its end, too",
    "  × (X in ASCII)           NaN or infinite; the letter below says whose",
    "  an open line             steps that are missing, or a minute or more without one",
    "  ▾ ▴ (v ^ in ASCII)       off the axis",
    "",
    "x is steps, tokens so far, or seconds since the run's first line, starting up included.",
    "Settings are the effective ones: `auto: bf16` is auto, which became bf16.",
)


class CompareScreen(PollingScreen):
    """Draws the polls of one CompareFeed."""

    AUTO_FOCUS = "#plot"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "help", "help", tooltip="this help"),
        Binding("escape,q", "back", "back", tooltip="the cursor away, or back to the runs"),
        *(
            Binding(
                str(digit),
                f"pane('{name}')",
                name,
                group=PANE_KEYS,
                tooltip=f"a pane: {', '.join(PANES)}",
            )
            for digit, name in enumerate(PANES, start=1)
        ),
        Binding("m", "metric(1)", "metric", tooltip="the next metric"),
        Binding("M", "metric(-1)", "metric before", show=False, tooltip="the metric before"),
        Binding("x", "axis", "x axis", tooltip="x by step, tokens or wall time"),
        Binding("l", "log_y", "log y", tooltip="logarithmic y axis on or off"),
        Binding("left", "move(-1)", "cursor", tooltip="a cursor that tells each run's value there"),
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
        Binding("r", "refresh", "refresh", show=False, tooltip="look again now"),
    ]
    CSS = """
    CompareScreen {
        #head { height: 1; padding: 0 1; background: $panel; text-wrap: nowrap; text-overflow: ellipsis; }
        #tabs { height: 1; padding: 0 1; background: $panel; }
        #plot { height: 5fr; }
        #below { height: 4fr; layout: horizontal; }
        .pane { border: round $foreground 40%; padding: 0 1; }
        .pane:focus, .pane:focus-within { border: heavy $primary; }
        #results, #settings, #alerts { width: 1fr; height: 1fr; }
    }
    CompareScreen.-grid #tabs { display: none; }
    """

    def __init__(self, context: Context, chosen: Mapping[int, RunFolder]) -> None:
        """`chosen` gives each style its run."""
        super().__init__(context.refresh_s)
        assert 2 <= len(chosen) <= len(SERIES), chosen
        self._ascii_only = context.ascii_only
        self._feed = CompareFeed(chosen)
        self._comparison: Comparison | None = None
        self._metric, self._axis, self._log_y = 0, 0, False
        self._cursor: float | None = None
        self._pane = PANES[0]

    def compose(self) -> ComposeResult:
        yield Static("reading runs", id="head", markup=False)
        with Vertical(id="body"):
            yield OverlayPlot(ascii_only=self._ascii_only, id="plot", classes="pane")
            with Horizontal(id="below"):
                yield TablePane("2 results", right=True, id="results", classes="pane")
                yield TablePane(
                    "3 settings that differ", right=False, id="settings", classes="pane"
                )
                with VerticalScroll(id="alerts", classes="pane") as pane:
                    pane.border_title = "4 alerts"
                    yield Static(id="alert_words", markup=False)
        yield Static(id="tabs", markup=False)
        yield KeyBar()

    def poll(self) -> ComparePolled:
        return ComparePolled(self._feed.poll())

    def tick(self) -> None:
        if self.is_current:
            super().tick()

    @on(ComparePolled)
    def show(self, message: ComparePolled) -> None:
        """Hand the runs down."""
        self._comparison = message.comparison
        runs = message.comparison.runs
        slots = [run.slot for run in runs]
        names = [run.snapshot.run.name for run in runs]
        with self.app.batch_update():
            self._draw_plot()
            self.query_one("#results", TablePane).show(slots, names, results_table(runs))
            rows = settings_table(runs)
            note = "" if rows else "every setting is the same in all of them"
            if not all(run.settings for run in runs):
                note = "the settings of a run cannot be read"
            self.query_one("#settings", TablePane).show(slots, names, rows, note)
            letters = [series_style(slot).letter for slot in slots]
            words = "\n".join(alerts_words(runs, letters))
            self.query_one("#alert_words", Static).update(words)

    @on(OverlayPlot.Moved)
    def _draw_plot(self) -> None:
        comparison = self._comparison
        if comparison is None:
            return
        metric, axis = METRICS[self._metric], AXES[self._axis]
        plot = self.query_one("#plot", OverlayPlot)
        plot.border_title = f"1 {metric.name} by {axis}{', log y' if self._log_y else ''}"
        plot.show(comparison, metric, axis, cursor=self._cursor, log_y=self._log_y)
        self.query_one("#head", Static).update(self._heading(comparison))

    def _heading(self, comparison: Comparison) -> Content:
        metric, axis = METRICS[self._metric], AXES[self._axis]
        parts = [Content.styled("compare", "bold")]
        if self._cursor is not None:
            parts.append(Content.styled(f"{axis} {axis_text(axis, self._cursor)}", "bold reverse"))
        for run in comparison.runs:
            style = series_style(run.slot)
            value = (
                run.trace(metric, axis, 0.0, 0.0, 1).last
                if self._cursor is None
                else run.value_at(metric, axis, self._cursor)
            )
            said = "no value" if value is None else metric.text(value)
            sign = style.sign(ascii_only=self._ascii_only)
            letter = style.letter if self._ascii_only else f"{style.letter} {sign}"
            parts.append(
                Content.assemble(
                    (f"{letter} {run.snapshot.run.name}", f"bold {style.colour}"), f" {said}"
                )
            )
        if comparison.behind:
            parts.append(Content("still reading"))
        return Content("  ").join(parts)

    # Layout

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
        self.query_one("#plot").display = has_plot
        self.query_one("#below").display = bool(below)
        for name in PANES[1:]:
            self.query_one(f"#{name}").display = name in below
        self._draw_tabs()

    def _draw_tabs(self) -> None:
        parts = []
        for digit, name in enumerate(PANES, start=1):
            chosen = name == self._pane
            tab = Content.styled(
                f"[{digit} {name}]" if chosen else f" {digit} {name} ",
                "bold reverse" if chosen else "",
            )
            parts.append(tab.stylize(Style.from_meta({"@click": f"screen.pane('{name}')"})))
        self.query_one("#tabs", Static).update(Content("").join(parts))

    def action_pane(self, name: str) -> None:
        self._pane = name
        self.lay_out()
        self.query_one(f"#{name}").focus()

    @on(DescendantFocus)
    def choose_focused(self, event: DescendantFocus) -> None:
        if event.widget.id in PANES and event.widget.id != self._pane:
            self._pane = event.widget.id
            self.lay_out()

    # Keys

    def action_metric(self, by: int) -> None:
        self._metric = (self._metric + by) % len(METRICS)
        self._draw_plot()

    def action_axis(self) -> None:
        self._axis = (self._axis + 1) % len(AXES)
        self._cursor = None
        self._draw_plot()

    def action_log_y(self) -> None:
        self._log_y = not self._log_y
        self._draw_plot()

    def action_move(self, by: int) -> None:
        """Move the cursor by dot columns; the first move puts it at the end that it comes from."""
        if self._comparison is None:
            return
        axis = AXES[self._axis]
        low, high = self._comparison.extent(METRICS[self._metric], axis) or (0.0, 0.0)
        width = (high - low) / max(1, self.query_one(OverlayPlot).dots - 1)
        if axis == "step":
            # No less than a step: between two of them there is nothing to be told.
            width = max(1.0, width)
        before = self._cursor
        if before is None:
            before = high if by < 0 else low
        else:
            before += by * width
        before = min(high, max(low, before))
        self._cursor = float(round(before)) if axis == "step" else before
        self._draw_plot()

    def action_refresh(self) -> None:
        self.tick()

    def action_back(self) -> None:
        if self._cursor is not None:
            self._cursor = None
            self._draw_plot()
        else:
            self.app.pop_screen()

    def action_help(self) -> None:
        self.app.push_screen(HelpScreen("help: compare", bindings_of(self), NOTES))
