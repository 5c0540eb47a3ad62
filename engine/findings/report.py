"""A finding for people: a tree in text, and the README.md of its bundle with plots.

Made from the finding and its artifacts alone, so the same bundle gives the same bytes; what a person
wrote is escaped, so a claim cannot become markup.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from msgspec import UNSET, UnsetType

from engine.errors import EngineError
from engine.findings import logs, redact
from engine.findings.finding import (
    Alternative,
    Artifact,
    CommandRun,
    EventRange,
    Evidence,
    ExitRecord,
    FileRange,
    Finding,
    FlipResult,
    Locator,
    MetricWindow,
    Node,
    Statement,
    Withdrawn,
)
from engine.findings.locate import Read
from engine.findings.plot import line_plot, sparkline
from engine.findings.rules import effective_status, judge, observations
from engine.log.read import decode_line
from engine.log.text import event_text, one_line
from engine.units import format_bytes, format_seconds

README = "README.md"
_EVENTS_SHOWN = 8
_ESCAPES = str.maketrans(
    {**{sign: f"\\{sign}" for sign in "\\`*_[]|#~"}, "<": "&lt;", ">": "&gt;", "&": "&amp;"}
)


def state_words(finding: Finding) -> str:
    if finding.closed is None:
        return "open"
    what = "root cause" if finding.closed.outcome == "root-cause" else "closed unresolved"
    return f"{what}: {one_line(finding.closed.text)} ({finding.closed.at}, {finding.closed.author})"


def tree_lines(finding: Finding, broken: Mapping[str, str] | None = None) -> list[str]:
    """The whys as a tree; a node that answers two is drawn once and named again."""
    out = [f"{one_line(finding.title)}  [{state_words(finding)}]"]
    drawn: set[str] = set()

    def draw(node: Node, indent: str) -> None:
        status, why = effective_status(finding, node, broken)
        if node.id in drawn:
            out.append(f"{indent}{node.id}  see above")
            return
        drawn.add(node.id)
        deeper = f"{indent}    "
        if node.withdrawn is not UNSET:
            words = f"{node.id}  {node.kind}: {one_line(node.claim)}"
            out.append(f"{indent}{struck(words, node.withdrawn)}")
        else:
            out.append(
                f"{indent}{node.id}  {status}  {node.kind}: {one_line(node.claim)}{_count(node)}"
            )
        if node.withdrawn is UNSET and status != node.status:
            out.append(f"{deeper}said to be {node.status}; {why}")
        if node.reason and node.status == "refuted":
            out.append(f"{deeper}refuted: {one_line(node.reason)}")
        out.extend(
            deeper + struck(f"{e.id}  {e.says}: {locator_words(e.locator)}{_by(e)}", e.withdrawn)
            for e in node.evidence
        )
        out.extend(
            deeper + struck(f"{a.id}  or: {alternative_words(a)}", a.withdrawn)
            for a in node.alternatives
        )
        out.extend(f"{deeper}missing: {one_line(text)}" for text in node.missing)
        for inner in finding.whys_of(node.id):
            draw(inner, f"{deeper}")

    for node in finding.nodes:
        if not node.why_of:
            draw(node, "")
    problems = judge(finding, broken)
    out += [f"{'warning' if p.level == 'warning' else 'open'}: {p}" for p in problems]
    return out


def struck(words: str, withdrawn: Withdrawn | UnsetType) -> str:
    """An entry, with a line through it when it was taken back, and why."""
    if withdrawn is UNSET:
        return words
    return f"~~{words}~~  {withdrawn_words(withdrawn)}"


def withdrawn_words(withdrawn: Withdrawn | UnsetType) -> str:
    """Why, when and by whom an entry was taken back; empty for one that stands."""
    if withdrawn is UNSET:
        return ""
    return one_line(f"withdrawn {withdrawn.at} by {withdrawn.author}: {withdrawn.reason}")


def _count(node: Node) -> str:
    count = observations(node)
    return f"  (n = {count})" if count else ""


def _by(evidence: Evidence) -> str:
    return "" if evidence.captured_by == "tool" else "  [by a person]"


def alternative_words(alternative: Alternative) -> str:
    answer = alternative.answer
    if answer is None:
        result = f"untested, {alternative.cost_minutes:g} minutes"
    else:
        result = f"{answer.outcome} by {answer.evidence}: {one_line(answer.text)}"
    return f"{one_line(alternative.claim)} [{result}; test: {one_line(alternative.test)}]"


def locator_words(locator: Locator) -> str:
    """What evidence says, in one line."""
    return one_line(_locator_words(locator))


def _locator_words(locator: Locator) -> str:
    match locator:
        case EventRange():
            first, last = locator.first_seq, locator.last_seq
            lines = f"line {first}" if first == last else f"lines {first} to {last}"
            return f"{locator.run}/{locator.log}.jsonl, {lines}"
        case ExitRecord():
            return (
                f"exit of {locator.run}: {locator.state}, {locator.certainty}. {locator.sentence}"
            )
        case MetricWindow():
            seconds = format_seconds(locator.to_unix_s - locator.from_unix_s)
            lost = f", {locator.absent} absent" if locator.absent else ""
            lost += f", {locator.non_finite} not finite" if locator.non_finite else ""
            return (
                f"{locator.metric} of {locator.run} over {seconds}: {_number(locator.first)} to "
                f"{_number(locator.last)}, least {_number(locator.least)}, greatest "
                f"{_number(locator.greatest)}, mean {_number(locator.mean)}, n = {locator.count}{lost}"
            )
        case FileRange():
            lines = (
                f", lines {locator.first_line} to {locator.last_line}" if locator.first_line else ""
            )
            return f"{locator.path}{lines} ({format_bytes(locator.file_bytes)})"
        case FlipResult():
            if locator.effect is None:
                effect = ""
            else:
                ends = f"[{_number(locator.low)}, {_number(locator.high)}]"
                effect = f", B/A {locator.effect:.4g} {ends} in {locator.metric}"
            changes = "; ".join(locator.changes)
            return (
                f"flip {locator.flip} ({changes}): {locator.verdict}, {locator.grade}"
                f"{effect}, {locator.n_pairs} complete pairs"
            )
        case CommandRun():
            status = "out of time" if locator.exit_status is None else f"exit {locator.exit_status}"
            shown = {True: ", as expected", False: ", NOT as expected", None: ""}
            return f"`{shlex.join(locator.argv)}`: {status}{shown[locator.as_expected]}"
        case Statement():
            return f"“{locator.text}”"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def derive(finding: Finding, read: Read) -> dict[str, str]:
    """The files made for people: README.md and a plot for each metric window, by their names."""
    files: dict[str, str] = {}
    for _, evidence in finding.evidence():
        if isinstance(evidence.locator, MetricWindow):
            points = _points(evidence, evidence.locator, read)
            title = f"{evidence.locator.metric} of {evidence.locator.run}"
            files[f"plots/{evidence.id}.svg"] = line_plot(points, title)
    files[README] = "\n".join(_readme(finding, read)) + "\n"
    return files


def _points(evidence: Evidence, locator: MetricWindow, read: Read) -> list[logs.Point]:
    data = read(evidence.artifact) or b""
    lines = logs.read_lines(data.splitlines(keepends=True), evidence.id)
    return logs.points_of(lines, logs.metric(locator.metric))


def _readme(finding: Finding, read: Read) -> Iterator[str]:
    yield f"# {_escape(finding.title)}"
    yield ""
    by = f"By {_escape(finding.author)} on {_escape(finding.host)}, {finding.at}."
    yield f"`{finding.slug}`, {_escape(state_words(finding))}. {by}"
    yield ""
    yield "```"
    yield from (line.replace("```", "'''") for line in tree_lines(finding))
    yield "```"
    for node in finding.nodes:
        yield ""
        yield from _node_lines(node, finding, read)
    if finding.artifacts:
        yield ""
        yield "## Files"
        yield ""
        yield "| file | what | bytes | sha256 | |"
        yield "|---|---|---|---|---|"
        for artifact in sorted(finding.artifacts, key=lambda a: (a.what, a.sha256)):
            notes = [] if artifact.kept else ["not copied"]
            notes += [redact.words(artifact.redacted)] if artifact.redacted else []
            cells = [_place(artifact), _escape(artifact.what), str(artifact.size)]
            cells += [f"`{artifact.sha256[:16]}`", _escape(", ".join(notes))]
            yield f"| {' | '.join(cells)} |"
    yield ""
    yield "Checked with `engine evidence verify`; made from `finding.json`, do not edit."


def _node_lines(node: Node, finding: Finding, read: Read) -> Iterator[str]:
    status, why = effective_status(finding, node)
    gone = node.withdrawn is not UNSET
    yield f"## {_struck(f'{node.id}: {_escape(node.claim)}', gone)}"
    yield ""
    parents = f", why of {', '.join(node.why_of)}" if node.why_of else ""
    yield f"**{status}**, {node.kind}{parents}{_count(node)}. {_escape(node.author)}, {node.at}."
    for text in (
        withdrawn_words(node.withdrawn),
        f"Said to be {node.status}; {why}" if why else "",
        node.reason,
    ):
        if text:
            yield ""
            yield _escape(text)
    if node.missing:
        yield ""
        yield "Missing in the record it was taken from:"
        yield ""
        yield from (f"- {_escape(text)}" for text in node.missing)
    for evidence in node.evidence:
        yield ""
        place = _place(finding.artifact(evidence.artifact))
        words = f"{_escape(locator_words(evidence.locator))} {place}"
        by = f"captured by {evidence.captured_by}, {evidence.at}"
        said = _struck(
            f"**{evidence.id}** {evidence.says}: {words}, {by}", evidence.withdrawn is not UNSET
        )
        yield f"- {said} {_escape(withdrawn_words(evidence.withdrawn))}".rstrip()
        yield from _detail(evidence, read)
    if node.alternatives:
        yield ""
        yield "| alternative | test | if true | if false | minutes | result |"
        yield "|---|---|---|---|---|---|"
        for a in node.alternatives:
            result = (
                "untested"
                if a.answer is None
                else f"{a.answer.outcome} ({a.answer.evidence}): {a.answer.text}"
            )
            gone = a.withdrawn is not UNSET
            texts = (f"{a.id}: {a.claim}", a.test, a.expected_if_true, a.expected_if_false)
            cells = [*map(_escape, texts), f"{a.cost_minutes:g}", _escape(result)]
            shown = [_struck(cell, gone) for cell in cells]
            if a.withdrawn is not UNSET:
                shown[-1] += f" {_escape(withdrawn_words(a.withdrawn))}"
            yield f"| {' | '.join(shown)} |"


def _struck(text: str, gone: bool) -> str:
    return f"~~{text}~~" if gone else text


def _place(artifact: Artifact) -> str:
    name = _escape(artifact.name)
    return f"[{name}]({artifact.path})" if artifact.kept else name


def _detail(evidence: Evidence, read: Read) -> Iterator[str]:
    """The plot of a metric window, the lines of an event range."""
    locator = evidence.locator
    if isinstance(locator, MetricWindow):
        yield ""
        yield f"  ![{_escape(locator.metric)}](plots/{evidence.id}.svg)"
        yield ""
        yield f"      {sparkline(_points(evidence, locator, read))}"
    elif isinstance(locator, EventRange):
        yield ""
        yield from (f"      {line}" for line in event_lines(evidence, read))


def event_lines(evidence: Evidence, read: Read) -> Iterator[str]:
    """The first lines of an event range in words, and how many more there are."""
    lines = (read(evidence.artifact) or b"").splitlines()
    for raw in lines[:_EVENTS_SHOWN]:
        try:
            yield event_text(decode_line(raw, evidence.id))
        except EngineError as error:
            yield one_line(str(error))
    if len(lines) > _EVENTS_SHOWN:
        yield f"and {len(lines) - _EVENTS_SHOWN} more"


def _escape(text: str) -> str:
    """Text that Markdown leaves as it is, on one line."""
    return one_line(text).translate(_ESCAPES)
