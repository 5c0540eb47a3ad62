"""Operations on a finding as a value: each function returns a new one. `engine.findings.changes` applies them
on disk, for every surface.

    finding = new_finding("hang", "no step in 90 minutes")
    capture = capture_metric(run, "host_available_bytes", Redactor())
    finding = link(finding, "n1", capture)
    finding = add_node(finding, "the attention ran on the CPU", why_of=["n1"], kind="mechanism")
    finding = add_alternative(finding, "n2", "the disk was slow", test="engine flip ...",
                              if_true="...", if_false="...", minutes=5)
    Bundle.create(Path("evidence"), finding, capture.blobs)

Changing a closed finding reopens it. These functions refuse only what makes no sense; which evidence a claim
needs is decided by `engine.findings.rules`.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

from msgspec import UNSET
from msgspec.structs import replace

from engine.errors import EXIT_FAIL, BadInput, EngineError
from engine.findings.capture import Capture
from engine.findings.finding import (
    Alternative,
    Answer,
    Closed,
    Evidence,
    Finding,
    Kind,
    Node,
    Says,
    Status,
    Withdrawn,
    is_active,
    now_utc,
)
from engine.findings.redact import Redactor
from engine.findings.rules import Problem, in_the_way, judge, silence

OUTCOMES = ("excluded", "holds", "undecided")


class CannotClose(EngineError):
    """Rules forbid closing a finding as its root cause."""

    exit_code = EXIT_FAIL

    def __init__(self, finding: Finding, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        text = "\n".join(f"  {problem}" for problem in problems)
        super().__init__(
            f"finding: {finding.slug} — expected nothing open, found\n{text}",
            hint="answer these, or close it as unresolved",
        )


def new_finding(
    slug: str,
    claim: str,
    *,
    title: str = "",
    author: str = "",
    at: str = "",
) -> Finding:
    """Create a finding whose first node is what was observed. Raises BadInput for a name that is no slug."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,63}", slug):
        raise BadInput.expected("finding", slug, "a name of a-z, 0-9 and -", repr(slug))
    root = _new_node("n1", claim, "observation", author, at)
    return Finding(
        slug=slug,
        title=_clean(title or claim, "title"),
        host=platform.node(),
        author=root.author,
        at=root.at,
        nodes=(root,),
    )


def _new_node(
    id_: str, claim: str, kind: Kind, author: str, at: str, *, missing: Iterable[str] = ()
) -> Node:
    return Node(
        id=id_,
        claim=_clean(claim, "claim"),
        kind=_one_of(kind, get_args(Kind), "kind"),
        status="unverified",
        missing=tuple(missing),
        **_signed(author, at),
    )


def add_node(
    finding: Finding,
    claim: str,
    *,
    why_of: Iterable[str],
    kind: Kind = "hypothesis",
    id_: str = "",
    author: str = "",
    at: str = "",
    missing: Iterable[str] = (),
) -> Finding:
    """Add an unverified node that explains the nodes in `why_of`. Raises BadInput."""
    parents = tuple(_standing(finding, parent).id for parent in why_of)
    if not parents:
        raise BadInput.expected("node", finding.slug, "a node that it is a why of", "none")
    taken = [node.id for node in finding.nodes]
    id_ = id_ or _next_id("n", taken)
    if id_ in taken:
        raise BadInput.expected("node", finding.slug, "a new id", f"{id_}, which is taken")
    node = replace(_new_node(id_, claim, kind, author, at, missing=missing), why_of=parents)
    return replace(finding, closed=None, nodes=(*finding.nodes, node))


def link(
    finding: Finding,
    node_id: str,
    capture: Capture,
    *,
    says: Says = "supports",
    relative_to: Path | None = None,
    at: str = "",
) -> Finding:
    """Link evidence to a node.

    Support makes an observation observed; support that a tool captured makes any other claim supported.
    `relative_to` is the folder of the bundle. Raises BadInput for support of a refuted node.
    """
    node = _standing(finding, node_id)
    if says == "supports" and node.status == "refuted":
        found, hint = "one that was refuted", "add another node"
        raise BadInput.expected("node", node_id, "one that stands", found, hint=hint)
    evidence = Evidence(
        id=_next_id("e", [evidence.id for _, evidence in finding.evidence()]),
        says=_one_of(says, get_args(Says), "what the evidence says"),
        locator=capture.locator,
        artifact=capture.blob.artifact.sha256,
        captured_by="human" if capture.captured_by == "human" else "tool",
        source=_relative(capture.source, relative_to),
        at=at or now_utc(),
        attached=tuple(dict.fromkeys(blob.artifact.sha256 for blob in capture.attached)),
    )
    status = node.status
    if says == "supports" and not silence(evidence):
        status = _supported(node, evidence) or status
    known = {artifact.sha256: artifact for artifact in finding.artifacts}
    for blob in capture.blobs:
        known.setdefault(blob.artifact.sha256, blob.artifact)
    finding = replace(finding, artifacts=tuple(known[sha] for sha in sorted(known)))
    return _with(finding, replace(node, status=status, evidence=(*node.evidence, evidence)))


