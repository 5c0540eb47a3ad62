"""Check contracts, run what they promise, and show what each has reached.

    engine contracts validate [FILES]    is each file sound? every problem at once, with line and column
    engine contracts run [IDS]           run tests and proofs, then plant each bug and see it caught
    engine contracts status              the level each has reached, from its receipts alone
    engine contracts list                each with its equations, last result and age
    engine contracts show ID             all of one

Exit codes of validate: 0 no errors (warnings are allowed), 1 errors. Of run and status: 0 all pass, 1
one fails, 2 something is unknown: skipped, stale, not run, or its tool is not here.
"""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import limits
from engine.cli.numbers import whole
from engine.terminal import put, put_json, say

if TYPE_CHECKING:
    from engine.contracts.problems import Problem
    from engine.contracts.status import Status

HELP = "check contracts, run them, show what each has reached"
WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    text = "is each file sound? every problem at once"
    validate = actions.add_parser("validate", help=text, description=text)
    validate.add_argument(
        "files", type=Path, nargs="*", metavar="FILES", help="files or folders (contracts/)"
    )
    validate.add_argument("--format", choices=("text", "json", "sarif"), default="text")
    validate.add_argument(
        "--rules",
        choices=("all", "pv"),
        default="all",
        help="pv: only the rules that upstream's `pv validate` has",
    )
    text = "run tests, proofs and planted bugs, and keep receipts"
    run_ = actions.add_parser("run", help=text, description=text)
    run_.add_argument("ids", nargs="*", metavar="IDS", help="contracts (all)")
    run_.add_argument(
        "--jobs", type=whole(limits.JOBS.most), default=1, metavar="N", help="contracts at once (1)"
    )
    text = "the level each contract has reached, from its receipts alone"
    status = actions.add_parser("status", help=text, description=text)
    text = "every contract with its equations, last result and age"
    listed = actions.add_parser("list", help=text, description=text)
    text = "everything of one contract"
    show = actions.add_parser("show", help=text, description=text)
    show.add_argument("id", metavar="ID")
    for parser_ in (run_, status, listed, show):
        parser_.add_argument("--json", action="store_true", help="print one JSON value")
        parser_.add_argument(
            "--receipts",
            type=Path,
            default=Path("evidence/contracts"),
            metavar="DIR",
            help="(evidence/contracts)",
        )


def run(arguments: argparse.Namespace) -> int:
    actions = {
        "validate": _validate,
        "run": _run,
        "status": _status,
        "list": _list,
        "show": _show,
    }
    return actions[arguments.action](arguments)


def _validate(a: argparse.Namespace) -> int:
    from engine.contracts.catalogue import UPSTREAM_IDS
    from engine.contracts.problems import ERROR, counted
    from engine.contracts.resolve import checked_contracts
    from engine.contracts.sarif import to_sarif

    loaded = checked_contracts(a.files, Path())
    problems = sorted(problem for one in loaded for problem in one.problems)
    if a.rules == "pv":
        problems = [p for p in problems if p.rule in UPSTREAM_IDS]
    if a.format == "sarif":
        put_json(to_sarif(problems), ensure_ascii=False)
    elif a.format == "json":
        put_json(_problems_as_json(problems, len(loaded)), ensure_ascii=False)
    else:
        for problem in problems:
            put(problem)
        put(counted(problems))
    return int(any(problem.severity == ERROR for problem in problems))


def _problems_as_json(problems: Sequence[Problem], files: int) -> dict[str, Any]:
    from engine.contracts.problems import ERROR, WARNING

    severities = [problem.severity for problem in problems]
    return {
        "files": files,
        "errors": severities.count(ERROR),
        "warnings": severities.count(WARNING),
        "problems": [dataclasses.asdict(problem) for problem in problems],
    }


def _run(a: argparse.Namespace) -> int:
    from engine.contracts.resolve import checked_contracts
    from engine.contracts.run import Runner
    from engine.contracts.status import overview
    from engine.errors import BadInput, UsageError

    if a.jobs < 1:
        raise UsageError("contracts run: expected --jobs of 1 or more")
    loaded = checked_contracts((), Path())
    known = {one.path.stem: one for one in loaded}
    if unknown := [id_ for id_ in a.ids if id_ not in known]:
        raise BadInput.expected(
            "contract", unknown[0], f"one of {', '.join(known)}", "none of them"
        )
    wanted = [known[id_] for id_ in dict.fromkeys(a.ids or known)]
    for one in wanted:
        for problem in one.problems:
            say(problem)
    contracts = [c for one in wanted if (c := one.contract) is not None and c.is_run]
    runner = Runner(Path(), a.receipts, lambda text: say(text))
    runner.run(contracts, a.jobs)
    ids = {one.path.stem for one in wanted}
    return _print([s for s in overview(receipts=a.receipts) if s.id in ids], as_json=a.json)


