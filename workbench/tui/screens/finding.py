"""One finding: what was observed, its possible causes, the tests of each, and the actions on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

from textual.binding import Binding, BindingType

from engine.errors import EngineError
from engine.findings import changes
from engine.findings.bundle import Bundle
from engine.findings.changes import Suspect, suspects_of
from engine.findings.finding import Finding
from engine.findings.text import next_words, state_words
from engine.log.folder import RunFolder
from engine.log.observed import observation, observations
from engine.log.text import one_line
from workbench.finding_rows import EVIDENCE, JOB, FindingFeed
from workbench.listing import beside
from workbench.tui.context import Context
from workbench.tui.screens.browse import BrowseScreen, own_keys
from workbench.tui.screens.form import FormScreen
from workbench.tui.screens.polling import PollingScreen
from workbench.tui.widgets.fields import Field, Values

NOTES = (
    "+ confirmed: the unchanged runs show the observation, and the changed runs do not, in three pairs or more.",
    "x refuted: a changed run shows it too, and no test shows that the change ends it.",
    "? open, or not decided by its tests. - withdrawn. * the observation. , a note by a person, which is no evidence.",
    "> a test, evaluated again from its files. ! a cause that could not be tested, or a test whose files fail",
    "  verification.",
    "",
    "t runs the next test in the background, and E opens the list of flips. The test continues when this screen",
    "or the workbench is closed, and t resumes one that was interrupted.",
    "Every change is made as by `engine why`, under the lock of the finding.",
)
LATER = "name one later"
SHOWN = 3
"""Maximum number of failures that are shown in full above the form."""


class FindingScreen(BrowseScreen[FindingFeed]):
    """One finding."""

    NOTES, JOB = NOTES, JOB
    CSS = "FindingScreen.-wide #both RowList, FindingScreen.-wide #both #details { width: 1fr; }"
    ACTING = frozenset({"test", "cause", "close", "stop"})
    BINDINGS: ClassVar[list[BindingType]] = own_keys(
        Binding(
            "t", "test", "test", tooltip="run the next test, or that of the cause under the cursor"
        ),
        Binding("ctrl+x", "stop", "stop", tooltip="interrupt the test; t resumes it"),
        Binding("a", "cause", "add cause", tooltip="name another change that may end the failure"),
        Binding("c", "close", "close", tooltip="close with the confirmed cause, or as unresolved"),
    )

    def __init__(self, context: Context, path: Path) -> None:
        super().__init__(context, FindingFeed(path))
        self.title = f"finding {path.name}"
        self.bundle = Bundle(path)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        finding = self._feed.finding
        if action == "stop":
            return self.job_runs
        if action == "test":
            return finding is not None and finding.next_cause is not None and not self.job_runs
        if action in self.ACTING:
            return finding is not None
        return super().check_action(action, parameters)

    def _ask(self, title: str, send: Callable[[Values], Finding], *fields: Field) -> None:
        """Open a form; what comes next is shown after it."""

        def sent(values: Values) -> str:
            return next_words(send(values)) or "closed"

        def done(message: str | None) -> None:
            if message is not None:
                self.notify(message, markup=False)
                self.tick()

        self.app.push_screen(FormScreen(title, fields, sent), done)

    # Keys

    def action_test(self) -> None:
        arguments = ["why", "test", "--finding", str(self.bundle.path)]
        key, finding = "" if self.selected is None else self.selected.key, self._feed.finding
        if finding is not None and key in {cause.id for cause in finding.causes}:
            arguments += ["--cause", key]
        self.start_job([*arguments, "--evidence", str(self.bundle.path.parent)])

    def action_cause(self) -> None:
        hint = "teacher.backend=dequantized, OMP_NUM_THREADS=1, --lr 1e-4, train.py:42=TEXT"
        self._ask(
            "another change that may end the failure",
            lambda v: changes.suspect(self.bundle, v["change"]),
            Field(name="change", label="change", hint=hint),
        )

    def action_close(self) -> None:
        finding = self._feed.finding
        if finding is not None and finding.confirmed:
            self.command("close", lambda: state_words(changes.close(self.bundle)))
            return
        self._ask(
            "close as unresolved: no test confirms a cause",
            lambda v: changes.close(self.bundle, v["reason"]),
            Field(name="reason", label="reason", hint="why there is no cause"),
        )


def ask_why(screen: PollingScreen, form: Callable[[], FormScreen]) -> None:
    """Open the form of a new finding, and then the finding. The form is made in a thread: a log may be long."""

    def begun(path: str | None) -> None:
        if path is not None:
            screen.app.push_screen(FindingScreen(screen.context, Path(path)))

    def make() -> None:
        try:
            screen.app.call_from_thread(screen.app.push_screen, form(), begun)
        except EngineError as problem:
            notify = partial(screen.notify, str(problem), severity="warning", markup=False)
            screen.app.call_from_thread(notify)

    screen.run_worker(make, thread=True)


def finding_form(run: RunFolder, suspects: Sequence[Suspect] = ()) -> FormScreen:
    """Return a form for a new finding about a run, filled in; its result is the folder of the finding. Raises BadInput
    where nothing went wrong in the run."""
    observation(run, "")
    failures, proposed = observations(run), suspects_of(run)
    folder: Path = beside([run.path.parent], EVIDENCE)[0]
    by_assignment = {suspect.assignment: suspect for suspect in (*suspects, *proposed)}

    def send(v: Values) -> str:
        names = [v["other"]] if v["other"] else [v["cause"]] if v["cause"] != LATER else []
        chosen = [by_assignment.get(name, Suspect(name)) for name in names]
        return str(changes.begin(folder, run, v["seen"], chosen).path)

    fields = (
        Field(name="seen", label="went wrong", options=tuple(failure.name for failure in failures)),
        Field(name="cause", label="ended by", options=(*by_assignment, LATER)),
        Field(name="other", label="or by", hint="another change: KEY=VALUE, NAME=VALUE, or words"),
    )
    note = "\n".join(f"{failure.name}: {one_line(failure.text)}" for failure in failures[:SHOWN])
    return FormScreen(f"why? a finding about {run.name}", fields, send, note=note)
