"""Decide whether run B, which does not show a failure, did the work of run A, which shows it, step by step up to the
failure (`Worked`).

B counts as free of the failure only if it did at least the work that A had done:

    rows        each step has the same rows, by their digests; a row may be corrected at its position. After a change of
                data: as many distinct rows and parts of rows, and every sample that A's sampler yielded
    judge       it has as many results that could show the failure: logged losses and evaluations, and calls of the
                model without gradients on the same rows. For an identity half as many results are enough, because they
                may come later
    objective   the loss of the first step, before any update, is the same unless the objective or the model was
                changed; as many parameters are trained; the outputs and the last losses still depend on the rows
    step        the changed line does not set an integer of the script that grows with each step
    call        the changed line makes the call in which A failed, if A's line made it
    training    it trains at the same lines, and every identity that it contradicts was also contradicted by A
    learning    its loss fell at least half as far as A's did before the failure, and does not rise until the end as A's
                did: a run that hardly learns, or fails later, does not show the failure either
    cause       if A was ended by a check of a number in the script itself, the change is not of a value that the check
                reads, and B computed a different number: not the same number under another limit, nor a multiple of it
"""

from __future__ import annotations

import ast
import math
import statistics
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, takewhile
from types import MappingProxyType

from engine.log.events import (
    ALERT,
    IDENTITY,
    Evaluated,
    Judged,
    ScriptEnded,
    StepDone,
    Watched,
    Worked,
)
from engine.log.folder import RunFolder
from engine.log.observed import LOGS, WRONG, Observed, lines_of, log_of, raised_at
from engine.log.own_checks import (
    OwnCheck,
    assigned_names,
    changed_names,
    find_own_check,
    parse_line,
)

