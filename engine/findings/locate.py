"""Whether a locator still says what it said: of the artifact in the bundle, and of what it was taken from.

The artifact must say it: everything in a locator is read from the artifact's bytes again. Where the run
or the flip it came from is still in its place, that must say it too: logs only grow, so a difference is
a change. A file of a project may go on changing, which is a note and no fault; so is a source that is
gone.

A metric is computed again with the arithmetic of this version, a flip's effect from its pairs.
"""

from __future__ import annotations

import hashlib
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from engine.errors import BadInput, EngineError
from engine.files import parse_json
from engine.findings import capture, logs
from engine.findings.command import as_expected, begun_of
from engine.findings.finding import (
    CommandRun,
    EventRange,
    Evidence,
    ExitRecord,
    FileRange,
    Finding,
    FlipResult,
    MetricWindow,
    Statement,
)
from engine.findings.flips import capture_flip, fields_of, is_flip
from engine.findings.redact import Redactor
from engine.findings.rules import Problem
from engine.findings.support import arm_logs, names_a_run, unix_s
from engine.flips.judge import Pair, interval_of
from engine.flips.outcome import metrics_of
from engine.flips.plan import Plan, read_plan
from engine.flips.record import read_pairs
from engine.log.events import TrainerExited
from engine.log.folder import RunFolder, is_run
from engine.log.follow import Follower

OF_STEPS = frozenset({"step_s", "tokens_per_s", "final_loss"})
"""Metrics that the log of an arm alone gives again."""

Read = Callable[[str], bytes | None]
"""The bytes of an artifact by its hash; None for one that was not copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What checking one piece of evidence gave."""

    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def check_locator(finding: Finding, evidence: Evidence, read: Read) -> tuple[str, ...]:
    """What a locator says that its artifact does not."""
    data = read(evidence.artifact)
    if data is None:
        return ()  # known by hash and size alone
    try:
        return tuple(_differences(finding, evidence, data, read))
    except (EngineError, ValueError, KeyError, TypeError) as error:
        return (f"it cannot be read as it was: {error}",)


def _differences(finding: Finding, evidence: Evidence, data: bytes, read: Read) -> Iterator[str]:
    locator = evidence.locator
    match locator:
        case EventRange():
            seqs = [line.event.seq for line in _lines(data)]
            if seqs != list(range(locator.first_seq, locator.last_seq + 1)):
                yield f"expected lines {locator.first_seq} to {locator.last_seq}, found {seqs[:3]}..."
            if capture.quotes_of(data) != locator.quotes:
                yield "the lines do not begin as they are quoted"
        case ExitRecord():
            (line,) = _lines(data)
            event = line.event
            if not isinstance(event, TrainerExited):
                yield f"expected the record of an exit, found {type(event).__name__}"
                return
            yield from _unequal(
                locator,
                {
                    "seq": event.seq,
                    "state": event.state.upper(),
                    "certainty": event.certainty,
                    "cause": event.cause,
                    "sentence": event.sentence,
                },
            )
        case MetricWindow():
            points = logs.points_of(_lines(data), logs.metric(locator.metric))
            numbers = logs.numbers_of(points)
            if numbers is None:
                yield f"no line has {locator.metric}"
                return
            yield from _unequal(
                locator, {name: getattr(numbers, name) for name in numbers.__slots__}
            )
        case FileRange():
            if locator.first_line:
                count = locator.last_line - locator.first_line + 1
                if len(data.splitlines()) != count:
                    yield f"expected {count} lines, found {len(data.splitlines())}"
            elif evidence.artifact != locator.file_sha256:
                yield "the file is not the artifact"
        case FlipResult():
            yield from _flip_differences(finding, evidence, locator, data, read)
        case CommandRun():
            yield from _command_differences(finding, evidence, locator, data, read)
        case Statement():
            if data.decode().rstrip("\n") != locator.text:
                yield "the statement is another"


def _lines(data: bytes) -> list[logs.Line]:
    return list(logs.read_lines(data.splitlines(keepends=True), "artifact"))


