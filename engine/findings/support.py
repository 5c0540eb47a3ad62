"""Which evidence can carry anything: what ran, what it started, and whether it is the test that was named.

    an exit that says nothing    usage, bad input, not found, our mistake, a signal from outside, out of time
    a reproduction               starts a run of its own: the tool finds its log, begun while the command ran
    a flip                       has the runs of its arms, and decided
    the test of an alternative   is the one that was named: the same command, a flip of the same setting, a
                                 run of the same spec, or the recorded thing that the test speaks of

All of it is read from the finding alone, so that it can be judged again from what was recorded; what the
locators say is held against the artifacts by `engine.findings.locate`.
"""

from __future__ import annotations

import calendar
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import PurePath

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
)

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
"""Exits that say that the command was not given its chance, and so nothing about any claim."""
NOTHING_SAID = frozenset({"INCONCLUSIVE", "INVALID", "PARITY_FAIL"})
"""Verdicts of a flip that decide nothing."""
ARMS_KEPT = 16
"""Runs of a flip of which settings, receipt and logs are copied: the first ones."""

_STARTING = frozenset({"distill", "flip", "drill", "bench", "prepare", "eval", "smoke"})
_PROGRAMS = frozenset({"engine", "apr-workbench"})
_ARM_LOG = re.compile(r"events\.jsonl of (arms/[0-9]+-([ab])(?:\.[0-9]+)?)")


def unix_s(utc: str) -> float:
    """Seconds since 1970 of a time as findings have it."""
    return float(calendar.timegm(time.strptime(utc, "%Y-%m-%dT%H:%M:%SZ")))


def silence(evidence: Evidence) -> str:
    """Why evidence says nothing at all, whatever it is linked for; empty where it does say something."""
    if evidence.withdrawn is not UNSET:
        return "it was withdrawn"
    if isinstance(evidence.locator, CommandRun):
        return NO_ANSWER_EXITS.get(evidence.locator.exit_status, "")
    return ""


def carries_nothing(evidence: Evidence) -> str:
    """What a command that was just linked does not do, and why; empty where it may count."""
    locator = evidence.locator
    if mute := silence(evidence):
        return f"says nothing: {mute}"
    meant = isinstance(locator, CommandRun) and locator.reproduces and evidence.says != "answers"
    why = no_reproduction(locator) if meant and isinstance(locator, CommandRun) else ""
    return f"reproduces nothing: {why}" if why else ""


# Reproductions


def starts_a_run(argv: Sequence[str]) -> bool:
    """Whether a command line can start a run. One of `engine` that only looks at what is there cannot;
    what other programs do, their runs show."""
    called = list(_engine_actions(argv))
    return not called or any(action in _STARTING for action in called)


def _engine_actions(argv: Sequence[str]) -> Iterator[str]:
    """The actions of every call of `engine` in a command line, those within `sh -c '...'` too."""
    words = list(argv)
    for word in argv:
        if re.search(r"\s", word):
            words += re.split(r"[\s;&|()'\"`]+", word)
    for i, word in enumerate(words):
        named = PurePath(word).name in _PROGRAMS
        if named and (i == 0 or words[i - 1] not in ("--out", "--evidence", "cd")):
            action = next((w for w in words[i + 1 :] if not w.startswith("-")), "")
            yield action


def no_reproduction(locator: CommandRun) -> str:
    """Why a command reproduces nothing; empty where it does."""
    if not starts_a_run(locator.argv):
        return "the command reads what is there and starts no run"
    if locator.started is UNSET:
        return "the command started no run: no log of one began while it ran"
    return ""


# Flips


def lacking_arms(finding: Finding, evidence: Evidence) -> str:
    """Which runs of a flip's arms are not there; empty where they are."""
    locator = evidence.locator
    assert isinstance(locator, FlipResult)
    runs = {name for name, _ in arm_logs(finding, evidence)}
    arms = {name.rpartition("-")[2][:1] for name in runs}
    wanted = min(ARMS_KEPT, 2 * max(1, locator.n_pairs))
    if len(runs) < wanted or arms != {"a", "b"}:
        return f"the runs of the flip's arms are not there ({len(runs)} of {wanted} logs)"
    return ""


def arm_logs(finding: Finding, evidence: Evidence) -> Iterator[tuple[str, str]]:
    """The runs of a flip whose log is kept, with its hash."""
    known = {artifact.sha256: artifact for artifact in finding.artifacts}
    for sha in evidence.attached:
        if sha in known and (match := _ARM_LOG.fullmatch(known[sha].what)):
            yield match[1], sha


# Tests of alternatives


def not_the_test(finding: Finding, node: Node, alternative: Alternative) -> str:
    """Why the answer of an alternative is not that of the test it names; empty where it is."""
    answer = alternative.answer
    assert answer is not None
    evidence = next((e for e in node.evidence if e.id == answer.evidence), None)
    if evidence is None:
        return "its evidence is not there"
    if mute := silence(evidence):
        return f"{evidence.id} says nothing: {mute}"
    locator, test = evidence.locator, alternative.test
    if names_a_run(test) and getattr(locator, "run_id", "") in _seen_runs(finding):
        return f"{evidence.id} is of the run that was observed, no run of the test"
    match locator:
        case CommandRun():
            return _not_that_command(evidence.id, locator, test)
        case FlipResult():
            return lacking_arms(finding, evidence) or _not_that_flip(evidence.id, locator, test)
        case MetricWindow():
            return _not_named(evidence.id, test, locator.metric)
        case ExitRecord():
            return _not_named(evidence.id, test, "exit")
        case EventRange():
            kinds = [m[1] for q in locator.quotes if (m := re.search(r'"kind":"(\w+)"', q.text))]
            return _not_named(evidence.id, test, *kinds)
        case FileRange():
            what = _captured_as(finding, evidence)
            if not what:
                return f"{evidence.id} is a file that a person offers, no record of the test"
            return _not_named(evidence.id, test, what)
    return f"{evidence.id} is what a person says: no test ran"


def _seen_runs(finding: Finding) -> set[str]:
    """The runs in which something was observed, which is what asks for a why."""
    return {
        evidence.locator.run_id
        for node, evidence in finding.evidence()
        if node.kind == "observation" and evidence.says == "supports" and not silence(evidence)
        if isinstance(evidence.locator, EventRange | ExitRecord | MetricWindow)
    }


def names_a_run(test: str) -> str:
    """The spec or folder of a run that a test says to start; empty where it does not."""
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
    """A run that was started as the test says is held against its settings, by `tested_runs`."""
    if names_a_run(test):
        return ""
    if any(re.search(rf"(?i)(?<![\w.]){re.escape(name)}(?![\w.])", test) for name in names):
        return ""
    return f"{id_} shows {' and '.join(names) or 'nothing'}, which the test does not name"


def _captured_as(finding: Finding, evidence: Evidence) -> str:
    """What the tool captured the same bytes as, beside a run: `stacks`; empty where it did not."""
    by_tool = {
        sha
        for _, other in finding.evidence()
        if other.captured_by == "tool" and other.withdrawn is UNSET
        for sha in (other.artifact, *other.attached)
    }
    if evidence.artifact not in by_tool:
        return ""
    return finding.artifact(evidence.artifact).what.partition(" of ")[0]
