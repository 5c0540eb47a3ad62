"""Forms that begin or extend a finding from another screen: with a part of a run, or with a flip's verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.attach.identities import CONTRADICTION, SUSPICION
from engine.findings.changes import begin, slug_of
from engine.log.folder import RunFolder
from engine.log.view import RunView
from workbench.findings import EVIDENCE, NEW, keep_flip, open_findings
from workbench.flips import FlipSnapshot
from workbench.linking import PARTS, captured
from workbench.listing import beside
from workbench.tui.screens.form import Field, FormScreen, Values

OTHER = "other"
KEEP_NOTE = (
    "new begins a finding with the claim; in an existing finding the flip goes under a node (n2), or "
    "under a new answer to a node's why (of n1)."
)


def finding_form(run: RunFolder, view: RunView) -> FormScreen:
    """Return a form for a new finding whose first evidence is a part of the run; the most important part comes
    first."""
    said = _parts(view)
    folder: Path = beside([run.path.parent], EVIDENCE)[0]

    def send(v: Values) -> str:
        part = v["part"] if v["shown"] == OTHER else v["shown"]
        claim = v["claim"] or said.get(part, "") or part
        name = v["name"] or slug_of(f"{run.name} {claim}")
        return str(begin(folder, name, claim, take=lambda: captured(str(run.path), part)).path)

    fields = (
        Field(name="shown", label="shown by", options=(*said, OTHER)),
        Field(name="part", label="other part", hint=f"with other: {PARTS}"),
        Field(name="claim", label="what was seen", hint="empty: the words of the alert or the end"),
        Field(name="name", label="name", hint="a-z, 0-9 and -; empty: from the words above"),
    )
    note = f"It is begun in {folder}/ with this part of {run.name} as its evidence, frozen by hash."
    return FormScreen("why? a finding about this run", fields, send, note=note)


def _parts(view: RunView) -> dict[str, str]:
    """Return the parts of a run worth a finding, with their texts: alerts (errors first), checks that failed, what is
    suspected of a script that is not ours, then the exit."""
    alerts = sorted(view.alerts.values(), key=lambda a: (a.severity != "error", -a.to_unix_s))
    found = {f"alert {alert.id}": alert.title for alert in alerts}
    found |= {f"check {id}": one.reason for id, one in view.checks.items() if one.level == "fail"}
    for degree in (CONTRADICTION, SUSPICION):
        for one in view.identities:
            if one.degree == degree:
                found.setdefault(f"check {one.id}", f"{degree}: {one.text}")
    if view.exit is not None:
        found["exit"] = view.exit.sentence
    return found


def keep_form(snapshot: FlipSnapshot) -> FormScreen:
    """Return a form for a flip with a verdict."""
    assert snapshot.verdict is not None and snapshot.plan is not None, "a flip that has ended"
    folders = beside([snapshot.folder.parent.parent], EVIDENCE)
    known = open_findings(folders)
    flip = snapshot.folder

    def send(v: Values) -> str:
        asked: Any = {name: v[name] for name in ("name", "claim", "under", "says")}
        return keep_flip(flip, folders[0], finding=known.get(v["finding"]), **asked)

    fields = (
        Field(name="finding", label="finding", value=NEW, options=(NEW, *known)),
        Field(name="claim", label="claim", value=str(snapshot.verdict["reason"])),
        Field(name="name", label="name of new", value=slug_of(f"flip-{flip.name}")),
        Field(name="under", label="under", value="of n1", hint="n2, or of n1"),
        Field(name="says", label="it", value="supports", options=("supports", "contradicts")),
    )
    return FormScreen("add the flip to a finding", fields, send, note=KEEP_NOTE)