def _unequal(locator: Any, found: dict[str, Any]) -> Iterator[str]:
    for name, value in found.items():
        if getattr(locator, name) != value:
            yield f"{name}: expected {getattr(locator, name)!r}, found {value!r}"


def _flip_differences(
    finding: Finding, evidence: Evidence, locator: FlipResult, data: bytes, read: Read
) -> Iterator[str]:
    verdict = parse_json(data, "artifact", "verdict")
    yield from _unequal(locator, fields_of(verdict, "artifact"))
    plan_raw, pairs_raw = read(locator.plan), read(locator.pairs)
    if plan_raw is None or pairs_raw is None or finding.artifact(locator.plan).redacted:
        return
    plan = read_plan(plan_raw.decode())
    if plan.sha256 != locator.plan_sha256:
        yield f"plan: expected {locator.plan_sha256[:12]}, found {plan.sha256[:12]}"
    if locator.grade != "exploratory" and verdict["prereg_sha"] != plan.sha256:
        yield "the verdict is of another plan"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pairs.jsonl").write_bytes(pairs_raw)
        measured = read_pairs(Path(folder))
    interval = interval_of(plan, measured)
    yield from _arm_differences(finding, evidence, plan, measured, read)
    pairs = 0 if interval is None else interval.pairs
    if pairs != locator.n_pairs:
        yield f"expected {locator.n_pairs} complete pairs, found {pairs}"
    effect = None if interval is None else interval.ratio
    if (effect is None) != (locator.effect is None) or (
        effect is not None
        and locator.effect is not None
        and not math.isclose(effect, locator.effect, rel_tol=1e-9)
    ):
        yield f"effect: expected {locator.effect} from the pairs, found {effect}"


def _arm_differences(
    finding: Finding, evidence: Evidence, plan: Plan, measured: Sequence[Pair], read: Read
) -> Iterator[str]:
    """Pairs that do not say what the logs of their arms say; a log that was not copied is taken as it is."""
    said = {arm.run: arm for pair in measured for arm in (pair.a, pair.b)}
    for run, sha in arm_logs(finding, evidence):
        raw = read(sha)
        if raw is None or finding.artifact(sha).redacted:
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


def _close(one: float, other: float | None) -> bool:
    return other is not None and math.isclose(one, other, rel_tol=1e-9)


def tested_problems(finding: Finding, read: Read) -> Iterator[Problem]:
    """Alternatives that were excluded by another run than the one whose start their test names: its
    settings, which were captured with it, say which spec it was started with."""
    for node in finding.nodes:
        for alternative in node.alternatives:
            answer, wanted = alternative.answer, names_a_run(alternative.test)
            if answer is None or answer.outcome != "excluded" or not wanted:
                continue
            if node.withdrawn is not UNSET or alternative.withdrawn is not UNSET:
                continue
            evidence = next(e for e in node.evidence if e.id == answer.evidence)
            if not isinstance(evidence.locator, EventRange | ExitRecord | MetricWindow):
                continue
            if why := _another_run(finding, evidence, wanted, alternative.test, read):
                text = f"{alternative.id} is not excluded by the test it names: {evidence.id} {why}"
                yield Problem(rule="E-WHY-004", level="open", node=node.id, text=text)


def _another_run(finding: Finding, evidence: Evidence, spec: str, test: str, read: Read) -> str:
    """Why the run of evidence was not started with `spec` and the settings of the test; empty where it
    was."""
    names = {a.sha256: a.name for a in finding.artifacts}
    kept = [sha for sha in evidence.attached if names.get(sha) == "effective.json"]
    raw = read(kept[0]) if kept else None
    try:
        effective = parse_json(raw or b"", "effective.json", "settings")
        file, sets, tree = effective["spec_file"], effective["sets"], effective["spec"]
        if Path(str(file)).name != Path(spec).name:
            return f"is of a run of {Path(str(file)).name}, the test names {spec}"
        for key, value in re.findall(r"--set[ =](\S+?)=(\S+)", test):
            section, _, name = key.partition(".")
            if f"{key}={value}" not in sets and str(tree[section].get(name)) != value:
                return f"is of a run without {key}={value}"
    except (BadInput, KeyError, TypeError, AttributeError):
        return "is of a run of which it is not recorded how it was started"
    return ""


