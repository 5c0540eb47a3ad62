"""The findings on a run: the first-minute checks, and the alerts of the rules."""

from __future__ import annotations

import argparse
import contextlib
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.arguments import (
    add_flag,
    add_json,
    add_run,
)
from engine.cli.runs import plain
from engine.errors import EXIT_FAIL, EXIT_PASS, RunLogError, UsageError
from engine.terminal import put, put_json

if TYPE_CHECKING:
    from engine.catalogue import About
    from engine.log.events import Judged
    from engine.log.view import ErrorNote, RunView
    from engine.verdict import Verdict

WIDTH = 100


def add_checks_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, or_nothing=True)
    add_flag(parser, "--list", "list the checks")
    add_json(parser)


def checks(arguments: argparse.Namespace) -> int:
    """List the first-minute checks, or show what they found in a run; of a script that is watched, the identities
    that hold in any training.

    engine checks --list       every check: its question, what a failure means, what to do
    engine checks RUN          the results of a run's newest session, with their cost
    ... --json                 the same as one JSON value

    A check that fails on any rank has failed, and the rank is named; what the run or a rank noted as an error is shown
    below. A check that was skipped, broke or has no result yet is unknown, never passed. Exit code of a run: the
    lowest answer, 0 pass, 1 fail or an error, 2 unknown. Of a script that is watched: 1 with a contradiction or an
    error, 0 without one, 2 where no identity could be judged.
    """
    if arguments.list == (arguments.run is not None):
        raise UsageError("checks: expected either a run folder or --list")
    return (
        _list_checks(arguments.json) if arguments.list else _answers(arguments.run, arguments.json)
    )


def _list_checks(as_json: bool) -> int:
    from engine.catalogue import CHECKS

    if as_json:
        keys = ("id", "question", "means", "remedy", "stops")
        put_json(
            [{key: getattr(one, key) for key in keys} | {"when": one.when.value} for one in CHECKS]
        )
        return 0
    for about in CHECKS:
        stops = "; stops the run" if about.stops else ""
        put(f"{about.id}  ({about.when.value.replace('_', ' ')}{stops})")
        for text in (about.question, f"failed: {about.means}", f"do: {about.remedy}"):
            put(textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="    "))
    return 0


def _answers(path: Path, as_json: bool) -> int:
    from engine.catalogue import BY_ID, CHECKS, RETIRED
    from engine.log.folder import open_run, read_command
    from engine.log.follow import Follower
    from engine.log.text import audit_text, error_lines, errors_text, one_line
    from engine.units import format_seconds
    from engine.verdict import Level, Verdict, lowest

    run = open_run(path)
    follower = Follower(run)
    follower.read_all()
    # Checks are in the log: settings that cannot be read do not keep anybody from their results.
    with contextlib.suppress(RunLogError):
        if read_command(run) is not None:
            return _identities(path, follower.view, as_json)
    view = follower.view
    found = view.own_checks
    named: list[tuple[str, About | None]] = [(about.id, about) for about in CHECKS]
    # What an earlier version asked, its answers still count.
    named += [(id, BY_ID["check"].get(now)) for id, now in RETIRED.items() if id in found]
    answers: list[tuple[str, About | None, int, Judged | None, Verdict]] = []
    for id, about in named:
        seen: list[tuple[int, Judged | None]] = [*view.failures(id)] or [(0, found.get(id))]
        answers += [(id, about, rank, check, _verdict(check)) for rank, check in seen]
    verdicts = [verdict for *_, verdict in answers]
    wrong = view.errors or view.ended_by_rank is not None
    overall = Verdict(Level.FAIL, "") if wrong else lowest(verdicts)
    if as_json:
        rows = [
            {
                "id": id,
                "level": verdict.level.name.lower(),
                "reason": verdict.reason,
                "numbers": {} if check is None else plain(check.numbers),
                "cost_s": None if check is None else check.cost_s,
                "step": None if check is None else check.step,
                "rank": rank,
            }
            for id, about, rank, check, verdict in answers
        ]
        put_json(
            {
                "run": str(path),
                "level": overall.level.name.lower(),
                "audited_steps": list(view.audited_steps),
                "checks": rows,
                "errors": _errors_json(view.errors),
                "ended_by_rank": None if view.ended_by_rank is None else view.ended_by_rank.reason,
            }
        )
        return overall.exit_code
    width = max(len(id) for id, *_ in answers)
    for id, about, _, check, verdict in answers:
        cost = format_seconds(check.cost_s) if check is not None else ""
        now = "" if about is None or id == about.id else f" (now {about.id})"
        put(f"{verdict.level.name:7}  {id:{width}}  {cost:>8}  {verdict.reason}{now}")
        if check is not None and check.level == "fail" and about is not None:
            for text in (about.means, f"do: {about.remedy}"):
                put(textwrap.fill(text, WIDTH, initial_indent=" " * 9, subsequent_indent=" " * 11))
    for line in error_lines(view.errors, path):
        put(textwrap.fill(line, WIDTH, subsequent_indent=" " * 4))
    if view.ended_by_rank is not None:
        put(textwrap.fill(f"ended: {one_line(view.ended_by_rank.reason)}", WIDTH))
    total = sum(check.cost_s or 0.0 for check in found.values())
    counts = {level: sum(v.level.name == level for v in verdicts) for level in ("PASS", "FAIL")}
    errors = errors_text(len(view.errors))
    put(
        f"{counts['PASS']} passed, {counts['FAIL']} failed, "
        f"{len(verdicts) - sum(counts.values())} unknown, in {format_seconds(total)}"
        f"{errors and ', '}{errors}"
    )
    if audited := audit_text(view):
        put(audited)
    return overall.exit_code


