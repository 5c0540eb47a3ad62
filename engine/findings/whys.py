"""What can be done with a finding. Each function returns a new one; `engine.findings.bundle` keeps it.

    finding, blobs = new_finding("hang", "no step in 90 minutes"), []
    capture = capture_metric(run, "host_available_bytes", Redactor())
    finding = link(finding, "n1", capture)
    finding = add_node(finding, "the attention ran on the CPU", why_of=["n1"], kind="mechanism")
    finding = add_alternative(finding, "n2", "the disk was slow", test="engine flip ...",
                              if_true="...", if_false="...", minutes=5)
    Bundle.create(Path("evidence"), finding).save(finding, blobs_of(capture))

A change of a closed finding opens it again. What may not be said is `engine.findings.rules`'s business;
here only what makes no sense is refused.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast, get_args

import msgspec
from msgspec import UNSET

from engine.errors import EXIT_FAIL, BadInput, EngineError
from engine.findings.capture import Blob, Capture
from engine.findings.finding import (
    Alternative,
    Answer,
    Artifact,
    Closed,
    Evidence,
    Finding,
    Kind,
    Node,
    Says,
    Status,
    Withdrawn,
)
from engine.findings.form import now_utc
from engine.findings.redact import Redactor
from engine.findings.rules import Problem, judge
from engine.findings.support import silence


class CannotClose(EngineError):
    """Rules stand against closing a finding as its root cause."""

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
    kind: Kind = "observation",
    author: str = "",
    at: str = "",
) -> Finding:
    """A finding that begins with what was seen. Raises BadInput for a name that is no slug."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,63}", slug):
        raise BadInput.expected("finding", slug, "a name of a-z, 0-9 and -", repr(slug))
    author, at = author or current_user(), at or now_utc()
    root = Node(
        id="n1",
        claim=_clean(claim, "claim"),
        kind=cast(Kind, _one_of(kind, get_args(Kind), "kind")),
        status="unverified",
        author=author,
        at=at,
    )
    return Finding(
        slug=slug,
        title=_clean(title or claim, "title"),
        host=platform.node(),
        author=author,
        at=at,
        nodes=(root,),
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
    """Add an answer to why `why_of` is so, unverified. Raises BadInput."""
    parents = tuple(finding.node(parent).id for parent in why_of)
    for parent in parents:
        _standing(finding, parent)
    if not parents:
        raise BadInput.expected("node", finding.slug, "a node that it is a why of", "none")
    id_ = id_ or _next_id("n", [node.id for node in finding.nodes])
    if id_ in {node.id for node in finding.nodes}:
        raise BadInput.expected("node", finding.slug, "a new id", f"{id_}, which is taken")
    node = Node(
        id=id_,
        claim=_clean(claim, "claim"),
        kind=cast(Kind, _one_of(kind, get_args(Kind), "kind")),
        status="unverified",
        why_of=parents,
        missing=tuple(missing),
        author=author or current_user(),
        at=at or now_utc(),
    )
    return _opened(finding, nodes=(*finding.nodes, node))


def link(
    finding: Finding,
    node_id: str,
    capture: Capture,
    *,
    says: Says = "supports",
    relative_to: Path | None = None,
    at: str = "",
) -> Finding:
    """Put evidence under a node. What supports an observation makes it observed; what a tool captured
    and supports another claim makes that supported. `relative_to` is the folder of the bundle. Raises
    BadInput for support of a node that was refuted."""
    node = _standing(finding, node_id)
    if says == "supports" and node.status == "refuted":
        raise BadInput.expected(
            "node", node_id, "one that stands", "one that was refuted", hint="add another node"
        )
    evidence = Evidence(
        id=_next_id("e", [evidence.id for _, evidence in finding.evidence()]),
        says=cast(Says, _one_of(says, get_args(Says), "what the evidence says")),
        locator=capture.locator,
        artifact=capture.blob.artifact.sha256,
        captured_by="human" if capture.captured_by == "human" else "tool",
        source=_relative(capture.source, relative_to),
        at=at or now_utc(),
        attached=tuple(dict.fromkeys(blob.artifact.sha256 for blob in capture.attached)),
    )
    status: Status = node.status
    if says == "supports" and not silence(evidence):
        status = _supported(node, evidence) or status
    changed = msgspec.structs.replace(node, status=status, evidence=(*node.evidence, evidence))
    known = {artifact.sha256: artifact for artifact in finding.artifacts}
    for blob in blobs_of(capture):
        known.setdefault(blob.artifact.sha256, blob.artifact)
    artifacts: tuple[Artifact, ...] = tuple(known[sha] for sha in sorted(known))
    return _with_node(finding, changed, artifacts=artifacts)


def blobs_of(*captures: Capture) -> list[Blob]:
    """Everything that a bundle needs for these captures."""
    return [
        blob for capture in captures for blob in (capture.blob, *capture.needed, *capture.attached)
    ]


def refute(finding: Finding, node_id: str, reason: str) -> Finding:
    """Say that a claim is wrong, and why; its evidence stays."""
    node = _standing(finding, node_id)
    return _with_node(
        finding,
        msgspec.structs.replace(node, status="refuted", reason=_clean(reason, "reason")),
    )


def add_alternative(
    finding: Finding,
    node_id: str,
    claim: str,
    *,
    test: str,
    if_true: str,
    if_false: str,
    minutes: float,
) -> Finding:
    """Name another explanation of what a node explains, and the cheapest test that tells them apart."""
    node = _standing(finding, node_id)
    if not 0 <= minutes < float("inf"):
        raise BadInput.expected("alternative", node_id, "a cost in minutes", f"{minutes:g}")
    taken = [a.id for other in finding.nodes for a in other.alternatives]
    alternative = Alternative(
        id=_next_id("a", taken),
        claim=_clean(claim, "claim"),
        test=_clean(test, "test"),
        expected_if_true=_clean(if_true, "what is expected if it is true"),
        expected_if_false=_clean(if_false, "what is expected if it is false"),
        cost_minutes=float(minutes),
    )
    return _with_node(
        finding,
        msgspec.structs.replace(node, alternatives=(*node.alternatives, alternative)),
    )


def answer(
    finding: Finding, alternative_id: str, *, outcome: str, text: str, evidence: str, at: str = ""
) -> Finding:
    """What the test of an alternative showed: `excluded`, `holds` or `undecided`, by evidence that is
    linked to its node. Raises BadInput."""
    for node in finding.nodes:
        for index, alternative in enumerate(node.alternatives):
            if alternative.id != alternative_id:
                continue
            own = [e.id for e in node.evidence if e.withdrawn is UNSET]
            if alternative.withdrawn is not UNSET:
                raise BadInput.expected(
                    "alternative", alternative_id, "one that stands", "one that was withdrawn"
                )
            if evidence not in own:
                expected = f"evidence of {node.id} ({', '.join(own) or 'it has none'})"
                raise BadInput.expected("answer", alternative_id, expected, evidence or "none")
            if outcome not in ("excluded", "holds", "undecided"):
                raise BadInput.expected(
                    "answer", alternative_id, "excluded, holds or undecided", repr(outcome)
                )
            done = Answer(
                outcome=outcome,  # type: ignore[arg-type]
                text=_clean(text, "result"),
                evidence=evidence,
                at=at or now_utc(),
            )
            changed = list(node.alternatives)
            changed[index] = msgspec.structs.replace(alternative, answer=done)
            return _with_node(finding, msgspec.structs.replace(node, alternatives=tuple(changed)))
    raise BadInput.expected("alternative", finding.slug, "one that was named", repr(alternative_id))


def withdraw(finding: Finding, id_: str, reason: str, *, author: str = "", at: str = "") -> Finding:
    """Take back a node, an alternative or a piece of evidence: it is kept, struck out, and carries
    nothing any more. Raises BadInput for the first node, one that others are a why of, an alternative
    that holds, and what was withdrawn before."""
    taken = Withdrawn(
        reason=_clean(reason, "reason"), author=author or current_user(), at=at or now_utc()
    )
    for node in finding.nodes:
        if node.id == id_:
            _standing(finding, id_)
            if node is finding.nodes[0] or finding.standing_whys_of(id_):
                found = "the first one" if node is finding.nodes[0] else "one that has answers"
                raise BadInput.expected("withdraw", id_, "a node that nothing hangs on", found)
            return _with_node(finding, msgspec.structs.replace(node, withdrawn=taken))
        for one in node.evidence:
            if one.id == id_:
                _not_twice(id_, one)
                return _with_node(finding, _without(node, one, taken))
        for other in node.alternatives:
            if other.id == id_:
                _not_twice(id_, other)
                if other.answer is not None and other.answer.outcome == "holds":
                    raise BadInput.expected(
                        *("withdraw", id_, "an alternative that does not hold", "one that holds"),
                        hint=f"withdraw {other.answer.evidence} where its test was wrong",
                    )
                gone = msgspec.structs.replace(other, withdrawn=taken)
                kept = tuple(gone if a is other else a for a in node.alternatives)
                return _with_node(finding, msgspec.structs.replace(node, alternatives=kept))
    raise BadInput.expected("withdraw", finding.slug, "a node, evidence or alternative", repr(id_))


def _without(node: Node, evidence: Evidence, taken: Withdrawn) -> Node:
    """The node with that evidence struck out, its status as what is left allows, and what the evidence
    answered untested again."""
    gone = msgspec.structs.replace(evidence, withdrawn=taken)
    kept = tuple(gone if e is evidence else e for e in node.evidence)
    says = "contradicts" if node.status == "refuted" else "supports"
    left = [e for e in kept if e.says == says and not silence(e)]
    status = node.status
    if node.status == "refuted":
        status = "refuted" if left else "unverified"
    elif node.status != "unverified":
        status = next((s for e in left if (s := _supported(node, e))), "unverified")
    others = tuple(
        msgspec.structs.replace(a, answer=msgspec.structs.replace(a.answer, outcome="undecided"))
        if a.answer is not None and a.answer.evidence == evidence.id
        else a
        for a in node.alternatives
    )
    return msgspec.structs.replace(node, status=status, evidence=kept, alternatives=others)


def _supported(node: Node, evidence: Evidence) -> Status | None:
    """What a node is by evidence that supports it; None where it stays as it was."""
    if node.kind == "observation":
        return "observed"
    return "supported" if evidence.captured_by == "tool" else None


def _standing(finding: Finding, id_: str) -> Node:
    """A node that was not withdrawn. Raises BadInput."""
    node = finding.node(id_)
    _not_twice(id_, node)
    return node


def _not_twice(id_: str, entry: Node | Evidence | Alternative) -> None:
    if entry.withdrawn is not UNSET:
        found = f"one that was withdrawn: {entry.withdrawn.reason}"
        raise BadInput.expected("entry", id_, "one that stands", found)


def close(
    finding: Finding,
    *,
    unresolved: str = "",
    text: str = "",
    author: str = "",
    at: str = "",
    known: Iterable[Problem] = (),
) -> Finding:
    """Close as root cause, or with `unresolved` saying why not. Raises CannotClose with what the rules
    have against it. Check the bundle first: rules take hashes for granted, and what the check found by
    reading artifacts is `known`."""
    everything = dict.fromkeys([*judge(finding), *known])
    problems = [
        p for p in everything if p.level == "error" or (p.level == "open" and not unresolved)
    ]
    if problems:
        raise CannotClose(finding, problems)
    closed = Closed(
        outcome="unresolved" if unresolved else "root-cause",
        text=_clean(unresolved or text or "root cause", "text"),
        author=author or current_user(),
        at=at or now_utc(),
    )
    return msgspec.structs.replace(finding, closed=closed)


def current_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


def _opened(finding: Finding, **changes: object) -> Finding:
    return msgspec.structs.replace(finding, closed=None, **changes)


def _with_node(finding: Finding, changed: Node, **changes: object) -> Finding:
    nodes = tuple(changed if node.id == changed.id else node for node in finding.nodes)
    return _opened(finding, nodes=nodes, **changes)


def _next_id(letter: str, taken: Sequence[str]) -> str:
    return next(id_ for n in range(1, len(taken) + 2) if (id_ := f"{letter}{n}") not in taken)


def _clean(text: str, what: str) -> str:
    """A sentence of a person as it is kept: no secrets, no bytes that are not UTF-8."""
    kept = Redactor().text(text.encode("utf-8", "backslashreplace").decode()).text.strip()
    if not kept:
        raise BadInput.expected(what, "of the finding", "some words", "none")
    return kept


def _one_of(value: str, allowed: Sequence[str], what: str) -> str:
    if value not in allowed:
        raise BadInput.expected(what, "of the finding", f"one of {', '.join(allowed)}", repr(value))
    return value


def _relative(source: Path | None, folder: Path | None) -> str:
    if source is None or folder is None:
        return ""
    return Redactor().text(os.path.relpath(source.resolve(), folder.resolve())).text
