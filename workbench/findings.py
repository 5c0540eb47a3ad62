"""Findings as rows: the list of findings, and one finding as a tree.

A finding has a row for each node of the chain, with its evidence and alternatives below it; the details of
evidence are opened at its window. A node that answers two whys is expanded under the first and only
referenced under the second. The status of a row is shown as a word and as a sign:

    * observed    + supported    x refuted    ? unverified
    > evidence    ! evidence that was changed, or an alternative that holds    / excluded
    - withdrawn: struck through

The actions on a finding are in `engine.findings.changes`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import BadInput, EngineError
from engine.findings import changes
from engine.findings.bundle import FINDING, Bundle, find_bundles
from engine.findings.capture import Capture, capture_flip
from engine.findings.finding import (
    Alternative,
    CommandRun,
    Evidence,
    Finding,
    MetricWindow,
    Node,
    Says,
    Status,
    is_active,
)
from engine.findings.kinds import KINDS, Piece, points_of, words_of
from engine.findings.redact import Redactor
from engine.findings.rules import CHEAP_MINUTES, effective_status, judge
from engine.findings.text import (
    alternative_words,
    count_words,
    state_words,
    tree_lines,
    withdrawn_words,
)
from engine.findings.verify import Checked, check_bundle
from engine.flips.text import ASCII, UNICODE
from engine.log.downsample import buckets, equal_counts
from engine.log.text import one_line
from engine.units import format_bytes
from workbench.listing import TONE_OF, Listing, Row, Tone
from workbench.traces import Trace

EVIDENCE = "evidence"
NEW = "new"
"""The choice that starts a new finding."""
NONE = """\
No finding in {folders} yet.

A finding begins with what was seen, and asks why:

  n                                  begin one here
  W on the screen of a run           begin one with an alert as its evidence
  ctrl+w on the screen of a flip     begin one with the flip, or add the flip to one
  engine why new NAME --claim TEXT   the same from a shell"""
SIGNS: dict[Status, tuple[str, Tone]] = {
    "observed": ("*", "good"),
    "supported": ("+", "good"),
    "refuted": ("x", "quiet"),
    "unverified": ("?", "unsure"),
}
DRAWN = 1024
"""So many points of a metric are drawn."""
HEAD = "finding"
"""Key of the first row: the finding as a whole."""


# The list.


class FindingsFeed:
    """Reads the findings in some folders; one is read again when its file has changed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        self._rows: dict[Path, tuple[object, Row]] = {}

    def poll(self) -> Listing:
        """Return the list of findings, newest first."""
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
        # A damaged finding must not hide the others.
        text = f"damaged: {one_line(problem.message)}"
        lines = (f"{name}: damaged", f"  {one_line(problem.message)}")
        return Row(key=str(bundle.path), name=name, text=text, tone="bad", lines=lines)
    blocking = [problem for problem in judge(finding) if problem.level != "warning"]
    if finding.closed is None:
        state, tone = f"open, {len(blocking)} rules unmet", "unsure"
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


def open_findings(folders: Sequence[Path]) -> dict[str, Path]:
    """Return name and folder of each readable finding, newest first."""
    found: dict[str, Path] = {}
    for bundle in (bundle for folder in folders for bundle in find_bundles(folder)):
        try:
            bundle.load()
        except BadInput:
            continue
        found.setdefault(bundle.path.name, bundle.path)
    return found


def keep_flip(
    flip: Path, folder: Path, *, finding: Path | None, name: str, claim: str, under: str, says: Says
) -> str:
    """Add the verdict of a flip to a finding; returns its location. Raises BadInput, RunLogError.

    Without `finding`, a new one called `name` starts with the claim. Otherwise `under` is a node (`n2`), or
    `of n1`: then the claim is added as an answer to why n1 is so, with the flip under it.
    """

    def take() -> Capture:
        return capture_flip(flip, Redactor())

    if finding is None:
        return f"kept: {changes.begin(folder, name, claim, take=take).path}"
    first, _, parent = under.strip().partition(" ")
    where = {"claim": claim} if first == "of" else {}
    node = parent.strip() if first == "of" else first
    return f"{finding.name}: {changes.link(Bundle(finding), node, take, says=says, **where).said}"