def refute(finding: Finding, node_id: str, reason: str) -> Finding:
    """Mark a claim as refuted, with the reason; its evidence stays."""
    node = _standing(finding, node_id)
    return _with(finding, replace(node, status="refuted", reason=_clean(reason, "reason")))


def add_alternative(
    finding: Finding,
    node_id: str,
    claim: str,
    *,
    test: str,
    if_true: str,
    if_false: str,
    minutes: float | str,
) -> Finding:
    """Add another explanation to a node, and the cheapest test that tells the two apart."""
    try:
        cost = float(minutes)
    except ValueError:
        raise BadInput.expected(
            "alternative", node_id, "a cost in minutes", repr(minutes)
        ) from None
    node = _standing(finding, node_id)
    if not 0 <= cost < float("inf"):
        raise BadInput.expected("alternative", node_id, "a cost in minutes", f"{cost:g}")
    alternative = Alternative(
        id=_next_id("a", [a.id for other in finding.nodes for a in other.alternatives]),
        claim=_clean(claim, "claim"),
        test=_clean(test, "test"),
        expected_if_true=_clean(if_true, "what is expected if it is true"),
        expected_if_false=_clean(if_false, "what is expected if it is false"),
        cost_minutes=cost,
    )
    return _with(finding, replace(node, alternatives=(*node.alternatives, alternative)))


def answer(
    finding: Finding, alternative_id: str, outcome: str, text: str, *, evidence: str, at: str = ""
) -> Finding:
    """Record the result of an alternative's test: `excluded`, `holds` or `undecided`, by evidence that is
    linked to its node. Raises BadInput."""
    node, alternative = _entry(finding, alternative_id)
    if not isinstance(alternative, Alternative):
        expected, found = "one that was named", repr(alternative_id)
        raise BadInput.expected("alternative", finding.slug, expected, found)
    if not is_active(alternative):
        found = "one that was withdrawn"
        raise BadInput.expected("alternative", alternative_id, "one that stands", found)
    own = [e.id for e in node.evidence if is_active(e)]
    if evidence not in own:
        expected = f"evidence of {node.id} ({', '.join(own) or 'it has none'})"
        raise BadInput.expected("answer", alternative_id, expected, evidence or "none")
    if outcome not in OUTCOMES:
        expected = "excluded, holds or undecided"
        raise BadInput.expected("answer", alternative_id, expected, repr(outcome))
    done = Answer(
        outcome=outcome,  # type: ignore[arg-type]
        text=_clean(text, "result"),
        evidence=evidence,
        at=at or now_utc(),
    )
    return _with(finding, _with_alternative(node, replace(alternative, answer=done)))


def withdraw(finding: Finding, id_: str, reason: str, *, author: str = "", at: str = "") -> Finding:
    """Withdraw a node, an alternative or a piece of evidence.

    It stays in the finding, struck out, and counts for nothing any more. Raises BadInput for the first node,
    a node that others explain, an alternative that holds, and an entry that is already withdrawn.
    """
    taken = Withdrawn(reason=_clean(reason, "reason"), **_signed(author, at))
    node, entry = _entry(finding, id_)
    if entry is None:
        expected = "a node, evidence or alternative"
        raise BadInput.expected("withdraw", finding.slug, expected, repr(id_))
    _refuse_withdrawn(entry)
    gone = replace(entry, withdrawn=taken)
    if isinstance(gone, Evidence):
        return _with(finding, _without(node, gone))
    if isinstance(gone, Alternative):
        if gone.answer is not None and gone.answer.outcome == "holds":
            hint = f"withdraw {gone.answer.evidence} where its test was wrong"
            expected = "an alternative that does not hold"
            raise BadInput.expected("withdraw", id_, expected, "one that holds", hint=hint)
        return _with(finding, _with_alternative(node, gone))
    if node is finding.nodes[0] or finding.active_whys_of(id_):
        found = "the first one" if node is finding.nodes[0] else "one that has answers"
        raise BadInput.expected("withdraw", id_, "a node that nothing hangs on", found)
    return _with(finding, gone)


