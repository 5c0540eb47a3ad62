"""The rules for which claim needs which evidence: one row of `RULES` each, and E-WHY-005 over the whole
finding.

    E-WHY-001  an observed claim needs evidence; a supported or a refuted one needs evidence for or against
               it that a tool captured and whose hash verifies
    E-WHY-002  a cause (hypothesis, mechanism) needs a flip or a reproduction that supports it, or it is
               printed as "unverified"; a flip has the runs of its arms, a reproduction started a run after
               the finding began
    E-WHY-003  "OOM" in an observed or supported claim needs an exit record whose cause is out of memory
    E-WHY-004  a root cause is refused while an alternative that costs less than 30 minutes is untested,
               while there is no alternative, while one holds, or while one was excluded by anything but
               the test it names
    E-WHY-005  one observation supports one claim once
    W-WHY-006  the chain ends at a person: ask what let it happen

Evidence counts for nothing when it was withdrawn, and when its command timed out, was killed by a signal from
outside, or exited with usage (64), bad input (65), internal error (70), program not executable (126) or not
found (127). A reproduction starts a run of its own: the tool found a log that was opened while the command
ran. The test of an alternative must be the one that was named: the same command, a flip of the same setting,
a run of the same spec, or the recorded quantity that the test mentions.

A problem is an `error` (the finding cannot be closed, `verify` fails), `open` (not a root cause yet) or a
`warning`. A process node explains how something could happen, not what made it happen, and needs no flip.

A flip supports a claim when it is measured, or when an arm did not complete. A screen may only contradict. An
exploratory flip, or one of several settings at once, does neither. "Not OOM" also needs an exit record, with
another cause.

W-WHY-006 matches words ("forgot", "human error", an author's name). It misses some cases and matches some
wrongly, so it only warns.

The rules see the finding alone; `engine.findings.verify` compares the locators with the artifacts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

import msgspec
from msgspec import UNSET

from engine.findings.finding import (
    Alternative,
    CommandRun,
    EventRange,
    Evidence,
    ExitRecord,
    FileRange,
    Finding,
    FlipResult,
    MetricWindow,
    Node,
    OfRun,
    Status,
    canonical,
    is_active,
    unix_of,
)

CHEAP_MINUTES = 30.0
OUT_OF_MEMORY = frozenset({"OOM_MEMCG", "OOM_GLOBAL", "ALLOC_FAILED"})
DECIDED_WITHOUT_CONTROLS = frozenset({"A_DID_NOT_COMPLETE", "B_DID_NOT_COMPLETE"})
NOTHING_SAID = frozenset({"INCONCLUSIVE", "INVALID", "PARITY_FAIL"})
"""Verdicts of a flip that decide nothing."""
ARMS_KEPT = 16
"""The number of runs of a flip whose settings, receipt and logs are copied: the first ones."""
NO_ANSWER_EXITS: dict[int | None, str] = {
    None: "it ran out of its time and was ended",
    64: "exit 64, a command line that was wrong",
    65: "exit 65, an input that was wrong",
    70: "exit 70, a mistake of the tool",
    126: "exit 126, a program that cannot be run",
    127: "exit 127, a program that was not found",
    129: "exit 129, ended by SIGHUP from outside",
    130: "exit 130, ended by SIGINT from outside",
    131: "exit 131, ended by SIGQUIT from outside",
    137: "exit 137, ended by SIGKILL from outside",
    143: "exit 143, ended by SIGTERM from outside",
}
"""Exit statuses that prove nothing about any claim, because the command did not get to do its work."""

_STARTING = frozenset({"distill", "flip", "drill", "bench", "prepare", "eval", "smoke"})
_PROGRAMS = frozenset({"engine", "apr-workbench"})
_ARM_LOG = re.compile(r"events\.jsonl of (arms/[0-9]+-([ab])(?:\.[0-9]+)?)")
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

Broken = Mapping[str, str]
"""Artifacts that do not verify: sha256 to reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    rule: str
    level: Literal["error", "open", "warning"]
    node: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule} {self.node}: {self.text}"

    def as_fields(self) -> dict[str, str]:
        return {"rule": self.rule, "level": self.level, "node": self.node, "text": self.text}


