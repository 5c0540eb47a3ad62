"""List findings, read receipts.

    engine evidence list [DIR]            the findings in ./evidence, newest first
    engine evidence receipt RUN           what a run really did, compared with the files in its folder

`engine why check --all` checks that nothing in the findings was changed.

Exit codes of receipt: 0 it agrees with its run, 1 it does not, 2 the run has none.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from engine.cli.answers import put_json
from engine.cli.arguments import actions_of, add_json, add_path, add_run
from engine.terminal import put, say

HELP = "list findings, read receipts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    action = actions_of(parser)
    list_parser = action("list", "the findings in a folder, newest first")
    add_path(list_parser, "folder", "DIR", "(evidence)", nargs="?")
    receipt = action("receipt", "what a run really did, compared with the files in its folder")
    add_run(receipt)
    for parser_of_action in (list_parser, receipt):
        add_json(parser_of_action)


def run(arguments: argparse.Namespace) -> int:
    actions = {"list": _list, "receipt": _receipt}
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
        put_json("evidence", rows)
        return 0
    if not rows:
        say(f"no findings in {folder}; begin one with `engine why new`")
    names = [Path(row["folder"]).name for row in rows]
    width = max(map(len, names), default=0)
    for name, row in zip(names, rows, strict=True):
        words = row.get("error") or f"{row['title']}  [{row['state']}]"
        put(f"{name:{width}}  {one_line(words)}")
    return 0


def _folder(given: Path | None) -> Path:
    """Return the folder of findings: the default ./evidence may be missing, a named folder may not."""
    from engine.errors import BadInput

    if given is not None and not given.is_dir():
        found = "nothing there" if not os.path.lexists(given) else "no folder"
        raise BadInput.expected("findings", given, "a folder", found)
    return given or Path("evidence")


def _receipt(a: argparse.Namespace) -> int:
    from engine.log.folder import open_run
    from engine.log.text import one_line
    from engine.receipts.context import view_of
    from engine.receipts.receipt import check_receipt, not_compared, read_receipt_or_facts
    from engine.receipts.text import receipt_lines
    from engine.verdict import lowest

    folder = open_run(a.run)
    view = view_of(folder)
    receipt, is_receipt = read_receipt_or_facts(folder, view)
    checks = check_receipt(folder, receipt, view) if is_receipt else {}
    verdict = lowest(checks.values())
    unchecked = not_compared(folder, receipt) if is_receipt else []
    if a.json:
        put_json(
            "receipt",
            {"receipt": receipt, "is_receipt": is_receipt, "level": verdict.level}
            | {"checks": checks, "not_looked_at": unchecked},
        )
        return verdict.exit_code
    for line in receipt_lines(receipt):
        put(one_line(line))
    if not is_receipt:
        put("no receipt: the run did not finish; the lines above are from its logs")
    for check in checks.values():
        put(f"{check.level.name:7}  {check.reason}")
    for what in unchecked:
        put(f"         not checked: {what}")
    return verdict.exit_code
