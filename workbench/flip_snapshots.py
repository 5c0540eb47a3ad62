"""Frozen snapshots of a flip folder for the screens of flips, while it runs and after.

The flip itself is `engine flip` in its own process; this module reads what it has written. So a flip
started from a shell, or before this program, is shown in the same way, and leaving the screen does not
end it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import RunLogError, UsageError
from engine.flips.flip_folder import find_flips, read_pairs, read_plan_of, read_verdict
from engine.flips.judge import interval_of
from engine.flips.pair import Pair, count_of
from engine.flips.plan import Plan
from engine.flips.text import (
    answer_lines,
    detail_lines,
    interval_text,
    pair_heading,
    pair_line,
    plan_lines,
    verdict_line,
)
from engine.flips.verdicts import DECIDED, INCONCLUSIVE
from engine.flips.watched import options_for
from engine.log.fold import Follower
from engine.log.folder import RunFolder, find_runs
from engine.log.read import writer_is_alive
from engine.units import parse_time
from workbench.engine_commands import check_flip
from workbench.jobs import Job, start_flip
from workbench.listing import FoldersFeed, Row, Tone
from workbench.paths import stamps

FLIPS = "flips"
NONE = """\
No flip in {folders} yet.

A flip runs a spec in pairs, once as it is and once with one setting changed, until it is clear \
which is better:

  F on the screen of a run                 what its alerts and decisions suggest, of a watched script too
  engine flip RUN --set compute.threads=1  the same from a shell"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipSnapshot:
    """One flip as of one poll."""

    folder: Path
    plan: Plan | None
    """Registered plan; None before it is registered."""
    pairs: tuple[Pair, ...]
    going_on: bool
    arm: str
    """Description of the arm that is running."""
    verdict: dict[str, Any] | None
    """The fields of verdict.json; None before there is one."""
    error: str
    """Reason why the flip was refused or a file could not be read."""
    controls: tuple[str, ...] = ()
    """One line for each control run: A against A (`same`), and A slowed down on purpose (`slow`)."""

    @property
    def has_ended(self) -> bool:
        """Whether the verdict is final."""
        return self.plan is not None and self.verdict is not None and not self.going_on

    @property
    def state(self) -> str:
        """The verdict with its class, or what is running, as text."""
        if self.going_on:
            return self.arm
        if self.verdict is not None:
            return f"{self.verdict['verdict']} ({self.verdict['class']})"
        return "it ended without a verdict" if self.plan else "refused"

    def lines(self) -> list[str]:
        """Return the plan, a line for each pair, and one for each control."""
        if self.plan is None:
            return []
        table = [pair_heading(self.plan)] if self.pairs else []
        for count, pair in enumerate(self.pairs, start=1):
            interval = interval_of(self.plan, self.pairs[:count])
            table += pair_line(self.plan, pair, interval).splitlines()
        return [*plan_lines(self.plan), "", *table, *self.controls]


class FlipFeed:
    """Follows one flip; `started` is its process, if this program started it."""

    def __init__(self, folder: Path, started: Job | None = None) -> None:
        self.folder = folder
        self._started = started

    def poll(self) -> FlipSnapshot:
        """Return the flip as it is now."""
        plan, verdict, error = None, None, ""
        pairs: tuple[Pair, ...] = ()
        controls: tuple[str, ...] = ()
        # Checked first: a flip that ends while it is read is reported as ended at the next poll, with its
        # verdict.
        going_on = self._goes_on()
        try:
            if (self.folder / "pairs.jsonl").is_file():
                plan = read_plan_of(self.folder)
                pairs = tuple(read_pairs(self.folder))
                controls = tuple(_controls(self.folder))
                verdict = read_verdict(self.folder)
            arm = self._arm(plan) if going_on else ""
        except RunLogError as problem:
            error, going_on, arm = str(problem), False, ""
        if self._started is not None and not going_on and verdict is None:
            error = error or self._started.refusal
        return FlipSnapshot(
            folder=self.folder,
            plan=plan,
            pairs=pairs,
            going_on=going_on,
            arm=arm,
            verdict=verdict,
            error=error,
            controls=controls,
        )

    def _goes_on(self) -> bool:
        if self._started is not None:
            return self._started.is_alive
        return writer_is_alive(self.folder / "pairs.jsonl")

    def _arm(self, plan: Plan | None) -> str:
        places = {"": self.folder / "arms"}
        places |= {
            f"control {path.name}, ": path / "arms" for path in (self.folder / "controls").glob("*")
        }
        newest = [
            (runs[0].path.stat().st_mtime_ns, what, runs[0])
            for what, place in places.items()
            if (runs := find_runs(place))
        ]
        if plan is None or not newest:
            return "starting"
        _, what, run = max(newest, key=lambda one: one[0])
        view = Follower(RunFolder(run.path)).read_all()
        phase = view.phase.name if view.phase is not None else "starting"
        number, _, arm = run.name.partition("-")
        steps = f"step {view.last_step}/{plan.steps}"
        return f"{what}pair {int(number)}, arm {arm[:1].upper()}: {steps}, {phase}"


