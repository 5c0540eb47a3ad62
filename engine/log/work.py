"""Whether two runs of an experiment did the same work, step by step, until one of them failed (`Worked`).

A run that leaves out the step in which the other one failed has not shown that this step can be done. It is seen by
what goes on evenly: the number of a batch in its pass over a loader, and the counters of the script's loops, integers
that grow by the same amount with each step. Where both differ from the first step on, the data were changed, which may
be meant: then the rows have to be counted, and as many (`observed.shown`).
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from itertools import pairwise

from engine.log.events import StepDone, Watched, Worked
from engine.log.folder import RunFolder
from engine.log.observed import LOGS, lines_of, log_of

_STEPS = 64
"""Number of steps from which the pace of a counter is read."""
_BEGINS = "0:"
"""Beginning of the name of the first batch of a pass."""


def work_left_out(
    a: RunFolder, b: RunFolder, was: str = "", now: str = "", *, same_rows: bool = False
) -> str | None:
    """Return what run `b` left out of the work of run `a`, in words: empty where it did all of it, None where the logs
    do not tell. `was` and `now` are the line that was changed for `b`; with `same_rows` that is not one of data, so
    that steps of the engine must be on the same rows. Raises RunLogError."""
    (its_a, places_a, done_a), (its_b, places_b, done_b) = (_work_of(run) for run in (a, b))
    for one, other in zip(done_a, done_b, strict=False) if same_rows else ():
        if one.rows_digest and other.rows_digest and one.rows_digest != other.rows_digest:
            return f"step {one.step} of B is on other rows than A's"
    # The first such loss may be what A fails for, in its last step.
    broken = next((one.step for one in done_b if _is_broken(one)), None)
    if broken is not None and not any(map(_is_broken, done_a[:-1])):
        return f"its loss is not finite from step {broken} on, and A's was until it failed"
    if not its_a or not its_b:
        return None
    # A may have failed before it came to some of them.
    elsewhere = {
        name: places_b.get(name) for name in places_a if places_b.get(name) != places_a[name]
    }
    if elsewhere:
        return f"its training is at other lines: {elsewhere}, and {places_a} in A"
    assigned = _assigned(now)
    found = [
        *_counters(its_a, its_b, assigned, assigned - _assigned(was)),
        _batches(its_a, its_b),
    ]
    known = [one for one in found if one is not None]
    return next((one for one in known if one), "") if known else None


def _is_broken(step: StepDone) -> bool:
    return step.loss is not None and not math.isfinite(step.loss)


def _work_of(run: RunFolder) -> tuple[list[Worked], Mapping[str, str], list[StepDone]]:
    """Return what the steps of a script's run worked on, the lines that make them, and the steps."""
    events = [line.event for log in LOGS for line in lines_of(log_of(run, log))]
    places = (event.places for event in events if isinstance(event, Watched))
    done = [event for event in events if isinstance(event, StepDone)]
    return [event for event in events if isinstance(event, Worked)], next(places, {}), done


def _assigned(line: str) -> set[str]:
    """Return the names that a line assigns; none where it is no Python."""
    for text in (line.strip(), f"{line.strip()} pass"):
        try:
            nodes = [*ast.walk(ast.parse(text))]
        except (SyntaxError, ValueError, RecursionError):
            continue
        kinds = (ast.Name, ast.Attribute, ast.Subscript)
        stored = [one for one in nodes if isinstance(one, kinds) and type(one.ctx) is ast.Store]
        return {
            ast.unparse(one).rstrip("'\"]").replace("['", ".").rpartition(".")[2] for one in stored
        }
    return set()


