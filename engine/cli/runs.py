"""List the runs in a folder, newest first.

engine runs                the runs in ./runs
engine runs DIR --json     as one JSON list
"""

from __future__ import annotations

import argparse
from pathlib import Path

from engine.terminal import put, put_json, say

HELP = "list runs: state, progress, losses"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("runs"), help="folder of run folders (runs)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list")


def run(arguments: argparse.Namespace) -> int:
    from engine.cli.tail import as_json
    from engine.errors import RunLogError
    from engine.log.folder import RunFolder, find_runs
    from engine.log.follow import Follower
    from engine.log.text import status_text

    rows: list[tuple[RunFolder, Follower | None, str]] = []
    for folder in find_runs(arguments.folder):
        follower = Follower(folder)
        try:
            follower.read_all()
        except RunLogError as error:
            # One broken log must not hide the others.
            rows.append((folder, None, error.message))
            continue
        rows.append((folder, follower, status_text(follower.view, follower.alive)))
    if arguments.json:
        put_json(
            [
                as_json(f) if f is not None else {"run": str(r.path), "error": text}
                for r, f, text in rows
            ]
        )
        return 0
    if not rows:
        say(
            f"no runs in {arguments.folder}; start one with `engine distill SPEC.toml` or `make demo`"
        )
    width = max((len(folder.name) for folder, _, _ in rows), default=0)
    for folder, _, text in rows:
        put(f"{folder.name:{width}}  {text}")
    return 0