@dataclass(frozen=True, slots=True)
class Rule:
    id: str
    level: Literal["error", "open", "warning"]
    broken_by: Callable[[Finding, Node, Broken], Iterator[str]]
    """Yields in words what breaks the rule at a node that was not withdrawn."""
    of_status: bool = False
    """Whether breaking this rule makes the node's effective status unverified."""

    def problems(self, finding: Finding, node: Node, broken: Broken) -> Iterator[Problem]:
        for text in self.broken_by(finding, node, broken):
            yield Problem(rule=self.id, level=self.level, node=node.id, text=text)


def judge(finding: Finding, broken: Broken | None = None) -> tuple[Problem, ...]:
    """Return every problem that the rules find."""
    standing = [node for node in finding.nodes if is_active(node)]
    found = [
        problem
        for node in standing
        for rule in RULES
        for problem in rule.problems(finding, node, broken or {})
    ]
    return (*found, *_double_problems(finding))


def in_the_way(problems: Iterable[Problem], *, unresolved: bool) -> list[Problem]:
    """Return the problems that forbid closing a finding as unresolved, or as its root cause."""
    levels = ("error",) if unresolved else ("error", "open")
    return [problem for problem in problems if problem.level in levels]


def effective_status(
    finding: Finding, node: Node, broken: Broken | None = None
) -> tuple[Status, str]:
    """Return the status that the evidence allows, and why it differs from the given one (empty when it does
    not)."""
    if node.withdrawn is not UNSET:
        return "unverified", f"withdrawn: {node.withdrawn.reason}"
    if node.status != "unverified":
        for rule in RULES:
            if rule.of_status:
                for problem in rule.problems(finding, node, broken or {}):
                    return "unverified", str(problem)
    return node.status, ""


# What evidence can prove


def silence(evidence: Evidence) -> str:
    """Say why evidence counts for nothing, whatever it is linked for; empty when it counts."""
    if not is_active(evidence):
        return "it was withdrawn"
    if isinstance(evidence.locator, CommandRun):
        return NO_ANSWER_EXITS.get(evidence.locator.exit_status, "")
    return ""


def carries_nothing(evidence: Evidence) -> str:
    """Say why a command that was just linked proves or reproduces nothing; empty when it may count."""
    locator = evidence.locator
    if mute := silence(evidence):
        return f"says nothing: {mute}"
    meant = isinstance(locator, CommandRun) and locator.reproduces and evidence.says != "answers"
    why = no_reproduction(locator) if meant and isinstance(locator, CommandRun) else ""
    return f"reproduces nothing: {why}" if why else ""


def observations(node: Node) -> int:
    """Count the independent sources that support a node: runs, flips, commands and files count once each."""
    return len({source_of(e) for e in node.evidence if e.says == "supports" and not silence(e)})


def source_of(evidence: Evidence) -> str:
    """Identify the source of evidence: two locators in one run are one observation."""
    locator = evidence.locator
    if isinstance(locator, FlipResult):
        return f"flip {locator.plan_sha256}"
    run_id = getattr(locator, "run_id", "")
    return f"run {run_id}" if run_id else f"artifact {evidence.artifact}"


def starts_a_run(argv: Sequence[str]) -> bool:
    """Whether a command line can start a run. Commands of `engine` that only read cannot; any other program
    may, and then its run is found by its log."""
    called = list(_engine_actions(argv))
    return not called or any(action in _STARTING for action in called)


def _engine_actions(argv: Sequence[str]) -> Iterator[str]:
    """Yield the action of every call of `engine` in a command line, including calls inside `sh -c '...'`."""
    words = list(argv)
    for word in argv:
        if re.search(r"\s", word):
            words += re.split(r"[\s;&|()'\"`]+", word)
    for i, word in enumerate(words):
        named = PurePath(word).name in _PROGRAMS
        if named and (i == 0 or words[i - 1] not in ("--out", "--evidence", "cd")):
            yield next((w for w in words[i + 1 :] if not w.startswith("-")), "")


def no_reproduction(locator: CommandRun) -> str:
    """Say why a command reproduces nothing; empty when it does."""
    if not starts_a_run(locator.argv):
        return "the command reads what is there and starts no run"
    if locator.started is UNSET:
        return "the command started no run: no log of one began while it ran"
    return ""


