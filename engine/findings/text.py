"""A finding in words, and its README.md. Text from people and logs is escaped, so no claim becomes markup."""

from __future__ import annotations

from collections.abc import Mapping

from engine.findings.finding import Cause, Finding, Test
from engine.findings.older import LEVEL, Older
from engine.flips.ending import split_kind
from engine.flips.verdicts import INVALID
from engine.log.text import one_line

_ESCAPES = str.maketrans(
    {**{sign: f"\\{sign}" for sign in "\\`*_[]|#~"}, "<": "&lt;", ">": "&gt;", "&": "&amp;"}
)


def state_words(finding: Finding | Older) -> str:
    """Return the state of a finding in one sentence, computed from its tests."""
    if isinstance(finding, Older):
        return LEVEL
    if (closed := finding.closed) is not None:
        what = "root cause" if closed.outcome == "root-cause" else "closed unresolved"
        return f"{what}: {closed.text} ({closed.at}, {closed.author})"
    if finding.confirmed:
        return (
            f"confirmed, to be closed: {', '.join(cause.assignment for cause in finding.confirmed)}"
        )
    levels = [finding.level_of(cause) for cause in finding.causes]
    counts = [f"{levels.count(level)} {level}" for level in dict.fromkeys(levels)]
    return f"open: causes {', '.join(counts)}" if counts else "open: no cause was named"


def next_words(finding: Finding) -> str:
    """Return the next action."""
    if finding.closed is not None:
        return ""
    if finding.confirmed:
        return "close it"
    cause = finding.next_cause
    if cause is None:
        return "name a possible cause: a change that would end it"
    if finding.level_of(cause) == "could not be tested":
        return (
            f"mend {cause.assignment}: name the mended change as a cause, and withdraw {cause.id}"
        )
    if any(test.verdict == INVALID for test in tests_of(finding, cause)):
        named = f"name another change than {cause.assignment} and withdraw {cause.id}"
        return f"{named}, or test it again as the last test asks"
    return f"test {cause.id}: does {cause.assignment} end it?"


def lines(finding: Finding | Older, broken: Mapping[str, str] | None = None) -> list[str]:
    """Describe a finding. `broken` has the reasons why tests do not verify, by their ids."""
    if isinstance(finding, Older):
        return [*finding.lines]
    seen = finding.observed
    out = [
        f"{one_line(finding.title)}  [{one_line(state_words(finding))}]",
        f"  seen after {seen.step} steps, {seen.after_s:.0f} s: line {seen.seq} of {seen.log}.jsonl",
    ]
    if (parent := finding.parent) is not None:
        out += [f"  why of {parent.finding}: {parent.cause}"]
    for cause in finding.causes:
        out += [f"  {cause_words(finding, cause)}", *([f"      {cause.why}"] if cause.why else ())]
        out += [f"      {test_words(test, broken)}" for test in tests_of(finding, cause)]
    out += [f"  note: {one_line(note.text)} ({note.author}, {note.at})" for note in finding.notes]
    return out + ([f"  next: {action}"] if (action := next_words(finding)) else [])


def tests_of(finding: Finding, cause: Cause) -> list[Test]:
    return [test for test in finding.tests if test.cause == cause.id]


def cause_words(finding: Finding, cause: Cause) -> str:
    kind, _ = split_kind(cause.assignment)
    named = f"{kind}: " if kind else ""
    return f"{cause.id}  {finding.level_of(cause)}: {named}{one_line(str(cause.change))}"


def test_words(test: Test, broken: Mapping[str, str] | None = None) -> str:
    if why := (broken or {}).get(test.id):
        return f"{test.id}  does not verify: {why}"
    text = f"{test.verdict}: {one_line(test.reason)}" if test.verdict else "registered, not ended"
    return f"{test.id}  {text}"


def readme(finding: Finding) -> str:
    by = f"By {finding.author} on {finding.host}, {finding.at}."
    body = "\n".join(f"    {line}" for line in lines(finding))
    end = "Checked with `engine why check`; made from `finding.json`, do not edit."
    return f"# {_escape(finding.title)}\n\n{_escape(state_words(finding))}. {_escape(by)}\n\n{body}\n\n{end}\n"


def _escape(text: str) -> str:
    """Return text on one line, with everything escaped that Markdown would interpret."""
    return one_line(text).translate(_ESCAPES)
