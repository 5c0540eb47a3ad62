"""What the list of findings is fed, and what may be done to one: as `engine why`, through the same
functions.

Every change holds the lock of the finding's folder, so a shell and a screen may work on the same one.
What is refused is raised in the engine's own words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.errors import BadInput
from engine.findings.bundle import FINDING, Bundle, find_bundles
from engine.findings.capture import Blob, Capture
from engine.findings.finding import Finding
from engine.findings.flips import capture_flip
from engine.findings.redact import Redactor
from engine.findings.report import state_words, tree_lines
from engine.findings.rules import judge
from engine.findings.verify import check_bundle
from engine.findings.whys import (
    add_alternative,
    add_node,
    answer,
    blobs_of,
    close,
    link,
    new_finding,
    refute,
    withdraw,
)
from engine.log.text import one_line
from workbench.listing import Listing, Row

EVIDENCE = "evidence"
NEW = "new"
"""The choice of a finding that is begun."""
NONE = """\
No finding in {folders} yet.

A finding begins with what was seen, and asks why:

  n                                  begin one here
  W on the screen of a run           begin one with an alert as its evidence
  ctrl+w on the screen of a flip     begin one with the flip, or add the flip to one
  engine why new NAME --claim TEXT   the same from a shell"""


class FindingsFeed:
    """The findings in some folders; one is read again when its file has changed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        self._rows: dict[Path, tuple[object, Row]] = {}

    def poll(self) -> Listing:
        """The list of them, newest first."""
        rows = []
        for bundle in (bundle for folder in self.folders for bundle in find_bundles(folder)):
            stat = (bundle.path / FINDING).lstat()
            seen = (stat.st_mtime_ns, stat.st_size)
            known = self._rows.get(bundle.path)
            if known is None or known[0] != seen:
                known = self._rows[bundle.path] = (seen, _row(bundle))
            rows.append(known[1])
        words = ", ".join(map(str, self.folders))
        return Listing(
            head=f"five whys: {len(rows)} finding{'' if len(rows) == 1 else 's'} in {words}",
            rows=tuple(rows),
            empty=NONE.format(folders=words),
        )


def _row(bundle: Bundle) -> Row:
    name = bundle.path.name
    try:
        finding = bundle.load()
    except BadInput as problem:
        # One that is damaged must not hide the others.
        text = f"damaged: {one_line(problem.message)}"
        lines = (f"{name}: damaged", f"  {one_line(problem.message)}")
        return Row(key=str(bundle.path), name=name, text=text, tone="bad", lines=lines)
    blocking = [problem for problem in judge(finding) if problem.level != "warning"]
    if finding.closed is None:
        state, tone = f"open, {len(blocking)} in the way", "unsure"
    elif finding.closed.outcome == "unresolved":
        state, tone = "closed unresolved", "quiet"
    else:
        state, tone = "root cause", "good"
    return Row(
        key=str(bundle.path),
        name=name,
        text=f"{state}, {len(finding.nodes)} nodes  {one_line(finding.title)}",
        tone=tone,  # type: ignore[arg-type]
        lines=(name, f"  {state_words(finding)}", *tree_lines(finding)),
    )


def slug_of(text: str) -> str:
    """A name for a finding, from some words."""
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return words[:48].strip("-") or "finding"


def begin(
    folder: Path, slug: str, claim: str, capture: Callable[[], Capture] | None = None
) -> Bundle:
    """A new finding in `folder`, with evidence under its first node. Raises BadInput."""
    finding = new_finding(slug, claim)
    path = folder / f"{finding.at[:10]}-{slug}"
    if path.exists():
        raise BadInput.expected("finding", path, "a new name", "one that exists")
    if capture is None:
        return Bundle.create(folder, finding)
    found = capture()
    return Bundle.create(folder, link(finding, "n1", found, relative_to=path), blobs_of(found))


def add_why(path: Path, claim: str, *, why_of: str, kind: str) -> str:
    """Add an answer to why `why_of` (ids, by commas or spaces) is so. Raises BadInput."""
    parents = why_of.replace(",", " ").split()
    done = _change(path, lambda f: (add_node(f, claim, why_of=parents, kind=kind), []))  # type: ignore[arg-type]
    return f"{done.nodes[-1].id}: why of {', '.join(parents)}"


def link_evidence(
    path: Path,
    node: str,
    capture: Callable[[], Capture],
    *,
    says: str = "supports",
    answers: str = "",
    outcome: str = "",
    result: str = "",
) -> str:
    """Put evidence under a node; with `answers` it is the test of that alternative. Raises BadInput."""
    bundle = Bundle(path)
    bundle.load().node(node)  # before a command is run for nothing
    if says == "answers" and not (answers and result.strip()):
        raise BadInput.expected(
            "evidence", node, "an alternative and what its test showed", answers or "neither"
        )
    found = capture()

    def changed(before: Finding) -> tuple[Finding, list[Blob]]:
        done = link(before, node, found, says=says, relative_to=path)  # type: ignore[arg-type]
        if says == "answers":
            own = done.node(node).evidence[-1].id
            done = answer(done, answers, outcome=outcome, text=result, evidence=own)
        return done, blobs_of(found)

    done = _change(path, changed)
    return f"{done.node(node).evidence[-1].id} {says} {node}"


