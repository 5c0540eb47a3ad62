"""Whether a run that does not show a failure did the work of the run that did, step by step until then (`Worked`).

It did not happen counts only where the run did at least what the other one had done:

    rows        the same ones in each step, by their digests; one may be mended in its place. After a change of data: as
                many different ones and pieces of them, and each sample that the other one's sampler had asked for
    judge       it was asked as often: losses and evaluations on the log, calls of the model without gradients on the
                same rows, verdicts on the identity
    objective   the loss of the first step, before any update, is the same unless the objective or the model was
                changed; later ones depend on the rows, and as many parameters are trained
    step        none was left out: the counters of the script's loops, integers that grow by the same amount with each
                step, and the number of a batch in its pass over a loader
    call        the changed line makes the call in which the other one failed, if it made that
    training    at the same lines, and no identity contradicts it that did not contradict the other one
    cause       where the script itself had judged a number, by `raise` or `assert`, another one was computed: not the
                same one under another limit, nor a multiple of it

Logs of earlier versions have steps and batches alone.
"""

from __future__ import annotations

import ast
import contextlib
import math
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from engine.log.events import (
    IDENTITY,
    Evaluated,
    Judged,
    ScriptEnded,
    StepDone,
    Watched,
    Worked,
)
from engine.log.folder import RunFolder
from engine.log.observed import LOGS, WRONG, Observed, lines_of, log_of

_STEPS = 64
"""Number of steps from which the pace of a counter is read."""
_BEGINS = "0:"
"""Beginning of the name of the first batch of a pass."""
_SAME_LOSS = 0.02
"""Largest relative difference of two losses on the same rows, for another precision or order of sums."""
_ROUNDING = 1e-4
"""Largest relative difference of two numbers that were computed alike."""
_PIECES = 0.95
"""Least share of the other one's different pieces, as rows may be drawn at random."""
_POWER = 0.25
"""Power of a loss's rise that other losses on the same rows, such as its logarithm, have at least."""
DATA, OBJECTIVE, MODEL = KINDS = ("data", "objective", "model")
"""Kinds of a change that may be registered: what it changes on purpose."""


def work_left_out(
    a: RunFolder,
    b: RunFolder,
    was: str = "",
    now: str = "",
    *,
    key: str = "",
    same_rows: bool = False,
    kind: str = "",
    observed: Observed | None = None,
) -> str | None:
    """Return what run `b` left out of the work of run `a`, in words: empty where it did all of it, None where the logs
    do not tell. `was` and `now` are the line `key` that was changed for `b`, `kind` is one of KINDS or empty; with
    `same_rows` steps of the engine must be on the same rows. Raises RunLogError."""
    mine, its = _Run.read(a), _Run.read(b)
    for one, other in zip(mine.done, its.done, strict=False) if same_rows else ():
        if one.rows_digest and other.rows_digest and one.rows_digest != other.rows_digest:
            return f"step {one.step} of B is on other rows than A's"
    # The first such loss may be what A fails for, in its last step.
    broken = next((one.step for one in its.done if _is_broken(one)), None)
    if broken is not None and not any(map(_is_broken, mine.done[:-1])):
        return f"its loss is not finite from step {broken} on, and A's was until it failed"
    if not mine.worked or not its.worked:
        return None
    # A may have failed before it came to some of them.
    places = mine.places
    elsewhere = {
        name: its.places.get(name) for name in places if its.places.get(name) != places[name]
    }
    if elsewhere:
        return f"its training is at other lines: {elsewhere}, and {places} in A"
    assigned = _assigned(now)
    # Another model may draw other random numbers, and so rows of its own.
    makes_model = bool(assigned) and assigned <= {
        name.rpartition(".")[2] for name in mine.names.values()
    }
    kind = kind or (MODEL if makes_model else "")
    if mine.worked[0].rows is not None and its.worked[0].rows is not None:
        # One may have been registered for what the other does: each is judged by all that it left out.
        rules = (
            _samples(mine, its, is_drawn=makes_model)
            if kind in (DATA, MODEL)
            else _rows(mine, its),
            _asked(mine, its, observed),
            _objective(mine, its, kind, observed),
            _contradicted(mine, its),
            # A setting that the probe changes is none of the script's limits.
            () if "." in key and ":" not in key else _uncaused(mine, its, kind),
            _calls(mine, key, was, now),
        )
        if said := next((one for rule in rules for one in rule), ""):
            return said
    found = _counters(mine.worked, its.worked, assigned, assigned - _assigned(was))
    found += [] if kind == DATA else [_batches(mine.worked, its.worked)]
    known = [one for one in found if one is not None]
    return next((one for one in known if one), "") if known else None


