"""The form that puts a flip into a finding, a new one or one that there is."""

from __future__ import annotations

from typing import Any

from engine.evidence.changes import slug_of
from workbench.findings import EVIDENCE, NEW, keep_flip, open_findings
from workbench.flips import FlipSnapshot
from workbench.listing import beside
from workbench.tui.screens.form import Field, FormScreen, Values

NOTE = (
    "new begins a finding with what was seen; of another, the flip goes under a node (n2), or under a "
    "new answer to its why (of n1)."
)


def keep_form(snapshot: FlipSnapshot) -> FormScreen:
    """For a flip with a verdict."""
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
    return FormScreen("the flip to a finding", fields, send, note=NOTE)
