"""What differs between kinds of evidence: one row of `KINDS` for each class of locator.

    words         the locator in one line
    differences   where the locator differs from its artifact. Every field is recomputed from the bytes: a
                  metric with the arithmetic of this version, a flip's effect from its pairs
    opened        the content of the artifact in words
    again         captures the evidence again from its source; None when something else lies there now. A
                  kind without it has no lasting source

Capturing is in `engine.findings.capture`; what each kind can prove is in `engine.findings.rules`.
"""

from __future__ import annotations

import math
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from engine.files import parse_json
from engine.findings import capture, logs
from engine.findings.capture import Capture
from engine.findings.finding import (
    CommandRun,
    EventRange,
    Evidence,
    ExitRecord,
    FileRange,
    Finding,
    FlipResult,
    Locator,
    MetricWindow,
    Read,
    Statement,
    unix_of,
)
from engine.findings.redact import Redactor
from engine.findings.rules import arm_logs
from engine.flips.arms import metrics_of
from engine.flips.plan import Plan, read_plan
from engine.flips.record import read_pairs
from engine.flips.text import UNICODE, verdict_lines
from engine.flips.verdict import Pair, interval_of
from engine.log.folder import RunFolder, is_run
from engine.log.follow import Follower
from engine.log.read import decode_line
from engine.log.text import event_text, one_line
from engine.units import format_bytes, format_seconds

OF_STEPS = frozenset({"step_s", "tokens_per_s", "final_loss"})
"""Metrics that can be recomputed from the log of an arm alone."""
LINES_SHOWN = 200
_NO_SECRETS = Redactor({})


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of evidence, with its finding and a reader of artifacts."""

    finding: Finding
    evidence: Evidence
    read: Read
    characters: str = UNICODE
    """The character set for plots in text."""

    @property
    def data(self) -> bytes:
        """The artifact's bytes; empty when it was not copied."""
        return self.read(self.evidence.artifact) or b""

    def text(self, sha256: str) -> list[str]:
        """Return an artifact as lines to stand below a heading."""
        raw = self.read(sha256)
        text = "(not copied)" if raw is None else raw.decode("utf-8", "replace")
        return cut(text.splitlines())


def cut(lines: Sequence[str]) -> list[str]:
    """Indent lines to stand below a heading; of very many, only the first ones."""
    more = len(lines) - LINES_SHOWN
    shown = [f"  {line}" for line in lines[:LINES_SHOWN]] or ["  (empty)"]
    return [*shown, f"  and {more} more"] if more > 0 else shown


@dataclass(frozen=True, slots=True)
class Kind:
    words: Callable[[Any], str]
    differences: Callable[[Any, Piece], Iterator[str]]
    opened: Callable[[Any, Piece], list[str]]
    again: Callable[[Any, Path], Capture | None] | None = None


def words_of(locator: Locator) -> str:
    """Describe a locator in one line."""
    return one_line(KINDS[type(locator)].words(locator))


def _unequal(locator: Any, found: dict[str, Any]) -> Iterator[str]:
    for name, value in found.items():
        if getattr(locator, name) != value:
            yield f"{name}: expected {getattr(locator, name)!r}, found {value!r}"


def _in_its_run(take: Callable[[Any, RunFolder], Capture]) -> Callable[[Any, Path], Capture | None]:
    """Wrap `take` so that it captures only when the locator's run is still at that path."""

    def again(locator: Any, path: Path) -> Capture | None:
        run = RunFolder(path)
        there = is_run(path) and logs.run_id(run) == locator.run_id
        return take(locator, run) if there else None

    return again


# Lines of a log


def _events_words(locator: EventRange) -> str:
    first, last = locator.first_seq, locator.last_seq
    lines = f"line {first}" if first == last else f"lines {first} to {last}"
    return f"{locator.run}/{locator.log}.jsonl, {lines}"


def _events_differences(locator: EventRange, piece: Piece) -> Iterator[str]:
    seqs = [line.event.seq for line in logs.lines_of(piece.data, "artifact")]
    if seqs != list(range(locator.first_seq, locator.last_seq + 1)):
        yield f"expected lines {locator.first_seq} to {locator.last_seq}, found {seqs[:3]}..."
    if capture.quotes_of(piece.data) != locator.quotes:
        yield "the lines do not begin as they are quoted"


def _events_opened(locator: EventRange, piece: Piece) -> list[str]:
    lines = [decode_line(line, piece.evidence.id) for line in piece.data.splitlines()]
    return ["the lines", *cut([event_text(line) for line in lines])]


def _events_again(locator: EventRange, run: RunFolder) -> Capture:
    place = (locator.log, locator.first_seq, locator.last_seq)
    return capture.capture_events(run, *place, _NO_SECRETS)


# The record of an exit


def _exit_words(locator: ExitRecord) -> str:
    return f"exit of {locator.run}: {locator.state}, {locator.certainty}. {locator.sentence}"


