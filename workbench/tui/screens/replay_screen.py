"""The part of a run's screen that knows what time is shown: now, or one that a replay has come to."""

from __future__ import annotations

from abc import abstractmethod

from textual import on
from textual.binding import Binding
from textual.timer import Timer

from engine.log.folder import RunFolder
from workbench.feed import Snapshot
from workbench.tui.screens.acting import ActingScreen
from workbench.tui.screens.replaying import TICK_S, Replay, Replayed
from workbench.tui.widgets.key_bar import KeyBar
from workbench.tui.widgets.status_line import StatusLine
from workbench.tui.widgets.timeline_pane import TimelinePane


class ReplayScreen(ActingScreen):
    """Has the keys of a replay; what is shown is `shown`."""

    def __init__(self, refresh_s: float) -> None:
        super().__init__(refresh_s)
        self._snapshot: Snapshot | None = None
        self._replay: Replay | None = None
        self._past: Snapshot | None = None
        self._player: Timer

    @property
    @abstractmethod
    def run(self) -> RunFolder:
        """The run that is shown."""

    @abstractmethod
    def hand_down(self) -> None:
        """Give every widget what is shown."""

    @abstractmethod
    def lay_out(self) -> None:
        """Show the panes that belong to what is shown."""

    # Textual calls the handlers of every class of a screen, so none calls that of its base.

    def on_mount(self) -> None:
        self._player = self.set_interval(TICK_S, self._play, pause=True)

    def on_unmount(self) -> None:
        if self._replay is not None:
            self._replay.close()

    @property
    def shown(self) -> Snapshot | None:
        """What the panes show: the run as it is, or as it was."""
        return self._snapshot if self._replay is None else self._past

    def draw_keys(self) -> None:
        """While a replay is shown: the keys of the replay."""
        replay = self._replay
        if replay is None:
            super().draw_keys()
            return
        keys = [
            Binding("question_mark", "help", "help"),
            Binding("space", "pause", "pause" if replay.is_playing else "play"),
            Binding("left,right", "scrub(-1)", "time"),
            Binding("v", "speed", f"{replay.speed}x"),
            Binding("p", "replay", "end replay"),
            Binding("z", "zoom", "zoom"),
        ]
        self.query_one(KeyBar).draw(keys)

    def action_replay(self) -> None:
        if self._replay is not None:
            self._end_replay()
            return
        if self._snapshot is None or self._snapshot.view.first_unix_s is None:
            return
        line = self.query_one(TimelinePane)
        begin = line.cursor_unix_s
        if begin is None:
            begin = self._snapshot.view.first_unix_s
        self._past = None
        self._player.resume()
        self._replay = Replay(self.run, begin, self.post_message)
        line.show_time(begin)
        line.focus()
        self.draw_keys()
        self.tell_replay()

    def _end_replay(self) -> None:
        if self._replay is not None:
            self._replay.close()
        self._player.pause()
        self._replay, self._past = None, None
        self.hand_down()
        self.draw_keys()
        self.lay_out()

    def tell_replay(self) -> None:
        live, replay = self._snapshot, self._replay
        words = ""
        if replay is not None and live is not None:
            words = replay.words(live.view.first_unix_s or 0.0, live.view.last_unix_s or 0.0)
        self.query_one(StatusLine).replay = words

    def _play(self) -> None:
        replay, live = self._replay, self._snapshot
        if replay is not None and live is not None and replay.is_playing:
            replay.tick(live.view.last_unix_s or 0.0)
            self.query_one(TimelinePane).show_time(replay.unix_s)
            self.tell_replay()
            if not replay.is_playing:
                self.draw_keys()

    @on(Replayed)
    def show_past(self, message: Replayed) -> None:
        """Draw the run as it was."""
        if self._replay is not None:
            before, self._past = self._past, message.snapshot
            self.hand_down()
            if lays_out_anew(before, message.snapshot):
                self.lay_out()

    @on(TimelinePane.Moved)
    def seek(self, message: TimelinePane.Moved) -> None:
        """In a replay the cursor is the time that is shown."""
        replay, live = self._replay, self._snapshot
        if replay is not None and live is not None:
            last = live.view.steps.last("clock_s")
            # After the last step a run still has an end to show.
            is_end = last is not None and message.unix_s >= last
            replay.seek(live.view.last_unix_s or 0.0 if is_end else message.unix_s)
            self.tell_replay()

    def action_scrub(self, columns: int) -> None:
        self.query_one(TimelinePane).action_move(columns)

    def action_speed(self) -> None:
        if self._replay is not None:
            self._replay.next_speed()
            self.tell_replay()
            self.draw_keys()


def lays_out_anew(before: Snapshot | None, snapshot: Snapshot) -> bool:
    """Whether another snapshot may need other panes and keys."""
    return before is None or _layout_of(before) != _layout_of(snapshot)


def _layout_of(snapshot: Snapshot) -> tuple[object, ...]:
    """What the panes and keys that are shown depend on."""
    return snapshot.state, snapshot.alive, bool(snapshot.view.alerts)
