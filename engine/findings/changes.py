"""Changes of a finding on disk, for `engine why`, the screens and the notebook.

Each change holds the lock of the finding's folder, so a shell and a screen can work on the same finding, and
returns a short description of what it did. Evidence is captured before the lock is taken, because a command
may run for minutes. Errors are the engine's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, ParamSpec

from engine.errors import BadInput
from engine.findings import whys
from engine.findings.bundle import LOG, Bundle
from engine.findings.capture import Blob, Capture
from engine.findings.finding import Finding, Says
from engine.findings.verify import Checked, check_bundle

P = ParamSpec("P")
Take = Callable[[], Capture]
"""Captures evidence when called, possibly by running a command."""


@dataclass(frozen=True, slots=True)
class Done:
    finding: Finding
    """The finding as it is on disk now."""
    said: str
    """What was done, beginning with the id of the entry."""
    reopened: bool
    """Whether the finding was closed before."""


def slug_of(text: str, otherwise: str = "finding") -> str:
    """Make the name of a finding from some words."""
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return words[:48].strip("-") or otherwise


def begin(
    folder: Path, slug: str, claim: str, *, title: str = "", take: Take | None = None
) -> Bundle:
    """Create a finding in `folder`, with evidence under its first node when `take` is given. Raises BadInput."""
    finding, blobs = whys.new_finding(slug, claim, title=title), list[Blob]()
    path = Bundle.path_of(folder, finding)
    if take is not None and not path.exists():
        capture = take()
        finding = whys.link(finding, "n1", capture, relative_to=path)
        blobs = capture.blobs
    return Bundle.create(folder, finding, blobs)


def _changed(
    bundle: Bundle,
    change: Callable[[Finding], Finding],
    said: Callable[[Finding], str],
    blobs: Iterable[Blob] = (),
) -> Done:
    before, done = bundle.change(lambda finding: (change(finding), blobs))
    return Done(done, said(done), before.closed is not None and done.closed is None)


def _on_disk(
    operation: Callable[Concatenate[Finding, P], Finding], said: Callable[..., str]
) -> Callable[Concatenate[Bundle, P], Done]:
    """Apply an operation of `engine.findings.whys` to the finding of a bundle. `said` describes it, given the
    changed finding and the arguments."""

    def change(bundle: Bundle, /, *args: P.args, **kwargs: P.kwargs) -> Done:
        return _changed(
            bundle,
            lambda finding: operation(finding, *args, **kwargs),
            lambda finding: said(finding, *args, **kwargs),
        )

    return change


add = _on_disk(
    whys.add_node, lambda f, *_, why_of, **__: f"{f.nodes[-1].id}: why of {', '.join(why_of)}"
)
refute = _on_disk(whys.refute, lambda _, node, __: f"{node}: refuted")
withdraw = _on_disk(whys.withdraw, lambda _, entry, __: f"{entry}: withdrawn")
suspect = _on_disk(
    whys.add_alternative,
    lambda f, node, *_, **__: f"{f.node(node).alternatives[-1].id}: alternative to {node}",
)
answer = _on_disk(
    whys.answer, lambda _, alternative, outcome, *__, **___: f"{alternative}: {outcome}"
)


def link(
    bundle: Bundle,
    node: str,
    take: Take,
    *,
    says: Says = "supports",
    answers: str = "",
    outcome: str = "",
    result: str = "",
    claim: str = "",
) -> Done:
    """Link evidence to a node. With `answers` it is the test of that alternative; with `claim` it goes under
    a new node that explains `node`."""
    bundle.load().node(node)  # fail before a command is run for nothing
    if says == "answers" and not (answers and result.strip()):
        expected = "an alternative and what its test showed"
        raise BadInput.expected("evidence", node, expected, answers or "neither")
    capture = take()

    def change(finding: Finding) -> Finding:
        if claim:
            finding = whys.add_node(finding, claim, why_of=[node])
        under = finding.nodes[-1].id if claim else node
        finding = whys.link(finding, under, capture, says=says, relative_to=bundle.path)
        if says == "answers":
            own = finding.node(node).evidence[-1].id
            finding = whys.answer(finding, answers, outcome=outcome, text=result, evidence=own)
        return finding

    def said(finding: Finding) -> str:
        if claim:
            new = finding.nodes[-1]
            return f"{new.id}: why of {node}, with {new.evidence[-1].id}"
        return f"{finding.node(node).evidence[-1].id} {says} {node}"

    return _changed(bundle, change, said, capture.blobs)


def close(bundle: Bundle, *, unresolved: str = "", text: str = "") -> Done:
    """Close as root cause, or as unresolved with a reason. Raises CannotClose with the rules that forbid it,
    and BadInput for a bundle that does not verify."""
    known = _sound(bundle).problems
    outcome = "unresolved" if unresolved else "root cause"
    return _changed(
        bundle,
        lambda f: whys.close(f, unresolved=unresolved, text=text, known=known),
        lambda f: f"{f.slug}: closed, {outcome}",
    )


def export(bundle: Bundle, to: Path | None = None) -> Bundle:
    """Enter the finding into LOG.md; with `to`, copy it into that evidence folder first. Raises BadInput for
    a bundle that does not verify."""
    # The entry in LOG.md is rewritten anyway, so it need not match.
    _sound(bundle, but=LOG)
    return bundle.export(to)


def _sound(bundle: Bundle, but: str = "") -> Checked:
    checked = check_bundle(bundle)
    if faults := [fault for fault in checked.faults if fault.where != but]:
        raise BadInput.expected("finding", bundle.path, "a sound bundle", str(faults[0]))
    return checked
