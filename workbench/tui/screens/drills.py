"""Drills: known incidents, whether each was named, and running one."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual.binding import Binding, BindingType

from engine.log.folder import RunFolder, is_run
from workbench.drill_rows import JOB, DrillsFeed, drill_arguments, new_folder
from workbench.tui.context import Context
from workbench.tui.screens.browse import BrowseScreen, own_keys
from workbench.tui.screens.runs import RunsScreen

NOTES = (
    "A drill makes one known incident happen in a short real run and asks whether the workbench names it.",
    "PASS: it was named as required. FAIL: it was not. UNKNOWN: it cannot be tried here.",
    "",
    "A running drill continues when this screen or the workbench is closed; its folder is in drills/.",
)


class DrillsScreen(BrowseScreen[DrillsFeed]):
    """Every drill of the engine."""

    NOTES = NOTES
    JOB = JOB
    ACTING = frozenset({"run", "stop"})
    BINDINGS: ClassVar[list[BindingType]] = own_keys(
        Binding("n", "run", "run now", tooltip="run the drill under the cursor (a few seconds)"),
        Binding(
            "o", "open_run", "open its run", tooltip="the screen of the run of its last result"
        ),
        Binding("x", "stop", "stop", tooltip="stop the running drill and its run"),
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context, "drills", DrillsFeed())

    def _run(self) -> Path | None:
        """Return the run of the selected drill: its active run, else that of its last result."""
        if not self.is_mounted or (row := self.selected) is None:
            return None
        if self.job is not None and self.job_runs and self.job.arguments[1] == row.key:
            folder = Path(self.job.arguments[3]) / row.key
            if is_run(folder):
                return folder
        found = self._feed.results.get(row.key)
        return None if found is None else found.run

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "open_run":
            return self._run() is not None
        if action == "run":
            return not self.job_runs
        return self.job_runs if action == "stop" else True

    def action_run(self) -> None:
        row = self.selected
        if row is not None:
            self.start_job(drill_arguments(row.key, new_folder(row.key)))

    def action_open_run(self) -> None:
        folder = self._run()
        if folder is not None:
            self.post_message(RunsScreen.Opened(RunFolder(folder)))
