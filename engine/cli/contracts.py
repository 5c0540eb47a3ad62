"""Check contracts, run their tests and proofs, and show for each the verdict (pass, unknown, fail) and the level that
it has reached (none, basic, standard, strict, proven: `engine.contracts.status`).

    engine contracts validate [FILES]    check each file; list what is wrong, with its place
    engine contracts run [IDS]           run tests and proofs, then plant each bug and see it caught
    engine contracts status              verdict and level of each, from the receipts of earlier runs alone
    engine contracts list                each with its equations, last result and age
    engine contracts show ID             one in full

Exit codes of validate: 0 no problem, 1 one or more. Of run and status: 0 all pass, 1
one fails, 2 something is unknown: skipped, stale, not run, or its tool is not installed.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import limits
from engine.cli.answers import answer
from engine.cli.arguments import actions_of, add_json, add_number, add_path
from engine.terminal import say

if TYPE_CHECKING:
    from engine.contracts.status import Status

HELP = "check contracts, run them, show the level of each"
WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    action = actions_of(parser)
    validate = action("validate", "check each file; list what is wrong")
    add_path(validate, "files", "FILES", "files or folders (contracts/)", nargs="*")
    add_json(validate)
    run_ = action("run", "run tests, proofs and planted bugs, and keep receipts")
    run_.add_argument("ids", nargs="*", metavar="IDS", help="contracts (all)")
    add_number(run_, "--jobs", limits.JOBS, "contracts at once (1)", default=1, metavar="N")
    status = action("status", "verdict and level of each contract, from its receipts alone")
    list_parser = action("list", "every contract with its equations, last result and age")
    show = action("show", "everything of one contract")
    show.add_argument("id", metavar="ID")
    receipts = Path("evidence/contracts")
    for subparser in (run_, status, list_parser, show):
        add_json(subparser)
        add_path(
            subparser,
            "--receipts",
            "DIR",
            "folder of the receipts (evidence/contracts)",
            default=receipts,
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
    from engine.contracts.contract import checked_contracts

    loaded = checked_contracts(a.files, Path())
    problems = sorted(problem for file in loaded for problem in file.problems)
    value = {"files": len(loaded), "problems": problems}
    lines = [*problems, f"{len(loaded)} contracts, {len(problems)} problems"]
    return answer(a, "contract-problems", value, lines, int(bool(problems)))


def _run(a: argparse.Namespace) -> int:
    from engine.contracts.contract import checked_contracts
    from engine.contracts.run import Runner
    from engine.contracts.status import overview
    from engine.errors import UsageError

    if a.jobs < 1:
        raise UsageError("contracts run: expected --jobs of 1 or more")
    by_id = {file.path.stem: file for file in checked_contracts((), Path())}
    for id_ in a.ids:
        _expect(id_, by_id)
    ids = dict.fromkeys(a.ids or by_id)
    for problem in (problem for id_ in ids for problem in by_id[id_].problems):
        say(problem)
    contracts = [by_id[id_].contract for id_ in ids]
    runner = Runner(Path(), a.receipts, say)
    runner.run([contract for contract in contracts if contract and not contract.demoted_by], a.jobs)
    return _print([s for s in overview(receipts=a.receipts) if s.id in ids], a)


def _expect(id_: str, ids: Iterable[str]) -> None:
    from engine.errors import BadInput

    if id_ not in ids:
        raise BadInput.expected("contract", id_, f"one of {', '.join(ids)}", "none of them")


def _status(a: argparse.Namespace) -> int:
    from engine.contracts.status import overview

    return _print(overview(receipts=a.receipts), a)


def _print(statuses: Sequence[Status], a: argparse.Namespace) -> int:
    """Print a line per contract, below it the reasons why it does not pass, and a count per verdict."""
    from engine.contracts.status import Rank, meet_all
    from engine.units import format_seconds

    # The lowest result; demoted contracts do not count.
    overall = meet_all(status.answer for status in statuses if status.counts)
    lines: list[str] = []
    width = max((len(status.id) for status in statuses), default=0)
    for status in statuses:
        age = "never" if status.age_s is None else format_seconds(status.age_s)
        lines.append(
            f"{status.answer.level.name:7}  {status.id:{width}}  {status.reached.name.lower():8}  "
            f"{age:>8}  {_line(status.answer)}"
        )
        lines += [
            f"         {check.kind} {check.id}: {_line(check.answer)}"
            for check in status.checks
            if check.answer.rank is not Rank.PASS and status.age_s is not None
        ]
    names = [status.answer.level.name for status in statuses]
    lines.append(
        f"{names.count('PASS')} pass, {names.count('FAIL')} fail, {names.count('UNKNOWN')} unknown"
    )
    value = {"level": overall.level, "contracts": [_as_json(status) for status in statuses]}
    return answer(a, "contracts", value, lines, overall.verdict.exit_code)


def _line(text: object) -> str:
    from engine.log.text import one_line

    return one_line(str(text))


def _as_json(status: Status) -> dict[str, Any]:
    file = status.contract.file if status.contract else None
    claims = file.proof_obligations if file else ()
    return {
        "id": status.id,
        "path": status.path,
        "level": status.answer.level,
        "reason": str(status.answer),
        "reached": status.reached,
        "age_s": status.age_s,
        "description": file.metadata.description if file else None,
        "equations": {name: one.formula for name, one in file.equations.items()} if file else {},
        "obligations": {one.id: one.property for one in claims if one.is_active},
        # Claims that a finding has refuted, which it names.
        "demoted": [
            {"id": one.id, "property": one.property, "by": one.demoted_by}
            for one in claims
            if not one.is_active
        ],
        "problems": status.problems,
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
    from engine.contracts.text import summary

    statuses = overview(receipts=a.receipts)
    lines = []
    for status in statuses:
        lines.append(summary(status))
        equations = status.contract.file.equations if status.contract else {}
        for name, equation in equations.items():
            lines.append(_wrapped(f"  {name}: {_line(equation.formula)}"))
    return answer(a, "contract", [_as_json(status) for status in statuses], lines)


def _show(a: argparse.Namespace) -> int:
    from engine.contracts.status import overview
    from engine.contracts.text import contract_lines

    statuses = {status.id: status for status in overview(receipts=a.receipts)}
    _expect(a.id, statuses)
    status = statuses[a.id]
    return answer(a, "contract", _as_json(status), map(_wrapped, contract_lines(status)))


def _wrapped(line: str) -> str:
    """Wrap a line to the page width, with continuation lines indented by two."""
    text = line.lstrip()
    indent = line[: len(line) - len(text)]
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ")
