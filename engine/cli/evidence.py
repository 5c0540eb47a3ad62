"""List findings, read receipts.

    engine evidence list [DIR]            the findings in ./evidence, newest first
    engine evidence receipt RUN           what a run really did, compared with the files in its folder

`engine why check --all` checks that nothing in the findings was changed.

Exit codes of receipt: 0 it agrees with its run, 1 it does not, 2 the run has none.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from engine.cli.answers import answer
from engine.cli.arguments import actions_of, add_json, add_path, add_run
from engine.terminal import aligned, say

HELP = "list findings, read receipts"
_ENTRIES_SHOWN = 200
"""Maximum number of entries printed for one part of a receipt."""


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
    if not rows:
        say(f"no findings in {folder}; begin one with `engine why new`")
    words = [row.get("error") or f"{row['title']}  [{row['state']}]" for row in rows]
    names = [Path(row["folder"]).name for row in rows]
    lines = aligned(list(zip(names, map(one_line, words), strict=True)))
    return answer(a, "evidence", rows, lines)


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
    from engine.verdict import lowest

    folder = open_run(a.run)
    view = view_of(folder)
    receipt, is_receipt = read_receipt_or_facts(folder, view)
    checks = check_receipt(folder, receipt, view) if is_receipt else {}
    verdict = lowest(checks.values())
    unchecked = not_compared(folder, receipt) if is_receipt else []
    lines = list(map(one_line, _receipt_lines(receipt)))
    if not is_receipt:
        lines.append("no receipt: the run did not finish; the lines above are from its logs")
    lines += [f"{check.level.name:7}  {check.reason}" for check in checks.values()]
    lines += [f"         not checked: {what}" for what in unchecked]
    value = {"receipt": receipt, "is_receipt": is_receipt, "level": verdict.level}
    value |= {"checks": checks, "not_looked_at": unchecked}
    return answer(a, "receipt", value, lines, verdict.exit_code)


def _receipt_lines(receipt: dict[str, Any]) -> Iterator[str]:
    """Render a receipt: the identity of the run, its work and its decisions."""
    for name in (
        *("run", "tool", "outcome", "config", "seeds", "data", "weights", "device_facts"),
        *("times", "environment", "rows", "heldout_loss_nats"),
    ):
        value = receipt.get(name)
        if not isinstance(value, dict | list):
            yield f"{name}: {_compact(value)}"
            continue
        yield name
        items = value.items() if isinstance(value, dict) else ((None, item) for item in value)
        for key, inner in islice(items, _ENTRIES_SHOWN):
            yield f"  {_compact(inner)}" if key is None else f"  {key}: {_compact(inner)}"
        if (hidden := len(value) - _ENTRIES_SHOWN) > 0:
            yield f"  and {hidden:,} more"
    yield "decisions"
    for decision in receipt.get("decisions") or []:
        how = "set by the user" if decision["overridden"] else f"because {decision['reason']}"
        yield f"  {decision['knob']}: {decision['choice']}, {how}"


def _compact(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
