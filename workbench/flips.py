"""What the screen of a flip is fed: frozen snapshots of a flip folder, while it goes on and after.

The flip itself is `engine flip` in a process of its own; this reads what it has written. So a flip
that was started in a shell, or before this program, is shown in the same way, and leaving the screen
does not end it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import BadInput, RunLogError
from engine.experiments.judge import Pair, interval_of
from engine.experiments.plan import Plan, make_plan
from engine.experiments.record import find_flips, read_pairs, read_plan_of, read_verdict
from engine.experiments.text import pair_heading, pair_line, plan_lines
from engine.runlog.folder import RunFolder, find_runs
from engine.runlog.follow import Follower
from engine.runlog.read import writer_is_alive
from workbench.launch import StartedFlip


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipSnapshot:
    """One flip as of one poll."""

    folder: Path
    plan: Plan | None
    """None before it is registered."""
    pairs: tuple[Pair, ...]
    going_on: bool
    arm: str
    """What runs at the moment, in words."""
    verdict: dict[str, Any] | None
    """The fields of verdict.json; None before there is one."""
    error: str
    """Why it was refused, or what could not be read."""

    def lines(self) -> list[str]:
        """The plan, and a line for each pair."""
        if self.plan is None:
            return []
        table = [pair_heading(self.plan)] if self.pairs else []
        for count, pair in enumerate(self.pairs, start=1):
            interval = interval_of(self.plan, self.pairs[:count])
            table += pair_line(self.plan, pair, interval).splitlines()
        return [*plan_lines(self.plan), "", *table]


class FlipFeed:
    """Follows one flip; `started` is the process of one that this program started."""

    def __init__(self, folder: Path, started: StartedFlip | None = None) -> None:
        self.folder = folder
        self._started = started

    def poll(self) -> FlipSnapshot:
        """The flip as it is now."""
        plan, verdict, error = None, None, ""
        pairs: tuple[Pair, ...] = ()
        # Asked first: what ends while it is read is seen as ended at the next look, with its verdict.
        going_on = self._goes_on()
        try:
            if (self.folder / "pairs.jsonl").is_file():
                plan = read_plan_of(self.folder)
                pairs = tuple(read_pairs(self.folder))
                verdict = read_verdict(self.folder)
            arm = self._arm(plan) if going_on else ""
        except RunLogError as problem:
            error, going_on, arm = str(problem), False, ""
        if self._started is not None and not going_on and verdict is None:
            error = error or self._started.said()
        return FlipSnapshot(
            folder=self.folder,
            plan=plan,
            pairs=pairs,
            going_on=going_on,
            arm=arm,
            verdict=verdict,
            error=error,
        )

    def _goes_on(self) -> bool:
        if self._started is not None:
            return self._started.is_alive
        return writer_is_alive(self.folder / "pairs.jsonl")

    def _arm(self, plan: Plan | None) -> str:
        arms = find_runs(self.folder / "arms")
        if plan is None or not arms:
            return "starting"
        view = Follower(RunFolder(arms[0].path)).read_all()
        phase = view.phase.name if view.phase is not None else "starting"
        number, _, arm = arms[0].name.partition("-")
        return f"pair {int(number)}, arm {arm[:1].upper()}: step {view.last_step}/{plan.steps}, {phase}"


def plan_of(source: Path, assignment: str, hypothesis: str, budget_s: float) -> list[str] | str:
    """The plan that `engine flip` would register, in lines; or why there can be none."""
    try:
        plan = make_plan(
            source, [assignment], order_seed=0, hypothesis=hypothesis, budget_s=budget_s
        )
    except BadInput as problem:
        return str(problem)
    # The seed is drawn, and with it the hash made, when the flip starts.
    return [line for line in plan_lines(plan) if not line.startswith(("plan sha256", "source"))]


def going_on(flips: Path, source: Path) -> Path | None:
    """The flip of a run that goes on at the moment, in a folder of flips."""
    for path in find_flips(flips):
        try:
            if Path(read_plan_of(path).source) == source.absolute() and writer_is_alive(
                path / "pairs.jsonl"
            ):
                return path
        except RunLogError:
            continue
    return None