def add_under(
    path: Path, parent: str, claim: str, capture: Callable[[], Capture], *, says: str
) -> str:
    """Add a claim as a why of `parent`, with its evidence, in one change. Raises BadInput."""
    bundle = Bundle(path)
    bundle.load().node(parent)
    found = capture()

    def changed(before: Finding) -> tuple[Finding, list[Blob]]:
        done = add_node(before, claim, why_of=[parent])
        new = done.nodes[-1].id
        return link(done, new, found, says=says, relative_to=path), blobs_of(found)  # type: ignore[arg-type]

    done = _change(path, changed)
    return f"{done.nodes[-1].id}: why of {parent}, with {done.nodes[-1].evidence[-1].id}"


def refute_node(path: Path, node: str, reason: str) -> str:
    """Say that a claim is wrong, and why. Raises BadInput."""
    _change(path, lambda f: (refute(f, node, reason), []))
    return f"{node}: refuted"


def withdraw_entry(path: Path, entry: str, reason: str) -> str:
    """Take back a node, evidence or an alternative, which stays, struck out. Raises BadInput."""
    _change(path, lambda f: (withdraw(f, entry, reason), []))
    return f"{entry}: withdrawn"


def name_alternative(
    path: Path, node: str, claim: str, *, test: str, if_true: str, if_false: str, minutes: str
) -> str:
    """Name another explanation and the test that would tell. Raises BadInput."""
    try:
        cost = float(minutes)
    except ValueError:
        raise BadInput.expected("alternative", node, "a cost in minutes", repr(minutes)) from None

    def changed(finding: Finding) -> tuple[Finding, list[Blob]]:
        done = add_alternative(
            finding, node, claim, test=test, if_true=if_true, if_false=if_false, minutes=cost
        )
        return done, []

    done = _change(path, changed)
    return f"{done.node(node).alternatives[-1].id}: alternative to {node}"


def close_finding(path: Path, *, outcome: str, text: str) -> str:
    """Close as root cause or unresolved. Raises CannotClose with the rules that stand against it, and
    BadInput for a bundle that is not sound or an unresolved one without a reason."""
    checked = check_bundle(Bundle(path))
    if checked.faults:
        raise BadInput.expected("finding", path, "a sound bundle", str(checked.faults[0]))
    unresolved = outcome == "unresolved"
    if unresolved and not text.strip():
        raise BadInput.expected("finding", path, "why it stays unresolved", "no reason")
    reason = text if unresolved else ""
    known = checked.problems
    done = _change(path, lambda f: (close(f, unresolved=reason, text=text, known=known), []))
    return f"{done.slug}: closed, {outcome}"


def verify(path: Path) -> str:
    """Hash and evaluate everything again, in a sentence."""
    verdict = check_bundle(Bundle(path)).verdict
    return f"{verdict.level.name}: {verdict.reason}"


def export(path: Path, to: str) -> str:
    """Enter it into LOG.md; with `to`, copy it into that evidence folder first. Raises BadInput."""
    faults = [f for f in check_bundle(Bundle(path)).faults if f.where != "LOG.md"]
    if faults:
        raise BadInput.expected("finding", path, "a sound bundle", str(faults[0]))
    done = Bundle(path).export(Path(to) if to.strip() else None)
    return f"exported: {done.path}, entered into {done.path.parent / 'LOG.md'}"


def _change(path: Path, change: Callable[[Finding], tuple[Finding, Sequence[Blob]]]) -> Finding:
    return Bundle(path).change(change)[1]


def open_findings(folders: Sequence[Path]) -> dict[str, Path]:
    """Names and folders of the findings that can be read, newest first."""
    found: dict[str, Path] = {}
    for bundle in (bundle for folder in folders for bundle in find_bundles(folder)):
        try:
            bundle.load()
        except BadInput:
            continue
        found.setdefault(bundle.path.name, bundle.path)
    return found


def keep_flip(
    flip: Path, folder: Path, *, finding: Path | None, name: str, claim: str, under: str, says: str
) -> str:
    """Put the verdict of a flip into a finding, and say where it is. Raises BadInput, RunLogError.

    Without `finding` a new one of that `name` begins with the claim. Else `under` is a node (`n2`), or
    `of n1`: then the claim is added as an answer to why n1 is so, with the flip under it.
    """

    def capture() -> Capture:
        return capture_flip(flip, Redactor())

    if finding is None:
        return f"kept: {begin(folder, name, claim, capture).path}"
    first, _, parent = under.strip().partition(" ")
    if first == "of":
        return f"{finding.name}: {add_under(finding, parent.strip(), claim, capture, says=says)}"
    return f"{finding.name}: {link_evidence(finding, first, capture, says=says)}"
