"""The update: gradients, their clipping and the learning rate that was used.

The schedule is worked out here a second time, from the settings alone: what the trainer used is held
against it, so an argument that never reached the optimizer is seen.
"""

from __future__ import annotations

import math

from engine.spec import TrainSection
from engine.watch.rules.rule import ERROR, WARNING, Alert, CannotJudge, Case, Rule, alert, median

ZERO_STEPS = 10
ZERO_NORM = 1e-12
EXPLODING_STEPS, EXPLODING_BEFORE = 10, 100
EXPLODING_RATIO = 50.0
CLIPPED_STEPS = 200
CLIPPED_SHARE = 0.98
CLIPPED_TIMES = 3.0
"""The median norm over the limit: a norm that lies just above it is hardly changed by clipping."""
RATE_STEPS = 20
RATE_TOLERANCE = 1e-4
"""Relative; the logged rate is the optimizer's own double."""


def gradient_zero(case: Case) -> Alert | None:
    rows = case.steps(ZERO_STEPS, at_least=ZERO_STEPS)
    norm = median(case.column("grad_norm", rows))
    if norm > ZERO_NORM:
        return None
    return alert(
        "gradient_zero",
        ERROR,
        f"the gradient is {norm:.1e}: no weight moves",
        [("grad_norm, median", norm, f"at most {ZERO_NORM:g}")],
        case.span(rows),
        meaning="the loss does not depend on the weights: a detached graph, masked labels, or equal models",
        flip="--set loss.alpha=1" if case.started.alpha < 1 else "",
        no_flip=""
        if case.started.alpha < 1
        else "cross entropy alone gives no gradient either: look at the labels",
    )


def gradient_exploding(case: Case) -> Alert | None:
    rows = case.steps(EXPLODING_STEPS + EXPLODING_BEFORE, at_least=3 * EXPLODING_STEPS)
    norms = case.column("grad_norm", rows)
    if len(norms) < 3 * EXPLODING_STEPS:
        raise CannotJudge(f"needs {3 * EXPLODING_STEPS} finite gradient norms")
    before, now = median(norms[:-EXPLODING_STEPS]), median(norms[-EXPLODING_STEPS:])
    if before <= ZERO_NORM or now < EXPLODING_RATIO * before:
        return None
    return alert(
        "gradient_exploding",
        ERROR,
        f"the gradient norm is {now:.3g}, {now / before:.0f} times what it was",
        [("grad_norm, median", now, f"{before:.4g} before; {EXPLODING_RATIO:g} times is too much")],
        case.span(rows),
        meaning="training diverges; clipping bounds the step but not the direction",
        flip=f"--set train.lr={case.started.peak_lr / 10:g}",
    )


def always_clipped(case: Case) -> Alert | None:
    limit = case.spec.train.clip_norm
    if limit <= 0:
        raise CannotJudge("train.clip_norm is 0: nothing is clipped")
    rows = case.steps(CLIPPED_STEPS, at_least=CLIPPED_STEPS)
    norms = case.column("grad_norm", rows)
    share = sum(norm > limit for norm in norms) / len(norms)
    if share < CLIPPED_SHARE or median(norms) < CLIPPED_TIMES * limit:
        return None
    return alert(
        "always_clipped",
        WARNING,
        f"{100 * share:.0f} % of the gradients were clipped, to a {median(norms) / limit:.1f}th of their norm",
        [
            ("share of steps clipped", share, f"at least {CLIPPED_SHARE:g}"),
            ("grad_norm, median", median(norms), f"{CLIPPED_TIMES:g} times the limit of {limit:g}"),
        ],
        case.span(rows),
        meaning="the size of the gradient has no say any more: a loss that is summed, not averaged, looks like this",
        flip=f"--set train.clip_norm={2 * median(norms):.3g}",
    )


def expected_rate(step: int, train: TrainSection) -> float:
    """The learning rate of optimizer step `step`, counted from 1: linear warm-up, then cosine or
    constant."""
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    if train.schedule == "constant":
        return train.lr
    done = min(1.0, (step - train.warmup_steps) / (train.steps - train.warmup_steps))
    floor = train.lr * train.final_lr_ratio
    return floor + (train.lr - floor) * (1 + math.cos(math.pi * done)) / 2


def learning_rate(case: Case) -> Alert | None:
    train = case.spec.train
    rows = case.steps(RATE_STEPS, at_least=1)
    for rate, step in reversed(case.pairs("lr", "step", rows)):
        wanted = expected_rate(int(step), train)
        # The last step of a cosine to 0 is 0 by intention; rounding there is of the peak.
        if abs(rate - wanted) <= RATE_TOLERANCE * max(wanted, 1e-3 * train.lr):
            continue
        zero = rate == 0
        return alert(
            "learning_rate",
            ERROR,
            f"the learning rate of step {int(step)} was {rate:.4g}; the settings say {wanted:.4g}",
            [("lr", rate, f"{wanted:.6g} by train.schedule={train.schedule}")],
            case.span(rows),
            meaning="nothing is trained: the rate is 0"
            if zero
            else "the rate that was set never reached the optimizer",
            flip="--set train.schedule=constant" if train.schedule != "constant" else "",
            no_flip="" if train.schedule != "constant" else "the schedule is constant already",
        )
    return None


RULES = (
    Rule(
        id="gradient_zero",
        asks="Is there a gradient at all?",
        reads=("grad_norm",),
        threshold=f"median norm of {ZERO_STEPS} steps at most {ZERO_NORM:g}",
        judge=gradient_zero,
    ),
    Rule(
        id="gradient_exploding",
        asks="Does the gradient explode?",
        reads=("grad_norm",),
        threshold=(
            f"median norm of {EXPLODING_STEPS} steps {EXPLODING_RATIO:g} times that of the "
            f"{EXPLODING_BEFORE} before"
        ),
        judge=gradient_exploding,
    ),
    Rule(
        id="always_clipped",
        asks="Is every gradient clipped, and by much?",
        reads=("grad_norm", "train.clip_norm"),
        threshold=(
            f"{CLIPPED_SHARE:.0%} of {CLIPPED_STEPS} steps, with a median norm of "
            f"{CLIPPED_TIMES:g} times the limit"
        ),
        judge=always_clipped,
    ),
    Rule(
        id="learning_rate",
        asks="Is the learning rate that of the schedule, and not 0?",
        reads=("lr", "[train]"),
        threshold=f"a relative difference of {RATE_TOLERANCE:g} in one of {RATE_STEPS} steps",
        judge=learning_rate,
    ),
)
