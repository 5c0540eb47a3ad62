"""The details of a row: its plot, where it has one, over its words."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.reactive import reactive

from workbench.listing import Row
from workbench.plot.chart import chart_of
from workbench.tui.widgets.chart_view import ChartView
from workbench.tui.widgets.words_view import WordsView


class DetailsPane(VerticalScroll, can_focus=True):
    """Draws one row in full."""

    HELP = """\
# Details

What is known of the row under the cursor. Up, down, page up and page down scroll; `z` gives it the
whole screen.
"""
    DEFAULT_CSS = """
    DetailsPane {
        border: round $foreground 40%; padding: 0 1; scrollbar-size-vertical: 1;
        ChartView { height: 9; margin-bottom: 1; display: none; }
        &.-plotted ChartView { display: block; }
    }
    DetailsPane:focus { border: heavy $primary; }
    """

    row: reactive[Row | None] = reactive(None, init=False)

    def __init__(self, *, ascii_only: bool, id: str | None = None) -> None:
        super().__init__(id=id)
        self._ascii_only = ascii_only

    def compose(self) -> ComposeResult:
        yield ChartView(ascii_only=self._ascii_only)
        yield WordsView()

    def whole_text(self) -> str:
        """All that is said of the row."""
        return "\n".join(self.row.lines) if self.row is not None else ""

    def watch_row(self, before: Row | None, row: Row | None) -> None:
        if row is None:
            self.query_one(WordsView).lines = ()
            self.set_class(False, "-plotted")
            return
        if before is None or before.key != row.key:
            self.scroll_home(animate=False)
        self.set_class(row.trace is not None, "-plotted")
        if row.trace is not None:
            self.query_one(ChartView).chart = chart_of((row.trace,))
        self.query_one(WordsView).lines = row.lines
