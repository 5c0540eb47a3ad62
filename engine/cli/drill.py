"""Make a known incident happen in a short real run, and see whether the workbench names it.

    engine drill --list                     every drill: the incident, where it was met, what must name it
    engine drill swapped_tokenizer deadlock
    engine drill --all --json
    engine drill --all --out drills         keep the table there, and the runs of drills that did not pass

Each drill is a supervised run of a few seconds in its own process and folder; drills that need a
GPU, or a cgroup with a memory limit, report UNKNOWN where there is none.

Exit codes: 0 every incident was named correctly, 1 one was not, 2 one could not be tried.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from engine.cli.answers import answer
from engine.cli.arguments import (
    add_choice,
    add_flag,
    add_json,
    add_path,
)
from engine.errors import BadInput, UsageError
from engine.signals import scratch_folder
from engine.terminal import put, say

if TYPE_CHECKING:
    from engine.drills.catalogue import Drill

HELP = "plant a known defect, and check that it is named"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("drill", nargs="*", metavar="NAME", help="drills to run")
    add_flag(parser, "--all", "run every drill and print a table")
    add_flag(parser, "--list", "list the drills, start nothing")
    add_choice(
        parser, "--device", ("cpu", "cuda"), "cpu", "device for drills that do not need a GPU (cpu)"
    )
    add_path(parser, "--out", "DIR", "keep the results in DIR")
    add_flag(parser, "--keep", "with --out: keep every run folder")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from engine.drills.catalogue import DRILLS, drill

    if [bool(arguments.drill), arguments.all, arguments.list].count(True) != 1:
        raise UsageError("expected one of NAME, --all and --list")
    if arguments.keep and arguments.out is None:
        raise UsageError("--keep needs --out, where the run folders are")
    if arguments.list:
        return _list(DRILLS, arguments)
    with _folder(arguments.out) as folder:
        drills = DRILLS if arguments.all else tuple(map(drill, arguments.drill))
        return _drill(arguments, drills, folder)


@contextlib.contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    if out is None:
        with scratch_folder("drills-") as folder:
            yield folder
        return
    out.mkdir(parents=True, exist_ok=True)
    yield out.absolute()


def _list(drills: tuple[Drill, ...], arguments: argparse.Namespace) -> int:
    rows, lines = [], []
    for drill in drills:
        names = [expected.name for expected in drill.expected]
        rows.append(
            {"id": drill.id, "what": drill.what, "happened": drill.happened}
            | {"must_be_named_by": names, "needs": drill.needs}
        )
        needs = f"  (needs: {', '.join(drill.needs)})" if drill.needs else ""
        lines.append(f"{drill.id}: {drill.what}{needs}")
        lines.append(f"  happened: {drill.happened}")
        lines.append(f"  must be named by: {' or '.join(names)}")
    return answer(arguments, "drill", rows, lines)


def _drill(arguments: argparse.Namespace, drills: tuple[Drill, ...], folder: Path) -> int:
    from engine.drills.carry import carry_out
    from engine.drills.text import as_json, lines_of, table
    from engine.verdict import Level, lowest

    _refuse_taken(folder, [drill.id for drill in drills])
    results = []
    for drill in drills:
        drilled = carry_out(drill, folder, device=arguments.device)
        results.append(drilled)
        lines_of_drill = lines_of(drilled)
        # The table comes last; until then these lines show progress.
        (say if arguments.all or arguments.json else put)("\n".join(lines_of_drill))
        if drilled.verdict.level == Level.PASS and not arguments.keep:
            _remove(folder, drill.id)
    rows = [as_json(drilled) for drilled in results]
    lines = table(results)
    verdict = lowest(drilled.verdict for drilled in results)
    value = {"unix_s": round(time.time()), "level": verdict.level.name.lower(), "drills": rows}
    if arguments.out is not None:
        (folder / "drills.json").write_text(json.dumps(value, indent=1) + "\n")
        (folder / "drills.txt").write_text("\n".join(lines) + "\n")
    return answer(arguments, "drills", value, lines if arguments.all else (), verdict.exit_code)


def _refuse_taken(folder: Path, names: list[str]) -> None:
    for name in names:
        if (folder / name).exists():
            raise BadInput.expected("run folder", folder / name, "none", "one that exists")


def _remove(folder: Path, name: str) -> None:
    shutil.rmtree(folder / name, ignore_errors=True)
    (folder / f"{name}.toml").unlink(missing_ok=True)