def lacking_arms(finding: Finding, evidence: Evidence) -> str:
    """Say how many runs of a flip's arms are missing; empty when enough are there."""
    locator = evidence.locator
    assert isinstance(locator, FlipResult)
    runs = {name for name, _ in arm_logs(finding, evidence)}
    arms = {name.rpartition("-")[2][:1] for name in runs}
    wanted = min(ARMS_KEPT, 2 * max(1, locator.n_pairs))
    if len(runs) < wanted or arms != {"a", "b"}:
        return f"the runs of the flip's arms are not there ({len(runs)} of {wanted} logs)"
    return ""


def arm_logs(finding: Finding, evidence: Evidence) -> Iterator[tuple[str, str]]:
    """Yield the runs of a flip whose log was captured, each with the log's hash."""
    known = {artifact.sha256: artifact for artifact in finding.artifacts}
    for sha in evidence.attached:
        if sha in known and (match := _ARM_LOG.fullmatch(known[sha].what)):
            yield match[1], sha


def is_test_of_cause(finding: Finding, evidence: Evidence) -> tuple[bool, str]:
    """Whether evidence is a flip or a reproduction whose result fits what it is linked for; otherwise also
    the reason."""
    locator = evidence.locator
    if mute := silence(evidence):
        return False, f"{evidence.id} says nothing: {mute}"
    if isinstance(locator, FlipResult):
        why = _no_test_flip(locator, evidence.says) or lacking_arms(finding, evidence)
        return not why, why
    if isinstance(locator, CommandRun) and locator.reproduces:
        if none := no_reproduction(locator):
            return False, none
        assert locator.started is not UNSET, "no_reproduction looked"
        if locator.started.begun_unix_s < unix_of(finding.at):
            return False, "the run of the reproduction began before the finding"
        shown = locator.as_expected is True
        if shown == (evidence.says != "contradicts"):
            return True, ""
        no = "the reproduction did not show what it was to show"
        return False, "it did show it" if shown else no
    return False, ""


def _no_test_flip(locator: FlipResult, says: str) -> str:
    """Say why a flip by itself is no test of a cause; empty when it is one."""
    if locator.verdict in NOTHING_SAID:
        return f"the flip says {locator.verdict}"
    if locator.grade == "exploratory":
        return "the flip is exploratory"
    if len(locator.changes) != 1:
        return f"the flip changed {len(locator.changes)} settings: it names no single cause"
    decided = locator.grade != "screen" or locator.verdict in DECIDED_WITHOUT_CONTROLS
    return (
        "" if decided or says != "supports" else "the flip is a screen: it may refute, not support"
    )


def _decides(finding: Finding, evidence: Evidence) -> bool:
    """Whether evidence against a claim counts; a flip or a reproduction must have decided something."""
    locator = evidence.locator
    tested = isinstance(locator, FlipResult) or getattr(locator, "reproduces", False)
    return evidence.says != "contradicts" or not tested or is_test_of_cause(finding, evidence)[0]


def _good(node: Node, says: str, broken: Broken) -> list[Evidence]:
    """The evidence of that kind that verifies and counts."""
    sound = [e for e in node.evidence if e.says == says and e.artifact not in broken]
    return [e for e in sound if not silence(e)]


def _mute(node: Node, says: str) -> str:
    """Say why evidence that was linked for a claim does not count; empty when there is none."""
    linked = [(e.id, silence(e)) for e in node.evidence if e.says == says]
    said = "; ".join(f"{id_} says nothing: {why}" for id_, why in linked if why)
    return f" ({said})" if said else ""


# The rules


def _lacks_evidence(finding: Finding, node: Node, broken: Broken) -> Iterator[str]:
    for evidence in node.evidence:
        for sha in (evidence.artifact, *evidence.attached):
            if sha in broken:
                yield f"{evidence.id}: {broken[sha]}"
    if node.status == "observed" and not _good(node, "supports", broken):
        yield f"observed, and no evidence shows it{_mute(node, 'supports')}"
    for status, says in (("supported", "supports"), ("refuted", "contradicts")):
        if node.status == status:
            good = _good(node, says, broken)
            if not any(e.captured_by == "tool" and _decides(finding, e) for e in good):
                yield f"{status}, and nothing that a tool captured {says} it{_mute(node, says)}"