# One finding.


class FindingFeed:
    """Reads one finding; it is verified again when one of its files has changed, or after `forget`."""

    def __init__(self, path: Path, *, ascii_only: bool = False) -> None:
        self.path, self._ascii_only = path, ascii_only
        self._seen: object = None
        self._listing: Listing | None = None
        self.finding: Finding | None = None
        """As of the last poll; None where it cannot be read."""

    def forget(self) -> None:
        """Verify every byte again at the next poll."""
        self._seen = None

    def poll(self) -> Listing:
        """Return its tree. Damage is shown in the tree, not raised."""
        seen = _fingerprint(self.path)
        if self._listing is None or seen != self._seen:
            checked = check_bundle(Bundle(self.path))
            self.finding = checked.finding
            self._listing = listing_of(checked, ascii_only=self._ascii_only)
            self._seen = seen
        return self._listing


def _fingerprint(path: Path) -> object:
    found = set()
    for file in path.rglob("*"):
        # A temporary file may have disappeared meanwhile.
        with contextlib.suppress(FileNotFoundError):
            stat = file.stat()
            found.add((file, stat.st_mtime_ns, stat.st_size))
    return found


def listing_of(checked: Checked, *, ascii_only: bool) -> Listing:
    """Return the rows of a verified finding."""
    verdict, finding = checked.verdict, checked.finding
    said = f"{verdict.level.name}: {one_line(verdict.reason)}"
    first = Row(
        key=HEAD,
        text=one_line(finding.title) if finding else "cannot be read",
        tone=TONE_OF[verdict.level],
        lines=tuple(_head_lines(checked, said)),
    )
    rows = [] if finding is None else _Tree(checked, finding, ascii_only).rows()
    return Listing(head=f"{checked.bundle.path.name}: {said}", rows=(first, *rows))


def _section(title: str, lines: Iterable[object]) -> list[str]:
    """Return a heading with its lines; empty where there are no lines."""
    found = [f"  {one_line(str(line))}" for line in lines]
    return [title, *found] if found else []


def _head_lines(checked: Checked, said: str) -> Iterator[str]:
    finding = checked.finding
    yield f"{checked.bundle.path}"
    yield f"  {said}"
    if finding is not None:
        yield f"  {state_words(finding)}"
        yield f"  by {one_line(finding.author)} on {one_line(finding.host)}, {finding.at}"
    yield from _section("changed since the tool wrote it", checked.faults)
    blocking = [f"{p.level}: {p}" for p in checked.problems if p.level != "warning"]
    in_the_way = "rules that block closing it as a root cause"
    yield from _section(in_the_way, blocking or ["nothing"])
    yield from _section("warnings", (p for p in checked.problems if p.level == "warning"))
    yield from _section("notes", checked.notes)


