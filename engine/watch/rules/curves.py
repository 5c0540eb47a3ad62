"""Rules about the curves of an imported log, evaluated once when all of it has been read.

None of them fires on the curves of a healthy training: losses that are meant to rise, warm restarts, a curriculum that
becomes harder, small noisy evaluation sets, schedules that end at 0, evaluations that take their time.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from engine.units import format_seconds
from engine.watch.rules.loss import rate_and_norm
from engine.watch.rules.rule import CannotJudge, Case, Symptom, mean, median, rule, sigma

ROWS = 60
"""Minimum number of rows of a curve that is judged."""
PARTS = 40
"""Number of windows into which a loss is divided; the medians of the windows are its smoothed curve."""
LEARNT = 0.3
"""Minimum fall of a loss before it can count as diverged, as a share of its first level."""
LOST = 0.5
"""Minimum rise of a diverged loss, as a share of its fall before."""
SIGMAS = 6.0
"""Minimum rise of a diverged loss, in robust standard deviations of the losses just before it."""
RECOVERY = 0.05
"""Fall of the loss after its rise from which the training counts as recovered, as a share of the loss."""
VOCABULARIES = (
    1000,
    30522,
    32000,
    32768,
    50257,
    50304,
    65536,
    100277,
    128256,
    129280,
    151936,
    256000,
    262144,
)
"""Sizes of common vocabularies, for logs without a vocabulary size."""
NEAR, FLAT = 0.01, 0.01
"""Maximum distance of a flat loss from ln V, and maximum range of its levels, both as shares of the loss."""
DEAD_RATE, DEAD_SHARE, DEAD_ROWS = 1e-6, 0.2, 20
"""Limits of a dead learning rate: its share of the peak, the share of the rows with it, and their minimum number."""
BELOW, BELOW_NATS, BELOW_EVALS = 1 / 3, 0.3, 3
"""Limits of a held-out loss that is too low: its ratio to the training loss, its distance below it in nats, and the
number of evaluations."""
GROWS, GROWS_POINTS, GROWS_EVENLY = 0.15, 20, 0.5
"""Limits of growing memory: its growth as a share, the number of readings, and the smallest growth between quarters
of the run relative to the mean growth."""
SLOW_TIMES, SLOW_LEAST, SLOW_SHARE, SLOW_REGULAR = 3.0, 5, 0.15, 0.8
"""Limits of slow steps: the ratio of their time to the median, their number, the share of the total time that they
lose, and the share of them that come at one interval."""
SLOW_PART = 0.25
"""Minimum time that a slow step loses, as a share of the time that the slowest steps lose: a step of a few milliseconds
is often some milliseconds late."""
GAP_S, GAP_TIMES, GAP_OTHERS = 300.0, 30.0, 3.0
"""Limits of a gap: its seconds, its ratio to the median step time, and its ratio to the second longest gap."""


def _rows_of_whole_log(case: Case, least: int = ROWS) -> range:
    """Return all rows of an imported log. Raises CannotJudge if the log is not imported or not read to its end.
    --"""
    if case.view.imported is None:
        raise CannotJudge("only an imported log is judged")
    if not case.is_over:
        raise CannotJudge("the log is not read to its end")
    return case.steps(len(case.view.steps), at_least=least, session=False)


@rule(
    reads=("loss",),
    threshold=f"a loss that had fallen by {LEARNT:.0%} loses {LOST:.0%} of that or more, by {SIGMAS:g} robust sigmas, "
    "stays up and does not learn again, unless it may be meant to rise",
)
def loss_diverged(case: Case) -> Symptom | None:
    rows = _rows_of_whole_log(case)
    case.require_loss_should_fall()
    pairs = case.pairs("loss", "step", rows)
    losses = [loss for loss, _ in pairs]
    if len(losses) < ROWS or min(losses) <= 0:
        raise CannotJudge(f"needs {ROWS} losses above 0")
    window = max(3, len(losses) // PARTS)
    levels = [median(losses[at : at + window]) for at in range(0, len(losses) - window + 1, window)]
    first, last = levels[0], median(levels[-3:])
    at = min(range(len(levels)), key=levels.__getitem__)
    best = levels[at]
    if best > (1 - LEARNT) * first or last - best < LOST * (first - best):
        return None
    limit = best + 0.2 * (last - best)
    smoothed = [median(losses[max(0, i - 4) : i + 1]) for i in range(len(losses))]
    begin = max((i for i, level in enumerate(smoothed) if level <= limit), default=0) + 1
    after = losses[begin:]
    before = losses[max(0, begin - 2 * window) : begin]
    if len(after) < 10 or len(before) < 5 or last - best < SIGMAS * sigma(before):
        return None
    third = len(after) // 3
    # A harder stage of a curriculum raises the loss within one step, to less than at the start, and is then learnt.
    if median(after[-third:]) < (1 - RECOVERY) * median(after[third : 2 * third]) and last < first:
        return None
    step = int(pairs[begin][1])
    return Symptom(
        f"the loss diverged from {best:.4g} to {last:.4g}",
        [
            ("loss, median of the end", last, f"best {best:.4g}, {first:.4g} at the start"),
            *rate_and_norm(case, rows, begin),
        ],
        replace(case.span(rows), first_step=step),
        meaning="an update destroyed what was learnt: a learning rate too high for this stage, a bad batch, or low "
        "precision",
        **case.lower_learning_rate(3),
    )


@rule(
    reads=("loss",),
    threshold=f"the loss of {ROWS} steps or more is flat within {FLAT:.0%} from first to last, within {NEAR:.0%} "
    "of ln V of a common vocabulary",
)
def loss_flat_at_guessing(case: Case) -> Symptom | None:
    losses = case.column("loss", rows := _rows_of_whole_log(case))
    size = max(3, len(losses) // PARTS)
    levels = [median(losses[at : at + size]) for at in range(0, len(losses) - size + 1, size)]
    level = median(levels)
    nearest = min(VOCABULARIES, key=lambda one: abs(math.log(one) - level))
    if (
        abs(level - math.log(nearest)) > NEAR * level
        or max(levels) - min(levels) > FLAT * level
        or min(levels) < math.log(nearest) * (1 - 2 * NEAR)
    ):
        return None
    return Symptom(
        f"the loss stays at {level:.4g}: guessing among {nearest:,} tokens gives {math.log(nearest):.4g}",
        [("loss, median", level, f"ln {nearest} = {math.log(nearest):.4g}")],
        case.span(rows),
        meaning="nothing is learnt: a learning rate far too large or too small, no gradient, or labels that do not "
        "depend on the inputs",
        no_flip="overfit one batch: if its loss does not fall, the graph or the labels are at fault",
    )


@rule(
    reads=("lr",),
    threshold=f"at most {DEAD_RATE:g} of its peak in the last {DEAD_SHARE:.0%} of the rows, {DEAD_ROWS} at least",
)
def rate_is_dead(case: Case) -> Symptom | None:
    rows = _rows_of_whole_log(case, DEAD_ROWS)
    pairs = case.pairs("lr", "step", rows)
    peak = max(rate for rate, _ in pairs)
    dead = list(itertools.takewhile(lambda one: one[0] <= DEAD_RATE * peak, reversed(pairs)))
    if len(dead) < max(DEAD_ROWS, DEAD_SHARE * len(pairs)):
        return None
    step = int(dead[-1][1])
    return Symptom(
        f"the learning rate is {dead[0][0]:.3g} from step {step} on",
        [
            (
                "steps with a learning rate of about 0",
                len(dead),
                f"of {len(pairs)}; its peak was {peak:.4g}",
            )
        ],
        replace(case.span(rows), first_step=step),
        meaning="nothing is trained any more: the schedule ends before the run does, or does not count optimizer steps",
        no_flip="give the scheduler the number of optimizer steps of the whole run, and step it once in each",
    )


@rule(
    reads=("held-out loss", "loss"),
    threshold=f"each of the last {BELOW_EVALS} evaluations or more under {BELOW:.2g} of the training loss and "
    f"{BELOW_NATS:g} below it",
)
def heldout_below_training(case: Case) -> Symptom | None:
    pairs = case.pairs("loss", "step", rows := _rows_of_whole_log(case, 20))
    case.require_loss_should_fall()
    evals = [
        e
        for e in case.view.evals
        if e.subject == "student" and e.loss is not None and math.isfinite(e.loss)
    ]
    below = []
    for e in reversed(evals):
        at = max((i for i, (_, step) in enumerate(pairs) if step <= e.step), default=0)
        training = mean([loss for loss, _ in pairs[max(0, at - 19) : at + 1]])
        assert e.loss is not None
        if e.loss > BELOW * training or training - e.loss < BELOW_NATS:
            break
        below.append((e.loss, training, e.step))
    if len(below) < max(BELOW_EVALS, len(evals) / 2):
        return None
    loss, training, _ = below[0]
    return Symptom(
        f"the held-out loss is {loss:.3g}, 1/{training / loss:.0f} of the training loss",
        [("held-out loss", loss, f"training loss {training:.4g}")],
        replace(case.span(rows), first_step=below[-1][2]),
        meaning="the two losses are computed differently (a sum over micro-batches and a mean, different labels or "
        "masks), or "
        "the held-out set contains training text",
        no_flip="evaluate a training batch with the evaluation code: its loss must agree with the training loss",
    )


@rule(
    reads=("a logged name with `mem`",),
    threshold=f"{GROWS_POINTS} readings or more, medians of quarters rise by {GROWS:.0%} in all, evenly to the end",
)
def logged_memory_grows(case: Case) -> Symptom | None:
    rows = _rows_of_whole_log(case, GROWS_POINTS)
    for name, points in case.view.memory_logged.items():
        values = [value for _, value in points]
        begin, end = (points[at][0] for at in (len(points) // 10, -1))
        edges = [begin + (end - begin) * at / 4 for at in range(5)]
        quarters = [
            [value for step, value in points if low <= step <= high]
            for low, high in itertools.pairwise(edges)
        ]
        if len(points) < GROWS_POINTS or not all(quarters) or "replay" in name.lower():
            continue
        levels = [median(quarter) for quarter in quarters]
        rises = [right - left for left, right in itertools.pairwise(levels)]
        if (
            levels[0] <= 0
            or levels[-1] < (1 + GROWS) * levels[0]
            or min(rises) < GROWS_EVENLY * mean(rises)
        ):
            continue
        return Symptom(
            f"{name} grows from step to step: from {values[0]:.4g} to {values[-1]:.4g}",
            [(name, values[-1], f"{values[0]:.4g} after the first steps")],
            replace(case.span(rows), first_step=points[0][0]),
            meaning="something is kept from step to step: a graph, a list of tensors, an unbounded cache",
            no_flip="look for losses summed without .item(); compare the memory snapshots of two steps",
            part=name,
        )
    if not case.view.memory_logged:
        raise CannotJudge("no memory is logged")
    return None


def _seconds_of_half(lost_s: list[float]) -> float:
    """Return the lost seconds of the step at which the sum over steps, the largest first, reaches half of all lost
    time; 0 without lost time."""
    total = sum(lost_s)
    ordered = sorted(lost_s, reverse=True)
    sums = itertools.accumulate(ordered)
    return next(
        (seconds for seconds, upto in zip(ordered, sums, strict=True) if 2 * upto >= total), 0.0
    )


def _slow_stretches(
    pairs: Sequence[tuple[float, float]], over_s: float
) -> Iterator[list[tuple[float, float]]]:
    """Yield each run of consecutive steps that all took longer than `over_s`, as (seconds, step) pairs."""
    for is_slow, group in itertools.groupby(pairs, lambda pair: pair[0] > over_s):
        if is_slow:
            yield list(group)


@rule(
    reads=("step_s",),
    threshold=f"{SLOW_LEAST} steps or more of {SLOW_TIMES:g} times the median take {SLOW_SHARE:.0%} of the time: "
    f"{SLOW_REGULAR:.0%} at one interval that no evaluation explains, or half in one period that ended",
)
def slow_steps_recur(case: Case) -> Symptom | None:
    pairs = case.pairs("step_s", "step", rows := _rows_of_whole_log(case))[1:]
    usual_s = median([seconds for seconds, _ in pairs])
    slow = [(seconds, int(step)) for seconds, step in pairs if seconds > SLOW_TIMES * usual_s]
    least_s = usual_s + SLOW_PART * _seconds_of_half([seconds - usual_s for seconds, _ in slow])
    slow = [pair for pair in slow if pair[0] >= least_s]
    lost_s = sum(seconds - usual_s for seconds, _ in slow)
    if (
        len(slow) < SLOW_LEAST
        or usual_s <= 0
        or lost_s < SLOW_SHARE * sum(seconds for seconds, _ in pairs)
    ):
        return None
    gaps = Counter(right - left for (_, left), (_, right) in itertools.pairwise(slow))
    period, count = gaps.most_common(1)[0]
    took = median([seconds for seconds, _ in slow])
    if period <= case.view.steps.spacing("step_s", "step"):
        # Consecutive rows of the log, whatever its logging interval; a slow period that lasts to the end is a drift.
        stretch = max(_slow_stretches(pairs, SLOW_TIMES * usual_s), key=len)
        if 2 * len(stretch) < len(slow) or stretch[-1] == pairs[-1]:
            return None
        begin, end = int(stretch[0][1]), int(stretch[-1][1])
        return Symptom(
            f"a step took {format_seconds(took)} from step {begin:,} to {end:,}, the others {format_seconds(usual_s)}",
            [
                (
                    "seconds lost",
                    lost_s,
                    f"of {sum(seconds for seconds, _ in pairs):.0f} that were logged",
                )
            ],
            replace(case.span(rows), first_step=begin, last_step=end),
            meaning="for a while the machine was shared, throttled or swapping, or the data was slow",
            no_flip="look for what else ran on the machine at that time",
        )
    evaluated = {e.step for e in case.view.evals}
    explained = sum(bool({step - 1, step, step + 1} & evaluated) for _, step in slow)
    if count < SLOW_REGULAR * (len(slow) - 1) or 2 * explained >= len(slow):
        return None
    return Symptom(
        f"every {period} steps one takes {format_seconds(took)}, the others {format_seconds(usual_s)}",
        [
            ("slow steps", len(slow), f"over {SLOW_TIMES:g} times the median"),
            ("seconds lost", lost_s, "in all of them"),
        ],
        replace(case.span(rows), first_step=slow[0][1]),
        meaning="something slow runs at that interval: a checkpoint, a blocking log write, a restarted DataLoader",
        no_flip=f"look for what the script does every {period} steps, and do it less often or in another thread",
    )


@rule(
    reads=("times of the steps",),
    threshold=f"{format_seconds(GAP_S)} or more between two rows, {GAP_TIMES:g} times the median, {GAP_OTHERS:g} times "
    "the second longest, without an evaluation",
)
def gap_in_time(case: Case) -> Symptom | None:
    rows = _rows_of_whole_log(case, 20)
    times = case.pairs("unix_s", "step", rows)
    gaps = [(right - left, int(step)) for (left, _), (right, step) in itertools.pairwise(times)]
    *_, second, (longest, step) = sorted(gaps)
    usual_s = median([gap for gap, _ in gaps])
    evaluated = any(e.step in (step - 1, step) for e in case.view.evals)
    if longest < max(GAP_S, GAP_TIMES * usual_s, GAP_OTHERS * second[0]) or evaluated:
        return None
    return Symptom(
        f"no step for {format_seconds(longest)} before step {step}; usually one takes {format_seconds(usual_s)}",
        [("seconds of the gap", longest, f"median {usual_s:.4g}, second longest {second[0]:.4g}")],
        replace(case.span(rows), first_step=step),
        meaning="the training hung, waited for a machine, or was stopped and started again",
        no_flip="read the logs of the machine and of the job scheduler for that time",
    )
