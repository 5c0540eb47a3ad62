"""The alerts of the rules on a run or any log, on the logs of a folder, or on standard input."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.answers import answer, plain
from engine.cli.arguments import add_flag, add_json, add_path
from engine.cli.checks import errors_json
from engine.errors import EXIT_FAIL, EXIT_PASS, BadInput, RunLogError, UsageError
from engine.terminal import aligned

if TYPE_CHECKING:
    from engine.interchange.baseline import Change
    from engine.interchange.importing import JudgedLog
    from engine.interchange.kinds import Log
    from engine.log.view import RunView
    from engine.watch.replay import Diagnosis
    from engine.watch.verdict_line import RunVerdict

_NO_LOGS_LISTED = 20
"""Maximum number of files without values that are listed by name."""

HELP = "report what is wrong with a run or any log"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "a run folder, a log of another tool, a folder of them, or - for standard input"
    add_path(parser, "path", "PATH", what, nargs="?")
    add_flag(parser, "--all", "also the rules that found nothing or could not judge")
    add_flag(parser, "--series", "how each name and line of another tool's log was read")
    add_path(
        parser, "--baseline", "OLD", "a run or log that the curves and settings are compared with"
    )
    parser.add_argument(
        "--fail-on",
        choices=("wrong", "suspect"),
        help="for CI: exit code 1 for a verdict as bad as that or worse, or a failed check; with suspect, also for a "
        "change for the worse from the baseline; else 0",
    )
    add_json(parser)
    add_flag(parser, "--list", "list the rules")


def run(arguments: argparse.Namespace) -> int:
    """Diagnose a run, ours or any other, from its logs: alerts, checks that failed, errors, and how it ended.

    engine diagnose RUN           alerts, each with its numbers and the flip that would test it; failed checks; errors
    engine diagnose train.log     what a training has printed; or TensorBoard, W&B, MLflow, trainer_state.json, CSV,
                                  JSON lines, Parquet; nothing is written (`engine import` makes a run folder of it)
    engine diagnose DIR           every log in it, worst first, a line each; a single log in full
    python train.py 2>&1 | engine diagnose -
    engine diagnose PATH --series how each name and line was read
    engine diagnose NEW --baseline OLD     which curves, rates, times and settings differ beyond their noise
    engine diagnose PATH --fail-on suspect exit code 1 where something is suspected or wrong, else 0
    engine diagnose PATH --all    also the rules that saw nothing, and those that could not judge, with reasons
    engine diagnose PATH --json   one JSON value
    engine diagnose --list        every rule: its question, what it reads, when it raises an alert

    The first line is the verdict: what explains the others, since which step, and what to do.

    Exit codes: 0 healthy, 1 something is wrong, a check failed or the run did, 2 something is suspected or nothing
    could be judged, 65 a log cannot be read to its end.
    """
    if arguments.list == (arguments.path is not None):
        raise UsageError("expected either PATH or --list", hint="engine diagnose --help")
    if arguments.list:
        return _list_rules(arguments)
    from engine.interchange.kinds import find_logs
    from engine.log.folder import open_run

    if str(arguments.path) == "-":
        return _diagnose_one(_standard_input(), None, "-", arguments)
    if not os.path.lexists(arguments.path):
        open_run(arguments.path)  # which says what it expected there
    logs = find_logs(arguments.path)
    if len(logs) != 1:
        if arguments.baseline is not None:
            raise BadInput.expected("diagnose", arguments.path, "one log", f"{len(logs)}")
        return _diagnose_folder(logs, arguments)
    try:
        return _diagnose_one(_replayed(logs[0]), logs[0], logs[0].name, arguments)
    except BadInput as error:
        raise type(error)(error.message) from None  # the hint is about `engine import`


def _exit_code(
    code: int, level: str, fail_on: str | None, changes: list[Change] | None = None
) -> int:
    from engine.watch.verdict_line import SUSPECT

    if fail_on is None:
        return code
    is_suspect = level == SUSPECT or any(change.is_worse for change in changes or ())
    fails = code == EXIT_FAIL or (fail_on == "suspect" and is_suspect)
    return EXIT_FAIL if fails else EXIT_PASS


def _changes(
    view: RunView, settings: Mapping[str, object], baseline: Path | None
) -> list[Change] | None:
    """Compare a view and its settings with those of another run or log; None where none is named."""
    if baseline is None:
        return None
    from engine.interchange.baseline import compare, compare_settings
    from engine.interchange.kinds import find_logs
    from engine.log.folder import open_run, settings_of

    logs = find_logs(baseline) if os.path.lexists(baseline) else []
    if len(logs) != 1:
        raise BadInput.expected("--baseline", baseline, "one run or log", f"{len(logs)}")
    old_diagnosis, old_log = _judged(logs[0])
    old_settings = old_log.recorded.settings if old_log else settings_of(open_run(logs[0].path))
    return compare(view, old_diagnosis.view) + compare_settings(settings, old_settings)


def _changes_json(changes: list[Change] | None) -> dict[str, Any]:
    return {} if changes is None else {"compared": [change._asdict() for change in changes]}


def _change_lines(changes: list[Change] | None, baseline: Path | None) -> list[str]:
    from engine.log.text import one_line

    if changes is None:
        return []
    differ = [change for change in changes if change.why]
    rows: list[tuple[str, ...]] = [("differs", "new", "old", "")] if differ else []
    for name, new, old, why, is_worse in differ:
        shown = [f"{x:.4g}" if isinstance(x, float) else str(x or "none") for x in (new, old)]
        rows.append((name, *shown, f"{why}{', worse' if is_worse else ''}"))
    lines = [f"\ncompared with {baseline}", *(one_line(f"  {row}") for row in aligned(rows))]
    if same := [change.name for change in changes if not change.why]:
        lines.append(f"  the same within noise: {', '.join(same)}")
    if not changes:
        lines.append("  no curve, time or setting is in both")
    return lines


def _list_rules(arguments: argparse.Namespace) -> int:
    from engine.watch.rules import RULES

    rows = [
        {
            "id": rule.id,
            "asks": rule.about.question,
            "reads": rule.reads,
            "threshold": rule.threshold,
        }
        for rule in RULES
    ]
    lines = (
        f"{rule.id}: {rule.about.question}\n  fires at: {rule.threshold}\n"
        f"  reads: {', '.join(rule.reads)}"
        for rule in RULES
    )
    return answer(arguments, "rule", rows, lines)


def diagnosis_lines(
    diagnosis: Any, state: str, name: str, path: object, everything: bool
) -> list[str]:
    """Render a diagnosis, the verdict first."""
    from engine.log.text import ending_text, has_ended, one_line
    from engine.watch.verdict_line import run_verdict_lines

    head, *rest = _diagnosis_lines(name, diagnosis, everything=everything)
    exit_ = diagnosis.view.exit
    if has_ended(state) and state != "completed":
        ended = [f"ended: {state}: {one_line(ending_text(diagnosis.view, state))}"]
        if exit_ is not None and diagnosis.view.finished is not None:
            ended.append(f"exit: {exit_.state}: {one_line(exit_.sentence)}")
        rest = [*ended, *rest]
    return [*run_verdict_lines(diagnosis.judged_view, state, path), head, *rest]


def _diagnosis_lines(name: str, diagnosis: Any, *, everything: bool) -> list[str]:
    from engine.catalogue import BY_ID
    from engine.log.text import alert_lines, clock_text, error_lines, errors_text, one_line
    from engine.units import format_seconds

    count, judged = len(diagnosis.raised), len(diagnosis.judged)
    rules = judged + len(diagnosis.unjudged)
    head = (
        f"{name}: {count} alert{'' if count == 1 else 's'}; {judged} of {rules} rules could judge"
    )
    if diagnosis.failed:
        head += f"; {len(diagnosis.failed)} check{'' if len(diagnosis.failed) == 1 else 's'} failed"
    if diagnosis.errors:
        head += f"; {errors_text(len(diagnosis.errors))}"
    lines = [head]
    for _, check in diagnosis.failed:
        lines += ["", f"check {check.id}: {one_line(check.text)}", f"  at step {check.step}"]
        if (about := BY_ID["check"].get(check.id)) is not None:
            lines += [f"  {about.means}", f"  do: {about.remedy}"]
    if diagnosis.errors:
        lines += ["", *error_lines(diagnosis.errors, name)]
    for entry in diagnosis.raised:
        end = "active at the end of the log"
        if entry.cleared_unix_s is not None:
            end = f"over after {format_seconds(entry.cleared_unix_s - entry.unix_s)}"
        if not entry.replayed:
            end += "; raised while the run was active, but not when its logs were read again"
        head, *rest = alert_lines(entry.alert)
        lines += ["", head, f"  raised at {clock_text(entry.unix_s)}, {end}", *rest]
    if everything:
        spoke = {entry.alert.id for entry in diagnosis.raised}
        quiet = [id for id in diagnosis.judged if id not in spoke]
        lines += ["", "found nothing", *(f"  {id}" for id in quiet)]
        lines += ["", "could not judge"]
        lines += [one_line(f"  {id}: {reason}") for id, reason in diagnosis.unjudged.items()]
    return lines


def as_json(path: str, diagnosis: Any) -> dict[str, Any]:
    """Return a diagnosis as one JSON value."""
    envelope = ("v", "seq", "t_s", "nf")

    def event(logged: Any) -> dict[str, Any] | None:
        fields = {} if logged is None else plain(logged)
        return {n: v for n, v in fields.items() if n not in envelope} or None

    def alert(entry: Any) -> dict[str, Any]:
        times = {"raised_unix_s": entry.unix_s, "cleared_unix_s": entry.cleared_unix_s}
        return {**(event(entry.alert) or {}), **times, "replayed": entry.replayed}

    return {
        "run": path,
        "alerts": [alert(entry) for entry in diagnosis.raised],
        "checks": [{**(event(check) or {}), "rank": rank} for rank, check in diagnosis.failed],
        "errors": errors_json(diagnosis.errors),
        "finished": event(diagnosis.view.finished or diagnosis.view.ended_by_rank),
        "exit": event(diagnosis.view.exit),
        "judged": list(diagnosis.judged),
        "unjudged": diagnosis.unjudged,
        "fault": diagnosis.fault,
    }


def _standard_input() -> tuple[Diagnosis, JudgedLog]:
    from engine.interchange.importing import VALUES_MOST, diagnose_recorded
    from engine.interchange.sources import Recorded
    from engine.interchange.text_log import read_lines

    recorded = Recorded(path=Path("-"), most=VALUES_MOST)
    sys.stdin.reconfigure(errors="replace", newline="")  # type: ignore[union-attr]
    read_lines(recorded, sys.stdin)
    judged = diagnose_recorded(recorded, "text", {})
    return judged.found, judged


def _judged(log: Log) -> tuple[Diagnosis, JudgedLog | None]:
    """Judge a log. Raises BadInput where it cannot be read to its end."""
    diagnosis, judged = _replayed(log)
    if diagnosis.fault is not None:
        raise RunLogError(diagnosis.fault)
    return diagnosis, judged


def _replayed(log: Log) -> tuple[Diagnosis, JudgedLog | None]:
    from engine.interchange.importing import VALUES_MOST, diagnose_recorded
    from engine.interchange.sources import Recorded
    from engine.log.folder import open_run
    from engine.watch.replay import diagnose
    from engine.watch.rules.rule import read_settings

    if log.read is None:
        run = open_run(log.path)
        return diagnose(run, read_settings(run)), None
    recorded = Recorded(path=log.path, most=VALUES_MOST)
    log.read(recorded, {})
    judged = diagnose_recorded(recorded, log.source, {})
    return judged.found, judged


def _verdict(diagnosis: Diagnosis, log: Log | None, name: str) -> tuple[str, RunVerdict]:
    from engine.log.folder import open_run
    from engine.watch.verdict_line import verdict_of

    view = diagnosis.view
    if log is not None and log.read is None:
        state = view.state(open_run(log.path).liveness())
    else:
        assert view.finished is not None, "every log that is read has an end"
        state = view.finished.state
    return state, verdict_of(diagnosis.judged_view, state, name)


def _diagnose_one(
    judged: tuple[Diagnosis, JudgedLog | None],
    log: Log | None,
    name: str,
    arguments: argparse.Namespace,
) -> int:
    from engine.log.folder import open_run, settings_of

    diagnosis, judged_log = judged
    state, verdict = _verdict(diagnosis, log, name)
    settings = judged_log.recorded.settings if judged_log else settings_of(open_run(Path(name)))
    changes = _changes(diagnosis.view, settings, arguments.baseline)
    code = EXIT_FAIL if diagnosis.failed else verdict.exit_code
    code = _exit_code(code, verdict.level, arguments.fail_on, changes)
    notes = [note.text for note in judged_log.notes] if judged_log else []
    extra = {"verdict": verdict.as_dict(), **_changes_json(changes)}
    extra |= {"read": notes} if judged_log else {}
    short = name if judged_log else Path(name).name
    lines = diagnosis_lines(diagnosis, state, short, name, arguments.all)
    if arguments.series and judged_log is not None:
        lines.append("\nread")
        lines += [f"  {text}" for text in (*notes, *_series_lines(judged_log))]
    lines += _change_lines(changes, arguments.baseline)
    answer(arguments, "diagnosis", as_json(name, diagnosis) | extra, lines)
    if diagnosis.fault is not None:
        raise RunLogError(diagnosis.fault)
    return code


def _series_lines(read: JudgedLog) -> Iterable[str]:
    our_names = {tag: name for name, tag in read.names.items()}
    for name, series in read.recorded.series.items():
        if series.steps:
            as_ours = f", as {our_names[name]}" if name in our_names else ""
            last, steps = series.values[-1], f"steps {series.steps[0]:,} to {series.steps[-1]:,}"
            yield f"{name}{as_ours}: {series.seen:,} values, {steps}, last {last:.6g}"


def _diagnose_folder(logs: list[Log], arguments: argparse.Namespace) -> int:
    from engine.interchange.sources import NotALog
    from engine.log.text import one_line
    from engine.watch.verdict_line import ENDED, HEALTHY, SUSPECT, UNDECIDED, WRONG

    order = (WRONG, ENDED, SUSPECT, UNDECIDED, HEALTHY)
    rows: list[tuple[Log, RunVerdict]] = []
    unread: list[tuple[Log, str]] = []
    not_logs: list[Log] = []
    for log in logs:
        try:
            rows.append((log, _verdict(_judged(log)[0], log, log.name)[1]))
        except NotALog:
            not_logs.append(log)
        except BadInput as error:
            unread.append((log, one_line(error.message)))
    rows.sort(key=lambda row: order.index(row[1].level))
    if not rows and not unread:
        expected = "a log with the values of a run"
        problem = f"{len(not_logs)} files that have none" if not_logs else "none"
        raise BadInput.expected("diagnose", arguments.path, expected, problem)
    lines = aligned([(log.name, verdict.signed()) for log, verdict in rows])
    counts = [f"{len(rows)} logs judged"]
    counts += [f"{len(unread)} could not be read"] * bool(unread)
    counts += [f"{len(not_logs)} files have no values of a run"] * bool(not_logs)
    lines += ["; ".join(counts), *(f"  not read: {why}" for _, why in unread)]
    if arguments.series:
        lines += [f"  no values: {log.name}" for log in not_logs[:_NO_LOGS_LISTED]]
    value = {
        "logs": [{"path": log.name, "kind": log.source, "verdict": v.as_dict()} for log, v in rows],
        "not_read": [{"path": log.name, "why": why} for log, why in unread],
        "no_values": [log.name for log in not_logs],
    }
    answer(arguments, "diagnoses", value, lines)
    codes = {_exit_code(v.exit_code, v.level, arguments.fail_on) for _, v in rows}
    if EXIT_FAIL in codes:
        return EXIT_FAIL
    return BadInput.exit_code if unread else max(codes, default=EXIT_PASS)
