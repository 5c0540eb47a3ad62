"""The list of drills: every drill, its incident, and its last result.

The drills are listed once by `engine drill --list --json` in its own process, because drills import
what a trainer imports and a viewer must not. Results are the `drills.json` files that `engine drill
--out` writes, on this machine (`drills/DATE-NAME/`) and kept as evidence (`evidence/drills/`); the newest
result of a drill counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine import limits
from engine.errors import BadInput
from engine.files import read_bytes
from engine.log.folder import is_run
from engine.log.text import one_line
from engine.units import format_seconds
from engine.verdict import Level
from workbench.engine_commands import ask_json
from workbench.listing import TONE_OF, Listing, Row, age_text

DRILLS = Path("drills")
EVIDENCE = Path("evidence/drills")
JOB = "drill"
NO_RESULT = "no result yet: n runs it (a few seconds), or `engine drill {id} --out DIR`"


class KnownDrill(msgspec.Struct, frozen=True, kw_only=True):
    """One drill as `engine drill --list --json` prints it."""

    id: str
    what: str
    happened: str
    must_be_named_by: tuple[str, ...]
    needs: tuple[str, ...] = ()


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a drills.json."""

    drill: str
    level: str
    evidence: str
    named_by: str | None = None
    after_s: float | None = None
    after_start_s: float | None = None
    before_step_1: bool = False
    also_said: tuple[str, ...] = ()
    state: str = ""
    cost_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DatedResult:
    """A result and its location."""

    result: Result
    file: Path
    at_unix_s: float | None
    """When it was written; None where the file does not say."""

    @property
    def run(self) -> Path | None:
        """Return the folder of its run, if that was kept."""
        folder = self.file.parent / self.result.drill
        return folder if is_run(folder) else None


def known_drills() -> tuple[KnownDrill, ...]:
    """Return every drill. Raises InternalError when the engine does not list them."""
    return ask_json(["drill", "--list", "--json"], tuple[KnownDrill, ...])


def results_in(*folders: Path) -> dict[str, DatedResult]:
    """Return the newest result of each drill from the *.json files of some folders and their subfolders. A file
    without results of drills is skipped."""
    newest: dict[str, DatedResult] = {}
    for file in _files(folders):
        try:
            fields = msgspec.json.decode(
                read_bytes(file, "drills", limits.DRILL_RESULTS), type=dict[str, Any]
            )
            results = msgspec.convert(fields.get("drills", []), list[Result])
            at_unix_s = msgspec.convert(fields.get("unix_s"), float | None)
        except (BadInput, RecursionError, msgspec.DecodeError, msgspec.ValidationError):
            continue
        for result in results:
            candidate = DatedResult(result=result, file=file, at_unix_s=at_unix_s)
            best = newest.get(result.drill)
            if best is None or _rank(best) < _rank(candidate):
                newest[result.drill] = candidate
    return newest


def _rank(candidate: DatedResult) -> tuple[bool, float]:
    """Rank a result: one that could be judged outranks a newer one that could not."""
    return candidate.result.level != "unknown", candidate.at_unix_s or 0.0


def _files(folders: Sequence[Path]) -> Iterator[Path]:
    for folder in folders:
        yield from sorted(folder.glob("*.json"))
        yield from sorted(folder.glob("*/drills.json"))


class DrillsFeed:
    """Every drill with its last result."""

    def __init__(self, folders: Sequence[Path] = (EVIDENCE, DRILLS)) -> None:
        self._folders = tuple(folders)
        self._known: tuple[KnownDrill, ...] | None = None
        self.results: dict[str, DatedResult] = {}

    def poll(self) -> Listing:
        """Return the list of drills. Raises InternalError when the engine does not list them."""
        if self._known is None:
            self._known = known_drills()
        self.results = results_in(*self._folders)
        now_unix_s = time.time()
        levels = [
            self.results[drill.id].result.level for drill in self._known if drill.id in self.results
        ]
        counts = ", ".join(
            f"{levels.count(word)} {word}" for word in ("pass", "fail", "unknown") if word in levels
        )
        return Listing(
            head=f"drills: {len(self._known)}, last results: {counts or 'none'}",
            rows=tuple(
                _row(drill, self.results.get(drill.id), now_unix_s) for drill in self._known
            ),
        )


def _row(drill: KnownDrill, last: DatedResult | None, now_unix_s: float) -> Row:
    level = last.result.level if last is not None else "not run"
    at_unix_s = None if last is None else last.at_unix_s
    age = "" if at_unix_s is None else age_text(now_unix_s - at_unix_s)
    tone = "quiet" if last is None else TONE_OF[Level[level.upper()]]
    return Row(
        key=drill.id,
        name=drill.id,
        text=f"{level.upper():7}  {age:>7}",
        words=drill.what,
        tone=tone,
        lines=tuple(_lines(drill, last, age)),
    )


def _lines(drill: KnownDrill, last: DatedResult | None, age: str) -> Iterator[str]:
    yield f"{drill.id}"
    yield f"  incident: {drill.what}"
    yield f"  happened: {drill.happened}"
    yield f"  must be named by: {' or '.join(drill.must_be_named_by)}"
    if drill.needs:
        yield f"  needs: {', '.join(drill.needs)}"
    yield "last result"
    if last is None:
        yield f"  {NO_RESULT.format(id=drill.id)}"
        return
    result = last.result
    when = f"{age} ago" if age else "time not recorded"
    yield f"  {result.level.upper()}, {when}"
    if result.named_by is not None:
        yield f"  named by {result.named_by}, {_when(result)}"
    yield f"  {one_line(result.evidence)}"
    if result.also_said:
        yield f"  also said: {', '.join(result.also_said)}"
    if result.state:
        cost = "" if result.cost_s is None else f", {format_seconds(result.cost_s)} in all"
        yield f"  the run ended {result.state}{cost}"
    yield f"  from {last.file}"
    yield f"  its run: {last.run or 'not kept (kept with --keep, or where the drill did not pass)'}"


def _when(result: Result) -> str:
    if result.before_step_1:
        return "before step 1"
    return f"{format_seconds(result.after_s)} after its effect"


def drill_arguments(id_: str, folder: Path) -> list[str]:
    """Return the arguments that carry out one drill and keep its run in `folder`."""
    return ["drill", id_, "--out", str(folder), "--keep"]


def new_folder(id_: str, folder: Path = DRILLS) -> Path:
    """Return the folder for the results of a drill that starts now."""
    return folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{id_}"
