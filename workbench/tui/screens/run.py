"""One run: its status, losses, pace, machine, decisions, log and result."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.events import DescendantFocus, Resize
from textual.widget import Widget

from engine.errors import EngineError
from engine.runlog.folder import RunFolder
from workbench.feed import UNREADABLE, RunFeed, Snapshot
from workbench.launch import resume_run, stop_run
from workbench.suspicions import suspicions
from workbench.tui.layout import PANES, Layout, arrange
from workbench.tui.messages import CommandEnded, RunPolled
from workbench.tui.screens.confirm import ConfirmScreen
from workbench.tui.screens.flip import FlipScreen
from workbench.tui.screens.help import HelpScreen
from workbench.tui.screens.polling import PollingScreen
from workbench.tui.widgets.key_bar import KeyBar, bindings_of
from workbench.tui.widgets.log_pane import LogPane
from workbench.tui.widgets.loss_plot import LossPlot
from workbench.tui.widgets.pace_pane import PacePane
from workbench.tui.widgets.pane_tabs import PaneTabs
from workbench.tui.widgets.status_line import StatusLine
from workbench.tui.widgets.text_pane import TextPane
from workbench.words import (
    check_words,
    decision_words,
    device_words,
    kernel_words,
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
    "  dashed level           ln V, the loss of guessing; the teacher's",
    "",
    "Closing this screen does nothing to a run: it goes on by itself.",
)


class RunScreen(PollingScreen):
    """Draws the snapshots of one RunFeed."""

    AUTO_FOCUS = "#loss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "help", "help", tooltip="this help"),
        Binding("q", "app.quit", "quit", tooltip="close the workbench; the run goes on"),
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
        Binding("z", "zoom", "zoom", tooltip="the chosen pane alone, or all panes again"),
        Binding("l", "log_y", "log y", tooltip="logarithmic y axis of the chosen plot on or off"),
        Binding("slash", "filter", "filter", tooltip="filter the log"),
        Binding("f", "follow", "follow", tooltip="follow the end of the log, or stop following"),
        Binding(
            "space", "pause", "pause", show=False, tooltip="hold the screen still; the run goes on"
        ),
        Binding("F", "flip", "flip", tooltip="test a suspicion: this run with one setting changed"),
        Binding("x", "stop", "stop", tooltip="ask the run to stop, after a question"),
        Binding("R", "resume", "resume", tooltip="continue a run that ended before its last step"),
        Binding("escape", "back", "back", show=False, tooltip="unzoom, or go back to the runs"),
    ]
    CSS = """
    RunScreen {
        #body, #top, #left, #right { height: 1fr; }
        #top { height: 2fr; layout: horizontal; }
        #left { width: 4fr; }
        #right { width: 3fr; }
        .pane { border: round $foreground 40%; height: 1fr; padding: 0 1; }
        .pane:focus, .pane:focus-within { border: heavy $primary; }
        TextPane { scrollbar-size-vertical: 1; }
        #loss { height: 2fr; padding: 0; }
        #pace { height: 1fr; padding: 0; }
        #device { height: auto; max-height: 9; }
        #decisions { min-height: 5; }
        #result { height: auto; max-height: 12; }
    }
    RunScreen.-ended #top { height: 3fr; }
    RunScreen.-tabs, RunScreen.-single, RunScreen.-zoomed {
        #top { layout: vertical; height: 1fr; }
        #left, #right { width: 1fr; }
        .pane { height: 1fr; max-height: 100%; }
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
        super().__init__(refresh_s)
        self._feed, self._read_only, self._ascii_only = feed, read_only, ascii_only
        self._snapshot: Snapshot | None = None
        self._chosen, self._zoomed, self._paused = "loss", False, False

    @property
    def run(self) -> RunFolder:
        """The run that is shown."""
        return self._feed.run

    def compose(self) -> ComposeResult:
        ascii_only = self._ascii_only
        yield StatusLine(
            self._feed.run.name, ascii_only=ascii_only, read_only=self._read_only, id="status"
        )
        with Vertical(id="body"):
            with Horizontal(id="top"):
                with Vertical(id="left"):
                    yield LossPlot(ascii_only=ascii_only, id="loss", classes="pane")
                    yield PacePane(ascii_only=ascii_only, id="pace", classes="pane")
                with Vertical(id="right"):
                    yield TextPane("3 device and host", device_words, id="device", classes="pane")
                    yield TextPane("4 decisions", decision_words, id="decisions", classes="pane")
                    yield TextPane("6 result", result_words, id="result", classes="pane")
                    yield TextPane("7 checks", check_words, id="checks", classes="pane")
                    yield TextPane("8 kernels", kernel_words, id="kernels", classes="pane")
            yield LogPane(id="log", classes="pane")
        yield PaneTabs()
        yield KeyBar()

    def poll(self) -> RunPolled:
        return RunPolled(self._feed.poll())

    @on(RunPolled)
    def show(self, message: RunPolled) -> None:
        """Hand a snapshot down to every widget."""
        before = self._snapshot
        self._snapshot = message.snapshot
        if not self._paused:
            self._hand_down()
        now = message.snapshot
        if before is None or (before.state, before.alive) != (now.state, now.alive):
            self.draw_keys()
            self.lay_out()

    def _hand_down(self) -> None:
        if self._snapshot is None:
            return
        with self.app.batch_update():
            self.query_one(StatusLine).snapshot = self._snapshot
            self.query_one(LossPlot).snapshot = self._snapshot
            self.query_one(PacePane).snapshot = self._snapshot
            self.query_one(LogPane).snapshot = self._snapshot
            for pane in self.query(TextPane):
                pane.snapshot = self._snapshot

    # Layout

    @property
    def _has_ended(self) -> bool:
        return self._snapshot is not None and self._snapshot.has_ended

    def _layout(self) -> Layout:
        return arrange(*self.size, chosen=self._chosen, zoomed=self._zoomed, ended=self._has_ended)

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
        if self._zoomed:
            self.action_zoom()
        elif len(self.app.screen_stack) > 2:
            self.app.pop_screen()

    # Keys of panes

    def action_log_y(self) -> None:
        plot: PacePane | LossPlot = self.query_one(LossPlot)
        if self._chosen == "pace":
            plot = self.query_one(PacePane)
        plot.log_y = not plot.log_y

    def action_follow(self) -> None:
        self.query_one(LogPane).toggle_follow()

    def action_filter(self) -> None:
        if "log" not in self._layout().panes:
            self.action_pane("log")
        self.query_one(LogPane).start_filter()

    def action_pause(self) -> None:
        self._paused = not self._paused
        self.query_one(StatusLine).paused = self._paused
        if not self._paused:
            self._hand_down()

    def action_help(self) -> None:
        self.app.push_screen(
            HelpScreen(f"help: run {self._feed.run.name}", bindings_of(self), NOTES)
        )

    # Keys that act on the run

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "flip":
            return not self._read_only and self._snapshot is not None
        if action not in ("stop", "resume"):
            return True
        snapshot = self._snapshot
        if self._read_only or snapshot is None:
            return False
        goes_on = snapshot.alive.trainer or snapshot.alive.supervisor
        if action == "stop":
            return goes_on
        ended = snapshot.has_ended and snapshot.state not in ("completed", UNREADABLE)
        return ended and not goes_on

    def action_flip(self) -> None:
        if self._snapshot is not None:
            self.app.push_screen(
                FlipScreen(
                    self._feed.run,
                    suspicions(self._snapshot.view),
                    refresh_s=self._refresh_s,
                    ascii_only=self._ascii_only,
                )
            )

    def action_stop(self) -> None:
        run = self._feed.run
        question = (
            f"{run.name} finishes its step, saves a checkpoint and stops; R resumes it.\n\n"
            f"This is `engine stop {run.path}`."
        )

        def answered(yes: bool | None) -> None:
            if yes:
                self._command("stop", lambda: stop_run(run) or "the run was asked to stop")

        self.app.push_screen(
            ConfirmScreen("stop this run", question, "stop it", "let it go on"), answered
        )

    def action_resume(self) -> None:
        run = self._feed.run
        self._command("resume", lambda: f"resumed {resume_run(run).name}")

    def _command(self, name: str, call: Callable[[], str]) -> None:
        def work() -> None:
            try:
                message = CommandEnded(call(), failed=False)
            except EngineError as error:
                message = CommandEnded(str(error), failed=True)
            self.post_message(message)

        self.notify(f"{name}: asking the engine", markup=False)
        # A daemon, not a worker: quitting must not wait for the command, and the command does not
        # need us.
        threading.Thread(target=work, name=f"engine-{name}", daemon=True).start()

    @on(CommandEnded)
    def say(self, message: CommandEnded) -> None:
        """What the engine answered."""
        self.notify(
            message.text,
            title="the engine refused" if message.failed else "",
            severity="error" if message.failed else "information",
            timeout=15 if message.failed else 5,
            markup=False,
        )
        self.tick()