def _exit_differences(locator: ExitRecord, piece: Piece) -> Iterator[str]:
    (line,) = logs.lines_of(piece.data, "artifact")
    if found := capture.exit_fields(line):
        yield from _unequal(locator, found)
    else:
        yield f"expected the record of an exit, found {type(line.event).__name__}"


def _exit_opened(locator: ExitRecord, piece: Piece) -> list[str]:
    state = f"  {locator.state}, {locator.certainty}: {one_line(locator.cause)}"
    return ["how it ended", state, f"  {one_line(locator.sentence)}"]


# A metric


def _metric_words(locator: MetricWindow) -> str:
    first, last, least, greatest, mean = map(
        _number, (locator.first, locator.last, locator.least, locator.greatest, locator.mean)
    )
    lost = f", {locator.absent} absent" if locator.absent else ""
    lost += f", {locator.non_finite} not finite" if locator.non_finite else ""
    seconds = format_seconds(locator.to_unix_s - locator.from_unix_s)
    return (
        f"{locator.metric} of {locator.run} over {seconds}: {first} to {last}, least {least}, "
        f"greatest {greatest}, mean {mean}, n = {locator.count}{lost}"
    )


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def points_of(locator: MetricWindow, data: bytes, where: object = "artifact") -> list[logs.Point]:
    """The points of a metric window (unix seconds, value), read from its artifact."""
    return logs.metric(locator.metric).points(logs.lines_of(data, where))


def _metric_differences(locator: MetricWindow, piece: Piece) -> Iterator[str]:
    if numbers := logs.numbers_of(points_of(locator, piece.data)):
        yield from _unequal(locator, numbers)
    else:
        yield f"no line has {locator.metric}"


def _metric_again(locator: MetricWindow, run: RunFolder) -> Capture:
    steps = (locator.first_step, locator.last_step)
    window = logs.Window(locator.from_unix_s, locator.to_unix_s, *steps)
    return capture.capture_metric(run, locator.metric, _NO_SECRETS, window)


# A file


def _file_words(locator: FileRange) -> str:
    first, last = locator.first_line, locator.last_line
    lines = f", lines {first} to {last}" if first else ""
    return f"{locator.path}{lines} ({format_bytes(locator.file_bytes)})"


def _file_differences(locator: FileRange, piece: Piece) -> Iterator[str]:
    if locator.first_line:
        count = locator.last_line - locator.first_line + 1
        if (found := len(piece.data.splitlines())) != count:
            yield f"expected {count} lines, found {found}"
    elif piece.evidence.artifact != locator.file_sha256:
        yield "the file is not the artifact"


def _text_opened(locator: Locator, piece: Piece) -> list[str]:
    return ["the text", *piece.text(piece.evidence.artifact)]


def _file_again(locator: FileRange, path: Path) -> Capture | None:
    again = capture.capture_file(path, _NO_SECRETS, locator.first_line, locator.last_line)
    return Capture(locator=replace(again.locator, path=locator.path), blob=again.blob)


# A flip


def _flip_words(locator: FlipResult) -> str:
    effect = ""
    if locator.effect is not None:
        ends = f"[{_number(locator.low)}, {_number(locator.high)}]"
        effect = f", B/A {locator.effect:.4g} {ends} in {locator.metric}"
    return (
        f"flip {locator.flip} ({'; '.join(locator.changes)}): {locator.verdict}, {locator.grade}"
        f"{effect}, {locator.n_pairs} complete pairs"
    )


def _flip_differences(locator: FlipResult, piece: Piece) -> Iterator[str]:
    verdict = parse_json(piece.data, "artifact", "verdict")
    yield from _unequal(locator, capture.flip_fields(verdict, "artifact"))
    plan_raw, pairs_raw = piece.read(locator.plan), piece.read(locator.pairs)
    if plan_raw is None or pairs_raw is None or piece.finding.artifact(locator.plan).redacted:
        return
    plan = read_plan(plan_raw.decode())
    if plan.sha256 != locator.plan_sha256:
        yield f"plan: expected {locator.plan_sha256[:12]}, found {plan.sha256[:12]}"
    if locator.grade != "exploratory" and verdict["prereg_sha"] != plan.sha256:
        yield "the verdict is of another plan"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pairs.jsonl").write_bytes(pairs_raw)
        measured = read_pairs(Path(folder))
    yield from _arm_differences(piece, plan, measured)
    interval = interval_of(plan, measured)
    pairs, effect = (0, None) if interval is None else (interval.pairs, interval.ratio)
    if pairs != locator.n_pairs:
        yield f"expected {locator.n_pairs} complete pairs, found {pairs}"
    if effect is not locator.effect and not _close(locator.effect, effect):
        yield f"effect: expected {locator.effect} from the pairs, found {effect}"


