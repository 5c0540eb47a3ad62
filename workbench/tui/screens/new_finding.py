"""The form that begins a finding from what a run shows: an alert, how it ended, or a metric."""

from __future__ import annotations

from pathlib import Path

from engine.log.folder import RunFolder
from engine.log.view import RunView
from workbench.findings import EVIDENCE, begin, slug_of
from workbench.linking import PARTS, captured
from workbench.listing import beside
from workbench.tui.screens.form import Field, FormScreen, Values

OTHER = "other"


def finding_form(run: RunFolder, view: RunView) -> FormScreen:
    """Its first evidence is a part of the run: what stood out most is offered first."""
    said = _parts(view)
    folder: Path = beside([run.path.parent], EVIDENCE)[0]

    def send(v: Values) -> str:
        part = v["part"] if v["shown"] == OTHER else v["shown"]
        claim = v["claim"] or said.get(part, "") or part
        name = v["name"] or slug_of(f"{run.name} {claim}")
        return str(begin(folder, name, claim, lambda: captured(str(run.path), part)).path)

    fields = (
        Field(name="shown", label="shown by", options=(*said, OTHER)),
        Field(name="part", label="other part", hint=f"with other: {PARTS}"),
        Field(name="claim", label="what was seen", hint="empty: the words of the alert or the end"),
        Field(name="name", label="name", hint="a-z, 0-9 and -; empty: from the words above"),
    )
    note = f"It is begun in {folder}/ with this part of {run.name} as its evidence, frozen by hash."
    return FormScreen("why? a finding about this run", fields, send, note=note)


def _parts(view: RunView) -> dict[str, str]:
    """Parts of a run that ask for a why, with their words: alerts, errors first, then the end."""
    alerts = sorted(view.alerts.values(), key=lambda a: (a.severity != "error", -a.to_unix_s))
    found = {f"alert {alert.id}": alert.title for alert in alerts}
    if view.exit is not None:
        found["exit"] = view.exit.sentence
    return found
