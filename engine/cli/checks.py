"""Show what the first-minute checks are, or what they found in a run.

engine checks --list       every check: what it asks, what a failure means, what to do
engine checks RUN          the answers of a run's newest session, with what each cost
... --json                 the same as one JSON value

A check that was skipped, broke or has not answered is unknown, never passed. Exit code of a run: the
lowest answer, 0 pass, 1 fail, 2 unknown.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.terminal import put, put_json

if TYPE_CHECKING:
    from engine.checks.check import About
    from engine.log.events import Checked
    from engine.verdict import Verdict

HELP = "show the first-minute checks, or what they found in a run"
WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="a run folder")
    parser.add_argument("--list", action="store_true", help="list the checks there are")
    parser.add_argument("--json", action="store_true", help="print one JSON value")


def run(arguments: argparse.Namespace) -> int:
    from engine.errors import UsageError

    if arguments.list == (arguments.run is not None):
        raise UsageError("checks: expected either a run folder or --list")
    if arguments.list:
        return _list(arguments.json)
    return _show(arguments.run, arguments.json)


def _list(as_json: bool) -> int:
    from engine.checks.catalogue import CATALOGUE

    if as_json:
        put_json([dataclasses.asdict(a) | {"when": a.when.value} for a in CATALOGUE])
        return 0
    for about in CATALOGUE:
        stops = "; stops the run" if about.stops else ""
        again = " and again" if about.again else ""
        put(f"{about.id}  ({about.when.value.replace('_', ' ')}{again}{stops})")
        for text in (about.question, f"failed: {about.means}", f"do: {about.remedy}"):
            put(textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="    "))
    return 0


def _show(path: Path, as_json: bool) -> int:
    from engine.checks.catalogue import CATALOGUE
    from engine.log.folder import open_run
    from engine.log.follow import Follower
    from engine.units import format_seconds
    from engine.verdict import lowest

    follower = Follower(open_run(path))
    follower.read_all()
    found = follower.view.checks
    answers = [(about, found.get(about.id)) for about in CATALOGUE]
    verdicts = [_verdict(check) for _, check in answers]
    overall = lowest(verdicts)
    if as_json:
        rows = [
            _as_json(about, check, verdict)
            for (about, check), verdict in zip(answers, verdicts, strict=True)
        ]
        level = overall.level.name.lower()
        put_json({"run": str(path), "level": level, "checks": rows})
        return overall.exit_code
    width = max(len(about.id) for about in CATALOGUE)
    for (about, check), verdict in zip(answers, verdicts, strict=True):
        cost = format_seconds(check.cost_s) if check is not None else ""
        put(f"{verdict.level.name:7}  {about.id:{width}}  {cost:>8}  {verdict.reason}")
        if check is not None and check.level == "fail":
            for text in (about.means, f"do: {about.remedy}"):
                put(textwrap.fill(text, WIDTH, initial_indent=" " * 9, subsequent_indent=" " * 11))
    total = sum(check.cost_s or 0.0 for check in found.values())
    counts = {level: sum(v.level.name == level for v in verdicts) for level in ("PASS", "FAIL")}
    put(
        f"{counts['PASS']} passed, {counts['FAIL']} failed, "
        f"{len(verdicts) - sum(counts.values())} unknown, in {format_seconds(total)}"
    )
    return overall.exit_code


def _verdict(check: Checked | None) -> Verdict:
    from engine.log.text import one_line
    from engine.verdict import Level, Verdict

    if check is None:
        return Verdict(Level.UNKNOWN, "has not answered in this session")
    level = {"pass": Level.PASS, "fail": Level.FAIL}.get(check.level, Level.UNKNOWN)
    return Verdict(level, one_line(check.reason))


def _as_json(about: About, check: Checked | None, verdict: Verdict) -> dict[str, Any]:
    from engine.log.events import name_of_non_finite

    numbers = check.numbers if check is not None else {}
    return {
        "id": about.id,
        "level": verdict.level.name.lower(),
        "reason": verdict.reason,
        "numbers": {
            name: value if math.isfinite(value) else name_of_non_finite(value)
            for name, value in numbers.items()
        },
        "cost_s": check.cost_s if check is not None else None,
        "step": check.step if check is not None else None,
    }
