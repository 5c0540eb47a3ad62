"""A flip: two arms that differ in one setting, run in turn until the times say which is which.

    register the plan -> a pair -> controls, if asked for -> pair, judge, pair, judge, ... -> verdict

Every run is a process of its own, started as any run is; the order inside the pairs is drawn from the
plan's seed. After each pair the judge looks, which the interval allows. Whatever happens to an arm is an
outcome; an interruption keeps what was measured, and `resume_flip` goes on with the same plan and
the same coins.

    verdict = run_flip(make_plan(Path("kd.toml"), ["compute.threads=1"], order_seed=7), Path("flips/x"))

Loads without torch, and may be called from any thread.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import BadInput
from engine.flips import controls, proof
from engine.flips.arms import Stopped, run_arm
from engine.flips.conclude import conclude
from engine.flips.controls import Control
from engine.flips.judge import Judgement, Pair, count_of, interval_of, judge
from engine.flips.outcome import Outcome
from engine.flips.plan import Plan
from engine.flips.record import (
    FlipFolder,
    FlipVerdict,
    create_flip,
    open_flip,
    read_verdict,
)
from engine.flips.statistics import Interval
from engine.flips.surroundings import Surroundings, device_lock, find_surroundings
from engine.log.view import RunView
from engine.units import format_seconds

CONTROLS = ("auto", "run", "skip")


OnPair = Callable[[str, Pair, Interval | None], None]
"""Called after each pair: of what (`flip`, `control same`, `control slow`), the pair, the interval."""
OnArm = Callable[[str, int, str, RunView], None]
"""Called some times a second while an arm runs: of what, number of the pair, arm, its view."""


def _nothing(*_: object) -> None:
    """What is called when nobody wants to hear."""


def _go_on() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """What whoever started a flip wants to hear of it."""

    on_pair: OnPair = _nothing
    on_arm: OnArm = _nothing
    stop: Callable[[], bool] = _go_on
    """Asked as often as `on_arm`; yes ends the arm that is running and then the flip."""


def run_flip(
    plan: Plan,
    folder: Path,
    on_pair: OnPair = _nothing,
    *,
    on_arm: OnArm = _nothing,
    stop: Callable[[], bool] = _go_on,
    use_controls: str = "auto",
    share: bool = False,
) -> FlipVerdict:
    """Carry out `plan` in the new folder `folder`.

    `use_controls`: `auto` uses those of the last day that speak of this plan, `run` makes them first,
    `skip` does without. Raises BadInput for a folder that exists or a device that is taken.
    """
    _check_choice(use_controls)
    surroundings = find_surroundings(plan)
    watching = Watching(on_pair=on_pair, on_arm=on_arm, stop=stop)
    with device_lock(surroundings.device, f"a flip in {folder.absolute()}", share=share):
        flip = create_flip(folder.absolute(), plan, surroundings)
        try:
            return _carry_out(plan, flip, surroundings, watching, use_controls)
        finally:
            flip.close()


def resume_flip(
    folder: Path,
    on_pair: OnPair = _nothing,
    *,
    on_arm: OnArm = _nothing,
    stop: Callable[[], bool] = _go_on,
    use_controls: str = "auto",
    share: bool = False,
) -> FlipVerdict:
    """Go on with a flip that was interrupted or died. Raises BadInput for one that came to its end."""
    _check_choice(use_controls)
    watching = Watching(on_pair=on_pair, on_arm=on_arm, stop=stop)
    flip, plan = open_flip(folder.absolute())
    try:
        before = read_verdict(flip.path)
        if before is not None and not before["interrupted"]:
            found = f"one that ended: {before['verdict']}"
            raise BadInput.expected("flip", folder, "one that was interrupted", found)
        surroundings = find_surroundings(plan)
        with device_lock(surroundings.device, f"a flip in {flip.path}", share=share):
            return _carry_out(plan, flip, surroundings, watching, use_controls)
    finally:
        flip.close()


def _check_choice(use_controls: str) -> None:
    if use_controls not in CONTROLS:
        expected = f"one of {', '.join(CONTROLS)}"
        raise BadInput.expected("controls", "of the flip", expected, use_controls)


def _carry_out(
    plan: Plan,
    flip: FlipFolder,
    surroundings: Surroundings,
    watching: Watching,
    use_controls: str,
) -> FlipVerdict:
    begun_s = time.monotonic()
    judgement, interrupted = None, False
    if use_controls == "run":
        # A pair first: an arm that hangs is decided by it, and would hang in every control too.
        judgement, interrupted = _measure(plan, flip, watching, "flip", most=1)
        if judgement is None and _run_controls(plan, flip.path, surroundings, watching):
            judgement = judge(plan, flip.pairs, "interrupted during the controls")
            interrupted = True
    if judgement is None:
        judgement, interrupted = _measure(plan, flip, watching, "flip")
    assert judgement is not None, "a flip that has ended has a verdict"
    found: dict[str, Control | None] = dict.fromkeys((controls.SAME, controls.SLOW))
    why_none = "skipped"
    if use_controls != "skip":
        found = controls.find(plan, surroundings)
        why_none = "none of this machine and spec within a day"
    verdict = conclude(
        plan,
        flip,
        judgement,
        controls.answers(plan, found, why_none),
        surroundings,
        interrupted=interrupted,
        cost_s=time.monotonic() - begun_s,
    )
    flip.write(verdict)
    return verdict


def _measure(
    plan: Plan, flip: FlipFolder, watching: Watching, what: str, *, most: int | None = None
) -> tuple[Judgement | None, bool]:
    """Pairs until the judge has heard enough, or there are `most` of them; the judgement, None in the
    second case, and whether it was interrupted."""
    order = plan.order()
    ended, interrupted = "", False
    while (judgement := judge(plan, flip.pairs, ended)) is None:
        if len(flip.pairs) == most:
            break
        ended = why_no_more(plan, flip.pairs)
        if ended:
            continue
        number = len(flip.pairs) + 1
        try:
            pair = _run_pair(plan, flip, number, order[number - 1], watching, what)
        except (Stopped, KeyboardInterrupt):
            ended, interrupted = f"interrupted after {count_of(number - 1)}", True
            continue
        flip.add(pair)
        watching.on_pair(what, pair, interval_of(plan, flip.pairs))
    return judgement, interrupted


def why_no_more(plan: Plan, pairs: Sequence[Pair]) -> str:
    """Why no further pair is begun; empty when one is."""
    if len(pairs) >= plan.pairs_max:
        return f"{count_of(len(pairs))}, the most that the plan allows, decide nothing"
    spent_s = sum(pair.seconds for pair in pairs)
    next_s = max((pair.seconds for pair in pairs), default=0.0)
    if spent_s + next_s > plan.budget_s:
        text = f"the next pair would not end within {format_seconds(plan.budget_s)}"
        return f"{text}: {count_of(len(pairs))} took {format_seconds(spent_s)}"
    return ""


def _run_pair(
    plan: Plan, flip: FlipFolder, number: int, b_first: bool, watching: Watching, what: str
) -> Pair:
    begun_unix_s, begun_s = time.time(), time.monotonic()
    done: dict[bool, Outcome] = {}
    for b in (b_first, not b_first):
        arm = "B" if b else "A"
        done[b] = run_arm(
            plan,
            b=b,
            pair=number,
            folder=flip.run_folder(number, arm),
            watch=functools.partial(watching.on_arm, what, number, arm),
            stop=watching.stop,
        )
    a, b_outcome = done[False], done[True]
    return Pair(
        number=number,
        b_first=b_first,
        begun_unix_s=begun_unix_s,
        seconds=time.monotonic() - begun_s,
        a=a,
        b=b_outcome,
        proofs={
            "flipped": proof.flipped(plan, a, b_outcome, flip.path),
            "equal": proof.equal(plan, a, b_outcome),
            "parity": proof.parity(plan, a, b_outcome),
        },
    )


def _run_controls(plan: Plan, folder: Path, surroundings: Surroundings, watching: Watching) -> bool:
    """Run the controls that a plan's metric has, and remember what they said. True when interrupted."""
    for kind in controls.kinds_of(plan):
        path = folder / "controls" / kind
        if path.exists():
            flip, control_plan = open_flip(path)  # begun before an interruption
        else:
            control_plan = plan.control(slow=kind == controls.SLOW)
            flip = create_flip(path, control_plan, surroundings)
        try:
            judgement, interrupted = _measure(control_plan, flip, watching, f"control {kind}")
        finally:
            flip.close()
        if interrupted:
            return True
        assert judgement is not None, "a control that has ended has a verdict"
        interval = judgement.interval
        control = Control(
            kind=kind,
            at_unix_s=time.time(),
            surroundings=dataclasses.asdict(surroundings),
            metric=plan.metric,
            margin=plan.margin,
            verdict=judgement.verdict,
            ratio=None if interval is None else interval.ratio,
            deviation=None if interval is None else interval.deviation,
            pairs=0 if interval is None else interval.pairs,
            folder=str(flip.path),
            plan_sha256=control_plan.sha256,
            spec=json.loads(json.dumps(plan.spec)),
        )
        controls.remember(control)
    return False
