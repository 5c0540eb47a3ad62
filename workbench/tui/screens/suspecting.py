"""The part of a run's screen that asks why: marks, the flip that tests a suspicion, the finding that an alert
begins."""

from __future__ import annotations

from pathlib import Path

from textual import on

from workbench.marks import Happening
from workbench.suspicions import Suspicion, of_alert, settings_of, suspicions
from workbench.tui.screens.acting import Target
from workbench.tui.screens.flip import FlipScreen
from workbench.tui.screens.mark import MarkScreen
from workbench.tui.screens.replay_screen import ReplayScreen
from workbench.tui.widgets.timeline_pane import TimelinePane


class SuspectingScreen(ReplayScreen):
    """Has the actions `flip` and `why`, and opens what a mark stands for."""

    ACTING = ReplayScreen.ACTING | {"flip", "why"}

    def __init__(self, refresh_s: float, *, read_only: bool, ascii_only: bool) -> None:
        super().__init__(refresh_s)
        self.read_only, self._ascii_only = read_only, ascii_only

    def target(self) -> Target | None:
        snapshot = self._snapshot
        if snapshot is None:
            return None
        alive = snapshot.alive.trainer or snapshot.alive.supervisor
        return Target(self.run, snapshot.state, alive, snapshot.view.last_step)

    @on(TimelinePane.Opened)
    def open_marks(self, message: TimelinePane.Opened) -> None:
        """Show what is under the cursor."""
        self.app.push_screen(MarkScreen(message.marks), self._flip_of)

    def _flip_of(self, mark: Happening | None) -> None:
        """Open the flip of a mark: one that there is, or the form filled with what its alert names."""
        if mark is not None and mark.folder is not None:
            # It has begun: looking at it starts nothing.
            self._push_flip(folder=mark.folder)
        elif mark is not None:
            self._open_flip(mark)

    def action_flip(self) -> None:
        self._open_flip(None)

    def _open_flip(self, mark: Happening | None) -> None:
        snapshot = self.shown
        if snapshot is None or self.read_only:
            return
        found = suspicions(snapshot.view, settings_of(self.run))
        if mark is not None and mark.alert is not None:
            named = of_alert(mark.alert)
            others = [one for one in found if one.assignment != named.assignment]
            found = (named, *others)
        self._push_flip(found)

    def _push_flip(
        self, found: tuple[Suspicion, ...] | None = None, folder: Path | None = None
    ) -> None:
        self.app.push_screen(
            FlipScreen(
                self.run if folder is None else None,
                found,
                refresh_s=self._refresh_s,
                ascii_only=self._ascii_only,
                folder=folder,
            )
        )

    def action_why(self) -> None:
        # Evidence is no part of the first frame.
        from workbench.tui.screens.finding_forms import finding_form

        if self._snapshot is not None:
            self.app.push_screen(finding_form(self.run, self._snapshot.view), self._begun)

    def _begun(self, path: str | None) -> None:
        if path is not None:
            self.notify(f"begun: {path}; w lists the findings", markup=False)
