"""One finding as rows: each node of the chain with its evidence and alternatives below it, and every
piece of evidence opened at its window.

A node that answers two whys is a row with everything under the first, and named again under the
second. What a row's status means is its word and its sign:

    * observed    + supported    x refuted    ? unverified
    > evidence    ! evidence that was changed, or an alternative that holds    / excluded
    - withdrawn: drawn with a line through it
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import UNSET

from engine.errors import BadInput, EngineError
from engine.findings.bundle import Bundle
from engine.findings.finding import (
    Alternative,
    Evidence,
    Finding,
    Node,
    Status,
)
from engine.findings.report import (
    alternative_words,
    locator_words,
    state_words,
    withdrawn_words,
)
from engine.findings.rules import CHEAP_MINUTES, effective_status, observations
from engine.findings.verify import Checked, check_bundle
from engine.flips.text import ASCII, UNICODE
from engine.log.text import one_line
from workbench.evidence_words import attached_lines, content_lines, trace_of
from workbench.listing import TONE_OF, Listing, Row, Tone
from workbench.traces import Trace

SIGN_OF: dict[Status, str] = {"observed": "*", "supported": "+", "refuted": "x", "unverified": "?"}
TONES: dict[Status, Tone] = {
    "observed": "good",
    "supported": "good",
    "refuted": "quiet",
    "unverified": "unsure",
}
HEAD = "finding"
"""Key of the first row: the finding as a whole."""


class FindingFeed:
    """One finding, checked again when a file of it has changed, or when it is told to."""

    def __init__(self, path: Path, *, ascii_only: bool = False) -> None:
        self.path, self._ascii_only = path, ascii_only
        self._seen: object = None
        self._listing: Listing | None = None
        self.finding: Finding | None = None
        """As of the last poll; None where it cannot be read."""

    def forget(self) -> None:
        """Check every byte again at the next poll."""
        self._seen = None

    def poll(self) -> Listing:
        """Its tree. What is damaged is said in it, not raised."""
        seen = _fingerprint(self.path)
        if self._listing is None or seen != self._seen:
            checked = check_bundle(Bundle(self.path))
            self.finding = checked.finding
            self._listing = listing_of(checked, ascii_only=self._ascii_only)
            self._seen = seen
        return self._listing


def _fingerprint(path: Path) -> object:
    found = []
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                stat = os.stat(os.path.join(folder, name))
            except FileNotFoundError:
                continue
            found.append((folder, name, stat.st_mtime_ns, stat.st_size))
    return tuple(sorted(found))


def listing_of(checked: Checked, *, ascii_only: bool) -> Listing:
    """A finding that was checked, as rows."""
    verdict = checked.verdict
    name = checked.bundle.path.name
    head = f"{name}: {verdict.level.name}: {one_line(verdict.reason)}"
    rows = [
        Row(
            key=HEAD,
            text=one_line(checked.finding.title) if checked.finding else "cannot be read",
            tone=TONE_OF[verdict.level],
            lines=tuple(_head_lines(checked)),
        )
    ]
    if checked.finding is not None:
        drawn: set[str] = set()
        for node in checked.finding.nodes:
            if not node.why_of:
                rows += _node_rows(checked, checked.finding, node, 0, drawn, ascii_only)
    return Listing(head=head, rows=tuple(rows))


def _head_lines(checked: Checked) -> Iterator[str]:
    finding = checked.finding
    yield f"{checked.bundle.path}"
    yield f"  {checked.verdict.level.name}: {one_line(checked.verdict.reason)}"
    if finding is not None:
        yield f"  {state_words(finding)}"
        yield f"  by {one_line(finding.author)} on {one_line(finding.host)}, {finding.at}"
    if checked.faults:
        yield "changed since the tool wrote it"
        yield from (f"  {one_line(str(fault))}" for fault in checked.faults)
    blocking = [problem for problem in checked.problems if problem.level != "warning"]
    yield "what stands in the way of closing it as a root cause"
    yield from (f"  {problem.level}: {one_line(str(problem))}" for problem in blocking)
    if not blocking:
        yield "  nothing"
    warnings = [problem for problem in checked.problems if problem.level == "warning"]
    if warnings:
        yield "warnings"
        yield from (f"  {one_line(str(problem))}" for problem in warnings)
    if checked.notes:
        yield "notes"
        yield from (f"  {one_line(note)}" for note in checked.notes)


def _node_rows(
    checked: Checked,
    finding: Finding,
    node: Node,
    depth: int,
    drawn: set[str],
    ascii_only: bool,
    parent: str = "",
) -> Iterator[Row]:
    branch = _branch(depth)
    status = effective_status(finding, node, checked.broken)[0]
    if node.id in drawn:
        text = f"{branch}{node.id}  {status}, see above: it answers {' and '.join(node.why_of)}"
        lines = (f"{node.id}: see above", f"  {one_line(node.claim)}")
        yield Row(key=f"{node.id}@{parent}", text=text, tone="quiet", lines=lines)
        return
    drawn.add(node.id)
    if node.withdrawn is not UNSET:
        text = f"{branch}{node.id}  {node.kind}: {one_line(node.claim)} {withdrawn_words(node.withdrawn)}"
        said = tuple(_node_lines(checked, finding, node))
        yield Row(key=node.id, text=text, tone="quiet", sign="-", struck=True, lines=said)
        return
    count = observations(node)
    shown = f" (n = {count})" if count else ""
    yield Row(
        key=node.id,
        text=f"{branch}{node.id}  {status} {node.kind}: {one_line(node.claim)}{shown}",
        tone=TONES[status],
        sign=SIGN_OF[status],
        lines=tuple(_node_lines(checked, finding, node)),
    )
    for evidence in node.evidence:
        yield _evidence_row(checked, finding, node, evidence, depth + 1, ascii_only)
    for alternative in node.alternatives:
        yield _alternative_row(node, alternative, depth + 1)
    for why in finding.whys_of(node.id):
        yield from _node_rows(checked, finding, why, depth + 1, drawn, ascii_only, node.id)


def _branch(depth: int) -> str:
    return "" if depth == 0 else f"{'  ' * (depth - 1)}└─"


def _node_lines(checked: Checked, finding: Finding, node: Node) -> Iterator[str]:
    status, why = effective_status(finding, node, checked.broken)
    yield f"{node.id}: {one_line(node.claim)}"
    if node.withdrawn is not UNSET:
        yield f"  {withdrawn_words(node.withdrawn)}"
    of = f", why of {', '.join(node.why_of)}" if node.why_of else ""
    yield f"  {SIGN_OF[status]} {status}, {node.kind}{of}"
    if why:
        yield f"  said to be {node.status}; {one_line(why)}"
    if node.reason:
        yield f"  refuted: {one_line(node.reason)}"
    yield f"  {one_line(node.author)}, {node.at}"
    mine = [problem for problem in checked.problems if problem.node == node.id]
    if mine:
        yield "rules"
        yield from (f"  {p.level}: {p.rule} {one_line(p.text)}" for p in mine)
    if node.evidence:
        yield "evidence"
        yield from (
            f"  {e.id} {e.says}: {locator_words(e.locator)} {withdrawn_words(e.withdrawn)}".rstrip()
            for e in node.evidence
        )
    if node.alternatives:
        yield "alternatives"
        yield from (f"  {a.id} {alternative_words(a)}" for a in node.alternatives)
    if node.missing:
        yield "missing in the record it was taken from"
        yield from (f"  {one_line(text)}" for text in node.missing)


def _alternative_row(node: Node, alternative: Alternative, depth: int) -> Row:
    answer = alternative.answer
    struck = alternative.withdrawn is not UNSET
    minutes = f"{alternative.cost_minutes:g} minute{'' if alternative.cost_minutes == 1 else 's'}"
    if answer is None or answer.outcome == "undecided":
        state = f"{'untested' if answer is None else 'undecided'}, {minutes}"
        sign, tone = "?", "unsure" if alternative.cost_minutes < CHEAP_MINUTES else "plain"
    elif answer.outcome == "excluded":
        state, sign, tone = f"excluded by {answer.evidence}", "/", "quiet"
    else:
        state, sign, tone = f"holds, by {answer.evidence}", "!", "bad"
    if struck:
        state, sign, tone = withdrawn_words(alternative.withdrawn), "-", "quiet"
    lines = [
        f"{alternative.id}: or {one_line(alternative.claim)}",
        f"  instead of {node.id}: {one_line(node.claim)}",
        f"  {state}",
        "cheapest test that tells them apart",
        f"  {one_line(alternative.test)}",
        f"  costs {minutes}",
        f"  if it is so: {one_line(alternative.expected_if_true)}",
        f"  if not: {one_line(alternative.expected_if_false)}",
    ]
    if answer is not None:
        lines += ["what it showed", f"  {answer.outcome}: {one_line(answer.text)}"]
    return Row(
        key=alternative.id,
        text=f"{_branch(depth)}{alternative.id}  or {one_line(alternative.claim)} [{state}]",
        tone=tone,  # type: ignore[arg-type]
        sign=sign,
        struck=struck,
        lines=tuple(lines),
    )


# Evidence, opened in place


def _evidence_row(
    checked: Checked,
    finding: Finding,
    node: Node,
    evidence: Evidence,
    depth: int,
    ascii_only: bool,
) -> Row:
    faults = [fault.text for fault in checked.faults if fault.where == evidence.id]
    faults += [checked.broken[sha] for sha in _shas(evidence) if sha in checked.broken]
    words = locator_words(evidence.locator)
    lines = [
        f"{evidence.id} {evidence.says} {node.id}: {words}",
        f"  captured by {evidence.captured_by}, {evidence.at}",
    ]
    struck = evidence.withdrawn is not UNSET
    lines += [f"  {withdrawn_words(evidence.withdrawn)}"] if struck else []
    lines += [f"  taken from {one_line(evidence.source)}"] if evidence.source else []
    if faults:
        lines += ["changed", *(f"  {one_line(text)}" for text in faults)]
    taken = withdrawn_words(evidence.withdrawn)
    trace: Trace | None = None
    try:
        raw = checked.bundle.read_artifact(finding.artifact(evidence.artifact))
        if raw is None:
            lines += ["not copied", "  too big, or not text: known by hash and size"]
        else:
            shown = ASCII if ascii_only else UNICODE
            lines += content_lines(checked.bundle, finding, evidence, raw, shown)
            trace = trace_of(evidence, raw)
        lines += attached_lines(checked.bundle, finding, evidence)
    except (EngineError, ValueError, KeyError, TypeError) as problem:
        lines += ["cannot be read", f"  {one_line(str(problem))}"]
    return Row(
        key=evidence.id,
        text=f"{_branch(depth)}{evidence.id}  {evidence.says}: {words} {taken}".rstrip(),
        tone="bad" if faults else "quiet" if struck else "plain",
        sign="!" if faults else "-" if struck else ">",
        struck=struck,
        lines=tuple(lines),
        trace=trace,
    )


def _shas(evidence: Evidence) -> tuple[str, ...]:
    return (evidence.artifact, *evidence.attached)


def node_of(finding: Finding, key: str) -> tuple[str, str]:
    """The node that a row belongs to, and the alternative that it is, if it is one."""
    for node in finding.nodes:
        if key.partition("@")[0] == node.id or key in {e.id for e in node.evidence}:
            return node.id, ""
        if key in {a.id for a in node.alternatives}:
            return node.id, key
    return finding.nodes[0].id, ""


def cheapest_untested(finding: Finding) -> Mapping[str, str]:
    """By node: the cheapest alternative that nobody has tested."""
    found = {}
    for node in finding.nodes:
        untested = [a for a in node.alternatives if a.answer is None and a.withdrawn is UNSET]
        if untested:
            found[node.id] = min(untested, key=lambda a: a.cost_minutes).id
    return found


def tested_id(finding: Finding, node: str, given: str) -> str:
    """The alternative that evidence answers: the one given, or the cheapest untested. Raises BadInput."""
    id_ = given or cheapest_untested(finding).get(node, "")
    if not id_:
        raise BadInput.expected(
            "evidence", node, "an alternative to answer", "none that is untested"
        )
    return id_
