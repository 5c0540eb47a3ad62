"""The first-minute checks of a run."""

from __future__ import annotations

import argparse
import contextlib
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.answers import answer
from engine.cli.arguments import (
    add_flag,
    add_json,
    add_run,
)
from engine.errors import RunLogError, UsageError

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
    lowest answer, 0 pass, 1 fail, an error or a rank that ended the run, 2 unknown. Of a script that is watched: 1
    with a contradiction or an error, 0 without one, 2 where no identity could be judged.
    """
    if arguments.list == (arguments.run is not None):
        raise UsageError("checks: expected either a run folder or --list")
    return _list_checks(arguments) if arguments.list else _answers(arguments)


def _list_checks(arguments: argparse.Namespace) -> int:
    from engine.catalogue import CHECKS

    keys = ("id", "question", "means", "remedy", "stops")
    rows, lines = [], []
    for about in CHECKS:
        rows.append({key: getattr(about, key) for key in keys} | {"when": about.when.value})
        stops = "; stops the run" if about.stops else ""
        lines.append(f"{about.id}  ({about.when.value.replace('_', ' ')}{stops})")
        lines += _filled(2, about.question, f"failed: {about.means}", f"do: {about.remedy}")
    return answer(arguments, "check", rows, lines)


def _filled(indent: int, *texts: str) -> list[str]:
    """Wrap texts at the width of the page, each indented, and its further lines a little more."""
    first, further = " " * indent, " " * (indent + 2)
    return [
        textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=further)
        for text in texts
    ]


def _answers(arguments: argparse.Namespace) -> int:
    from engine.catalogue import BY_ID, CHECKS, RETIRED
    from engine.log.fold import Follower
    from engine.log.folder import open_run, read_command
    from engine.log.text import audit_text, error_lines, errors_text, one_line
    from engine.units import format_seconds
    from engine.verdict import Level, Verdict, lowest

    path: Path = arguments.run
    run = open_run(path)
    follower = Follower(run)
    follower.read_all()
    # Checks are in the log: settings that cannot be read must not hide their results.
    with contextlib.suppress(RunLogError):
        if read_command(run) is not None:
            return _identities(arguments, follower.view)
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
    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    width = max(len(id) for id, *_ in answers)
    for id, about, rank, check, verdict in answers:
        rows.append(
            {
                "id": id,
                "level": verdict.level,
                "reason": verdict.reason,
                "numbers": {} if check is None else check.numbers,
                "cost_s": None if check is None else check.cost_s,
                "step": None if check is None else check.step,
                "rank": rank,
            }
        )
        cost = format_seconds(check.cost_s) if check is not None else ""
        now = "" if about is None or id == about.id else f" (now {about.id})"
        lines.append(f"{verdict.level.name:7}  {id:{width}}  {cost:>8}  {verdict.reason}{now}")
        if check is not None and check.level == "fail" and about is not None:
            lines += _filled(9, about.means, f"do: {about.remedy}")
    lines += _filled(0, *error_lines(view.errors, path))
    if view.ended_by_rank is not None:
        lines += _filled(0, f"ended: {one_line(view.ended_by_rank.reason)}")
    total = sum(check.cost_s or 0.0 for check in own_checks.values())
    counts = {level: sum(v.level.name == level for v in verdicts) for level in ("PASS", "FAIL")}
    errors = errors_text(len(view.errors))
    lines.append(
        f"{counts['PASS']} passed, {counts['FAIL']} failed, "
        f"{len(verdicts) - sum(counts.values())} unknown, in {format_seconds(total)}"
        f"{errors and ', '}{errors}"
    )
    if audited := audit_text(view):
        lines.append(audited)
    value = {
        "run": path,
        "level": overall.level,
        "audited_steps": view.audited_steps,
        "checks": rows,
        "errors": errors_json(view.errors),
        "ended_by_rank": view.ended_by_rank and view.ended_by_rank.reason,
    }
    return answer(arguments, "checks", value, lines, overall.exit_code)


def _identities(arguments: argparse.Namespace, view: RunView) -> int:
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
    lines: list[str] = []
    for line in identity_lines(view):
        text = line.lstrip()
        lines += _filled(len(line) - len(text), text)
    lines += _filled(0, *error_lines(view.errors, arguments.run))
    value = {"run": arguments.run, "level": level, "identities": rows}
    value |= {"errors": errors_json(view.errors)}
    return answer(arguments, "identities", value, lines, Verdict(level, "").exit_code)


def errors_json(errors: Sequence[ErrorNote]) -> list[dict[str, Any]]:
    return [{"rank": rank, "unix_s": unix_s, "text": note.text} for rank, unix_s, note in errors]


def _verdict(check: Judged | None) -> Verdict:
    from engine.log.text import one_line
    from engine.verdict import Level, Verdict

    if check is None:
        return Verdict(Level.UNKNOWN, "has no result in this session")
    level = {"pass": Level.PASS, "fail": Level.FAIL}.get(check.level, Level.UNKNOWN)
    return Verdict(level, one_line(check.text))