def _command_differences(
    finding: Finding, evidence: Evidence, locator: CommandRun, data: bytes, read: Read
) -> Iterator[str]:
    record = parse_json(data, "artifact", "command")
    hashes = {name: record[name]["sha256"] for name in ("stdout", "stderr")}
    yield from _unequal(
        locator,
        {
            "argv": tuple(record["argv"]),
            "exit_status": record["exit_status"],
            "stdout_sha256": hashes["stdout"],
            "stderr_sha256": hashes["stderr"],
            "expect_exit": record["expect_exit"],
            "expect_text": record["expect_text"],
        },
    )
    started = locator.started
    if started is not UNSET and not finding.artifact(started.log).redacted:
        first = (read(started.log) or b"").partition(b"\n")[0] + b"\n"
        if hashlib.sha256(first).hexdigest()[:16] != started.run_id:
            yield "the log that it left is of another run"
        elif begun_of(first) != started.begun_unix_s:
            yield "the log that it left begins at another time"
        if started.begun_unix_s < unix_s(record["started"]):
            yield "the run began before the command that is to have started it"
    attached = [read(sha) for sha in hashes.values() if sha in evidence.attached]
    if None not in attached:
        texts = [text.decode("utf-8", "replace") for text in attached if text is not None]
        shown = as_expected(locator.exit_status, texts, locator.expect_exit, locator.expect_text)
        yield from _unequal(locator, {"as_expected": shown})


def check_source(finding: Finding, evidence: Evidence, folder: Path) -> Said:
    """Compare evidence with what it was taken from; `folder` is the bundle's."""
    if not evidence.source:
        return Said()
    path = folder / evidence.source
    what = f"{evidence.id}: {evidence.source}"
    if finding.artifact(evidence.artifact).redacted or "[redacted" in evidence.source:
        return Said(notes=(f"{what}: not compared, secrets were taken out",))
    if not path.exists():
        return Said(notes=(f"{what}: is not here, not compared",))
    try:
        again = _capture_again(evidence, path)
    except (EngineError, OSError) as error:
        return Said(faults=(f"{evidence.source}: cannot be read any more: {error}",))
    if again is not None and again.blob.artifact.redacted:
        return Said(notes=(f"{what}: not compared, secrets are taken out of it by now",))
    if again is None:
        return Said(notes=(f"{what}: something else lies there now, not compared",))
    if again.blob.artifact.sha256 == evidence.artifact and again.locator == evidence.locator:
        return Said()
    if isinstance(evidence.locator, FileRange):
        return Said(notes=(f"{what}: the file was changed since",))
    return Said(faults=(f"{evidence.source}: does not say any more what was taken from it",))


def _capture_again(evidence: Evidence, path: Path) -> capture.Capture | None:
    redactor, locator = Redactor({}), evidence.locator
    if isinstance(locator, FileRange):
        again = capture.capture_file(path, redactor, locator.first_line, locator.last_line)
        same = msgspec.structs.replace(again.locator, path=locator.path)
        return capture.Capture(locator=same, blob=again.blob)
    if isinstance(locator, FlipResult):
        return capture_flip(path, redactor) if is_flip(path) else None
    if not isinstance(locator, EventRange | ExitRecord | MetricWindow) or not is_run(path):
        return None
    run = RunFolder(path)
    if logs.run_id(run) != locator.run_id:
        return None
    if isinstance(locator, EventRange):
        return capture.capture_events(
            run, locator.log, locator.first_seq, locator.last_seq, redactor
        )
    if isinstance(locator, MetricWindow):
        return capture.capture_metric(
            run,
            locator.metric,
            redactor,
            from_unix_s=locator.from_unix_s,
            to_unix_s=locator.to_unix_s,
            first_step=locator.first_step,
            last_step=locator.last_step,
        )
    return capture.capture_exit(run, redactor)