@dataclass
class _Tree:
    """The rows of one finding."""

    checked: Checked
    finding: Finding
    ascii_only: bool
    drawn: set[str] = field(default_factory=set)

    def rows(self) -> Iterator[Row]:
        for node in self.finding.nodes:
            if not node.why_of:
                yield from self.of_node(node, 0)

    def of_node(self, node: Node, depth: int, parent: str = "") -> Iterator[Row]:
        branch, claim = _branch(depth), one_line(node.claim)
        status = effective_status(self.finding, node, self.checked.broken)[0]
        if node.id in self.drawn:
            text = f"{branch}{node.id}  {status}, see above: it answers {' and '.join(node.why_of)}"
            said = (f"{node.id}: see above", f"  {claim}")
            yield Row(key=f"{node.id}@{parent}", text=text, tone="quiet", lines=said)
            return
        self.drawn.add(node.id)
        lines = tuple(self.node_lines(node))
        if not is_active(node):
            text = f"{branch}{node.id}  {node.kind}: {claim} {withdrawn_words(node.withdrawn)}"
            yield Row(key=node.id, text=text, tone="quiet", sign="-", struck=True, lines=lines)
            return
        sign, tone = SIGNS[status]
        text = f"{branch}{node.id}  {status} {node.kind}: {claim}{count_words(node)[1:]}"
        yield Row(key=node.id, text=text, tone=tone, sign=sign, lines=lines)
        for evidence in node.evidence:
            yield self.of_evidence(node, evidence, depth + 1)
        for alternative in node.alternatives:
            yield _alternative_row(node, alternative, depth + 1)
        for why in self.finding.whys_of(node.id):
            yield from self.of_node(why, depth + 1, node.id)

    def node_lines(self, node: Node) -> Iterator[str]:
        status, why = effective_status(self.finding, node, self.checked.broken)
        yield f"{node.id}: {one_line(node.claim)}"
        of = f", why of {', '.join(node.why_of)}" if node.why_of else ""
        for line in (
            withdrawn_words(node.withdrawn),
            f"{SIGNS[status][0]} {status}, {node.kind}{of}",
            f"recorded as {node.status}; {one_line(why)}" if why else "",
            f"refuted: {one_line(node.reason)}" if node.reason else "",
            f"{one_line(node.author)}, {node.at}",
        ):
            if line:
                yield f"  {line}"
        mine = [p for p in self.checked.problems if p.node == node.id]
        yield from _section("rules", (f"{p.level}: {p.rule} {p.text}" for p in mine))
        evidence = [
            f"{e.id} {e.says}: {words_of(e.locator)} {withdrawn_words(e.withdrawn)}".rstrip()
            for e in node.evidence
        ]
        yield from _section("evidence", evidence)
        yield from _section(
            "alternatives", (f"{a.id} {alternative_words(a)}" for a in node.alternatives)
        )
        yield from _section("missing from the imported record", node.missing)

    def of_evidence(self, node: Node, evidence: Evidence, depth: int) -> Row:
        bundle, broken = self.checked.bundle, self.checked.broken
        faults = [fault.text for fault in self.checked.faults if fault.where == evidence.id]
        shas = (evidence.artifact, *evidence.attached)
        faults += [broken[sha] for sha in shas if sha in broken]
        words, taken = words_of(evidence.locator), withdrawn_words(evidence.withdrawn)
        lines = [
            f"{evidence.id} {evidence.says} {node.id}: {words}",
            f"  captured by {evidence.captured_by}, {evidence.at}",
        ]
        lines += [f"  {taken}"] if taken else []
        lines += [f"  taken from {one_line(evidence.source)}"] if evidence.source else []
        lines += _section("changed", faults)
        piece = Piece(
            self.finding,
            evidence,
            lambda sha: bundle.read_artifact(self.finding.artifact(sha)),
            ASCII if self.ascii_only else UNICODE,
        )
        trace: Trace | None = None
        try:
            if piece.read(evidence.artifact) is None:
                lines += ["not copied", "  too big, or not text: known by hash and size"]
            else:
                lines += KINDS[type(evidence.locator)].opened(evidence.locator, piece)
                trace = _trace_of(piece)
            lines += _attached_lines(piece)
        except (EngineError, ValueError, KeyError, TypeError) as problem:
            lines += ["cannot be read", f"  {one_line(str(problem))}"]
        gone = not is_active(evidence)
        return Row(
            key=evidence.id,
            text=f"{_branch(depth)}{evidence.id}  {evidence.says}: {words} {taken}".rstrip(),
            tone="bad" if faults else "quiet" if gone else "plain",
            sign="!" if faults else "-" if gone else ">",
            struck=gone,
            lines=tuple(lines),
            trace=trace,
        )