def _cause_without_a_test(finding: Finding, node: Node, broken: Broken) -> Iterator[str]:
    if node.status == "unverified":
        yield "unverified: link evidence, or refute it"
    elif node.status == "supported" and node.kind in ("hypothesis", "mechanism"):
        tried = [is_test_of_cause(finding, e) for e in _good(node, "supports", broken)]
        if not any(good for good, _ in tried):
            why = next((why for _, why in tried if why), "no flip and no reproduction")
            yield f"unverified: a cause without a test ({why})"


def _asks_no_why(finding: Finding, node: Node, broken: Broken) -> Iterator[str]:
    if node is finding.nodes[0] and node.kind != "observation":
        yield "the first node is not an observation: nothing was seen that asks for a why"
    if not finding.active_whys_of(node.id) and node.kind == "observation":
        yield "no why was given"


def _memory_without_an_exit(finding: Finding, node: Node, broken: Broken) -> Iterator[str]:
    if node.status not in ("observed", "supported"):
        return
    # Negation is searched within the sentence, before the word.
    words = [_NEGATED.search(node.claim[: match.start()]) for match in _OOM.finditer(node.claim)]
    if not words:
        return
    states = [
        e.locator.state.upper()
        for e in node.evidence
        if isinstance(e.locator, ExitRecord) and e.artifact not in broken and not silence(e)
    ]
    denies = all(words)
    if denies:
        shown = any(state not in OUT_OF_MEMORY | {"UNKNOWN"} for state in states)
    else:
        shown = any(state in OUT_OF_MEMORY for state in states)
    if shown:
        return
    said = f" (it says {', '.join(states)})" if states else ""
    wanted = "another cause" if denies else "so"
    yield f"speaks of memory, and no record of an exit says {wanted}{said}"


def _alternative_untested(finding: Finding, node: Node, broken: Broken) -> Iterator[str]:
    if node.kind == "observation" or node.status == "refuted":
        return
    standing = [a for a in node.alternatives if is_active(a)]
    if not standing:
        yield "no alternative was thought of"
    untested = [a for a in standing if a.answer is None or a.answer.outcome == "undecided"]
    cheapest = min(untested, key=lambda a: a.cost_minutes, default=None)
    if cheapest is not None and cheapest.cost_minutes < CHEAP_MINUTES:
        minutes = f"{cheapest.cost_minutes:g} minutes"
        yield f"{cheapest.id} is untested and costs {minutes}: {cheapest.test}"
    for alternative in standing:
        if alternative in untested:
            continue
        if alternative.answer is not None and alternative.answer.outcome == "holds":
            yield f"{alternative.id} holds: {alternative.claim}"
        elif why := not_the_test(finding, node, alternative):
            yield f"{alternative.id} is not excluded by the test it names: {why}"


def _ends_at_a_person(finding: Finding, node: Node, broken: Broken) -> Iterator[str]:
    if finding.active_whys_of(node.id) or node.status == "refuted" or node is finding.nodes[0]:
        return
    authors = {re.escape(n.author) for n in finding.nodes if len(n.author) > 2}
    named = bool(authors) and re.search(rf"(?i)\b(?:{'|'.join(authors)})\b", node.claim) is not None
    if named or _PERSON.search(node.claim):
        yield "the chain ends at a person: ask what made it easy to do and hard to notice"


RULES = (
    Rule("E-WHY-001", "error", _lacks_evidence, of_status=True),
    Rule("E-WHY-002", "open", _cause_without_a_test, of_status=True),
    Rule("E-WHY-002", "open", _asks_no_why),
    Rule("E-WHY-003", "error", _memory_without_an_exit, of_status=True),
    Rule("E-WHY-004", "open", _alternative_untested),
    Rule("W-WHY-006", "warning", _ends_at_a_person),
)


def _double_problems(finding: Finding) -> Iterator[Problem]:
    seen: dict[bytes, str] = {}
    for node, evidence in finding.evidence():
        if evidence.says != "supports" or not is_active(evidence):
            continue
        key = evidence.artifact.encode() + canonical(msgspec.to_builtins(evidence.locator))
        if key in seen:
            text = f"{evidence.id} is {seen[key]} again: one observation supports one claim once"
            yield Problem(rule="E-WHY-005", level="error", node=node.id, text=text)
        seen.setdefault(key, evidence.id)