def _identities(path: Path, view: RunView, as_json: bool) -> int:
    from engine.log.events import FAIL, PASS, SUSPICION
    from engine.log.identities import (
        identity_lines,
        outcomes,
    )
    from engine.log.text import error_lines
    from engine.verdict import Level, Verdict

    found = outcomes(view)
    levels = {one.level for one in view.identities}
    level = Level.PASS if levels & {PASS, SUSPICION} else Level.UNKNOWN
    if FAIL in levels or view.errors:
        level = Level.FAIL
    if as_json:
        rows = [
            {
                "id": one.id,
                "level": one.level,
                "text": one.text,
                "numbers": {} if one.seen is None else plain(one.seen.numbers),
                "step": None if one.seen is None else one.seen.step,
                "means": one.means,
                "remedy": one.remedy,
            }
            for one in found
        ]
        errors = _errors_json(view.errors)
        level_name = level.name.lower()
        put_json({"run": str(path), "level": level_name, "identities": rows, "errors": errors})
    else:
        for line in identity_lines(view):
            indent = " " * (len(line) - len(line.lstrip()) + 2)
            put(textwrap.fill(line, WIDTH, subsequent_indent=indent))
        for line in error_lines(view.errors, path):
            put(textwrap.fill(line, WIDTH, subsequent_indent=" " * 4))
    return Verdict(level, "").exit_code


def _errors_json(errors: Sequence[ErrorNote]) -> list[dict[str, Any]]:
    return [{"rank": rank, "unix_s": unix_s, "text": note.text} for rank, unix_s, note in errors]


def _verdict(check: Judged | None) -> Verdict:
    from engine.log.text import one_line
    from engine.verdict import Level, Verdict

    if check is None:
        return Verdict(Level.UNKNOWN, "has not answered in this session")
    level = {"pass": Level.PASS, "fail": Level.FAIL}.get(check.level, Level.UNKNOWN)
    return Verdict(level, one_line(check.text))


def add_diagnose_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, or_nothing=True)
    add_flag(parser, "--all", "also the rules that found nothing")
    add_json(parser)
    add_flag(parser, "--list", "list the rules")


def diagnose(arguments: argparse.Namespace) -> int:
    """Diagnose a run from its logs: the alerts that the supervisor would have raised while it went on, those that it
    did raise, the checks that failed on any rank, the errors that were noted, and how the run ended.

    engine diagnose RUN           alerts, each with its numbers and the flip that would test it; failed checks; errors
    engine diagnose RUN --all     also the rules that saw nothing, and those that could not judge, with reasons
    engine diagnose RUN --json    one JSON value
    engine diagnose --list        every rule: its question, what it reads, when it raises an alert

    The first line is the verdict: what explains the others, since which step, and what to do.

    Exit codes: 0 healthy, 1 something is wrong, a check failed or the run did, 2 something is suspected or nothing
    could be judged.
    """
    if arguments.list == (arguments.run is not None):
        raise UsageError("expected either RUN or --list", hint="engine diagnose --help")
    if arguments.list:
        _list_rules(as_json=arguments.json)
        return EXIT_PASS
    from engine.errors import RunLogError
    from engine.log.folder import open_run
    from engine.log.text import ending_text, has_ended, one_line
    from engine.watch.replay import diagnose as replay
    from engine.watch.rules.rule import read_settings
    from engine.watch.verdict_line import run_verdict_lines, verdict_of

    folder = open_run(arguments.run)
    found = replay(folder, read_settings(folder), beside=True)
    state = found.view.state(folder.liveness())
    verdict = verdict_of(found.judged_view, state, folder.path)
    if arguments.json:
        put_json(as_json(str(folder.path), found) | {"verdict": plain(verdict.as_dict())})
    else:
        head, *rest = _diagnosis_lines(folder.name, found, everything=arguments.all)
        exit_ = found.view.exit
        if has_ended(state) and state != "completed":
            ended = [f"ended: {state}: {one_line(ending_text(found.view, state))}"]
            if exit_ is not None and found.view.finished is not None:
                ended.append(f"exit: {exit_.state}: {one_line(exit_.sentence)}")
            rest = [*ended, *rest]
        for line in [*run_verdict_lines(found.judged_view, state, folder.path), head, *rest]:
            put(line)
    if found.fault is not None:
        raise RunLogError(found.fault)
    return EXIT_FAIL if found.failed else verdict.exit_code


