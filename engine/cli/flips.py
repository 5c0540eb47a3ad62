"""List the flips in a folder with their verdicts, newest first.

engine flips               the flips in ./flips
engine flips DIR           of a folder, or one flip with its whole verdict
engine flips DIR --json    as one JSON list
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.cli.answers import answer
from engine.cli.arguments import add_json, add_path
from engine.terminal import aligned, say

HELP = "list flips and their verdicts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "folder of flip folders (flips)"
    add_path(parser, "folder", None, what, nargs="?", default=Path("flips"))
    add_json(parser, "print one JSON list")


def run(arguments: argparse.Namespace) -> int:
    from engine.errors import RunLogError
    from engine.flips.flip_folder import find_flips, read_verdict
    from engine.flips.text import verdict_line, verdict_lines

    rows: list[tuple[Path, dict[str, Any] | None, str]] = []
    for path in find_flips(arguments.folder):
        try:
            fields = read_verdict(path)
            rows.append((path, fields, "no verdict: it is still running, or it was killed"))
        except RunLogError as error:
            # One broken verdict must not hide the others.
            rows.append((path, None, error.message))
    if not rows:
        say(f"no flips in {arguments.folder}; make one with `engine flip`")

    def lines() -> Iterator[str]:
        # Only where they are printed: the file of a verdict may lack fields.
        if len(rows) == 1 and rows[0][0] == arguments.folder and rows[0][1] is not None:
            yield from verdict_lines(rows[0][1])
        else:
            yield from aligned(
                [(path.name, verdict_line(f) if f else why) for path, f, why in rows]
            )

    entries = [{"flip": path, **(fields or {"error": why})} for path, fields, why in rows]
    return answer(arguments, "flip", entries, lines())