_STEPS = 64
"""Number of last steps that are tested for a rising loss."""
_SAME_LOSS = 0.02
"""Maximum relative difference of two losses on the same rows that differ only in precision or in the order of
sums."""
_SLOW_S = 0.02
"""Minimum difference of two durations of a step that is no noise of the machine, in seconds."""
_ROUNDING = 1e-4
"""Maximum relative difference of two numbers that were computed in the same way."""
_PIECES = 0.95
"""Minimum number of distinct parts of rows, relative to A's; below 1 because rows may be drawn at random."""
_STANDS_OUT = 2.0
"""Minimum ratio of A's largest loss to its median loss from which B's largest loss may not be in the same step."""
_EXPLODED = 1000.0
"""Ratio of a loss to that of the first step from which it has exploded."""
_SLOWED = 1.5
"""Ratio of B's duration of a step to A's from which a wait is diluted instead of ended."""
_OF_TIME = (
    "data_wait",
    "slow_part",
    "unaccounted",
    "seldom_training",
    "gpu_idle",
    "cpu_bound_teacher",
)
"""Alerts on shares of the time, which fall by themselves where everything else takes longer."""
_NOISE = 4.0
"""Minimum change of a loss that is more than noise, in median differences of consecutive losses: losses that only
fluctuate change by up to 3."""
_LEARNT = 0.5
"""Minimum fall of B's loss, relative to the fall of A's before it failed."""
_CHANCE = 2.33
"""Number of standard deviations that chance exceeds in 1 % of cases."""
_IN_A_ROW = 5
"""Number of losses whose median is taken."""
DATA, OBJECTIVE, MODEL = KINDS = ("data", "objective", "model")
"""Kinds of change that may be registered: the part of the training that the change is intended to alter."""


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
    scales_updates: bool = False,
    sources: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return, in words, the work of run `a` that run `b` left out; empty if it did all of it, or if the logs do not
    show it. `was` and `now` are the line `key` before and after the change for `b`; `kind` is one of KINDS or empty.
    With `same_rows`, the steps of an engine run must be on the same rows. With `scales_updates`, which means that the
    change can make updates arbitrarily small, the loss must fall. `sources` are the source texts of A's script by
    path. Raises RunLogError."""
    run_a, run_b = _Run.read(a), _Run.read(b)
    for step, step_b in zip(run_a.done, run_b.done, strict=False) if same_rows else ():
        if step.rows_digest and step_b.rows_digest and step.rows_digest != step_b.rows_digest:
            return f"step {step.step} of B is on other rows than A's"
    # A non-finite loss in the last step may be A's failure.
    broken = next((step.step for step in run_b.done if _is_broken(step)), None)
    if broken is not None and not any(map(_is_broken, run_a.done[:-1])):
        return f"its loss is not finite from step {broken} on, and A's was until it failed"
    if text := next(_learnt_less(run_a, run_b, kind, observed, scales_updates=scales_updates), ""):
        return text
    is_of_time = observed is not None and observed.kind == ALERT and observed.id in _OF_TIME
    if is_of_time and run_b.step_s > _SLOWED * run_a.step_s > 0:
        times = run_b.step_s / run_a.step_s
        return f"its steps take {times:.3g} times as long as A's: a share of the time falls by that alone"
    if not run_a.worked or not run_b.worked:
        return ""
    # A may have failed before it reached some of these lines.
    places = run_a.places
    moved = {
        name: run_b.places.get(name) for name in places if run_b.places.get(name) != places[name]
    }
    if moved:
        return f"it trains at other lines: {moved}, and {places} in A"
    assigned = assigned_names(now)
    # Another model may draw other random numbers, and so other rows.
    makes_model = bool(assigned) and assigned <= {
        name.rpartition(".")[2] for name in run_a.names.values()
    }
    named, kind = kind, kind or (MODEL if makes_model else "")
    # A change may be registered as the wrong kind, so it must pass every rule.
    rules = (
        _missing_samples(run_a, run_b, kind, is_drawn=makes_model)
        if kind in (DATA, MODEL)
        else _other_rows(run_a, run_b),
        _judged_less(run_a, run_b, observed),
        _other_objective(run_a, run_b, kind, observed),
        _new_contradictions(run_a, run_b),
        _missing_calls(run_a, key, was, now),
        _unjudged(run_a, run_b, named, _own_check(observed, sources), changed_by(key, was, now)),
        _other_counts(run_a, run_b, assigned, assigned - assigned_names(was)),
    )
    return next((found for rule in rules for found in rule), "")


@dataclass(frozen=True, slots=True)
class _Run:
    """Work of a run, according to its log."""

    worked: list[Worked]
    done: list[StepDone]
    places: Mapping[str, str]
    names: Mapping[str, str]
    """Lines of the script that train, and the names of its objects in these lines; empty if the script did not reach
    them."""
    parameters: int
    judged: list[Judged]
    evaluated: list[Evaluated]
    has_ended: bool
    """Whether the script returned by itself."""

    @classmethod
    def read(cls, run: RunFolder) -> _Run:
        events = [line.event for log in LOGS for line in lines_of(log_of(run, log))]
        watched = next((event for event in events if isinstance(event, Watched)), None)
        return cls(
            [event for event in events if isinstance(event, Worked)],
            [event for event in events if isinstance(event, StepDone)],
            watched.places if watched is not None else {},
            watched.names if watched is not None else {},
            watched.parameters if watched is not None else 0,
            [event for event in events if isinstance(event, Judged)],
            [event for event in events if isinstance(event, Evaluated)],
            any(isinstance(event, ScriptEnded) and event.how == "returned" for event in events),
        )

    @property
    def last(self) -> int:
        """Number of the last step."""
        return self.worked[-1].step

    @property
    def losses(self) -> list[float]:
        """Losses of the steps up to the first step without a known loss; a non-finite loss is infinite."""
        known = takewhile(lambda step: step.loss is not None, self.done)
        return [math.inf if _is_broken(step) else step.loss or 0.0 for step in known]

    @property
    def step_s(self) -> float:
        """Median duration of a step, in seconds."""
        return statistics.median([step.step_s or 0.0 for step in self.done] or [0.0])


_LISTS = {"rows": "its loader's rows", "called": "the rows that its model is trained on"}


def _other_rows(a: _Run, b: _Run) -> Iterator[str]:
    """Yield the differences between B's rows and A's. A row may be corrected at its position: it is then new, and the
    last row of the step is still A's, which distinguishes a corrected row from rows that moved up."""
    for name, noun in _LISTS.items():
        known = {row for step_a in a.worked for row in getattr(step_a, name) or ()}
        new_rows: set[str] = set()
        for step_a, step_b in zip(a.worked, b.worked, strict=False):
            rows_a, rows_b = getattr(step_a, name) or [], getattr(step_b, name) or []
            if step_a.failed:
                rows_b = rows_b[: len(rows_a)]
            if len(rows_a) != len(rows_b):
                counts = f"{noun} are {len(rows_b)} in step {step_a.step}, and {len(rows_a)} in A"
                yield f"{counts}; {_NAME_IT}"
                break
            changed = [at for at, row in enumerate(rows_a) if rows_b[at] != row]
            repeated = [
                rows_b[at] for at in changed if rows_b[at] in known or rows_b[at] in new_rows
            ]
            if repeated or (changed and changed[-1] == len(rows_a) - 1):
                yield f"{noun} differ from A's in step {step_a.step}; {_NAME_IT}"
                break
            new_rows.update(rows_b)


