"""The first-minute checks of a run."""

from __future__ import annotations

import argparse
import contextlib
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.answers import put_json
from engine.cli.arguments import (
    add_flag,
    add_json,
    add_run,
)
from engine.errors import RunLogError, UsageError
from engine.terminal import put

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
            "check",
            [
                {key: getattr(check, key) for key in keys} | {"when": check.when.value}
                for check in CHECKS
            ],
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
    # Checks are in the log: settings that cannot be read must not hide their results.
    with contextlib.suppress(RunLogError):
        if read_command(run) is not None:
            return _identities(path, follower.view, as_json)
    view = follower.view
    own_checks = view.own_checks
    named: list[tuple[str, About | None]] = [(about.id, about) for about in CHECKS]
    # The results of checks of an earlier version still count.
    named += [(id, BY_ID["check"].get(now)) for id, now in RETIRED.items() if id in own_checks]
    answers: list[tuple[str, About | None, int, Judged | None, Verdict]] = []
    for id, about in named:
        results: list[tuple[int, Judged | None]] = [*view.failures(id)] or [(0, own_checks.get(id))]
        answers += [(id, about, rank, check, _verdict(check)) for rank, check in results]
    verdicts = [verdict for *_, verdict in answers]
    wrong = view.errors or view.ended_by_rank is not None
    overall = Verdict(Level.FAIL, "") if wrong else lowest(verdicts)
    if as_json:
        rows = [
            {
                "id": id,
                "level": verdict.level,
                "reason": verdict.reason,
                "numbers": {} if check is None else check.numbers,
                "cost_s": None if check is None else check.cost_s,
                "step": None if check is None else check.step,
                "rank": rank,
            }
            for id, about, rank, check, verdict in answers
        ]
        put_json(
            "checks",
            {
                "run": path,
                "level": overall.level,
                "audited_steps": view.audited_steps,
                "checks": rows,
                "errors": errors_json(view.errors),
                "ended_by_rank": None if view.ended_by_rank is None else view.ended_by_rank.reason,
            },
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
    total = sum(check.cost_s or 0.0 for check in own_checks.values())
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

    results = outcomes(view)
    levels = {identity.level for identity in view.identities}
    level = Level.PASS if levels & {PASS, SUSPICION} else Level.UNKNOWN
    if FAIL in levels or view.errors:
        level = Level.FAIL
    if as_json:
        rows = [
            {
                "id": outcome.id,
                "level": outcome.level,
                "text": outcome.text,
                "numbers": {} if outcome.seen is None else outcome.seen.numbers,
                "step": None if outcome.seen is None else outcome.seen.step,
                "means": outcome.means,
                "remedy": outcome.remedy,
            }
            for outcome in results
        ]
        errors = errors_json(view.errors)
        put_json("identities", {"run": path, "level": level, "identities": rows, "errors": errors})
    else:
        for line in identity_lines(view):
            indent = " " * (len(line) - len(line.lstrip()) + 2)
            put(textwrap.fill(line, WIDTH, subsequent_indent=indent))
        for line in error_lines(view.errors, path):
            put(textwrap.fill(line, WIDTH, subsequent_indent=" " * 4))
    return Verdict(level, "").exit_code


def errors_json(errors: Sequence[ErrorNote]) -> list[dict[str, Any]]:
    return [{"rank": rank, "unix_s": unix_s, "text": note.text} for rank, unix_s, note in errors]


def _verdict(check: Judged | None) -> Verdict:
    from engine.log.text import one_line
    from engine.verdict import Level, Verdict

    if check is None:
        return Verdict(Level.UNKNOWN, "has not answered in this session")
    level = {"pass": Level.PASS, "fail": Level.FAIL}.get(check.level, Level.UNKNOWN)
    return Verdict(level, one_line(check.text))