def _branch(depth: int) -> str:
    return "" if depth == 0 else f"{'  ' * (depth - 1)}└─"


def _alternative_row(node: Node, alternative: Alternative, depth: int) -> Row:
    answer = alternative.answer
    minutes = f"{alternative.cost_minutes:g} minute{'' if alternative.cost_minutes == 1 else 's'}"
    sign, tone = "?", "plain"
    if not is_active(alternative):
        state, sign, tone = withdrawn_words(alternative.withdrawn), "-", "quiet"
    elif answer is None or answer.outcome == "undecided":
        state = f"{'untested' if answer is None else 'undecided'}, {minutes}"
        tone = "unsure" if alternative.cost_minutes < CHEAP_MINUTES else "plain"
    elif answer.outcome == "excluded":
        state, sign, tone = f"excluded by {answer.evidence}", "/", "quiet"
    else:
        state, sign, tone = f"holds, by {answer.evidence}", "!", "bad"
    showed = [] if answer is None else [f"{answer.outcome}: {answer.text}"]
    expected = (
        alternative.test,
        f"costs {minutes}",
        f"if it is so: {alternative.expected_if_true}",
        f"if not: {alternative.expected_if_false}",
    )
    lines = (
        f"{alternative.id}: or {one_line(alternative.claim)}",
        f"  instead of {node.id}: {one_line(node.claim)}",
        f"  {state}",
        *_section("cheapest test that tells them apart", expected),
        *_section("what it showed", showed),
    )
    return Row(
        key=alternative.id,
        text=f"{_branch(depth)}{alternative.id}  or {one_line(alternative.claim)} [{state}]",
        tone=tone,  # type: ignore[arg-type]
        sign=sign,
        struck=not is_active(alternative),
        lines=lines,
    )


def _attached_lines(piece: Piece) -> list[str]:
    """Return the artifacts captured with the evidence; stacks in full."""
    lines, stacks = [], []
    locator, own = piece.evidence.locator, set[str]()
    if isinstance(locator, CommandRun):
        own = {locator.stdout_sha256, locator.stderr_sha256}
    for sha in piece.evidence.attached:
        if sha in own:
            continue
        artifact = piece.finding.artifact(sha)
        lines.append(f"{artifact.what} ({artifact.name}, {format_bytes(artifact.size)})")
        if artifact.what.startswith(("stacks of", "what ")) and artifact.kept:
            stacks += [one_line(artifact.what), *piece.text(sha)]
    return [*stacks, *_section("captured with it", lines)]


def _trace_of(piece: Piece) -> Trace | None:
    """Return the metric over the seconds of its window, from 0."""
    locator = piece.evidence.locator
    if not isinstance(locator, MetricWindow):
        return None
    points = points_of(locator, piece.data, piece.evidence.id)
    xs, ys = [x - locator.from_unix_s for x, _ in points], [y for _, y in points]
    found = buckets(xs, ys, equal_counts(len(points), DRAWN))
    last = points[-1][1] if points else None
    return Trace(name=locator.metric, buckets=tuple(found), last=last, x_name="s")


def node_of(finding: Finding, key: str) -> tuple[str, str]:
    """Return the node of a row, and the alternative if the row is one."""
    for node in finding.nodes:
        if key.partition("@")[0] in {node.id, *(e.id for e in node.evidence)}:
            return node.id, ""
        if key in {a.id for a in node.alternatives}:
            return node.id, key
    return finding.nodes[0].id, ""


def tested_id(finding: Finding, node: str, given: str) -> str:
    """Return the alternative that the evidence answers: the given one, or the cheapest untested one. Raises
    BadInput."""
    named = [n for n in finding.nodes if n.id == node]
    untested = [a for n in named for a in n.alternatives if a.answer is None and is_active(a)]
    if not given and not untested:
        found = "none that is untested"
        raise BadInput.expected("evidence", node, "an alternative to answer", found)
    return given or min(untested, key=lambda a: a.cost_minutes).id
