"""What may be said on which evidence.

    E-WHY-001  observed needs evidence; supported and refuted need evidence that a tool captured and
               whose hash verifies, for the one side and the other
    E-WHY-002  a cause (hypothesis, mechanism) is supported by a flip or a reproduction, or it is
               printed "unverified"; a flip has the runs of its arms, a reproduction started a run after
               the finding began
    E-WHY-003  "OOM" in a claim that stands needs the record of an exit whose cause says so
    E-WHY-004  no root cause while an alternative that costs less than 30 minutes is untested, or none
               was ever thought of, or one holds, or one is excluded by anything but the test it names
    E-WHY-005  one observation supports one claim once
    W-WHY-006  the chain ends at a person: ask what let it happen

An exit of usage (64), bad input (65), our mistake (70), a program not found or not executable (127, 126), a
signal from outside or the end of its time says nothing for or against anything, and neither does an entry
that was withdrawn (`engine.findings.support`).

A problem is an `error` (nothing may be closed with it, `verify` fails), `open` (not a root cause yet) or
a `warning`. A process node says how it could happen, not what made it happen, and needs no flip.

A flip supports when it is measured, or when an arm did not complete; a screen may only contradict; an
exploratory one, and one of several settings at once, does neither. "Not OOM" needs the record of an
exit too, one that says something else.

W-WHY-006 goes by words ("forgot", "human error", an author's name): it will miss some and mistake
others, so it only warns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import UNSET

from engine.findings.finding import (
    Alternative,
    CommandRun,
    Evidence,
    ExitRecord,
    Finding,
    FlipResult,
    Node,
    Status,
)
from engine.findings.form import canonical
from engine.findings.support import (
    NOTHING_SAID,
    lacking_arms,
    no_reproduction,
    not_the_test,
    silence,
    unix_s,
)

CHEAP_MINUTES = 30.0
OUT_OF_MEMORY = frozenset({"OOM_MEMCG", "OOM_GLOBAL", "ALLOC_FAILED"})
DECIDED_WITHOUT_CONTROLS = frozenset({"A_DID_NOT_COMPLETE", "B_DID_NOT_COMPLETE"})

_OOM = re.compile(
    r"(?i)\booms?\b|\boom[-_ ]?kill\w*|\bout[- ]of[- ]memory\b|\b(?:ran|running|run) out of memory\b"
    r"|\bmemory (?:was |is )?exhaust\w*|\bexhaust\w* (?:of )?(?:the )?memory\b"
)
_NEGATED = re.compile(
    r"(?i)\b(?:not|no|never|nor|neither|without|isn't|wasn't|rather than|instead of)\b[^.;:]{0,40}$"
)
_PERSON = re.compile(
    r"(?i)\bhuman error\b|\b(?:someone|somebody|he|she|they|we|i|you|operators?|users?|engineers?"
    r"|developers?|authors?|reviewers?|admins?|administrators?|the team|people|nobody|no one)\b[^.;]{0,40}"
    r"\b(?:forgot|failed to|did not|didn't|neglected|misread|mistook|overlooked|ignored|missed"
    r"|was careless|were careless|should have|looked)\b"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    rule: str
    level: Literal["error", "open", "warning"]
    node: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule} {self.node}: {self.text}"


def judge(finding: Finding, broken: Mapping[str, str] | None = None) -> tuple[Problem, ...]:
    """Everything that the rules have against a finding. `broken` says which artifacts do not verify,
    by sha256, and why."""
    broken = broken or {}
    found: list[Problem] = []
    for node in finding.nodes:
        if node.withdrawn is not UNSET:
            continue
        found += _evidence_problems(finding, node, broken)
        found += _cause_problems(finding, node, broken)
        found += _shape_problems(finding, node)
        found += _memory_problems(node, broken)
        found += _alternative_problems(finding, node)
        found += _person_problems(finding, node)
    found += _double_problems(finding)
    return tuple(found)


def effective_status(
    finding: Finding, node: Node, broken: Mapping[str, str] | None = None
) -> tuple[Status, str]:
    """The status that the evidence allows, and why it is not the one that was given."""
    if node.withdrawn is not UNSET:
        return "unverified", f"withdrawn: {node.withdrawn.reason}"
    for problem in (
        *_evidence_problems(finding, node, broken or {}),
        *_cause_problems(finding, node, broken or {}),
        *_memory_problems(node, broken or {}),
    ):
        if node.status != "unverified":
            return "unverified", str(problem)
    return node.status, ""


def observations(node: Node) -> int:
    """How many independent things support a node: runs, flips, commands, files; each counts once."""
    return len({source_of(e) for e in node.evidence if e.says == "supports" and not silence(e)})


def source_of(evidence: Evidence) -> str:
    """What evidence comes from: two locators in one run are one observation."""
    locator = evidence.locator
    if isinstance(locator, FlipResult):
        return f"flip {locator.plan_sha256}"
    run_id = getattr(locator, "run_id", "")
    return f"run {run_id}" if run_id else f"artifact {evidence.artifact}"


def is_test_of_cause(finding: Finding, evidence: Evidence) -> tuple[bool, str]:
    """Whether evidence is a flip or a reproduction that says what it is linked for; why not."""
    locator = evidence.locator
    if mute := silence(evidence):
        return False, f"{evidence.id} says nothing: {mute}"
    if isinstance(locator, FlipResult):
        if locator.verdict in NOTHING_SAID:
            return False, f"the flip says {locator.verdict}"
        if locator.grade == "exploratory":
            return False, "the flip is exploratory"
        if len(locator.changes) != 1:
            return (
                False,
                f"the flip changed {len(locator.changes)} settings: it names no single cause",
            )
        if (
            evidence.says == "supports"
            and locator.grade == "screen"
            and locator.verdict not in DECIDED_WITHOUT_CONTROLS
        ):
            return False, "the flip is a screen: it may refute, not support"
        lacking = lacking_arms(finding, evidence)
        return not lacking, lacking
    if isinstance(locator, CommandRun) and locator.reproduces:
        if none := no_reproduction(locator):
            return False, none
        assert locator.started is not UNSET, "no_reproduction looked"
        if locator.started.begun_unix_s < unix_s(finding.at):
            return False, "the run of the reproduction began before the finding"
        shown = locator.as_expected is True
        if shown == (evidence.says != "contradicts"):
            return True, ""
        return (
            False,
            "the reproduction did not show what it was to show" if not shown else "it did show it",
        )
    return False, ""


def _decides(finding: Finding, evidence: Evidence) -> bool:
    """Whether evidence against a claim says anything; a flip without a verdict does not."""
    tested = isinstance(evidence.locator, FlipResult) or getattr(
        evidence.locator, "reproduces", False
    )
    return evidence.says != "contradicts" or not tested or is_test_of_cause(finding, evidence)[0]


def _good(node: Node, says: str, broken: Mapping[str, str]) -> list[Evidence]:
    """Evidence that says anything."""
    sound = [e for e in node.evidence if e.says == says and e.artifact not in broken]
    return [e for e in sound if not silence(e)]


def _mute(node: Node, says: str) -> str:
    """Why evidence that was linked for it does not count, where there is such."""
    said = [
        f"{e.id} says nothing: {why}"
        for e in node.evidence
        if e.says == says and (why := silence(e))
    ]
    return f" ({'; '.join(said)})" if said else ""


def _evidence_problems(
    finding: Finding, node: Node, broken: Mapping[str, str]
) -> Iterator[Problem]:
    def problem(text: str) -> Problem:
        return Problem(rule="E-WHY-001", level="error", node=node.id, text=text)

    for evidence in node.evidence:
        for sha in (evidence.artifact, *evidence.attached):
            if sha in broken:
                yield problem(f"{evidence.id}: {broken[sha]}")
    if node.status == "observed" and not _good(node, "supports", broken):
        yield problem(f"observed, and no evidence shows it{_mute(node, 'supports')}")
    for status, says in (("supported", "supports"), ("refuted", "contradicts")):
        if node.status != status:
            continue
        good = _good(node, says, broken)
        if not any(e.captured_by == "tool" and _decides(finding, e) for e in good):
            yield problem(
                f"{status}, and nothing that a tool captured {says} it{_mute(node, says)}"
            )


def _cause_problems(finding: Finding, node: Node, broken: Mapping[str, str]) -> Iterator[Problem]:
    def problem(text: str) -> Problem:
        return Problem(rule="E-WHY-002", level="open", node=node.id, text=text)

    if node.status == "unverified":
        yield problem("unverified: link evidence, or refute it")
    elif node.status == "supported" and node.kind in ("hypothesis", "mechanism"):
        tried = [is_test_of_cause(finding, e) for e in _good(node, "supports", broken)]
        if not any(good for good, _ in tried):
            why = next((why for _, why in tried if why), "no flip and no reproduction")
            yield problem(f"unverified: a cause without a test ({why})")


def _shape_problems(finding: Finding, node: Node) -> Iterator[Problem]:
    def problem(text: str) -> Problem:
        return Problem(rule="E-WHY-002", level="open", node=node.id, text=text)

    if node is finding.nodes[0] and node.kind != "observation":
        yield problem("the first node is not an observation: nothing was seen that asks for a why")
    if not finding.standing_whys_of(node.id) and node.kind == "observation":
        yield problem("no why was given")


def _memory_problems(node: Node, broken: Mapping[str, str]) -> Iterator[Problem]:
    if node.status not in ("observed", "supported"):
        return
    # Negation is looked for within the sentence in front of the word.
    words = [_NEGATED.search(node.claim[: match.start()]) for match in _OOM.finditer(node.claim)]
    if not words:
        return
    states = [
        e.locator.state.upper()
        for e in node.evidence
        if isinstance(e.locator, ExitRecord) and e.artifact not in broken and not silence(e)
    ]
    says_so = any(state in OUT_OF_MEMORY for state in states)
    denies = all(words)
    if denies and any(state not in OUT_OF_MEMORY | {"UNKNOWN"} for state in states):
        return
    if not denies and says_so:
        return
    wanted = "another cause" if denies else "so"
    text = f"speaks of memory, and no record of an exit says {wanted}"
    if states:
        text += f" (it says {', '.join(states)})"
    yield Problem(rule="E-WHY-003", level="error", node=node.id, text=text)


def _alternative_problems(finding: Finding, node: Node) -> Iterator[Problem]:
    if node.kind == "observation" or node.status == "refuted":
        return

    def problem(text: str) -> Problem:
        return Problem(rule="E-WHY-004", level="open", node=node.id, text=text)

    standing = [a for a in node.alternatives if a.withdrawn is UNSET]
    if not standing:
        yield problem("no alternative was thought of")
    untested = [a for a in standing if a.answer is None or a.answer.outcome == "undecided"]
    cheapest: Alternative | None = min(untested, key=lambda a: a.cost_minutes, default=None)
    if cheapest is not None and cheapest.cost_minutes < CHEAP_MINUTES:
        yield problem(
            f"{cheapest.id} is untested and costs {cheapest.cost_minutes:g} minutes: {cheapest.test}"
        )
    for alternative in standing:
        if alternative.answer is None or alternative.answer.outcome == "undecided":
            continue
        if alternative.answer.outcome == "holds":
            yield problem(f"{alternative.id} holds: {alternative.claim}")
        elif why := not_the_test(finding, node, alternative):
            yield problem(f"{alternative.id} is not excluded by the test it names: {why}")


def _double_problems(finding: Finding) -> Iterator[Problem]:
    seen: dict[bytes, str] = {}
    for node, evidence in finding.evidence():
        if evidence.says != "supports" or evidence.withdrawn is not UNSET:
            continue
        key = evidence.artifact.encode() + canonical(msgspec.to_builtins(evidence.locator))
        if key in seen:
            text = f"{evidence.id} is {seen[key]} again: one observation supports one claim once"
            yield Problem(rule="E-WHY-005", level="error", node=node.id, text=text)
        seen.setdefault(key, evidence.id)


def _person_problems(finding: Finding, node: Node) -> Iterator[Problem]:
    if finding.standing_whys_of(node.id) or node.status == "refuted" or node is finding.nodes[0]:
        return
    authors = {re.escape(n.author) for n in finding.nodes if len(n.author) > 2}
    named = bool(authors) and re.search(rf"(?i)\b(?:{'|'.join(authors)})\b", node.claim) is not None
    if named or _PERSON.search(node.claim):
        text = "the chain ends at a person: ask what made it easy to do and hard to notice"
        yield Problem(rule="W-WHY-006", level="warning", node=node.id, text=text)