def _arm_differences(piece: Piece, plan: Plan, measured: Sequence[Pair]) -> Iterator[str]:
    """Yield where the pairs differ from the logs of their arms. A pair is accepted as it is when its log was
    not copied."""
    said = {arm.run: arm for pair in measured for arm in (pair.a, pair.b)}
    for run, sha in arm_logs(piece.finding, piece.evidence):
        raw = piece.read(sha)
        if raw is None or piece.finding.artifact(sha).redacted:
            continue
        if run not in said:
            yield f"{run} is no run of the flip"
            continue
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "events.jsonl").write_bytes(raw)
            view = Follower(RunFolder(Path(folder))).read_all()
        arm, value = said[run], metrics_of(view, plan.warm_up_steps).get(plan.metric)
        if view.last_step != arm.steps:
            yield f"{run}: expected {arm.steps} steps, its log has {view.last_step}"
        elif arm.value is not None and plan.metric in OF_STEPS and not _close(arm.value, value):
            yield f"{run}: expected {plan.metric} {arm.value}, its log gives {value}"


def _close(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and math.isclose(one, other, rel_tol=1e-9)


def _flip_opened(locator: FlipResult, piece: Piece) -> list[str]:
    lines = verdict_lines(
        parse_json(piece.data, "artifact", "verdict"), characters=piece.characters
    )
    return ["the verdict", *(f"  {line}" for line in lines)]


def _flip_again(locator: FlipResult, path: Path) -> Capture | None:
    return capture.capture_flip(path, _NO_SECRETS) if capture.is_flip(path) else None


# A command


def _command_words(locator: CommandRun) -> str:
    status = "out of time" if locator.exit_status is None else f"exit {locator.exit_status}"
    shown = {True: ", as expected", False: ", NOT as expected", None: ""}
    return f"`{shlex.join(locator.argv)}`: {status}{shown[locator.as_expected]}"


def _command_differences(locator: CommandRun, piece: Piece) -> Iterator[str]:
    record = parse_json(piece.data, "artifact", "command")
    yield from _unequal(locator, capture.command_fields(record))
    started = locator.started
    if started is not UNSET and not piece.finding.artifact(started.log).redacted:
        first = (piece.read(started.log) or b"").partition(b"\n")[0] + b"\n"
        if logs.id_of(first) != started.run_id:
            yield "the log that it left is of another run"
        elif logs.begun_of(first) != started.begun_unix_s:
            yield "the log that it left begins at another time"
        if started.begun_unix_s < unix_of(record["started"]):
            yield "the run began before the command that is to have started it"
    outputs = (record["stdout"]["sha256"], record["stderr"]["sha256"])
    printed = [piece.read(sha) for sha in outputs if sha in piece.evidence.attached]
    if None not in printed:
        texts = [text.decode("utf-8", "replace") for text in printed if text is not None]
        expected = (locator.expect_exit, locator.expect_text)
        shown = capture.as_expected(locator.exit_status, texts, *expected)
        yield from _unequal(locator, {"as_expected": shown})


def _command_opened(locator: CommandRun, piece: Piece) -> list[str]:
    known = locator.exit_status is not None
    status = f"exit status {locator.exit_status}" if known else "out of time"
    lines = ["the command", f"  {one_line(shlex.join(locator.argv))}", f"  {status}"]
    if locator.reproduces:
        exit_ = "" if locator.expect_exit is None else f"exit {locator.expect_exit}"
        text = f"the text {locator.expect_text!r}" if locator.expect_text else ""
        shown = "as expected" if locator.as_expected else "NOT as expected"
        lines.append(f"  {shown}: {' and '.join(x for x in (exit_, text) if x)}")
    kept = {artifact.sha256 for artifact in piece.finding.artifacts}
    for name, sha in (("stdout", locator.stdout_sha256), ("stderr", locator.stderr_sha256)):
        lines += [name, *piece.text(sha)] if sha in kept else [f"{name}: nothing"]
    return lines


# A person's statement


def _statement_differences(locator: Statement, piece: Piece) -> Iterator[str]:
    if piece.data.decode().rstrip("\n") != locator.text:
        yield "the statement is another"


# words, differences, opened, again
KINDS: dict[type[Locator], Kind] = {
    EventRange: Kind(
        _events_words, _events_differences, _events_opened, _in_its_run(_events_again)
    ),
    ExitRecord: Kind(
        _exit_words,
        _exit_differences,
        _exit_opened,
        _in_its_run(lambda _, run: capture.capture_exit(run, _NO_SECRETS)),
    ),
    # The plot shows the metric, and `words` has its numbers.
    MetricWindow: Kind(
        _metric_words, _metric_differences, lambda *_: [], _in_its_run(_metric_again)
    ),
    FileRange: Kind(_file_words, _file_differences, _text_opened, _file_again),
    FlipResult: Kind(_flip_words, _flip_differences, _flip_opened, _flip_again),
    CommandRun: Kind(_command_words, _command_differences, _command_opened),
    Statement: Kind(lambda said: f"“{said.text}”", _statement_differences, _text_opened),
}