@dataclass(frozen=True, slots=True)
class _Run:
    """Work of a run, by its log."""

    worked: list[Worked]
    done: list[StepDone]
    places: Mapping[str, str]
    names: Mapping[str, str]
    """Lines of the script that train, and names of its objects there; none where it did not come to them."""
    parameters: int
    judged: list[Judged]
    evaluated: list[Evaluated]
    has_ended: bool
    """Whether the script came to its own end."""

    @classmethod
    def read(cls, run: RunFolder) -> _Run:
        events = [line.event for log in LOGS for line in lines_of(log_of(run, log))]
        seen = next((one for one in events if isinstance(one, Watched)), None)
        return cls(
            [one for one in events if isinstance(one, Worked)],
            [one for one in events if isinstance(one, StepDone)],
            seen.places if seen is not None else {},
            seen.names if seen is not None else {},
            seen.parameters if seen is not None else 0,
            [one for one in events if isinstance(one, Judged)],
            [one for one in events if isinstance(one, Evaluated)],
            any(isinstance(one, ScriptEnded) and one.how == "returned" for one in events),
        )

    @property
    def last(self) -> int:
        """Number of the step to which it came."""
        return self.worked[-1].step


_LISTS = {"rows": "its loader's rows", "called": "the rows that its model is trained on"}


def _rows(a: _Run, b: _Run) -> Iterator[str]:
    """Yield where B is not on A's rows. A row may be mended in its place: it is new, and the last one of the step is
    A's, which tells it from rows that moved up."""
    for name, noun in _LISTS.items():
        known = {row for one in a.worked for row in getattr(one, name) or ()}
        taken: set[str] = set()
        for one, other in zip(a.worked, b.worked, strict=False):
            mine, its = getattr(one, name) or [], getattr(other, name) or []
            if one.failed:
                its = its[: len(mine)]
            if len(mine) != len(its):
                counts = f"{noun} are {len(its)} in step {one.step}, and {len(mine)} in A"
                yield f"{counts}; {_NAME_IT}"
                break
            others = [at for at, row in enumerate(mine) if its[at] != row]
            again = [its[at] for at in others if its[at] in known or its[at] in taken]
            if again or (others and others[-1] == len(mine) - 1):
                yield f"{noun} are others than A's in step {one.step}; {_NAME_IT}"
                break
            taken.update(its)


_NAME_IT = "a change of data is named so: `data: CHANGE`"


def _samples(a: _Run, b: _Run, *, is_drawn: bool) -> Iterator[str]:
    """Yield what a change of data left out: samples that were not asked for, fewer different rows or pieces of
    them, or, where they are not drawn at random, other ones by which only a run to its own end would tell."""
    rows, taken = sum(len(one.called) for one in a.worked), 0
    for one in b.worked:
        taken += len(one.called)
        if taken >= rows:
            if one.pieces < _PIECES * a.worked[-1].pieces:
                yield f"its first {taken} rows have {one.pieces} different pieces, A's {a.worked[-1].pieces}"
            break
    for name in ("asked", *_LISTS):
        mine, its = (
            {row for one in run.worked for row in getattr(one, name) or ()} for run in (a, b)
        )
        missing = len(mine - its)
        if name == "asked":
            if its and missing:
                yield f"its sampler did not ask for {missing} of the {len(mine)} samples that A's had (--steps)"
        elif len(its) < len(mine):
            yield f"it saw {len(its)} different rows, A {len(mine)} ({name})"
        elif 2 * missing > len(mine) and not b.has_ended and not is_drawn:
            yield f"{missing} of A's {len(mine)} rows were not seen: only a run to its own end tells (--steps)"


