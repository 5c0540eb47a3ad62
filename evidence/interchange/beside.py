"""What `engine diagnose`, trainproof and runmedic say of the same logs: of trainings with one fault, and healthy ones.

    python -m evidence.interchange.beside --rivals FOLDER_OF_THEIR_COMMANDS --out evidence/interchange/beside.json

The curves are those of this repository's tests (`tests/support/curves.py`), so its own row is no measurement of how
well it does on logs that it has not seen. Each is written as a kind of log that has the numbers in which its fault
shows itself, in turn. `said` is a finding of the level warning or worse; `step` is within what the tests allow.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from engine.interchange.importing import diagnose_recorded
from engine.interchange.kinds import find_logs
from engine.interchange.sources import Recorded
from engine.watch.verdict_line import HEALTHY, UNDECIDED, verdict_of
from tests.support.curves import faults, healthy
from tests.support.foreign_logs import KINDS

ALL = ("table", "trainer_state", "json_lines", "parquet", "lightning_csv", "mlflow_files")
OF = {
    "slow_steps": ("nanogpt",),
    "slow_for_a_while": ("nanogpt",),
    "slows_down": ("nanogpt",),
    "stalls": ("table", "torchtitan", "mlflow_files"),
    "overfits": ("table", "trainer_state", "json_lines", "mlflow_files", "nanogpt"),
    "leaks": ("table", "trainer_state", "json_lines", "mlflow_files", "nanogpt"),
}
"""Kinds of log that have what a fault shows itself in, where not every kind has it."""
Said = list[tuple[str, float | None]]
"""Findings of the level warning or worse: name and step."""


def ours(path: Path) -> Said:
    (log,) = find_logs(path)
    assert log.read is not None
    recorded = Recorded(path=log.path)
    log.read(recorded, {})
    found = diagnose_recorded(recorded, log.source, {}).found
    assert found.view.finished is not None
    verdict = verdict_of(found.judged_view, found.view.finished.state)
    return [] if verdict.level in (HEALTHY, UNDECIDED) else [(verdict.id, verdict.since)]


def trainproof(command: Path, path: Path) -> Said:
    found = _json(command, "doctor", "--json", path)
    return [
        (one["id"], _number(one.get("step")))
        for report in found.get("reports", ())
        for one in report["findings"]
        if one["level"] in ("WARN", "FAIL")
    ]


def runmedic(command: Path, path: Path) -> Said:
    return [
        (one["check"], _number(one.get("step")))
        for run in _json(command, "diagnose", "--json", path)
        for one in run.get("findings", ())
        if one["severity"] in ("critical", "warning")
    ]


def _json(command: Path, *arguments: object) -> Any:
    done = subprocess.run(
        [str(command), *map(str, arguments)], capture_output=True, text=True, check=False
    )
    try:
        return json.loads(done.stdout)
    except ValueError:
        return {}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rivals", type=Path, help="folder of the commands trainproof and runmedic"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    tools: dict[str, Any] = {"engine diagnose": ours}
    versions = {}
    for name, ask in (("trainproof", trainproof), ("runmedic", runmedic)):
        if given.rivals is not None:
            command = given.rivals / name
            tools[name] = lambda path, ask=ask, command=command: ask(command, path)
            told = subprocess.run(
                [command, "--version"], capture_output=True, text=True, check=True
            )
            versions[name] = told.stdout.split()[-1]
    kinds = cycle(ALL)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        made = [(name, one.points, one) for name, one in faults().items()]
        for at, (name, points, fault) in enumerate(
            [*made, *((name, points, None) for name, points in healthy().items())]
        ):
            of = OF.get(name, ALL)
            kind = next(one for one in kinds if one in of or len(of) < len(ALL))
            kind = kind if kind in of else of[at % len(of)]
            path = KINDS[kind](points, Path(folder) / name)
            row: dict[str, Any] = {"log": name, "kind": kind, "fault": fault is not None}
            for tool, ask in tools.items():
                said = ask(path)
                row[tool] = said
                if fault is not None:
                    row[f"{tool}, step"] = any(
                        step is not None and abs(step - fault.step) <= fault.within
                        for _, step in said
                    )
            rows.append(row)
    total = Counter("fault" if row["fault"] else "healthy" for row in rows)
    print(f"{total['fault']} logs with one fault, {total['healthy']} healthy ones; {versions}")
    summary = {}
    for tool in tools:
        summary[tool] = {
            "of a fault": sum(bool(row[tool]) for row in rows if row["fault"]),
            "with its step": sum(row[f"{tool}, step"] for row in rows if row["fault"]),
            "of healthy ones": sum(bool(row[tool]) for row in rows if not row["fault"]),
        }
        print(f"{tool:16} {summary[tool]}")
    if given.out is not None:
        found = {"versions": versions, "logs": dict(total), "summary": summary, "rows": rows}
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
