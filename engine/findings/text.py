"""A finding in words, and its README.md. Text from people and logs is escaped, so no claim becomes markup."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from engine.findings.finding import Cause, Finding, Test
from engine.log.text import one_line
from engine.redact import words

_ESCAPES = str.maketrans(
    {**{sign: f"\\{sign}" for sign in "\\`*_[]|#~"}, "<": "&lt;", ">": "&gt;", "&": "&amp;"}
)


def state_words(finding: Finding) -> str:
    """Its level in one sentence, computed from its tests."""
    if (closed := finding.closed) is not None:
        what = "root cause" if closed.outcome == "root-cause" else "closed unresolved"
        return f"{what}: {closed.text} ({closed.at}, {closed.author})"
    if finding.confirmed:
        return f"confirmed, to be closed: {', '.join(one.assignment for one in finding.confirmed)}"
    levels = [finding.level_of(cause) for cause in finding.causes]
    counts = [f"{levels.count(level)} {level}" for level in ("open", "refuted") if level in levels]
    return f"open: causes {', '.join(counts)}" if counts else "open: no cause was named"


def next_words(finding: Finding) -> str:
    """What to do next."""
    if finding.closed is not None:
        return ""
    if finding.confirmed:
        return "close it"
    cause = finding.next_cause
    if cause is None:
        return "name a possible cause: a change that would end it"
    again = any(test.cause == cause.id and test.verdict for test in finding.tests)
    return f"test {cause.id}{' again, with more steps' if again else ''}: does {cause.assignment} end it?"


def lines(finding: Finding, broken: Mapping[str, str] | None = None) -> list[str]:
    """Describe a finding. `broken` says of tests that do not verify why."""
    seen = finding.observed
    out = [f"{one_line(finding.title)}  [{one_line(state_words(finding))}]"]
    out += [
        f"  seen after {seen.step} steps, {seen.after_s:.0f} s: line {seen.seq} of {seen.log}.jsonl"
    ]
    if (parent := finding.parent) is not None:
        out += [f"  why of {parent.finding}: {parent.cause}"]
    for cause in finding.causes:
        out += [f"  {cause_words(finding, cause)}", *([f"      {cause.why}"] if cause.why else ())]
        out += [f"      {test_words(test, broken)}" for test in tests_of(finding, cause)]
    out += [f"  note: {one_line(note.text)} ({note.author}, {note.at})" for note in finding.notes]
    return out + ([f"  next: {said}"] if (said := next_words(finding)) else [])


def tests_of(finding: Finding, cause: Cause) -> list[Test]:
    return [test for test in finding.tests if test.cause == cause.id]


def cause_words(finding: Finding, cause: Cause) -> str:
    return f"{cause.id}  {finding.level_of(cause)}: {one_line(str(cause.change))}"


def test_words(test: Test, broken: Mapping[str, str] | None = None) -> str:
    if why := (broken or {}).get(test.id):
        return f"{test.id}  does not verify: {why}"
    said = f"{test.verdict}: {one_line(test.reason)}" if test.verdict else "registered, not ended"
    return f"{test.id}  {said}"


def readme(finding: Finding) -> str:
    return "\n".join(_readme(finding)) + "\n"


def _readme(finding: Finding) -> Iterator[str]:
    yield f"# {_escape(finding.title)}"
    yield ""
    yield f"{_escape(state_words(finding))}. By {_escape(finding.author)} on {_escape(finding.host)}, {finding.at}."
    yield ""
    yield from (f"    {line}" for line in lines(finding))
    yield from _table("file", "bytes", "sha256", "note")
    for name, file in sorted(finding.files.items()):
        notes = [] if file.is_copied else ["not copied"]
        notes += [f"{words(file.redacted)}, otherwise whole"] if file.redacted else []
        is_plain = file.is_copied and re.fullmatch(r"[\w./-]+", name)
        place = f"[{_escape(name)}]({name})" if is_plain else _escape(name)
        yield _cells(place, str(file.size), f"`{file.sha256[:16]}`", ", ".join(notes))
    yield ""
    yield "Checked with `engine why verify`; made from `finding.json`, do not edit."


def _table(*heads: str) -> Iterator[str]:
    yield ""
    yield _cells(*heads)
    yield f"{'|---' * len(heads)}|"


def _cells(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _escape(text: str) -> str:
    """Return text on one line, with everything escaped that Markdown would interpret."""
    return one_line(text).translate(_ESCAPES)
