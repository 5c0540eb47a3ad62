"""Compare what `engine diagnose`, trainproof and runmedic find in the same logs, of faulty and of healthy trainings.

    python -m evidence.interchange.beside --rivals FOLDER_OF_THEIR_COMMANDS --out evidence/interchange/beside.json

The logs are those of `by_libraries.py`, as the libraries have written them. `said` is a finding of the level warning or
worse; with its step it is at most WITHIN steps from where the fault began. A log that a tool does not read is counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from engine.interchange.importing import diagnose_recorded
from engine.interchange.kinds import find_logs
from engine.interchange.sources import Recorded
from engine.watch.verdict_line import HEALTHY, UNDECIDED, verdict_of

LOGS = Path(__file__).with_name("by_libraries.tar.xz")
WITHIN = 12
Said: TypeAlias = list[tuple[str, float | None]]
"""Findings of the level warning or worse: name and step."""
Ask: TypeAlias = Callable[[Path], Said | None]
"""Returns what a tool says of the log at a path; None if it reads none there."""


def ours(path: Path) -> Said | None:
    (log,) = find_logs(path)
    assert log.read is not None
    recorded = Recorded(path=log.path)
    log.read(recorded, {})
    found = diagnose_recorded(recorded, log.source, {}).found
    assert found.view.finished is not None
    verdict = verdict_of(found.judged_view, found.view.finished.state)
    return (
        []
        if verdict.level in (HEALTHY, UNDECIDED)
        else [(verdict.id or verdict.level, verdict.since)]
    )


def trainproof(command: Path, path: Path) -> Said | None:
    reports = _json(command, "doctor", "--json", path).get("reports", ())
    found = [one for report in reports for one in report["findings"]]
    if not reports or any(one["id"] == "TP-NO-LOSS" for one in found):
        return None
    return [
        (one["id"], _number(one.get("step"))) for one in found if one["level"] in ("WARN", "FAIL")
    ]


def runmedic(command: Path, path: Path) -> Said | None:
    runs = _json(command, "diagnose", "--json", path)
    if not runs or not any(run["roles"] for run in runs):
        return None
    return [
        (one["check"], _number(one.get("step")))
        for run in runs
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


def said_of(ask: Ask, path: Path) -> Said | None:
    """Return what a tool finds in a folder, or in the file in it if it does not read the folder."""
    places = [path, *(log.path for log in find_logs(path))]
    return next((said for place in places if (said := ask(place)) is not None), None)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rivals", type=Path, help="folder of the commands trainproof and runmedic"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    tools: dict[str, Ask] = {"engine diagnose": ours}
    versions = {}
    for name, rival in (("trainproof", trainproof), ("runmedic", runmedic)):
        if given.rivals is not None:
            command = given.rivals / name
            tools[name] = partial(rival, command)
            told = subprocess.run(
                [command, "--version"], capture_output=True, text=True, check=True
            )
            versions[name] = told.stdout.split()[-1]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, tarfile.open(LOGS) as archive:
        archive.extractall(folder, filter="data")
        index = json.loads((Path(folder) / "index.json").read_text())
        for log in index["logs"]:
            said = {tool: said_of(ask, Path(folder) / log["log"]) for tool, ask in tools.items()}
            rows.append(log | said)
    faulty, sound = (
        [row for row in rows if bool(row["fault"]) is is_faulty] for is_faulty in (True, False)
    )
    summary = {
        tool: {
            "of a fault": sum(bool(row[tool]) for row in faulty),
            "with its step": sum(_is_near(row[tool], row["step"]) for row in faulty),
            "of healthy ones": sum(bool(row[tool]) for row in sound),
            "not read": sum(row[tool] is None for row in rows),
        }
        for tool in tools
    }
    print(f"{len(faulty)} logs with one fault, {len(sound)} healthy ones; {versions}")
    for tool, counts in summary.items():
        print(f"{tool:16} {counts}")
    if given.out is not None:
        found = {"versions": index["versions"] | versions, "summary": summary, "rows": rows}
        given.out.write_text(json.dumps(found, indent=1) + "\n")


def _is_near(said: Said | None, step: int) -> bool:
    return any(one is not None and abs(one - step) <= WITHIN for _, one in said or ())


if __name__ == "__main__":
    main()