def _controls(folder: Path) -> Iterator[str]:
    """Yield a line per control: `control slow: 4 pairs, B/A 0.909 [0.900, 0.918]`."""
    for path in sorted((folder / "controls").glob("*")):
        if (path / "pairs.jsonl").is_file():
            plan, pairs = read_plan_of(path), read_pairs(path)
            interval = interval_of(plan, pairs)
            ratio = "" if interval is None else f", B/A {interval_text(interval)}"
            yield f"control {path.name}: {count_of(len(pairs))}{ratio}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A flip as a form describes it: the options of `engine flip`, as they are typed. The engine chooses the other
    options, and a budget where none is typed."""

    assignment: str
    hypothesis: str = ""
    budget: str = "5m"
    ends: str = ""
    """Problem that B should fix, such as `identity kept_gradients`; nothing is measured then. Empty for a metric."""

    def problem(self) -> str:
        """Return the problem with the form itself, before any file is read; empty if there is none."""
        if not self.assignment:
            return "name one setting and its other value; `engine spec` lists them"
        try:
            if self.budget:
                parse_time("budget", self.budget)
        except UsageError as problem:
            return str(problem)
        return ""

    def check(self, source: Path, flips: Path) -> list[str]:
        """Return the plan and its cost from the engine, which checks the inputs of both arms. Raises BadInput or
        UsageError for a flip that would be refused. The lines of the source and of the plan's hash are left out; the
        hash depends on a seed that is drawn when the flip starts."""
        lines = check_flip(self.arguments(source, self.folder(flips)))
        return [line for line in lines if not line.startswith(("plan sha256", "source"))]

    def start(self, source: Path, folder: Path) -> Job:
        """Start it in a new folder. Raises BadInput where that cannot be written."""
        return start_flip(self.arguments(source, folder), folder)

    def folder(self, flips: Path) -> Path:
        """Return the folder of a flip that begins now."""
        knob = re.sub(r"\W+", "-", self.assignment.partition("=")[0]).strip("-") or "flip"
        return (flips / f"{time.strftime('%Y%m%d-%H%M%S')}-{knob}").absolute()

    def arguments(self, source: Path, folder: Path) -> list[str]:
        """Return the engine arguments that start it."""
        named = ("budget", "ends" if self.ends else "hypothesis")
        values = [(f"--{name}", value) for name in named if (value := getattr(self, name))]
        asked = [tuple(options_for(self.assignment)), ("--out", str(folder)), *values]
        return ["flip", str(source), *(word for option in asked for word in option)]


def running_flip(flips: Path, source: Path) -> Path | None:
    """Return the running flip of a run in a folder of flips; None when there is none."""
    for path in find_flips(flips):
        try:
            if Path(read_plan_of(path).source) == source.absolute() and writer_is_alive(
                path / "pairs.jsonl"
            ):
                return path
        except RunLogError:
            continue
    return None


class FlipsFeed(FoldersFeed):
    """Reads the flips in some folders."""

    TITLE, NOUN, EMPTY = "experiments", "flip", NONE

    def __init__(self, folders: Sequence[Path]) -> None:
        super().__init__(folders)

    def find(self, folder: Path) -> Iterable[Path]:
        return find_flips(folder)

    def stamp(self, path: Path) -> object:
        if writer_is_alive(path / "pairs.jsonl"):
            return None
        return stamps(path / name for name in ("pairs.jsonl", "verdict.json", "plan.json"))

    def read(self, path: Path) -> Row:
        return row_of(FlipFeed(path).poll())


def row_of(snapshot: FlipSnapshot) -> Row:
    """Return a flip as a row of a list."""
    name = snapshot.folder.name
    if snapshot.error:
        text = f"{name}  cannot be read"
        lines = (text, *(f"  {line}" for line in snapshot.error.splitlines()))
        return Row(key=str(snapshot.folder), text=text, tone="bad", lines=lines)
    if snapshot.verdict is None or snapshot.going_on:
        knobs = ", ".join(snapshot.plan.keys) if snapshot.plan is not None else ""
        text = f"{name}  {snapshot.state}, {count_of(len(snapshot.pairs))}  {knobs}"
    else:
        text = f"{verdict_line(snapshot.verdict)}  {name}"
    return Row(
        key=str(snapshot.folder),
        text=text,
        tone=_tone(snapshot),
        sign="~" if snapshot.going_on else "",
        lines=tuple(flip_lines(snapshot)),
    )


def _tone(snapshot: FlipSnapshot) -> Tone:
    if snapshot.going_on:
        return "plain"
    word = snapshot.verdict["verdict"] if snapshot.verdict is not None else INCONCLUSIVE
    if word in DECIDED:
        return "good"
    return "unsure" if word == INCONCLUSIVE else "bad"


def verdict_of(snapshot: FlipSnapshot) -> list[str]:
    """Return the verdict in a sentence and the next action; nothing before there is one."""
    return [] if snapshot.verdict is None else answer_lines(snapshot.verdict)


def flip_details(snapshot: FlipSnapshot) -> list[str]:
    """Return what the verdict rests on: its statistics, controls and commands, the plan and the pairs."""
    lines: list[str] = []
    if snapshot.verdict is not None:
        lines += ["details", *_indented(detail_lines(snapshot.verdict))]
    if snapshot.plan is not None:
        lines += ["plan and pairs", *_indented(snapshot.lines())]
    if snapshot.error:
        lines += ["error", *_indented(snapshot.error.splitlines())]
    return [*lines, "folder", f"  {snapshot.folder}"]


def flip_lines(snapshot: FlipSnapshot) -> list[str]:
    """Return all lines of a flip: its state, the verdict in a sentence, and the details."""
    lines = [f"{snapshot.folder.name}: {snapshot.state}"]
    if verdict := verdict_of(snapshot):
        lines += ["verdict", *_indented(verdict)]
    return [*lines, *flip_details(snapshot)]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" if line else "" for line in lines]