_NAME_IT = "register a change of data as `data: CHANGE`"
_NAME_THEM = (
    "register a change of the objective or the model as `objective: CHANGE` or `model: CHANGE`"
)


def _missing_samples(a: _Run, b: _Run, kind: str, *, is_drawn: bool) -> Iterator[str]:
    """Yield what a change of data left out: samples that the sampler did not yield, and fewer distinct rows or parts
    of rows. If rows are not drawn at random and most of A's are missing, or after a change of data one of the step in
    which A failed, only a run to the end of the script can show whether they come later."""
    row_count, count = sum(len(step.called) for step in a.worked), 0
    for step in b.worked:
        count += len(step.called)
        if count >= row_count:
            if step.pieces < _PIECES * a.worked[-1].pieces:
                yield f"its first {count} rows have {step.pieces} distinct parts, A's have {a.worked[-1].pieces}"
            break
    for name in ("asked", *_LISTS):
        rows_a, rows_b = (
            {row for step in run.worked for row in getattr(step, name) or ()} for run in (a, b)
        )
        missing = len(rows_a - rows_b)
        # The script may have raised after its step, before it fetched the next rows.
        steps = [rows for step in a.worked[-2:] if (rows := getattr(step, name))]
        last = {*(steps[-1] if steps else ())} - rows_b
        if name == "asked":
            if rows_b and missing:
                yield f"its sampler did not yield {missing} of the {len(rows_a)} samples that A's did (--steps)"
        elif len(rows_b) < len(rows_a):
            yield f"it had {len(rows_b)} distinct rows, A {len(rows_a)} ({name})"
        elif 2 * missing > len(rows_a) and not b.has_ended and not is_drawn:
            yield (
                f"{missing} of A's {len(rows_a)} rows are missing: only a run to the end of the script shows "
                "whether they come later (--steps)"
            )
        elif last and missing == len(last) and kind == DATA and not b.has_ended:
            # Rows that come again show that all have been read once.
            read = Counter(row for step in b.worked for row in getattr(step, name) or ())
            if read.total() - len(read) < len(steps[-1]):
                yield (
                    f"{len(last)} rows of the step in which A failed are missing: only a run over all rows shows "
                    "whether they come later (--steps)"
                )


