"""One run: its status, losses, pace, machine, decisions, log and result."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.events import DescendantFocus, Resize
from textual.widget import Widget
from textual.widgets import Input

from engine.log.folder import RunFolder
from workbench.feed import RunFeed, Snapshot
from workbench.marks import FlipLook, FlipSeen, Happening, happenings
from workbench.tui.layout import PANE_LABELS, PANES, Layout, arrange
from workbench.tui.messages import RunPolled
from workbench.tui.screens.acting import RESUME, STOP
from workbench.tui.screens.help import HelpScreen
from workbench.tui.screens.replay_screen import lays_out_anew
from workbench.tui.screens.suspecting import SuspectingScreen
from workbench.tui.widgets.key_bar import KeyBar, bindings_of
from workbench.tui.widgets.ledger_pane import LedgerPane
from workbench.tui.widgets.log_pane import LogPane
from workbench.tui.widgets.pane_tabs import PaneTabs
from workbench.tui.widgets.status_line import StatusLine
from workbench.tui.widgets.text_pane import TextPane
from workbench.tui.widgets.timeline_pane import TimelinePane
from workbench.words import (
    alert_words,
    check_words,
    decision_words,
    kernel_words,
    machine_words,
    result_words,
)

PANE_KEYS = Binding.Group("pane")
NOTES = (
    "The digit of the chosen pane once more zooms it, too.",
    "",
    "Signs in plots",
    "  solid, dashed, dotted  loss, ce, kd; in ASCII three characters",
    "  ◆ (H in ASCII)         held-out loss of the student",
    "  × (X in ASCII)         NaN or infinite: no line goes over it",
    "  ▾ ▴ (v ^ in ASCII)     off the axis",
    "  dashed level           ln V, the loss of guessing; the share of it that CE has; the teacher's",
    "Signs on the row of marks",
    "  × ! R F C s c          not finite, alert, resumed, flip, late compile, saved, compile",
    "",
    "A replay shows every pane as it was: arrows go through time, space plays, v is how fast.",
    "Closing this screen does nothing to a run: it goes on by itself.",
)


class RunScreen(SuspectingScreen):
    """Draws the snapshots of one RunFeed."""

    AUTO_FOCUS = "#loss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "help", "help", tooltip="this help"),
        Binding("q", "app.quit", "quit", tooltip="close the workbench; the run goes on"),
        *(
            Binding(
                str(digit),
                f"pane('{name}')",
                PANE_LABELS.get(name, name),
                group=PANE_KEYS,
                tooltip=f"a pane: {', '.join(PANE_LABELS.get(name, name) for name in PANES)}",
            )
            for digit, name in enumerate(PANES, start=1)
        ),
        Binding("z", "zoom", "zoom", tooltip="the chosen pane alone, or all panes again"),
        Binding("l", "log_y", "log y", tooltip="logarithmic y axis of the chosen plot on or off"),
        Binding("slash", "filter", "filter", tooltip="filter the log"),
        Binding("f", "follow", "follow", tooltip="follow the end of the log, or stop following"),
        Binding(
            "space",
            "pause",
            "pause",
            show=False,
            tooltip="hold the screen still, the run goes on; in a replay: play or pause",
        ),
        Binding(
            "p", "replay", "replay", tooltip="the run as it was, from the cursor on; p ends it"
        ),
        Binding("v", "speed", "speed", show=False, tooltip="how fast a replay plays: 1x to 3600x"),
        Binding(
            "left", "scrub(-1)", "earlier", show=False, priority=True, tooltip="back in a replay"
        ),
        Binding("right", "scrub(1)", "later", show=False, priority=True, tooltip="on in a replay"),
        Binding("F", "flip", "flip", tooltip="test a suspicion: this run with one setting changed"),
        Binding("W", "why", "why", tooltip="begin a five-whys finding with an alert of this run"),
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
        TextPane { scrollbar-size-vertical: 1; }
        #loss { height: 2fr; padding: 0; }
        #pace { height: 1fr; max-height: 13; }
        #device { height: auto; max-height: 10; }
        #alerts { height: auto; max-height: 9; }
        #decisions { min-height: 5; }
        #result { height: auto; max-height: 12; }
    }
    RunScreen.-tabs, RunScreen.-single, RunScreen.-zoomed {
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
    RunScreen.-grid PaneTabs { display: none; }
    RunScreen.-status {
        #body, PaneTabs, KeyBar { display: none; }
        StatusLine { height: 1fr; max-height: 100%; }
    }
    """

    def __init__(
        self, feed: RunFeed, *, refresh_s: float, read_only: bool, ascii_only: bool
    ) -> None:
        super().__init__(refresh_s, read_only=read_only, ascii_only=ascii_only)
        self._feed = feed
        self._chosen, self._zoomed, self._paused = "loss", False, False
        self._flip_look = FlipLook(feed.run)
        self._flips: tuple[FlipSeen, ...] = ()
        self._marks: tuple[Happening, ...] = ()

    @property
    def run(self) -> RunFolder:
        """The run that is shown."""
        return self._feed.run

    def compose(self) -> ComposeResult:
        ascii_only = self._ascii_only
        yield StatusLine(
            self._feed.run.name, ascii_only=ascii_only, read_only=self.read_only, id="status"
        )
        with Vertical(id="body"):
            with Horizontal(id="top"):
                with Vertical(id="left"):
                    yield TimelinePane(ascii_only=ascii_only, id="loss", classes="pane")
                    yield LedgerPane(ascii_only=ascii_only, id="pace", classes="pane")
                with Vertical(id="right"):
                    yield TextPane("3 device and host", machine_words, id="device", classes="pane")
                    yield TextPane("4 decisions", decision_words, id="decisions", classes="pane")
                    yield TextPane("6 result", result_words, id="result", classes="pane")
                    yield TextPane("7 checks", check_words, id="checks", classes="pane")
                    yield TextPane("8 JIT", kernel_words, id="kernels", classes="pane")
                    yield TextPane("9 alerts", alert_words, id="alerts", classes="pane")
            yield LogPane(id="log", classes="pane")
        yield PaneTabs(PANES, PANE_LABELS)
        yield KeyBar()

    def poll(self) -> RunPolled:
        snapshot = self._feed.poll()
        # Walks long lists, and looks into other folders: no work for the thread that draws.
        self._flips = self._flip_look.look()
        self._marks = happenings(snapshot.view, self._flips)
        return RunPolled(snapshot)

    @on(RunPolled)
    def show(self, message: RunPolled) -> None:
        """Hand a snapshot down to every widget."""
        before = self._snapshot
        self._snapshot = message.snapshot
        if not self._paused:
            self.hand_down()
        if lays_out_anew(before, message.snapshot):
            self.draw_keys()
            self.lay_out()

    def hand_down(self) -> None:
        snapshot = self.shown
        if snapshot is None:
            return
        with self.app.batch_update():
            self.query_one(StatusLine).snapshot = snapshot
            line = self.query_one(TimelinePane)
            line.whole = self._snapshot if self._replay is not None else None
            line.marks = self._marks if self._replay is None else _until(self._marks, snapshot)
            line.snapshot = snapshot
            self.query_one(LedgerPane).snapshot = snapshot
            self.query_one(LogPane).snapshot = snapshot
            for pane in self.query(TextPane):
                pane.snapshot = snapshot
            self.tell_replay()

    # Layout

    @property
    def _has_ended(self) -> bool:
        return self.shown is not None and self.shown.has_ended

    def _layout(self) -> Layout:
        return arrange(
            *self.size,
            chosen=self._chosen,
            zoomed=self._zoomed,
            ended=self._has_ended,
            alerts=self.shown is not None and bool(self.shown.view.alerts),
        )

    @on(Resize)
    def lay_out(self) -> None:
        """Show the panes that belong on a screen of this size."""
        layout = self._layout()
        self.set_class(self._has_ended, "-ended")
        for mode in ("grid", "tabs", "single", "status"):
            self.set_class(layout.mode == mode, f"-{mode}")
        self.set_class(self._zoomed, "-zoomed")
        for name in PANES:
            self.query_one(f"#{name}").display = name in layout.panes
        for column, names in (("left", PANES[:2]), ("right", (*PANES[2:4], *PANES[5:]))):
            self.query_one(f"#{column}").display = not layout.panes.isdisjoint(names)
        self.query_one("#top").display = layout.panes != frozenset({"log"})
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
        """A pane that gets the focus, by tab or by mouse, is the chosen one."""
        for widget in event.widget.ancestors_with_self:
            if widget.id in PANES and widget.id != self._chosen:
                self._chosen = widget.id
                self.lay_out()

    def action_zoom(self) -> None:
        self._zoomed = not self._zoomed
        self.lay_out()

    def action_back(self) -> None:
        if self._replay is not None:
            self._end_replay()
        elif self._zoomed:
            self.action_zoom()
        elif len(self.app.screen_stack) > 2:
            self.app.pop_screen()

    # Keys of panes

    def action_log_y(self) -> None:
        plot = self.query_one(TimelinePane)
        plot.log_y = not plot.log_y

    def action_follow(self) -> None:
        self.query_one(LogPane).toggle_follow()

    def action_filter(self) -> None:
        if "log" not in self._layout().panes:
            self.action_pane("log")
        self.query_one(LogPane).start_filter()

    def action_pause(self) -> None:
        if self._replay is not None:
            self._replay.is_playing = not self._replay.is_playing
            self.tell_replay()
            self.draw_keys()
            return
        self._paused = not self._paused
        self.query_one(StatusLine).paused = self._paused
        if not self._paused:
            self.hand_down()

    def action_help(self) -> None:
        self.app.push_screen(
            HelpScreen(f"help: run {self._feed.run.name}", bindings_of(self), NOTES)
        )

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "scrub":
            # The time line has these keys itself, and a filter that is typed needs them.
            return self._replay is not None and not isinstance(self.focused, TimelinePane | Input)
        if action == "speed":
            return self._replay is not None
        if action in ("flip", "why"):
            return not self.read_only and self._snapshot is not None
        return self.may_act(action) if action in ("stop", "resume") else True


def _until(marks: tuple[Happening, ...], snapshot: Snapshot) -> tuple[Happening, ...]:
    """The marks that were there at the time of a snapshot of the past."""
    return tuple(mark for mark in marks if mark.unix_s <= snapshot.now_unix_s)
