"""Plan a flip that tests whether one change ends what was observed on a run (`Plan.observed`).

    engine flip runs/kd-1 --ends "alert stalled_at_start" --set teacher.backend=dequantized

Arm A is the run as it was, B has the change. Both run until they show the observation, or have made half as many steps
again as the run needed to show it. No setting is shortened and nothing is measured, so both evaluate and choose as the
run did.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from engine.errors import BadInput
from engine.files import read_text
from engine.flips.command import LINE
from engine.flips.plan import SHOWN, STEPS, WARM_UP_STEPS, Change, Plan, load_source, make_plan
from engine.flips.script_folder import same_code
from engine.flips.statistics import pairs_to_confirm, shown_to_confirm
from engine.flips.watched import difference, watched_plan
from engine.limits import SCRIPT
from engine.log.folder import RunFolder, read_command
from engine.log.observed import STALLS, Observed, raised_at
from engine.log.own_checks import find_own_check
from engine.log.work import DATA, KINDS, changed_by

PAIRS_MAX = 8
LONGEST_WAIT = 3.0
"""Maximum duration of an arm, relative to the time until the run showed the observation."""
LEAST_WAIT_S = 60.0
"""Minimum time limit of an arm, in seconds."""
DATA_STEPS = 5
"""Number of steps after a change of data, relative to those until the failure."""
PYTHONS_OWN = frozenset(
    {"PYTHONOPTIMIZE", "PYTHONWARNINGS", "PYTHONPATH", "PYTHONHOME", "PATH", "LD_PRELOAD"}
)
"""Variables that change which code runs: asserts, warnings, modules, the program itself."""
OBSERVERS = ("watch", "checks", "gate", "run")
"""Sections of checks, alerts and run folders: changing them hides the observation instead of ending it."""


def ending_plan(
    path: Path,
    observed: Observed,
    assignment: str,
    *,
    order_seed: int,
    attempt: int = 1,
    steps: int | None = None,
    budget_s: float | None = None,
) -> Plan:
    """Make the plan of test number `attempt` of a finding. `assignment` is B's change as `engine flip --propose` names
    it: a setting, a variable, or words of a command. The prefix `data: `, `objective: ` or `model: ` says that the
    change alters this on purpose. Raises BadInput, UsageError."""
    kind, assignment = split_kind(assignment)
    # Only a run over all rows shows whether those of the failure come later.
    for_rows = DATA_STEPS * observed.step if kind == DATA else 0
    steps = steps or max(steps_past(observed), for_rows)
    how: dict[str, Any] = {"order_seed": order_seed, "steps": steps, "attempt": attempt}
    if read_command(RunFolder(path)) is not None:
        plan = watched_plan(path, difference(assignment), **how)
    else:
        plan = make_plan(path, [assignment], **how)
        plan = dataclasses.replace(plan, spec=settings_as_run(path))
    (change,) = plan.changes
    section = change.key.partition(".")[0]
    # Fewer evaluations observe less; a stall is observed without any.
    if section in OBSERVERS or (section == "eval" and observed.id not in STALLS):
        found = "a setting of what observes it"
        raise BadInput.expected("change", str(change), "a setting of the job", found)
    _refuse_hiding(path, observed, change)
    if plan.steps < observed.step:
        text = f"at least {observed.step}, after which the run showed it"
        raise BadInput.expected("steps", "of the flip", text, str(plan.steps))
    pairs = pairs_to_confirm(attempt)
    limit_s = max(LEAST_WAIT_S, LONGEST_WAIT * max(observed.after_s, observed.window_s))
    values = f"{change.key}={change.text(b=False)} and not with {change.text(b=True)}"
    return dataclasses.replace(
        plan,
        hypothesis=f"{observed.name} is there with {values}",
        metric=SHOWN,
        observed=observed,
        changes_on_purpose=kind,
        pairs_min=pairs,
        pairs_max=max(PAIRS_MAX, pairs, shown_to_confirm(attempt)),
        run_limit_s=limit_s if budget_s is None else budget_s / 2 / pairs,
        budget_s=budget_s or 2 * pairs * limit_s,
    )


def split_kind(assignment: str) -> tuple[str, str]:
    """Split an assignment into its prefix, one of KINDS or empty, and the change itself."""
    kind, colon, change = assignment.partition(": ")
    return (kind, change) if colon and kind in KINDS else ("", assignment)


def steps_past(observed: Observed) -> int:
    """Return the steps that a run must make before it counts as one that does not show the observation."""
    return max(STEPS, observed.step + WARM_UP_STEPS, -(-3 * observed.step // 2))


def settings_as_run(path: Path) -> dict[str, dict[str, Any]]:
    """Return the settings of the run itself, without checkpoints, and without ending it when it hangs."""
    tree = load_source(path).to_dict()
    tree["checkpoint"] |= {"every": 0, "at_end": False}
    tree["watch"]["on_stall"] = "report"
    return tree


def _refuse_hiding(path: Path, observed: Observed, change: Change) -> None:
    """Refuse a change of a check, or of the statement that raises: it would hide the failure. Raises BadInput."""

    def refused(expected: str, found: str) -> BadInput:
        return BadInput.expected("change", str(change), expected, found)

    if change.key.startswith("APR_") or change.key in PYTHONS_OWN:
        expected = "a variable of the job"
        raise refused(expected, "a variable that changes what Python checks, or the probe")
    names = changed_by(change.key, change.text(b=False), change.text(b=True))
    if any("seed" in name.lower() for name in names):
        raise refused("a cause", "another seed, which is chance: each pair has its own seed")
    found = LINE.fullmatch(change.key)
    command = read_command(RunFolder(path))
    if found is None or command is None:
        return
    folder, number = Path(command.folder), int(found["number"])
    if same_code(folder, change.key, change.text(b=True)):
        raise refused("a change of the code", "a change of comments or spaces only")
    source = {found["file"]: read_text(folder / found["file"], "script", SCRIPT)}
    if (
        raised_at(observed)
        and (found["file"], number) in find_own_check(source, raised_at(observed)).lines
    ):
        raise refused("a change that leaves the failure possible", "the statement that raises it")