def _judged_less(a: _Run, b: _Run, observed: Observed | None) -> Iterator[str]:
    """Yield the kinds of results that B has fewer of than A."""
    is_alert = observed is not None and observed.kind == ALERT
    for step_a, step_b in zip(a.done, b.done, strict=False):
        for name in ("loss", "grad_norm")[: 1 + is_alert]:
            if getattr(step_a, name) is not None and getattr(step_b, name) is None:
                yield f"the {name} of step {step_a.step} is not known in B, but known in A"
                return
    evaluated_a, evaluated_b = (
        [event for event in run.evaluated if event.step <= a.last and event.loss is not None]
        for run in (a, b)
    )
    if len(evaluated_b) < len(evaluated_a):
        yield f"it logged {len(evaluated_b)} evaluations by step {a.last}, A {len(evaluated_a)}"
    rows_a, rows_b = (
        Counter(row for step in run.worked if step.step <= a.last for row in step.evaluated)
        for run in (a, b)
    )
    missing, extra = len(rows_a.keys() - rows_b.keys()), len(rows_b.keys() - rows_a.keys())
    if rows_b.total() < rows_a.total() or missing > min(extra, len(rows_a) // 2):
        yield (
            f"it evaluated on {rows_b.total()} rows by step {a.last}, {missing} of A's {rows_a.total()} not among them"
        )
    if observed is not None and observed.kind == IDENTITY:
        counts = [run.worked[-1].judged.get(observed.id, 0) for run in (a, b)]
        if 2 * counts[1] < counts[0]:
            yield f"{observed.name} has {counts[1]} results, and {counts[0]} in A"


def _other_objective(a: _Run, b: _Run, kind: str, observed: Observed | None) -> Iterator[str]:
    """Yield the reasons why B trains for another objective than A, or for none. The first loss and its scale are not
    compared for an identity, which itself judges the objective."""
    first_a, first_b = ([step.loss for step in run.done if step.step == 1] for run in (a, b))
    compares_exit = observed is not None and observed.kind in ("exit", "alert")
    compares = kind == "" and compares_exit
    for loss_a, loss_b in zip(first_a, first_b, strict=False) if compares else ():
        known = loss_a is not None and loss_b is not None and math.isfinite(loss_a)
        if known and not math.isclose(loss_a or 0.0, loss_b or 0.0, rel_tol=_SAME_LOSS):
            yield (
                f"its first loss is {loss_b:.6g}, and A's on the same rows {loss_a:.6g}; {_NAME_THEM}"
            )
    if kind != MODEL and b.parameters < a.parameters:
        yield f"it trains {b.parameters} parameters, and A {a.parameters}"
    if kind == OBJECTIVE and observed is not None and observed.kind == ALERT:
        yield from _largest_there_too(a, b)
    if kind == OBJECTIVE and compares_exit:
        yield from _no_objective(b)
    answers_a, answers_b = ([one for step in run.worked for one in step.answers] for run in (a, b))
    if len(answers_b) > 2 and len({*answers_b}) == 1 < len({*answers_a}):
        yield f"its model answers {answers_b[0]:g} without gradients, whatever the rows"
    last = [step for step in b.done if step.step >= a.last] or b.done
    losses = {step.loss for step in last}
    if len(last) > 2 and len(losses) == 1 and len({step.loss for step in a.done}) > 1:
        yield f"its loss is {last[0].loss} from step {last[0].step} on, whatever the rows"


def _no_objective(b: _Run) -> Iterator[str]:
    """Yield a step in which B's objective trains nothing, or one in which its loss has exploded."""
    losses = b.losses
    zero = next((at for at, loss in enumerate(losses) if loss == 0), None)
    if zero is not None and any(losses):
        yield f"its loss is exactly 0 in step {b.done[zero].step}: nothing is trained on its rows"
    if losses and losses[0] and max(losses) > _EXPLODED * abs(losses[0]):
        yield f"its own loss rises from {losses[0]:.3g} to {max(losses):.3g}"


def _largest_there_too(a: _Run, b: _Run) -> Iterator[str]:
    """Yield the step in which A's loss is far above its others, if B's loss is also largest in that step. That is so
    for every increasing function of A's loss, such as its logarithm."""
    losses_a, losses_b = a.losses, b.losses[: len(a.losses)]
    if len(losses_a) > 2 and losses_b:
        at = losses_a.index(max(losses_a))
        stands_out = losses_a[at] >= _STANDS_OUT * statistics.median(losses_a)
        if at > 0 and stands_out and at < len(losses_b) and losses_b[at] >= max(losses_b):
            yield f"the change only rescales the loss, which is also largest in step {at + 1}"


def _learnt_less(
    a: _Run, b: _Run, kind: str, observed: Observed | None, *, scales_updates: bool
) -> Iterator[str]:
    """Yield that B's loss fell less than A's, or rises until the end as A's did. Not for an identity, which itself
    judges the training."""
    losses_a, losses_b = a.losses, [loss for loss in b.losses if math.isfinite(loss)]
    if observed is None or observed.kind == IDENTITY or not losses_a:
        return
    fall_a, fall_b = _fall(losses_a[:-1]), _fall(losses_b)
    if kind != OBJECTIVE and fall_b < _LEARNT * fall_a:
        yield (
            f"its loss fell by {fall_b:.3g}, and A's by {fall_a:.3g} before it failed: "
            f"a run that learns as much tells (--steps)"
        )
    if scales_updates and not fall_b and len(losses_b) >= 2 * _IN_A_ROW:
        yield f"its loss did not fall in {len(losses_b)} steps: a run that learns tells (--steps)"
    rose = losses_a[-1] >= _STANDS_OUT * statistics.median(losses_a)
    if rose and _rises(losses_b[len(losses_b) // 2 :]):
        yield "its loss rises to its end, as A's did: it may fail later (--steps)"


def _fall(losses: Sequence[float]) -> float:
    """Return how far a loss falls; 0 if the fall may be noise, or if too few losses are known."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    if len(finite) < 2 * _IN_A_ROW:
        return 0.0
    lowest = min(
        statistics.median(finite[at : at + _IN_A_ROW]) for at in range(len(finite) - _IN_A_ROW + 1)
    )
    noise = statistics.median(abs(after - before) for before, after in pairwise(finite))
    fall = statistics.median(finite[:3]) - lowest
    return fall if fall > _NOISE * noise else 0.0


def _rises(losses: Sequence[float]) -> bool:
    """Return whether losses rise by more than chance, by the Mann-Kendall test: the number of pairs whose later loss
    is larger, compared with its distribution under random order."""
    last = losses[-_STEPS:]
    n, signs = len(last), sum((y > x) - (y < x) for x, y in combinations(last, 2))
    return signs - 1 > _CHANCE * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)


def _own_check(observed: Observed | None, sources: Mapping[str, str]) -> OwnCheck:
    """Return the check of the script that ended A; empty if something else ended it."""
    if observed is None or observed.kind != "exit":
        return OwnCheck()
    place = raised_at(observed)
    is_exception = place is not None or "Error" in observed.sign
    return find_own_check(sources, place) if place or not is_exception else OwnCheck()


def changed_by(key: str, was: str, now: str) -> set[str]:
    """Return the names that a change touches: a line and the names that it assigns, options of a command, or a
    variable."""
    if ":" in key:
        return {key, *changed_names(was, now)}
    options = {word.partition("=")[0] for word in now.split() if word.startswith("--")}
    return {key, *options, *(option[2:].replace("-", "_") for option in options)}


def _unjudged(a: _Run, b: _Run, kind: str, check: OwnCheck, changed: set[str]) -> Iterator[str]:
    """Yield the reasons why the script's check that ended A did not judge a different computation in B: the change is
    of a value that the check reads, or B computed the same as A except for the scale of its loss."""
    end = a.worked[-1]
    is_in_step = end.failed and bool(end.called or end.rows)
    if not (end.raised or check.lines or changed & check.around):
        return
    for name in sorted(
        changed & (check.constants | {f"{file}:{line}" for file, line in check.lines})
    ):
        yield f"it changes `{name}`, which the script's own check uses, so the checked number may be unchanged"
    if a.done and check.lines and not check.loops and not b.has_ended:
        yield "A failed after its last step, and B was ended before its own (--steps)"
    if not (a.done or is_in_step):
        return
    for step_a, step_b in zip(a.worked, b.worked, strict=False):
        for name in (*_LISTS, "evaluated"):
            rows_a, rows_b = getattr(step_a, name) or [], getattr(step_b, name) or []
            if rows_a != (rows_b[: len(rows_a)] if step_a.failed else rows_b):
                return
    for name in sorted(changed & check.reads) if kind == "" else ():
        yield f"it changes `{name}`, which the script's own check reads; {_NAME_THEM}"
    answers = (
        _is_alike(*pair)
        for steps in zip(a.worked, b.worked, strict=False)
        for pair in zip(*(step.answers for step in steps), strict=False)
    )
    # The check may be of the duration.
    is_faster = 2 * b.step_s < a.step_s and a.step_s - b.step_s > _SLOW_S
    if a.parameters != b.parameters or not all(answers) or is_faster:
        return
    at = end.step if is_in_step or not end.failed else end.step - 1
    losses_a, losses_b = (
        {step.step: step.loss for step in run.done if step.loss is not None and step.step <= at}
        for run in (a, b)
    )
    first_a, first_b = losses_a.get(1), losses_b.get(1)
    scale = first_b / first_a if first_a and first_b else 1.0
    text = "" if _is_alike(scale, 1.0) else "the scale of its loss and "
    is_same = all(
        _is_alike(losses_b[n] / scale, losses_a[n]) for n in losses_a.keys() & losses_b.keys()
    )
    if is_in_step and end.held and at in losses_b:
        is_same = is_same and any(_is_alike(losses_b[at] / scale, held) for held in end.held)
    if is_same:
        yield (
            f"it computed what A did until step {at}: the change is of {text}the code that raises, not of the "
            "training"
        )
    elif kind == OBJECTIVE:
        yield from _largest_there_too(a, b)


def _is_alike(left: float, right: float) -> bool:
    return math.isclose(left, right, rel_tol=_ROUNDING)


def _new_contradictions(a: _Run, b: _Run) -> Iterator[str]:
    """Yield each identity that B contradicts and A does not."""
    wrong_a, wrong_b = (
        {
            judged.id: judged
            for judged in run.judged
            if judged.by == IDENTITY and judged.level in WRONG and judged.step <= a.last
        }
        for run in (a, b)
    )
    for id_ in sorted(wrong_b.keys() - wrong_a.keys()):
        yield f"{wrong_b[id_].text}, which is not so in A"


def _missing_calls(a: _Run, key: str, was: str, now: str) -> Iterator[str]:
    """Yield each call on the way to A's failure that the changed line no longer makes, makes only under a condition,
    or whose name it assigns."""
    calls_before, calls_after = (
        {name for tree in parse_line(text) for name in _calls_always(tree)} for text in (was, now)
    )
    for place, name in (text.rsplit(" ", 1) for text in a.worked[-1].calls):
        if place == key and name in calls_before - calls_after:
            yield f"its line does not call `{name}`, in which A failed, or not always"
        if name in assigned_names(now):
            yield f"it assigns `{name}`, in which A failed"


def _calls_always(node: ast.AST) -> Iterator[str]:
    """Yield the names that code calls whenever it runs; of a condition, only the calls in the operand that is
    evaluated first."""
    if isinstance(node, ast.Call):
        yield ast.unparse(node.func).rpartition(".")[2]
    first = {ast.BoolOp: "values", ast.IfExp: "test", ast.If: "test"}.get(type(node))
    if first is not None:
        condition = getattr(node, first)
        yield from _calls_always(condition[0] if isinstance(condition, list) else condition)
    elif not isinstance(node, _LATER):
        for child in ast.iter_child_nodes(node):
            yield from _calls_always(child)


_LATER = (
    *(ast.Lambda, ast.FunctionDef, ast.ClassDef, ast.ListComp, ast.SetComp, ast.DictComp),
    *(ast.GeneratorExp, ast.For, ast.While, ast.With, ast.Try),
)
"""Code that runs elsewhere or later, may not run for any item, or whose exceptions may be caught."""


def _is_broken(step: StepDone) -> bool:
    return step.loss is not None and not math.isfinite(step.loss)


def _other_counts(
    a: _Run, b: _Run, assigned: Container[str], newly: Container[str]
) -> Iterator[str]:
    """Yield each variable that grows with the steps of A and that B sets differently. `assigned` are the names that
    the changed line assigns, `newly` those that it did not assign before."""
    for name in sorted({name for step in a.worked for name in step.counters}):
        values_a, values_b = (
            [step.counters.get(name) for step in run.worked if not step.failed] for run in (a, b)
        )
        known = [value for value in values_a if value is not None]
        last = name.rpartition(".")[2]
        differs = any(x != y for x, y in zip(values_a, values_b, strict=False))
        is_set = last in newly or (last in assigned and differs)
        if is_set and len(known) > 2 and all(y > x for x, y in pairwise(known)):
            yield f"it assigns `{name.partition('.')[2]}`, which counts the steps of A"