def _list_rules(*, as_json: bool) -> None:
    from engine.watch.rules import RULES

    if as_json:
        rows = [
            {
                "id": rule.id,
                "asks": rule.about.question,
                "reads": rule.reads,
                "threshold": rule.threshold,
            }
            for rule in RULES
        ]
        put_json(rows)
        return
    for rule in RULES:
        put(f"{rule.id}: {rule.about.question}")
        put(f"  fires at: {rule.threshold}")
        put(f"  reads: {', '.join(rule.reads)}")


def _diagnosis_lines(name: str, found: Any, *, everything: bool) -> list[str]:
    from engine.catalogue import BY_ID
    from engine.log.text import alert_lines, clock_text, error_lines, errors_text, one_line
    from engine.units import format_seconds

    count, judged = len(found.raised), len(found.judged)
    rules = judged + len(found.unjudged)
    head = (
        f"{name}: {count} alert{'' if count == 1 else 's'}; {judged} of {rules} rules could judge"
    )
    if found.failed:
        head += f"; {len(found.failed)} check{'' if len(found.failed) == 1 else 's'} failed"
    if found.errors:
        head += f"; {errors_text(len(found.errors))}"
    lines = [head]
    for _, check in found.failed:
        lines += ["", f"check {check.id}: {one_line(check.text)}", f"  at step {check.step}"]
        if (about := BY_ID["check"].get(check.id)) is not None:
            lines += [f"  {about.means}", f"  do: {about.remedy}"]
    if found.errors:
        lines += ["", *error_lines(found.errors, name)]
    for entry in found.raised:
        end = "active at the end of the log"
        if entry.cleared_unix_s is not None:
            end = f"over after {format_seconds(entry.cleared_unix_s - entry.unix_s)}"
        if not entry.replayed:
            end += "; said while the run went on, and not found again in its logs"
        head, *rest = alert_lines(entry.alert)
        lines += ["", head, f"  raised at {clock_text(entry.unix_s)}, {end}", *rest]
    if everything:
        spoke = {entry.alert.id for entry in found.raised}
        quiet = [id for id in found.judged if id not in spoke]
        lines += ["", "found nothing", *(f"  {id}" for id in quiet)]
        lines += ["", "could not judge"]
        lines += [one_line(f"  {id}: {reason}") for id, reason in found.unjudged.items()]
    return lines


def as_json(path: str, found: Any) -> dict[str, Any]:
    """Return a diagnosis as one JSON value."""
    envelope = ("v", "seq", "t_s", "nf")

    def event(found: Any) -> dict[str, Any] | None:
        fields = {} if found is None else plain(found)
        return {n: v for n, v in fields.items() if n not in envelope} or None

    def alert(entry: Any) -> dict[str, Any]:
        times = {"raised_unix_s": entry.unix_s, "cleared_unix_s": entry.cleared_unix_s}
        return {**(event(entry.alert) or {}), **times, "replayed": entry.replayed}

    return {
        "run": path,
        "alerts": [alert(entry) for entry in found.raised],
        "checks": [{**(event(check) or {}), "rank": rank} for rank, check in found.failed],
        "errors": _errors_json(found.errors),
        "finished": event(found.view.finished or found.view.ended_by_rank),
        "exit": event(found.view.exit),
        "judged": list(found.judged),
        "unjudged": found.unjudged,
        "fault": found.fault,
    }
