"""One piece of evidence, opened at its window: what its artifact holds, in words and as a plot."""

from __future__ import annotations

import shlex

import msgspec

from engine.findings import logs
from engine.findings.bundle import Bundle
from engine.findings.finding import (
    CommandRun,
    EventRange,
    Evidence,
    ExitRecord,
    Finding,
    FlipResult,
    MetricWindow,
)
from engine.flips.text import verdict_lines
from engine.log.read import decode_line
from engine.log.text import event_text, one_line
from engine.units import format_bytes
from workbench.traces import Decimator, Trace

LINES_SHOWN = 200


def content_lines(
    bundle: Bundle, finding: Finding, evidence: Evidence, raw: bytes, characters: str
) -> list[str]:
    """What the artifact of a piece of evidence holds, in words."""
    match evidence.locator:
        case EventRange():
            events = [event_text(decode_line(line, evidence.id)) for line in raw.splitlines()]
            return ["the lines", *_cut([f"  {text}" for text in events])]
        case ExitRecord() as ended:
            return [
                "how it ended",
                f"  {ended.state}, {ended.certainty}: {one_line(ended.cause)}",
                f"  {one_line(ended.sentence)}",
            ]
        case MetricWindow():
            return []  # the plot, and the numbers in its words
        case FlipResult():
            fields = msgspec.json.decode(raw)
            return [
                "the verdict",
                *(f"  {x}" for x in verdict_lines(fields, characters=characters)),
            ]
        case CommandRun() as ran:
            return _command_lines(bundle, finding, ran)
        case _:
            text = raw.decode("utf-8", "replace").splitlines()
            return ["the text", *_cut([f"  {line}" for line in text])]


def _command_lines(bundle: Bundle, finding: Finding, ran: CommandRun) -> list[str]:
    status = "out of time" if ran.exit_status is None else f"exit status {ran.exit_status}"
    lines = ["the command", f"  {one_line(shlex.join(ran.argv))}", f"  {status}"]
    if ran.reproduces:
        exit_ = "" if ran.expect_exit is None else f"exit {ran.expect_exit}"
        text = f"the text {ran.expect_text!r}" if ran.expect_text else ""
        shown = "as expected" if ran.as_expected else "NOT as expected"
        lines.append(f"  {shown}: {' and '.join(x for x in (exit_, text) if x)}")
    for name, sha in (("stdout", ran.stdout_sha256), ("stderr", ran.stderr_sha256)):
        if sha in {artifact.sha256 for artifact in finding.artifacts}:
            raw = bundle.read_artifact(finding.artifact(sha))
            text = "(not copied)" if raw is None else raw.decode("utf-8", "replace")
            lines += [name, *_cut([f"  {line}" for line in text.splitlines()])]
        else:
            lines += [f"{name}: nothing"]
    return lines


def attached_lines(bundle: Bundle, finding: Finding, evidence: Evidence) -> list[str]:
    """What was captured with it; stacks in full."""
    lines, stacks = [], []
    own = set[str]()
    if isinstance(evidence.locator, CommandRun):
        own = {evidence.locator.stdout_sha256, evidence.locator.stderr_sha256}
    for sha in evidence.attached:
        if sha in own:
            continue
        artifact = finding.artifact(sha)
        lines.append(
            f"  {one_line(artifact.what)} ({artifact.name}, {format_bytes(artifact.size)})"
        )
        if artifact.what.startswith(("stacks of", "what ")) and artifact.kept:
            raw = bundle.read_artifact(artifact) or b""
            text = raw.decode("utf-8", "replace").splitlines()
            stacks += [one_line(artifact.what), *_cut([f"  {line}" for line in text])]
    return [*stacks, "captured with it", *lines] if lines else []


def _cut(lines: list[str]) -> list[str]:
    if len(lines) <= LINES_SHOWN:
        return lines or ["  (empty)"]
    return [*lines[:LINES_SHOWN], f"  and {len(lines) - LINES_SHOWN} more"]


def trace_of(evidence: Evidence, raw: bytes) -> Trace | None:
    """The metric over the seconds of its window, from 0."""
    locator = evidence.locator
    if not isinstance(locator, MetricWindow):
        return None
    lines = logs.read_lines(raw.splitlines(keepends=True), evidence.id)
    points = logs.points_of(lines, logs.metric(locator.metric))
    decimator = Decimator()
    decimator.extend([p.unix_s - locator.from_unix_s for p in points], [p.value for p in points])
    last = points[-1].value if points else None
    return Trace(name=locator.metric, buckets=decimator.buckets(), last=last, x_name="s")