def _batches(a: Sequence[Worked], b: Sequence[Worked]) -> str | None:
    usual = {len(one.batches) for one in a if not one.failed}
    if not any(one.batches for one in a):
        return None
    first: list[str] = []
    for one, other in zip(a, b, strict=False):
        mine, its = one.batches, other.batches
        if one.failed:
            # The step was not finished: the other one may have gone on with further batches.
            if len(usual) == 1 and len(its) > max(usual):
                return f"step {one.step} of B took {len(its)} batches, each of A's {max(usual)}"
            count = min(len(mine), len(its))
            mine, its = mine[:count], its[:count]
        first = first or [name.partition(":")[2] for name in mine]
        if len(mine) != len(its) or not all(map(_is_same, mine, its)):
            if all(names and names[0].startswith(_BEGINS) for names in (mine, its)):
                return None
            rows = [name.partition(":")[2] for name in its]
            of_rows = any("." in name for name in rows)
            if of_rows and rows == first[: len(rows)]:
                return None  # the data from their begin once more
            return (
                f"step {one.step} of B is on other {'rows' if of_rows else 'batches'} "
                f"({', '.join(its) or 'none'}) than A's ({', '.join(mine) or 'none'})"
            )
    return ""


def _is_same(mine: str, its: str) -> bool:
    """Whether two batches are of the same samples. Rows that have no sampler may have been mended: then the last one is
    the same, which tells them from rows that moved up. Of a batch that a loader failed to hand out only the number is
    known."""
    (number, _, rows), (other_number, _, others) = mine.partition(":"), its.partition(":")
    if number != other_number or not rows or not others:
        return number == other_number
    return rows.rpartition(".")[2] == others.rpartition(".")[2]


def _counters(
    a: Sequence[Worked], b: Sequence[Worked], assigned: Container[str], newly: Container[str]
) -> list[str | None]:
    """Compare what counts the steps. `assigned`: the names that the changed line assigns, `newly` those that it
    did not assign before."""
    found: list[str | None] = []
    for name in sorted({name for one in a for name in one.counters}):
        variable = name.partition(".")[2]
        last = variable.rpartition(".")[2]
        mine, its = ([one.counters.get(name) for one in run if not one.failed] for run in (a, b))
        done = [one for one in mine if one is not None]
        pace = _pace(done)
        differs = any(one != other for one, other in zip(mine, its, strict=False))
        is_set = last in newly or (last in assigned and differs)
        if pace and is_set and all(y - x == pace for x, y in pairwise(done)):
            found.append(f"it assigns `{variable}`, which counts the steps of A")
        elif name in b[0].counters and last == variable:
            # Attributes are compared only where the change assigns them: others may count what it mends.
            found.append(_counter(name, a, b))
    return found


def _counter(name: str, a: Sequence[Worked], b: Sequence[Worked]) -> str | None:
    mine, its = ([one.counters.get(name) for one in run] for run in (a, b))
    done = [one.counters[name] for one in a if not one.failed and name in one.counters]
    pace = _pace(its)
    # It may begin again with each pass over the data.
    if not pace or any(y - x != pace and y != done[0] for x, y in pairwise(done)):
        return None
    for event, one, other in zip(a, mine, its, strict=False):
        if one is None or other is None:
            return None
        ahead = (other - one) / pace
        if event.failed:
            # Since the step before, the loop may have gone on, by a part of a step too, or not yet.
            gone_on = (one - done[-1]) / pace if done else 1.0
            if not 0 <= gone_on <= 1:
                return ""
            is_same = ahead <= 1 if gone_on == 0 else 0 <= ahead < 1
        else:
            is_same = ahead == 0
        if not is_same:
            return (
                f"`{name.partition('.')[2]}` is {other} in step {event.step} of B, and {one} in A's"
            )
    return ""


def _pace(values: Sequence[int | None]) -> int:
    """Return by how much a counter grows with most steps; 0 where it is none."""
    known = [one for one in values[:_STEPS] if one is not None]
    deltas = Counter(after - before for before, after in pairwise(known))
    if sum(deltas.values()) < 2:
        return 0
    ((delta, count),) = deltas.most_common(1)
    return delta if 2 * count > sum(deltas.values()) else 0
