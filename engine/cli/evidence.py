"""List findings, check that nothing in them was changed, read receipts.

    engine evidence list [DIR]            the findings in ./evidence, newest first
    engine evidence verify [DIR]          hash every file, judge every test again
    engine evidence receipt RUN           what a run really did, compared with what lies beside it

Exit codes of verify: 0 everything is unchanged and every recorded test holds, 1 something was changed or does not
hold (it is named), 2 there was nothing to check, 65 a finding could not be read (it is named) and was not
checked. Of receipt: 0 it agrees with its run, 1 it does not, 2 the run has none.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.arguments import actions_of, add_json, add_path, add_run
from engine.errors import EXIT_UNKNOWN
from engine.terminal import put, put_json, say

if TYPE_CHECKING:
    from engine.findings.verify import Checked

HELP = "list and verify findings, read receipts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    action = actions_of(parser)
    listed = action("list", "the findings in a folder, newest first")
    verify = action("verify", "check every byte, judge every test again")
    for made in (listed, verify):
        add_path(made, "folder", "DIR", "(evidence)", nargs="?")
    receipt = action("receipt", "what a run really did, compared with what lies beside it")
    add_run(receipt)
    for made in (listed, verify, receipt):
        add_json(made)


def run(arguments: argparse.Namespace) -> int:
    actions = {"list": _list, "verify": _verify, "receipt": _receipt}
    return actions[arguments.action](arguments)


def _list(a: argparse.Namespace) -> int:
    from engine.errors import BadInput
    from engine.findings.bundle import find_bundles
    from engine.findings.text import state_words
    from engine.log.text import one_line

    rows: list[dict[str, Any]] = []
    folder = _folder(a.folder)
    for bundle in find_bundles(folder):
        try:
            finding = bundle.read()
            row = {"title": finding.title, "state": state_words(finding)}
        except BadInput as error:
            # A damaged finding must not hide the others.
            row = {"error": error.message}
        rows.append({"folder": str(bundle.path)} | row)
    if a.json:
        put_json(rows)
        return 0
    if not rows:
        say(f"no findings in {folder}; begin one with `engine why new`")
    names = [Path(row["folder"]).name for row in rows]
    width = max(map(len, names), default=0)
    for name, row in zip(names, rows, strict=True):
        words = row.get("error") or f"{row['title']}  [{row['state']}]"
        put(f"{name:{width}}  {one_line(words)}")
    return 0


def _verify(a: argparse.Namespace) -> int:
    from engine.errors import EXIT_FAIL, BadInput
    from engine.findings.bundle import find_bundles
    from engine.findings.verify import check_bundle

    folder = _folder(a.folder)
    checked = [check_bundle(bundle) for bundle in find_bundles(folder)]
    print_checked(checked, as_json=a.json)
    if not checked:
        say(f"no findings in {folder}: nothing was checked")
        return EXIT_UNKNOWN
    if any(one.faults for one in checked):
        return EXIT_FAIL
    return BadInput.exit_code if any(one.unread for one in checked) else 0


def _folder(given: Path | None) -> Path:
    """Return the folder of findings: the default ./evidence may be missing, a named folder may not."""
    from engine.errors import BadInput

    if given is not None and not given.is_dir():
        found = "nothing there" if not os.path.lexists(given) else "no folder"
        raise BadInput.expected("findings", given, "a folder", found)
    return given or Path("evidence")


def print_checked(checked: Sequence[Checked], *, as_json: bool) -> None:
    """Print the result of checking findings: their faults and notes."""
    if as_json:
        put_json([one.as_fields() for one in checked])
        return
    for one in checked:
        verdict = one.verdict
        put(f"{verdict.level.name:7}  {one.bundle.path.name}: {verdict.reason}")
        for fault in one.faults:
            put(f"         changed: {fault}")
        for note in one.notes:
            put(f"         note: {note}")
        if one.finding is not None:
            put(f"         seal {one.finding.seal}")


def _receipt(a: argparse.Namespace) -> int:
    from engine.log.folder import open_run
    from engine.log.text import one_line
    from engine.receipts.context import view_of
    from engine.receipts.receipt import check_receipt, not_looked_at, read_receipt_or_facts
    from engine.receipts.text import receipt_lines
    from engine.verdict import lowest

    folder = open_run(a.run)
    view = view_of(folder)
    receipt, is_receipt = read_receipt_or_facts(folder, view)
    checks = check_receipt(folder, receipt, view) if is_receipt else {}
    verdict = lowest(checks.values())
    left = not_looked_at(folder, receipt) if is_receipt else []
    if a.json:
        said = {n: {"level": v.level.name.lower(), "reason": v.reason} for n, v in checks.items()}
        level = verdict.level.name.lower()
        put_json(
            {"receipt": receipt, "is_receipt": is_receipt, "level": level, "checks": said}
            | {"not_looked_at": left}
        )
        return verdict.exit_code
    for line in receipt_lines(receipt):
        put(one_line(line))
    if not is_receipt:
        put("no receipt: the run has not come to its end; this is what its logs say")
    for check in checks.values():
        put(f"{check.level.name:7}  {check.reason}")
    for what in left:
        put(f"         not looked at: {what}")
    return verdict.exit_code
