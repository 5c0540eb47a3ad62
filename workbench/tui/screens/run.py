"""One run: its panes, and the keys that act on it.

The panes come from the table `workbench.panes`; stopping and resuming a run is in `actions`.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.events import DescendantFocus, Resize
from textual.geometry import Size
from textual.reactive import reactive
from textual.widget import Widget

from engine.flips.proposals import of_alert, proposals
from engine.log.events import Judged
from engine.log.folder import RunFolder, settings_of
from engine.log.view import RunView
from workbench.feed import RunFeed, Snapshot, Target
from workbench.marks import Mark, all_marks
from workbench.panes import PANES, Pane
from workbench.tui.context import Context
from workbench.tui.layout import Layout, arrange
from workbench.tui.screens.actions import RESUME, STOP, ask_to_resume, ask_to_stop
from workbench.tui.screens.flip import FlipScreen
from workbench.tui.screens.form import ChooseScreen
from workbench.tui.screens.polling import Polled, PollingScreen
from workbench.tui.widgets.key_bar import KeyBar
from workbench.tui.widgets.log_pane import LogPane
from workbench.tui.widgets.loss_chart import LossChart
from workbench.tui.widgets.pane_tabs import PaneTabs, pane_keys
from workbench.tui.widgets.status_line import StatusLine
from workbench.tui.widgets.text_pane import TextPane

TABS = {pane.id: (pane.shown_key, pane.name) for pane in PANES}


class _Row(Horizontal):
    """The columns of panes. It never scrolls: a scrolling container is laid out twice when the
    size of its content changes."""

    virtual_size = reactive(Size(0, 0), repaint=False)


class _Column(Vertical):
    """Panes one below the other, which never scroll as one."""

    virtual_size = reactive(Size(0, 0), repaint=False)


class RunScreen(PollingScreen):
    """Draws the snapshots of one RunFeed."""

    NOTES = (
        "Pressing the key of the chosen pane again zooms it as well.",
        "",
        "Signs in plots",
        "  ◆ (H in ASCII)         an evaluation of the student on held-out text",
        "  L, C, K                training loss, its cross entropy, its divergence (c chooses them)",
        "  × (X in ASCII)         NaN or infinite: the line breaks there",
        "  ▾ ▴ (v ^ in ASCII)     0 or less on a logarithmic axis, above the end of the axis of step times",
        "  dashed level           on held-out text: the loss of the teacher, and of the student at the start",
        "  SM, GPU, mem, own      shares: busy SMs, time with a kernel, memory in use, memory of the trainer",
        "  W, TC                  shares: of the power limit, busy tensor cores",
        "Signs on the row of marks",
        "  × ! R C s c            not finite, alert, resumed, late compile, saved, compile",
        "",
        "Closing this screen does not affect the run.",
    )

    AUTO_FOCUS = "#loss"
    POLLS_WHILE_COVERED = True
    ACTING = frozenset({"stop", "resume", "flip", "why"})
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "app.help", "help", tooltip="this help"),
        Binding("q", "app.quit", "quit", tooltip="close the workbench; the run continues"),
        *pane_keys({pane.id: (pane.key, pane.name) for pane in PANES}),
        *(
            Binding(pane.letter, f"pane('{pane.id}')", pane.name, show=False, tooltip=words)
            for pane in PANES
            if pane.letter
            for words in [f"the pane {pane.name}, as {pane.key}"]
        ),
        Binding("z", "zoom", "zoom", tooltip="the chosen pane alone, or all panes again"),
        Binding("l", "log_y", "log y", tooltip="logarithmic y axis of the chosen plot on or off"),
        Binding("slash", "filter", "filter", tooltip="filter the log"),
        Binding("f", "follow", "follow", tooltip="follow the end of the log, or stop following"),
        Binding("F", "flip", "flip", tooltip="test a suspicion: this run with one setting changed"),
        Binding("W", "why", "why", tooltip="ask what causes what went wrong here, and test it"),
        STOP,
        RESUME,
        Binding("escape", "back", "back", show=False, tooltip="unzoom, or go back to the runs"),
    ]
    CSS = """
    RunScreen {
        #body, #top, #left, #right { height: 1fr; }
        #top { height: 5fr; layout: horizontal; }
        #log { height: 2fr; }
        #left { width: 4fr; }
        #right { width: 3fr; }
        .pane { border: round $foreground 40%; height: 1fr; padding: 0 1; }
        .pane:focus, .pane:focus-within { border: heavy $primary; }
        #loss { padding: 0; }
    }
    /* Several panes in a column: those of text are as high as their lines, one of each column takes the rest. */
    RunScreen.-grid {
        #loss { min-height: 40%; }
        #pace { height: auto; max-height: 35%; }
        #device { height: auto; max-height: 10; }
        #alerts { height: auto; max-height: 9; }
        #decisions { min-height: 5; }
        #result { height: auto; max-height: 12; }
        #checks { height: auto; max-height: 40%; }
        #kernels { height: auto; max-height: 12; }
    }
    RunScreen.-tabs, RunScreen.-single {
        #top { layout: vertical; height: 1fr; }
        #left, #right { width: 1fr; }
        .pane { height: 1fr; max-height: 100%; }
    }
    RunScreen.-single .pane, RunScreen.-single .pane:focus, RunScreen.-single .pane:focus-within {
        border: none; border-top: heavy $primary;
    }
    RunScreen.-tabs {
        #top, #left { height: 3fr; }
        #right, #log { height: 2fr; }
        #loss { height: 3fr; }
        #pace { height: 2fr; }
    }
    RunScreen .pane.-zoomed { height: 1fr !important; max-height: 100% !important; }
    RunScreen.-grid PaneTabs { display: none; }
    RunScreen.-status {
        #body, PaneTabs, KeyBar { display: none; }
        StatusLine { height: 1fr; max-height: 100%; }
    }
    """

    def __init__(self, context: Context, run: RunFolder) -> None:
        super().__init__(context)
        self.run = run
        self.title = f"run {run.name}"
        self._feed = RunFeed(run)
        self._snapshot: Snapshot | None = None
        self._chosen, self._zoomed = PANES[0].id, False
        self._marks: tuple[Mark, ...] = ()
        self._marked: RunView | None = None
        """View that the marks were made from."""

    def compose(self) -> ComposeResult:
        ascii_only, read_only = self.context.ascii_only, self.context.read_only
        yield StatusLine(self.run.name, ascii_only=ascii_only, read_only=read_only, id="status")
        with _Column(id="body"):
            with _Row(id="top"):
                for column in ("left", "right"):
                    with _Column(id=column):
                        yield from (
                            self._make_pane(pane) for pane in PANES if pane.column == column
                        )
            yield from (self._make_pane(pane) for pane in PANES if pane.column == "below")
        yield PaneTabs(TABS)
        yield KeyBar()

    def _make_pane(self, pane: Pane) -> Widget:
        title = pane.numbered_title()
        if pane.id == "loss":
            return LossChart(title, ascii_only=self.context.ascii_only, id=pane.id)
        if pane.id == "log":
            return LogPane(title, id=pane.id)
        return TextPane(title, id=pane.id, help=pane.help)

    def poll(self) -> Polled:
        snapshot = self._feed.poll()
        # Marks are made here, not in the drawing thread: making them walks long lists. A poll that found nothing new
        # must not make them again: quitting waits for the poll.
        if snapshot.view is not self._marked:
            self._marks, self._marked = all_marks(snapshot.view), snapshot.view
        return Polled(snapshot)

    @on(Polled)
    def show(self, message: Polled) -> None:
        """Pass a snapshot to every widget."""
        before, self._snapshot = self._snapshot, message.snapshot
        if not self.own_widgets:
            return  # the last poll of a screen that is taken down
        self._update_panes()
        self.draw_keys()
        if _layout_inputs(before) != _layout_inputs(self._snapshot):
            self.lay_out()

    def _update_panes(self) -> None:
        snapshot = self._snapshot
        if snapshot is None:
            return
        with self.app.batch_update():
            self.query_one(StatusLine).snapshot = snapshot
            line = self.query_one(LossChart)
            line.marks, line.snapshot = self._marks, snapshot
            self.query_one(LogPane).snapshot = snapshot
            for pane in PANES:
                if snapshot.command is not None and pane.title_of_watched:
                    self.query_one(PaneTabs).rename(pane.id, pane.title_of_watched)
                if pane.has_lines:
                    lines_for = partial(pane.lines, snapshot, self.context.ascii_only)
                    text = self.query_one(f"#{pane.id}", TextPane)
                    text.show(lines_for)
                    text.show_title(pane.numbered_title(watched=snapshot.command is not None))

    # Layout.

    def _layout(self) -> Layout:
        snapshot = self._snapshot
        return arrange(
            *self.size,
            chosen=self._chosen,
            zoomed=self._zoomed,
            ended=snapshot is not None and snapshot.has_ended,
            alerts=snapshot is not None and bool(snapshot.view.alerts),
        )

    @on(Resize)
    def lay_out(self) -> None:
        """Show the panes that belong on a screen of this size."""
        if not self.own_widgets:
            return  # a last resize of a screen that is taken down
        layout = self._layout()
        classes = {f"-{mode}": layout.mode == mode for mode in ("grid", "tabs", "single", "status")}
        # In one update: each change of classes of the screen makes Textual restyle every widget on it.
        self.update_classes(classes)
        columns = {pane.column for pane in PANES if pane.id in layout.panes}
        for pane in PANES:
            widget = self.query_one(f"#{pane.id}")
            widget.display = pane.id in layout.panes
            if widget.display:
                # A class of the screen would restyle the hidden panes as well.
                widget.set_class(self._zoomed, "-zoomed")
        for column in ("left", "right"):
            self.query_one(f"#{column}").display = column in columns
        self.query_one("#top").display = columns != {"below"}
        self.query_one(PaneTabs).chosen = self._chosen

    def _pane(self, name: str) -> Widget:
        pane = self.query_one(f"#{name}")
        return pane.view if isinstance(pane, LogPane) else pane

    def action_pane(self, name: str) -> None:
        if name == self._chosen and self._pane(name).has_focus:
            self._zoomed = not self._zoomed
        self._chosen = name
        self.lay_out()
        self._pane(name).focus()

    @on(DescendantFocus)
    def choose_focused(self, event: DescendantFocus) -> None:
        """Choose the pane that gets the focus by tab or by mouse."""
        for widget in event.widget.ancestors_with_self:
            if widget.has_class("pane") and widget.id not in (None, self._chosen):
                self._chosen = str(widget.id)
                self.lay_out()

    def action_zoom(self) -> None:
        self._zoomed = not self._zoomed
        self.lay_out()

    def action_back(self) -> None:
        if self._zoomed:
            self.action_zoom()
        elif len(self.app.screen_stack) > 2:
            self.app.pop_screen()

    # Keys of panes.

    def action_log_y(self) -> None:
        plot = self.query_one(LossChart)
        plot.log_y = not plot.log_y

    def action_follow(self) -> None:
        self.query_one(LogPane).toggle_follow()

    def action_filter(self) -> None:
        if "log" not in self._layout().panes:
            self.action_pane("log")
        self.query_one(LogPane).start_filter()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action in ("flip", "why"):
            # A log of another tool has no command that could be started again.
            live = self._snapshot
            return not self.context.read_only and live is not None and live.view.imported is None
        if action in ("stop", "resume"):
            return (target := self.target()) is not None and target.can(action)
        return True

    # Keys that act on the run, or ask why.

    def target(self) -> Target | None:
        return None if self._snapshot is None else self._snapshot.target

    def action_stop(self) -> None:
        if (target := self.target()) is not None:
            ask_to_stop(self, target)

    def action_resume(self) -> None:
        if (target := self.target()) is not None:
            ask_to_resume(self, target)

    @on(LossChart.Opened)
    def open_marks(self, message: LossChart.Opened) -> None:
        """Show the marks under the cursor, and offer the form of the flip that an alert among them names."""
        can_flip = bool(self.check_action("flip", ()))
        flippable = next(
            (mark.alert for mark in message.marks if can_flip and mark.alert and mark.alert.flip),
            None,
        )

        def answered(answer: str | None) -> None:
            if answer == "F" and flippable is not None:
                self._ask_for_flip(flippable)

        words = "\n\n".join("\n".join(mark.lines) for mark in message.marks)
        answers = [*([("F", "open the flip")] if flippable else []), ("n", "close")]
        title = f"at step {message.marks[0].step:.0f}"
        self.app.push_screen(ChooseScreen(title, words, answers), answered)

    def action_flip(self) -> None:
        self._ask_for_flip(None)

    def _ask_for_flip(self, alert: Judged | None) -> None:
        snapshot = self._snapshot
        if snapshot is None or self.context.read_only:
            return
        suggestions = proposals(snapshot.view, settings_of(self.run), snapshot.command)
        if alert is not None:
            first = of_alert(alert)
            others = [other for other in suggestions if other.assignment != first.assignment]
            suggestions = (first, *others)
        self.app.push_screen(FlipScreen(self.context, self.run, suggestions))

    def action_why(self) -> None:
        # Imported here: the first frame does not need it.
        from workbench.tui.screens.finding import ask_why, finding_form

        ask_why(self, lambda: finding_form(self.run))


def _layout_inputs(snapshot: Snapshot | None) -> object:
    """Return the values that decide which panes are visible."""
    return snapshot and (snapshot.state, snapshot.alive, bool(snapshot.view.alerts))
