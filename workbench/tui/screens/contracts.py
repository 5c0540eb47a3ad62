"""Contracts: what each promises, the level it has reached, and running its tests."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual.binding import Binding, BindingType

from workbench.contract_rows import JOB, ContractsFeed
from workbench.tui.context import Context
from workbench.tui.screens.browse import BrowseScreen, own_keys

NOTES = (
    "Levels, computed from receipts each time they are shown:",
    "  basic      the file is valid",
    "  standard   and every test passes",
    "  strict     and every planted bug is caught",
    "  proven     and every proof holds",
    "",
    "UNKNOWN is never a pass: not run, skipped, stale (the contract or its code changed since).",
    "`engine contracts run` continues when this screen or the workbench is closed.",
)


class ContractsScreen(BrowseScreen[ContractsFeed]):
    """The contracts of the project in the current folder."""

    NOTES = NOTES
    JOB = JOB
    ACTING = frozenset({"run", "run_all", "stop"})
    BINDINGS: ClassVar[list[BindingType]] = own_keys(
        Binding(
            "n", "run", "run now", tooltip="run the contract under the cursor in the background"
        ),
        Binding("N", "run_all", "run all", tooltip="run every contract in the background"),
        Binding(
            "x", "stop", "stop", tooltip="stop the running command; complete receipts are kept"
        ),
    )

    def __init__(self, context: Context, root: Path = Path()) -> None:
        super().__init__(context, "contracts", ContractsFeed(root))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "stop":
            return self.job_runs
        if action in ("run", "run_all"):
            return not self.job_runs and self.is_mounted and self.selected is not None
        return True

    def action_run(self) -> None:
        if self.selected is not None:
            self.start_job(["contracts", "run", self.selected.key])

    def action_run_all(self) -> None:
        self.start_job(["contracts", "run"])