def _without(node: Node, gone: Evidence) -> Node:
    """Return the node with that evidence struck out, with the status that the remaining evidence allows.
    Alternatives that the evidence decided become undecided."""
    kept = tuple(gone if e.id == gone.id else e for e in node.evidence)
    says = "contradicts" if node.status == "refuted" else "supports"
    left = [e for e in kept if e.says == says and not silence(e)]
    status = node.status
    if node.status == "refuted":
        status = "refuted" if left else "unverified"
    elif node.status != "unverified":
        status = next((s for e in left if (s := _supported(node, e))), "unverified")
    node = replace(node, status=status, evidence=kept)
    for a in node.alternatives:
        if a.answer is not None and a.answer.evidence == gone.id:
            undecided = replace(a, answer=replace(a.answer, outcome="undecided"))
            node = _with_alternative(node, undecided)
    return node


def _supported(node: Node, evidence: Evidence) -> Status | None:
    """The status that supporting evidence gives a node; None when it does not change the status."""
    if node.kind == "observation":
        return "observed"
    return "supported" if evidence.captured_by == "tool" else None


def close(
    finding: Finding,
    *,
    unresolved: str = "",
    text: str = "",
    author: str = "",
    at: str = "",
    known: Iterable[Problem] = (),
) -> Finding:
    """Close as root cause, or as unresolved for the reason in `unresolved`.

    Raises CannotClose with the problems that forbid it. Verify the bundle first: the rules do not check
    hashes. Pass the problems that verification found by reading artifacts as `known`.
    """
    everything = dict.fromkeys([*judge(finding), *known])
    if problems := in_the_way(everything, unresolved=bool(unresolved)):
        raise CannotClose(finding, problems)
    closed = Closed(
        outcome="unresolved" if unresolved else "root-cause",
        text=_clean(unresolved or text or "root cause", "text"),
        **_signed(author, at),
    )
    return replace(finding, closed=closed)


def current_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


def _signed(author: str, at: str) -> dict[str, Any]:
    return {"author": author or current_user(), "at": at or now_utc()}


def _entry(finding: Finding, id_: str) -> tuple[Node, Node | Evidence | Alternative | None]:
    """Find a node, evidence or alternative by id, with the node that it belongs to; None for an unknown id."""
    for node in finding.nodes:
        entries: list[Node | Evidence | Alternative] = [node, *node.evidence, *node.alternatives]
        for entry in entries:
            if entry.id == id_:
                return node, entry
    return finding.nodes[0], None


def _standing(finding: Finding, id_: str) -> Node:
    """Return a node that was not withdrawn. Raises BadInput."""
    node = finding.node(id_)
    _refuse_withdrawn(node)
    return node


def _refuse_withdrawn(entry: Node | Evidence | Alternative) -> None:
    if entry.withdrawn is not UNSET:
        found = f"one that was withdrawn: {entry.withdrawn.reason}"
        raise BadInput.expected("entry", entry.id, "one that stands", found)


def _with(finding: Finding, changed: Node) -> Finding:
    """Return the finding, reopened, with the node of the same id replaced."""
    nodes = tuple(changed if node.id == changed.id else node for node in finding.nodes)
    return replace(finding, closed=None, nodes=nodes)


def _with_alternative(node: Node, changed: Alternative) -> Node:
    others = tuple(changed if a.id == changed.id else a for a in node.alternatives)
    return replace(node, alternatives=others)


def _next_id(letter: str, taken: Sequence[str]) -> str:
    return next(id_ for n in range(1, len(taken) + 2) if (id_ := f"{letter}{n}") not in taken)


def _clean(text: str, what: str) -> str:
    """Normalise a person's sentence for storage: secrets removed, valid UTF-8."""
    kept = Redactor().text(text.encode("utf-8", "backslashreplace").decode()).text.strip()
    if not kept:
        raise BadInput.expected(what, "of the finding", "some words", "none")
    return kept


def _one_of(value: str, allowed: Sequence[str], what: str) -> Any:
    if value not in allowed:
        raise BadInput.expected(what, "of the finding", f"one of {', '.join(allowed)}", repr(value))
    return value


def _relative(source: Path | None, folder: Path | None) -> str:
    if source is None or folder is None:
        return ""
    return Redactor().text(os.path.relpath(source.resolve(), folder.resolve())).text