def _status(a: argparse.Namespace) -> int:
    from engine.contracts.status import overview

    return _print(overview(receipts=a.receipts), as_json=a.json)


def _print(statuses: Sequence[Status], *, as_json: bool) -> int:
    """Each contract in a line, what keeps it from passing below it, and how many of each there are."""
    from engine.contracts.answer import Rank, meet_all

    overall = meet_all(status.answer for status in statuses if status.counts)
    if as_json:
        value = {
            "level": overall.level.name.lower(),
            "contracts": [_as_json(status) for status in statuses],
        }
        put_json(value, ensure_ascii=False)
        return overall.verdict.exit_code
    width = max((len(status.id) for status in statuses), default=0)
    for status in statuses:
        put(
            f"{status.answer.level.name:7}  {status.id:{width}}  {status.reached.name.lower():8}  "
            f"{_age(status.age_s):>8}  {_line(status.answer)}"
        )
        for check in status.checks:
            if check.answer.rank is not Rank.PASS and status.age_s is not None:
                put(f"         {check.kind} {check.id}: {_line(check.answer)}")
    names = [status.answer.level.name for status in statuses]
    put(f"{names.count('PASS')} pass, {names.count('FAIL')} fail, {names.count('UNKNOWN')} unknown")
    return overall.verdict.exit_code


def _line(text: object) -> str:
    from engine.log.text import one_line

    return one_line(str(text))


def _age(age_s: float | None) -> str:
    from engine.units import format_seconds

    return "never" if age_s is None else format_seconds(age_s)


def _as_json(status: Status) -> dict[str, Any]:
    contract = status.contract
    return {
        "id": status.id,
        "path": str(status.path),
        "level": status.answer.level.name.lower(),
        "reason": str(status.answer),
        "reached": status.reached.name.lower(),
        "age_s": status.age_s,
        "description": contract.description if contract else None,
        "equations": dict(contract.equations) if contract else {},
        "obligations": dict(contract.obligations) if contract else {},
        "demoted": [
            {"id": id_, "property": property_, "by": by}
            for id_, property_, by in (contract.demoted if contract else ())
        ],
        "problems": list(status.problems),
        "checks": [
            {
                "id": check.id,
                "kind": check.kind,
                "says": check.says,
                "answer": check.answer.label,
                "text": check.answer.text,
                "age_s": check.age_s,
            }
            for check in status.checks
        ],
    }


def _list(a: argparse.Namespace) -> int:
    from engine.contracts.status import overview

    statuses = overview(receipts=a.receipts)
    if a.json:
        put_json([_as_json(status) for status in statuses], ensure_ascii=False)
        return 0
    for status in statuses:
        put(
            f"{status.id}  [{status.reached.name.lower()}, {status.answer.level.name.lower()}, "
            f"{_age(status.age_s)}]"
        )
        for name, formula in status.contract.equations if status.contract else ():
            put(_wrapped(f"{name}: {formula}", 2))
    return 0


def _wrapped(text: str, indent: int) -> str:
    from engine.log.text import one_line

    first, rest = " " * indent, " " * (indent + 2)
    return textwrap.fill(one_line(text), WIDTH, initial_indent=first, subsequent_indent=rest)


def _show(a: argparse.Namespace) -> int:
    from engine.contracts.status import overview
    from engine.errors import BadInput

    statuses = {status.id: status for status in overview(receipts=a.receipts)}
    if a.id not in statuses:
        raise BadInput.expected("contract", a.id, f"one of {', '.join(statuses)}", "none of them")
    status = statuses[a.id]
    if a.json:
        put_json(_as_json(status), ensure_ascii=False)
        return 0
    put(f"{status.id}: {_line(status.answer)}")
    put(f"  reached {status.reached.name.lower()}, oldest receipt {_age(status.age_s)}")
    for problem in status.problems:
        put(f"  {problem}")
    contract = status.contract
    if contract is None:
        return 0
    put(_wrapped(contract.description, 2))
    for title, pairs in (("equations", contract.equations), ("claims", contract.obligations)):
        put(title)
        for name, text in pairs:
            put(_wrapped(f"{name}: {text}", 2))
    for id_, text, by in contract.demoted:
        put(_wrapped(f"demoted {id_}: {text} (by {by})", 2))
    put("checks")
    for check in status.checks:
        put(_wrapped(f"{check.answer.level.name:7} {check.kind} {check.id}: {check.says}", 2))
        put(_wrapped(str(check.answer), 10))
    for falsifier in contract.falsifiers:
        if falsifier.differs:
            put(_wrapped(f"{falsifier.id} is not as published: {falsifier.differs}", 2))
    return 0