def _asked(a: _Run, b: _Run, observed: Observed | None) -> Iterator[str]:
    """Yield what was judged less often than in A."""
    for one, other in zip(a.done, b.done, strict=False):
        if one.loss is not None and other.loss is None:
            yield f"the loss of step {one.step} is not known, and A's is"
            break
    mine, its = (
        [one for one in run.evaluated if one.step <= a.last and one.loss is not None]
        for run in (a, b)
    )
    if len(its) < len(mine):
        yield f"it logged {len(its)} evaluations by step {a.last}, A {len(mine)}"
    rows, others = (
        Counter(row for one in run.worked if one.step <= a.last for row in one.evaluated)
        for run in (a, b)
    )
    missing, more = len(rows.keys() - others.keys()), len(others.keys() - rows.keys())
    if others.total() < rows.total() or missing > min(more, len(rows) // 2):
        yield (
            f"it evaluated on {others.total()} rows by step {a.last}, {missing} of A's {rows.total()} not among them"
        )
    if observed is not None and observed.kind == IDENTITY:
        counts = [run.worked[-1].judged.get(observed.id, 0) for run in (a, b)]
        if counts[1] < counts[0]:
            yield f"{observed.name} was judged {counts[1]} times, and {counts[0]} times in A"


def _objective(a: _Run, b: _Run, kind: str, observed: Observed | None) -> Iterator[str]:
    """Yield why B trains for something else than A, or for nothing. An identity judges the objective itself."""
    mine, its = ([one.loss for one in run.done if one.step == 1] for run in (a, b))
    is_asked = kind == "" and observed is not None and observed.kind in ("exit", "alert")
    for x, y in zip(mine, its, strict=False) if is_asked else ():
        known = x is not None and y is not None and math.isfinite(x)
        if known and not math.isclose(x or 0.0, y or 0.0, rel_tol=_SAME_LOSS):
            yield (
                f"its first loss is {y:.6g}, and A's on the same rows {x:.6g}; a change of the objective or the model "
                "is named so: `objective: CHANGE`, `model: CHANGE`"
            )
    if kind != MODEL and b.parameters < a.parameters:
        yield f"it trains {b.parameters} parameters, and A {a.parameters}"
    last = [one for one in b.done if one.step >= a.last] or b.done
    losses = {one.loss for one in last}
    if len(last) > 2 and len(losses) == 1 and len({one.loss for one in a.done}) > 1:
        yield f"its loss is {last[0].loss} from step {last[0].step} on, whatever the rows"


def _uncaused(a: _Run, b: _Run, kind: str) -> Iterator[str]:
    """Yield that B computed what A did, up to the scale of its loss, where the script itself judged A."""
    end = a.worked[-1]
    is_in_step = bool(end.called or end.rows)
    if not end.raised or a.parameters != b.parameters or not (a.done or is_in_step):
        return
    for one, other in zip(a.worked, b.worked, strict=False):
        for name in (*_LISTS, "evaluated"):
            mine, its = getattr(one, name) or [], getattr(other, name) or []
            if mine != (its[: len(mine)] if one.failed else its):
                return
        if not all(map(_is_alike, one.answers, other.answers)):
            return
    at = end.step if is_in_step else end.step - 1
    losses, others = (
        {one.step: one.loss for one in run.done if one.loss is not None and one.step <= at}
        for run in (a, b)
    )
    first, its_first = losses.get(1), others.get(1)
    scale = its_first / first if first and its_first else 1.0
    text = "" if _is_alike(scale, 1.0) else "the scale of its loss and "
    is_same = all(_is_alike(others[n] / scale, losses[n]) for n in losses.keys() & others.keys())
    if is_in_step and end.held and at in others:
        is_same = is_same and any(_is_alike(others[at] / scale, one) for one in end.held)
    if is_same:
        yield f"it computed what A did until step {at}: the change is of {text}what raises, not of the training"
    elif kind == OBJECTIVE and 1.0 <= _rise(losses, at) ** _POWER <= _rise(others, at):
        yield f"the change is of the scale of its loss, which rises in step {at} too"


def _rise(losses: Mapping[int, float], step: int) -> float:
    """Return how many times as large as any before a loss is; 1 where it is not known."""
    before = max((loss for at, loss in losses.items() if at < step), default=0.0)
    return losses.get(step, before) / before if before > 0 else math.inf


def _is_alike(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_ROUNDING)


def _contradicted(a: _Run, b: _Run) -> Iterator[str]:
    """Yield an identity that B breaks, and A did not."""
    wrong, others = (
        {
            one.id: one
            for one in run.judged
            if one.by == IDENTITY and one.level in WRONG and one.step <= a.last
        }
        for run in (a, b)
    )
    for id_ in sorted(others.keys() - wrong.keys()):
        yield f"{others[id_].text}, and not in A"


def _calls(a: _Run, key: str, was: str, now: str) -> Iterator[str]:
    """Yield a call that led to A's failure, and that the changed line does not make, or only on a condition, or whose
    name it gives to something else."""
    before, after = (
        {name for tree in _parsed(one) for name in _called_always(tree)} for one in (was, now)
    )
    for place, name in (one.rsplit(" ", 1) for one in a.worked[-1].calls):
        if place == key and name in before - after:
            yield f"its line does not call `{name}`, in which A failed, or not always"
        if name in _assigned(now):
            yield f"it assigns `{name}`, in which A failed"


def _called_always(node: ast.AST) -> Iterator[str]:
    """Yield the names of what code calls whenever it runs; of a condition that is what it asks first."""
    if isinstance(node, ast.Call):
        yield ast.unparse(node.func).rpartition(".")[2]
    first = {ast.BoolOp: "values", ast.IfExp: "test", ast.If: "test"}.get(type(node))
    if first is not None:
        found = getattr(node, first)
        yield from _called_always(found[0] if isinstance(found, list) else found)
    elif not isinstance(node, _LATER):
        for one in ast.iter_child_nodes(node):
            yield from _called_always(one)


_LATER = (
    *(ast.Lambda, ast.FunctionDef, ast.ClassDef, ast.ListComp, ast.SetComp, ast.DictComp),
    *(ast.GeneratorExp, ast.For, ast.While, ast.With, ast.Try),
)
"""Code that does not run where it is written, or for each of perhaps no items, or whose failure may be caught."""


def _is_broken(step: StepDone) -> bool:
    return step.loss is not None and not math.isfinite(step.loss)


def _parsed(line: str) -> list[ast.Module]:
    """Return the syntax tree of a line; none where it is no Python."""
    for text in (line.strip(), f"{line.strip()} pass"):
        with contextlib.suppress(SyntaxError, ValueError, RecursionError):
            return [ast.parse(text)]
    return []


def _assigned(line: str) -> set[str]:
    """Return the names that a line assigns, defines or imports."""
    nodes = [one for tree in _parsed(line) for one in ast.walk(tree)]
    bound = {one.asname or one.name for one in nodes if isinstance(one, ast.alias)}
    bound |= {one.name for one in nodes if isinstance(one, (ast.FunctionDef, ast.ClassDef))}
    kinds = (ast.Name, ast.Attribute, ast.Subscript)
    stored = [one for one in nodes if isinstance(one, kinds) and type(one.ctx) is ast.Store]
    return bound | {
        ast.unparse(one).rstrip("'\"]").replace("['", ".").rpartition(".")[2] for one in stored
    }


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
