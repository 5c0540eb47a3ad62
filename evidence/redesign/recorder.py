"""Inside the processes that `mutants.py` measures: which test runs which place, how long it takes, how it ends.

`mutants.py` puts this file and a `sitecustomize` that calls `start` first on PYTHONPATH, so every Python process that a
test starts is measured too; pytest loads `recorder_pytest.py`. What they are to do is in the environment:

    COVERAGE_PROCESS_START  coverage's settings; unset: nothing is recorded
    RECORDER_PLACES         JSON: file -> [first line, last line, number of the place] of each place
    RECORDER_OUT            folder for what is recorded
    RECORDER_RUNNING        who runs now: the id of a test or a fixture, which processes started by it inherit
    RECORDER_DEADLINE       unix time after which tests are skipped
    RECORDER_ONLY           JSON: the only tests to run, in this order

Coverage itself could keep a context for each line, but with branches that is a row for each test, file and pair of
lines: gigabytes. So the data that it collects for one test are looked through here for the few places that
are asked about, and then added to those of all tests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

RUNNING = "RECORDER_RUNNING"


class Recorder:
    """Looks through what coverage collected, each time that it is stored, for places."""

    def __init__(self) -> None:
        places = json.loads(Path(os.environ["RECORDER_PLACES"]).read_text())
        self.places: dict[str, list[tuple[int, int, int]]] = places
        self.stored: dict[str, set[tuple[int, int]]] = {}

    def look(self, arcs: Mapping[str, Collection[tuple[int, int]]]) -> None:
        """Append one line to this process's file: who ran, how many pairs of lines, which files and places."""
        hit = []
        for file, pairs in arcs.items():
            if file in self.places:
                lines = {line for pair in pairs for line in pair}
                hit += [
                    number
                    for first, last, number in self.places[file]
                    if any(line in lines for line in range(first, last + 1))
                ]
        record(
            "ran",
            by=os.environ.get(RUNNING, ""),
            size=sum(map(len, arcs.values())),
            files=[file for file in arcs if file in self.places],
            places=hit,
        )

    def unknown(
        self, arcs: Mapping[str, Collection[tuple[int, int]]]
    ) -> dict[str, list[tuple[int, int]]]:
        """What this process has not stored before: a test adds little to those before it."""
        fresh = {}
        for file, pairs in arcs.items():
            known = self.stored.setdefault(file, set())
            fresh[file] = [pair for pair in pairs if pair not in known]
            known.update(pairs)
        return fresh


def record(kind: str, **fields: object) -> None:
    """One line, at once: a process that is killed loses nothing that it recorded."""
    path = Path(os.environ["RECORDER_OUT"]) / f"{kind}.{os.getpid()}"
    with path.open("a") as file:
        file.write(json.dumps(fields) + "\n")


def start() -> None:
    """Measure this process, if that is wanted. An error here must not become one of the program."""
    if "COVERAGE_PROCESS_START" not in os.environ:
        return
    try:
        import coverage

        recorder = Recorder()
    except Exception:  # noqa: BLE001
        return
    add_arcs = coverage.CoverageData.add_arcs

    def look_and_add(self: coverage.CoverageData, arcs: Mapping[str, Any]) -> None:
        if arcs:
            with suppress(Exception):
                recorder.look(arcs)
            add_arcs(self, recorder.unknown(arcs))

    coverage.CoverageData.add_arcs = look_and_add  # type: ignore[method-assign]
    # Switching contexts is only used to have the data stored; they are all of one context.
    coverage.CoverageData.set_context = lambda self, context: None  # type: ignore[method-assign]
    coverage.process_startup()