# Tests of alternatives


def not_the_test(finding: Finding, node: Node, alternative: Alternative) -> str:
    """Say why an alternative's answer does not come from the test it names; empty when it does."""
    answer, test = alternative.answer, alternative.test
    assert answer is not None
    evidence = next((e for e in node.evidence if e.id == answer.evidence), None)
    if evidence is None:
        return "its evidence is not there"
    if mute := silence(evidence):
        return f"{evidence.id} says nothing: {mute}"
    id_, locator = evidence.id, evidence.locator
    if names_a_run(test) and getattr(locator, "run_id", "") in _seen_runs(finding):
        return f"{id_} is of the run that was observed, no run of the test"
    match locator:
        case CommandRun():
            return _not_that_command(id_, locator, test)
        case FlipResult():
            return lacking_arms(finding, evidence) or _not_that_flip(id_, locator, test)
        case MetricWindow():
            return _not_named(id_, test, locator.metric)
        case ExitRecord():
            return _not_named(id_, test, "exit")
        case EventRange():
            kinds = [m[1] for q in locator.quotes if (m := re.search(r'"kind":"(\w+)"', q.text))]
            return _not_named(id_, test, *kinds)
        case FileRange():
            if what := _captured_as(finding, evidence):
                return _not_named(id_, test, what)
            return f"{id_} is a file that a person offers, no record of the test"
    return f"{id_} is what a person says: no test ran"


def _seen_runs(finding: Finding) -> set[str]:
    """The runs in which something was observed that needs a why."""
    return {
        evidence.locator.run_id
        for node, evidence in finding.evidence()
        if node.kind == "observation" and evidence.says == "supports" and not silence(evidence)
        if isinstance(evidence.locator, OfRun)
    }


def names_a_run(test: str) -> str:
    """The spec or folder of the run that a test says to start; empty when it names none."""
    match = re.match(r"`?(?:\S*/)?(?:engine|apr-workbench) distill (\S+)", test.strip())
    return match[1].strip("`") if match else ""


def _not_that_command(id_: str, locator: CommandRun, test: str) -> str:
    named = re.search(r"`([^`]+)`", test)
    try:
        words = shlex.split(named[1] if named else test)
    except ValueError:
        words = []
    if words != list(locator.argv):
        return f"{id_} ran `{shlex.join(locator.argv)}`, which is not the test"
    if not locator.reproduces:
        return f"{id_} was run without saying before what it must show"
    return "" if locator.as_expected else f"{id_} did not show what was said before"


def _not_that_flip(id_: str, locator: FlipResult, test: str) -> str:
    if locator.verdict in NOTHING_SAID or locator.grade == "exploratory":
        return f"{id_} decided nothing ({locator.verdict}, {locator.grade})"
    for change in locator.changes:
        key, _, values = change.partition(": ")
        asked = re.search(rf"(?<![\w.]){re.escape(key)}(?:=(\S+))?(?![\w.])", test)
        if asked is None:
            return f"{id_} is a flip of {key}, which the test does not name"
        if asked[1] and asked[1].strip("`'\",;") not in values.split(" -> "):
            return f"{id_} is a flip of {change}, and the test names {key}={asked[1]}"
    return ""


def _not_named(id_: str, test: str, *names: str) -> str:
    """Check that the test names what the evidence shows. A run that the test says to start is compared with
    the run's settings by `engine.findings.verify` instead."""
    if names_a_run(test):
        return ""
    if any(re.search(rf"(?i)(?<![\w.]){re.escape(name)}(?![\w.])", test) for name in names):
        return ""
    return f"{id_} shows {' and '.join(names) or 'nothing'}, which the test does not name"


def _captured_as(finding: Finding, evidence: Evidence) -> str:
    """Name what the tool captured the same bytes as, such as `stacks`; empty when it captured no such bytes."""
    by_tool = {
        sha
        for _, other in finding.evidence()
        if other.captured_by == "tool" and is_active(other)
        for sha in (other.artifact, *other.attached)
    }
    if evidence.artifact not in by_tool:
        return ""
    return finding.artifact(evidence.artifact).what.partition(" of ")[0]
