"""Whys: a finding in a cell, with its causes, their tests, and the buttons that go on.

    whys = Whys.of("runs/kd-1", "alert gpu_idle", cause="teacher.backend=dequantized")   begins it in ./evidence
    whys = Whys("kd-1-gpu-idle")      one that exists
    whys.cause("compute.threads=1")   another change that may end the failure
    whys.test()                       runs the next test; the cell shows its pairs as they come
    whys.close_finding()              with the confirmed cause

Each change is made under the lock of the finding and shown at once; a refusal shows the message of the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ipywidgets

from engine.errors import EngineError
from engine.findings import changes
from engine.findings.bundle import find_bundle
from engine.findings.changes import Suspect
from engine.findings.check import Checked, check_bundle
from engine.findings.finding import Finding
from engine.findings.text import lines, state_words
from engine.log.folder import open_run
from engine.report.page import hanging
from workbench.jobs import Job, Jobs
from workbench.notebook.panel import Panel, hide_still

FOLDER = Path("evidence")
REFRESH_S = 2.0


class Whys(Panel):
    """One finding."""

    def __init__(self, finding: str | Path, *, folder: str | Path = FOLDER) -> None:
        super().__init__(REFRESH_S)
        self.bundle = find_bundle(str(finding), Path(folder))
        self._jobs = Jobs()
        self._tree = ipywidgets.HTML()
        self._change = ipywidgets.Text(
            description="may be ended by", placeholder="KEY=VALUE", layout={"width": "60%"}
        )
        buttons: tuple[tuple[str, str, Callable[[], str]], ...] = (
            ("test", "run the next test", lambda: self.test().lines()[0]),
            (
                "add cause",
                "add this change as a possible cause",
                lambda: f"added {self.cause(self._change.value.strip())}",
            ),
            ("close", "close with the confirmed cause", lambda: state_words(self.close_finding())),
            (
                "check",
                "hash every file, judge every test again",
                lambda: str(self.check().verdict.reason),
            ),
            ("export", "enter the finding into LOG.md", lambda: f"exported {self.export()}"),
        )
        self._buttons: dict[str, ipywidgets.Button] = {}
        for name, tooltip, call in buttons:
            button = self._buttons[name] = ipywidgets.Button(description=name, tooltip=tooltip)
            button.on_click(lambda _, name=name, call=call: self._command(name, call))
        row = ipywidgets.HBox([*self._buttons.values(), self._said])
        self._begin(ipywidgets.VBox([self._tree, self._change, row]))

    @classmethod
    def of(
        cls, run: str | Path, seen: str = "", *, cause: str = "", folder: str | Path = FOLDER
    ) -> Whys:
        """Begin a finding about what a run showed: `alert ID`, `check ID` or `exit`; if `seen` is empty,
        the observation that proves most. Raises BadInput."""
        suspects = [Suspect(cause)] if cause else []
        return cls(changes.begin(Path(folder), open_run(Path(run)), seen, suspects).path)

    def __repr__(self) -> str:
        return f"Whys({self.bundle.path.name!r})"

    # Actions of the user

    def cause(self, change: str) -> str:
        """Add a change that may end the failure, as a possible cause; returns its id. Raises BadInput."""
        return self._waking(changes.suspect(self.bundle, change)).causes[-1].id

    def test(self, cause: str = "") -> Job:
        """Run the test of a cause, or the next one, in the background."""
        asked = ["why", "test", "--finding", str(self.bundle.path)]
        job = self._jobs.start("why", [*asked, *(["--cause", cause] if cause else ())])
        self._wake.set()
        return job

    def note(self, text: str) -> None:
        """Add a note, which supports nothing. Raises BadInput."""
        self._waking(changes.note(self.bundle, text))

    def close_finding(self, unresolved: str = "") -> Finding:
        """Close with the confirmed cause, or as unresolved with a reason. Raises CannotClose."""
        return self._waking(changes.close(self.bundle, unresolved))

    def check(self) -> Checked:
        """Hash every file, and judge every test again."""
        return check_bundle(self.bundle)

    def export(self) -> Path:
        """Enter the finding into LOG.md in its folder. Raises BadInput if it does not verify."""
        return changes.export(self.bundle).path

    def _waking(self, finding: Finding) -> Finding:
        self._wake.set()
        return finding

    # The polling thread

    def tick(self) -> None:
        """Show the finding as it is on disk, where a shell may have changed it."""
        text = f"{hide_still(self.key)}{hanging(self.still()[1])}"
        if not self.is_closed and self._tree.value != text:
            self._tree.value = text
            self._update_still()

    @property
    def is_over(self) -> bool:
        """Always False: a finding never ends."""
        return False

    def still(self) -> tuple[list[str], list[str]]:
        job = self._jobs.of("why")
        running = [*job.lines()] if job is not None and (job.is_alive or job.code) else []
        try:
            checked = check_bundle(self.bundle)
            said = lines(self.bundle.read(), checked.broken)
            return [], [*(f"changed: {fault}" for fault in checked.faults), *said, *running]
        except EngineError as problem:
            return [], [str(problem), *running]
