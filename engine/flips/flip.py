"""A flip: two arms that differ in one setting, run alternately until the measurements decide.

    register the plan -> a pair -> controls, if requested -> pair, judge, pair, judge, ... -> verdict

Every run is an ordinary run in a process of its own. The order inside the pairs is drawn from the plan's
seed. The judge checks the pairs after each one, which the anytime-valid interval allows. Whatever happens to an arm is
an outcome. An interruption keeps what was measured, and `resume_flip` continues with the same plan and order.

    verdict = run_flip(make_plan(Path("kd.toml"), ["compute.threads=1"], order_seed=7), Path("flips/x"))

This module loads without torch, and its functions may be called from any thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from engine.errors import BadInput
from engine.flips import controls
from engine.flips.arms import Outcome, Stopped, run_arm
from engine.flips.controls import Control
from engine.flips.flip_folder import FlipFolder, create_flip, open_flip, read_verdict
from engine.flips.judge import Judgement, conclude, interval_of, judge
from engine.flips.pair import Pair, count_of, proofs
from engine.flips.plan import Plan
from engine.flips.statistics import Interval
from engine.flips.surroundings import Surroundings, device_lock, find_surroundings
from engine.log.view import RunView
from engine.units import format_seconds

Controls: TypeAlias = Literal["auto", "run", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """Callbacks of the caller of a flip."""

    on_pair: Callable[[str, Pair, Interval | None], object] = lambda *_: None
    """Called after each pair with what ran (`flip`, `control same`, `control slow`), the pair and the
    interval."""
    on_arm: Callable[[str, int, str, RunView], object] = lambda *_: None
    """Called several times a second while an arm runs, with what runs, the number of the pair, the arm and
    its view."""
    stop: Callable[[], bool] = lambda: False
    """Called as often as `on_arm`; True ends the running arm and then the flip."""


NO_CALLBACKS = Watching()


def run_flip(
    plan: Plan,
    folder: Path,
    watching: Watching = NO_CALLBACKS,
    *,
    use_controls: Controls = "auto",
    share: bool = False,
) -> dict[str, Any]:
    """Carry out `plan` in the new folder `folder`, and return the fields of its verdict.json.

    `use_controls`: `auto` uses the controls of the last day that apply to this plan, `run` runs them first,
    `skip` uses none. Raises BadInput for a folder that exists or a device that is in use.
    """
    surroundings = find_surroundings(plan)
    with (
        device_lock(surroundings.device, f"a flip in {folder.absolute()}", share=share),
        contextlib.closing(create_flip(folder.absolute(), plan, surroundings)) as flip,
    ):
        return _Experiment(plan, flip, surroundings, watching).carry_out(use_controls)


def resume_flip(
    folder: Path,
    watching: Watching = NO_CALLBACKS,
    *,
    use_controls: Controls = "auto",
    share: bool = False,
) -> dict[str, Any]:
    """Continue a flip that was interrupted or died. Raises BadInput for one that ended."""
    flip, plan = open_flip(folder.absolute())
    with contextlib.closing(flip):
        before = read_verdict(flip.path)
        if before is not None and not before["interrupted"]:
            found = f"one that ended: {before['verdict']}"
            raise BadInput.expected("flip", folder, "one that was interrupted", found)
        surroundings = find_surroundings(plan)
        with device_lock(surroundings.device, f"a flip in {flip.path}", share=share):
            return _Experiment(plan, flip, surroundings, watching).carry_out(use_controls)


@dataclass(frozen=True, slots=True)
class _Experiment:
    """A running flip, or one of its controls."""

    plan: Plan
    flip: FlipFolder
    surroundings: Surroundings
    watching: Watching
    what: str = "flip"

    def carry_out(self, use_controls: Controls) -> dict[str, Any]:
        begun_s = time.monotonic()
        judgement, interrupted = None, False
        if use_controls == "run":
            # Measure a pair first: it decides the flip when an arm hangs, which would also hang every
            # control.
            judgement, interrupted = self.measure(most=1)
            if judgement is None and self.run_controls():
                judgement = judge(self.plan, self.flip.pairs, "interrupted during the controls")
                interrupted = True
        if judgement is None:
            judgement, interrupted = self.measure()
        assert judgement is not None, "a flip that has ended has a verdict"
        found, why_none = {}, "skipped"
        if use_controls != "skip":
            found = controls.find(self.plan, self.surroundings)
            why_none = "no control of this spec was run on this machine within a day"
        verdict = conclude(
            self.plan,
            self.flip,
            judgement,
            controls.answers(self.plan, found, why_none),
            self.surroundings,
            interrupted=interrupted,
            cost_s=time.monotonic() - begun_s,
        )
        return self.flip.write(verdict)

    def measure(self, *, most: int | None = None) -> tuple[Judgement | None, bool]:
        """Measure pairs until the judge decides or there are `most` of them. Return the judgement (None in
        the second case) and whether the measurement was interrupted."""
        pairs, order = self.flip.pairs, self.plan.order()
        ended, interrupted = "", False
        while (judgement := judge(self.plan, pairs, ended)) is None:
            if len(pairs) == most:
                break
            ended = why_no_more(self.plan, pairs)
            if ended:
                continue
            number = len(pairs) + 1
            try:
                pair = self.run_pair(number, order[number - 1])
            except (Stopped, KeyboardInterrupt):
                ended, interrupted = f"interrupted after {count_of(number - 1)}", True
                continue
            self.flip.add(pair)
            self.watching.on_pair(self.what, pair, interval_of(self.plan, pairs))
        return judgement, interrupted

    def run_pair(self, number: int, b_first: bool) -> Pair:
        plan, begun_unix_s, begun_s = self.plan, time.time(), time.monotonic()
        done: dict[str, Outcome] = {}
        for arm in ("B", "A") if b_first else ("A", "B"):
            done[arm] = run_arm(
                plan,
                b=arm == "B",
                pair=number,
                folder=self.flip.run_folder(number, arm),
                watch=functools.partial(self.watching.on_arm, self.what, number, arm),
                stop=self.watching.stop,
            )
        a, b = done["A"], done["B"]
        return Pair(
            number=number,
            b_first=b_first,
            begun_unix_s=begun_unix_s,
            seconds=time.monotonic() - begun_s,
            a=a,
            b=b,
            proofs=proofs(plan, a, b, self.flip.path),
        )

    def run_controls(self) -> bool:
        """Run the controls that the plan's metric has and store their results. True when interrupted."""
        for kind in controls.kinds_of(self.plan):
            path = self.flip.path / "controls" / kind
            if path.exists():
                flip, plan = open_flip(path)  # begun before an interruption
            else:
                plan = self.plan.control(slow=kind == controls.SLOW)
                flip = create_flip(path, plan, self.surroundings)
            control = dataclasses.replace(self, plan=plan, flip=flip, what=f"control {kind}")
            with contextlib.closing(flip):
                judgement, interrupted = control.measure()
            if interrupted:
                return True
            assert judgement is not None, "a control that has ended has a verdict"
            interval = judgement.interval
            controls.remember(
                Control(
                    kind=kind,
                    at_unix_s=time.time(),
                    surroundings=dataclasses.asdict(self.surroundings),
                    metric=plan.metric,
                    margin=plan.margin,
                    verdict=judgement.verdict,
                    ratio=interval.ratio if interval else None,
                    deviation=interval.deviation if interval else None,
                    pairs=interval.pairs if interval else 0,
                    folder=str(flip.path),
                    spec=self.plan.subject,
                )
            )
        return False


def why_no_more(plan: Plan, pairs: Sequence[Pair]) -> str:
    """Return why no further pair is started; empty if one is."""
    if len(pairs) >= plan.pairs_max:
        return f"{count_of(len(pairs))}, the most that the plan allows, decide nothing"
    spent_s = sum(pair.seconds for pair in pairs)
    next_s = max((pair.seconds for pair in pairs), default=0.0)
    if spent_s + next_s > plan.budget_s:
        text = f"the next pair would not end within {format_seconds(plan.budget_s)}"
        return f"{text}: {count_of(len(pairs))} took {format_seconds(spent_s)}"
    return ""
