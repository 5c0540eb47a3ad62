"""A finding as text for people: a tree, and the README.md of its bundle with plots.

The text depends on the finding and its artifacts alone, so the same bundle gives the same bytes. Text from
people is escaped, so a claim cannot become markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import UNSET, UnsetType

from engine.errors import EngineError
from engine.findings import redact
from engine.findings.chart import metric_figure
from engine.findings.finding import (
    Alternative,
    Artifact,
    EventRange,
    Evidence,
    Finding,
    MetricWindow,
    Node,
    Read,
    Withdrawn,
    is_active,
)
from engine.findings.kinds import points_of, words_of
from engine.findings.rules import Broken, effective_status, judge, observations
from engine.log.read import decode_line
from engine.log.sparkline import sparkline
from engine.log.text import event_text, one_line

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


def tree_lines(finding: Finding, broken: Broken | None = None) -> list[str]:
    """Draw the whys as a tree. A node that explains two others is drawn once and referred to the second time."""
    out = [f"{one_line(finding.title)}  [{state_words(finding)}]"]
    drawn: set[str] = set()

    def draw(node: Node, indent: str) -> None:
        status, why = effective_status(finding, node, broken)
        if node.id in drawn:
            out.append(f"{indent}{node.id}  see above")
            return
        drawn.add(node.id)
        deeper = f"{indent}    "
        claim = f"{node.kind}: {one_line(node.claim)}"
        if is_active(node):
            out.append(f"{indent}{node.id}  {status}  {claim}{count_words(node)}")
            if status != node.status:
                out.append(f"{deeper}said to be {node.status}; {why}")
        else:
            out.append(indent + struck(f"{node.id}  {claim}", node.withdrawn))
        if node.reason and node.status == "refuted":
            out.append(f"{deeper}refuted: {one_line(node.reason)}")
        for e in node.evidence:
            by = "" if e.captured_by == "tool" else "  [by a person]"
            words = f"{e.id}  {e.says}: {words_of(e.locator)}{by}"
            out.append(deeper + struck(words, e.withdrawn))
        out.extend(
            deeper + struck(f"{a.id}  or: {alternative_words(a)}", a.withdrawn)
            for a in node.alternatives
        )
        out.extend(f"{deeper}missing: {one_line(text)}" for text in node.missing)
        for inner in finding.whys_of(node.id):
            draw(inner, deeper)

    for node in finding.nodes:
        if not node.why_of:
            draw(node, "")
    problems = judge(finding, broken)
    return out + [f"{'warning' if p.level == 'warning' else 'open'}: {p}" for p in problems]


def struck(words: str, withdrawn: Withdrawn | UnsetType) -> str:
    """Return an entry as it is, or struck through with the reason when it was withdrawn."""
    if withdrawn is UNSET:
        return words
    return f"~~{words}~~  {withdrawn_words(withdrawn)}"


def withdrawn_words(withdrawn: Withdrawn | UnsetType) -> str:
    """Why, when and by whom an entry was withdrawn; empty when it was not."""
    if withdrawn is UNSET:
        return ""
    return one_line(f"withdrawn {withdrawn.at} by {withdrawn.author}: {withdrawn.reason}")


def count_words(node: Node) -> str:
    count = observations(node)
    return f"  (n = {count})" if count else ""


def alternative_words(alternative: Alternative) -> str:
    answer = alternative.answer
    if answer is None:
        result = f"untested, {alternative.cost_minutes:g} minutes"
    else:
        result = f"{answer.outcome} by {answer.evidence}: {one_line(answer.text)}"
    return f"{one_line(alternative.claim)} [{result}; test: {one_line(alternative.test)}]"


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


# README.md


def derive(finding: Finding, read: Read) -> dict[str, str]:
    """Return the generated files by name: README.md, and a plot for each metric window."""
    files: dict[str, str] = {}
    for _, evidence in finding.evidence():
        if isinstance(locator := evidence.locator, MetricWindow):
            points = points_of(locator, read(evidence.artifact) or b"", evidence.id)
            title = f"{locator.metric} of {locator.run}"
            files[f"plots/{evidence.id}.svg"] = metric_figure(points, title)
    files[README] = "\n".join(_readme(finding, read)) + "\n"
    return files


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
        yield from _table("file", "what", "bytes", "sha256", "")
        for artifact in sorted(finding.artifacts, key=lambda a: (a.what, a.sha256)):
            notes = [] if artifact.kept else ["not copied"]
            notes += [redact.words(artifact.redacted)] if artifact.redacted else []
            cells = [_place(artifact), _escape(artifact.what), str(artifact.size)]
            yield _cells([*cells, f"`{artifact.sha256[:16]}`", _escape(", ".join(notes))])
    yield ""
    yield "Checked with `engine evidence verify`; made from `finding.json`, do not edit."


def _node_lines(node: Node, finding: Finding, read: Read) -> Iterator[str]:
    status, why = effective_status(finding, node)
    yield f"## {_struck(f'{node.id}: {_escape(node.claim)}', node)}"
    yield ""
    parents = f", why of {', '.join(node.why_of)}" if node.why_of else ""
    by = f"{_escape(node.author)}, {node.at}"
    yield f"**{status}**, {node.kind}{parents}{count_words(node)}. {by}."
    said = f"Said to be {node.status}; {why}" if why else ""
    for text in filter(None, (withdrawn_words(node.withdrawn), said, node.reason)):
        yield ""
        yield _escape(text)
    if node.missing:
        yield ""
        yield "Missing in the record it was taken from:"
        yield ""
        yield from (f"- {_escape(text)}" for text in node.missing)
    for e in node.evidence:
        yield ""
        words = f"{_escape(words_of(e.locator))} {_place(finding.artifact(e.artifact))}"
        words = f"**{e.id}** {e.says}: {words}, captured by {e.captured_by}, {e.at}"
        yield f"- {_struck(words, e)} {_escape(withdrawn_words(e.withdrawn))}".rstrip()
        if isinstance(e.locator, MetricWindow):
            points = points_of(e.locator, read(e.artifact) or b"", e.id)
            yield ""
            yield f"  ![{_escape(e.locator.metric)}](plots/{e.id}.svg)"
            yield ""
            yield f"      {sparkline([value for _, value in points])}"
        elif isinstance(e.locator, EventRange):
            yield ""
            yield from (f"      {line}" for line in event_lines(e, read))
    if node.alternatives:
        yield from _table("alternative", "test", "if true", "if false", "minutes", "result")
    for a in node.alternatives:
        answer, result = a.answer, "untested"
        if answer is not None:
            result = f"{answer.outcome} ({answer.evidence}): {answer.text}"
        texts = (f"{a.id}: {a.claim}", a.test, a.expected_if_true, a.expected_if_false)
        cells = [*map(_escape, texts), f"{a.cost_minutes:g}", _escape(result)]
        shown = [_struck(cell, a) for cell in cells]
        shown[-1] += "" if is_active(a) else f" {_escape(withdrawn_words(a.withdrawn))}"
        yield _cells(shown)


def _table(*heads: str) -> Iterator[str]:
    yield ""
    yield _cells(heads).replace("|  |", "| |")
    yield f"{'|---' * len(heads)}|"


def _cells(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _struck(text: str, entry: Node | Evidence | Alternative) -> str:
    return text if is_active(entry) else f"~~{text}~~"


def _place(artifact: Artifact) -> str:
    name = _escape(artifact.name)
    return f"[{name}]({artifact.path})" if artifact.kept else name


def _escape(text: str) -> str:
    """Return text on one line, with everything escaped that Markdown would interpret."""
    return one_line(text).translate(_ESCAPES)
