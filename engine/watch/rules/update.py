"""Rules about the optimizer update: its gradients, and its size."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from engine.log.events import SUSPICION
from engine.watch.rules.rule import CannotJudge, Case, Symptom, median, rule

ZERO_STEPS = 10
ZERO_NORM = 1e-12
"""Gradient norm up to which a gradient counts as 0."""
EXPLODING_STEPS, EXPLODING_BEFORE = 10, 100
"""Number of newest steps, and of the steps before them that they are compared with."""
EXPLODING_RATIO = 50.0
UPDATE_FROM = 100
"""First step that is judged: earlier, weights may still be as small as initialised and the warm-up at its peak."""
UPDATE_SHARE = 0.1
"""Relative change of the weights in one step from which it is too large; in healthy training it is about a
thousandth."""
UPDATE_FIRST, UPDATE_ROWS = 5, 50
"""Number of first and of newest steps of a watched script whose losses are compared."""
UPDATE_PROGRESS = 0.03
"""Share by which the loss must be below the first one, or below that of guessing, to count as progress."""


@rule(
    reads=("grad_norm",),
    threshold=f"median norm of {ZERO_STEPS} steps at most {ZERO_NORM:g}",
)
def gradient_zero(case: Case) -> Symptom | None:
    rows = case.steps(ZERO_STEPS, at_least=ZERO_STEPS)
    norm = median(case.column("grad_norm", rows))
    # A norm computed where no step uses the gradients, as before the backward pass, is none of theirs.
    if norm > ZERO_NORM or any(
        judged.id == "clipping" and judged.level == SUSPICION for judged in case.view.identities
    ):
        return None
    return Symptom(
        f"the gradient is {norm:.1e}: no weight moves",
        [("grad_norm, median", norm, f"at most {ZERO_NORM:g}")],
        case.span(rows),
        meaning="the loss does not depend on the weights: a detached graph, masked labels, or equal models",
        **_remedy_for_no_gradient(case),
    )


def _remedy_for_no_gradient(case: Case) -> dict[str, str]:
    if case.view.is_foreign:
        return {"no_flip": "look for detach(), no_grad() and masked labels in the script"}
    if case.started.alpha < 1:
        return {"flip": "--set loss.alpha=1"}
    return {"no_flip": "cross entropy alone gives no gradient either: check the labels"}


@rule(
    reads=("grad_norm",),
    threshold=f"median norm of {EXPLODING_STEPS} steps {EXPLODING_RATIO:g} times that of the "
    f"{EXPLODING_BEFORE} before",
)
def gradient_exploding(case: Case) -> Symptom | None:
    rows = case.steps(EXPLODING_STEPS + EXPLODING_BEFORE, at_least=3 * EXPLODING_STEPS)
    norms = case.column("grad_norm", rows)
    if len(norms) < 3 * EXPLODING_STEPS:
        raise CannotJudge(f"needs {3 * EXPLODING_STEPS} finite gradient norms")
    before, now = median(norms[:-EXPLODING_STEPS]), median(norms[-EXPLODING_STEPS:])
    if before <= ZERO_NORM or now < EXPLODING_RATIO * before:
        return None
    return Symptom(
        f"the gradient norm is {now:.3g}, {now / before:.0f} times what it was",
        [("grad_norm, median", now, f"{before:.4g} before; {EXPLODING_RATIO:g} times is too much")],
        case.span(rows),
        meaning="training diverges; clipping bounds the size of the step but not its direction",
        **case.lower_learning_rate(10),
    )


@rule(
    reads=("identity update_size", "loss"),
    threshold=f"an update of {UPDATE_SHARE:g} times the initial weights or more (median over the matrices of a "
    "watched script) from "
    f"step {UPDATE_FROM} on, while the median loss of the newest {UPDATE_ROWS} steps is less than "
    f"{UPDATE_PROGRESS:.0%} below the first, or below that of guessing",
)
def update_too_large(case: Case) -> Symptom | None:
    if not case.view.is_foreign:
        raise CannotJudge("the size of a step is measured in a watched script only")
    rows = case.steps(UPDATE_ROWS, at_least=UPDATE_ROWS)
    if case.view.last_step < UPDATE_FROM:
        raise CannotJudge(f"needs {UPDATE_FROM} steps since the start of the run")
    identity = next((i for i in case.view.identities if i.id == "update_size"), None)
    share = None if identity is None else identity.numbers.get("share")
    if identity is None or share is None or share < UPDATE_SHARE:
        return None
    # A small problem may be learnt by large steps, so the loss is also compared.
    case.require_loss_should_fall()
    start = case.column("loss", range(UPDATE_FIRST))
    first, now = min(start[0], median(start)), median(case.column("loss", rows))
    with contextlib.suppress(CannotJudge):
        first = min(first, case.vocabulary_nats)
    if now < (1 - UPDATE_PROGRESS) * first or first <= 0:
        return None
    return Symptom(
        f"a step moves the weights by {100 * share:.0f} % of their size, and nothing is learnt: the loss is {now:.3g}",
        [
            (
                "update / weight, median of the matrices",
                share,
                f"expected less than {UPDATE_SHARE:g}",
            ),
            (
                f"loss, median of the newest {len(rows)}",
                now,
                f"expected {UPDATE_PROGRESS:.0%} below {first:.4g}, that of the start or of guessing",
            ),
        ],
        replace(case.span(rows), first_step=identity.step or 0),
        meaning="the weights are overwritten within a few steps: the learning rate is far too large for them",
        **case.lower_learning_rate(10),
    )
