"""What several GPUs add to one rank's need for memory, and what they take off it.

Letters as in `engine.plan.memory_items`, R ranks, L weights of a layer, G = V D of the embedding (and
of a head of its own). Each rank keeps 1/R of weights, moments and gradients. Beside them:

    forward, loss   the embedding gathered, 4 G, and every layer, or the one that computes and the next
    backward        gradients of a layer before their reduction, and the copy that is sent
    its end         the gradient of the embedding, whole: it is reduced last
    evaluation      a plain copy of the student, put together for evaluations and files

A teacher whose layers are shared out is 1/R of them on each rank, embedding, norm and head whole, and two
layers put together: one that computes and the next (`engine.teachers.sharded`).

Before the first step every rank has the whole student, which is checked as one; its gradients are
then whole too. That is more than the rest where ranks are many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.models.config import ModelConfig, count_parameters
from engine.plan.budget import PHASES, BudgetItem
from engine.plan.memory_plan import MemoryPlan
from engine.units import format_bytes, format_count

_TEACHER_EVALUATION, _TEACHER, _LOSS, _BACKWARD, _LAST, _EVALUATION = PHASES


def rank_items(plan: MemoryPlan) -> Iterator[BudgetItem]:
    """Nothing for a run of one process."""
    if plan.ranks == 1:
        return
    parameters = count_parameters(plan.student)
    tables = 1 if plan.student.tie_word_embeddings else 2
    outside = tables * plan.student.vocab_size * plan.student.hidden_size
    layer = (parameters - outside) // plan.student.num_hidden_layers
    layers = "every layer" if not plan.reshard else "two layers, and what arrives for them"
    yield BudgetItem(
        name="gathered weights",
        bytes=4 * outside,
        how=f"embedding and head, {format_count(outside)} x 4 bytes",
        phases=(_TEACHER, _LOSS, _BACKWARD, _LAST),
    )
    yield BudgetItem(
        name="gathered layers",
        bytes=_gathered(plan, parameters - outside, layer),
        how=f"{layers}, {format_count(layer)} x 4 bytes each",
        phases=(_LOSS, _BACKWARD) if plan.reshard else (_TEACHER, _LOSS, _BACKWARD),
    )
    yield BudgetItem(
        name="gradients being reduced",
        bytes=4 * 2 * layer,
        how=f"of a layer, twice {format_count(layer)} x 4 bytes",
        phases=(_BACKWARD,),
    )
    yield BudgetItem(
        name="embedding's gradient",
        bytes=4 * outside,
        how=f"{format_count(outside)} x 4 bytes, until it is reduced",
        phases=(_LAST,),
    )
    yield BudgetItem(
        name="whole student",
        bytes=4 * parameters,
        how=f"{format_count(parameters)} x 4 bytes, for evaluations and files",
        phases=(_TEACHER_EVALUATION, _EVALUATION),
    )
    yield from _before_the_first_step(plan, parameters, outside, layer)


def _gathered(plan: MemoryPlan, layers: int, layer: int) -> int:
    """Of a student's `layers`: all, or two and what arrives for them."""
    return 4 * (min(4 * layer, layers) if plan.reshard else layers)


def shared_teacher(
    plan: MemoryPlan, config: ModelConfig, weights: BudgetItem
) -> Iterator[BudgetItem]:
    """The item of a teacher's weights as one rank has them, with what it gathers."""
    if plan.ranks == 1 or not plan.teacher_shard:
        yield weights
        return
    count = config.num_hidden_layers
    layers = plan.teacher_packed_layers if plan.quantized else ()
    if not layers:
        outside = plan.teacher_each * outside_layers(config)
        layers = ((weights.bytes - outside) // count,) * count
    inside = sum(layers)
    yield replace(
        weights,
        bytes=weights.bytes - inside + plan.share(inside),
        how=f"{weights.how}; layers, {format_bytes(inside)}, shared by {plan.ranks} GPUs",
    )
    rooms = min(2, count)
    yield BudgetItem(
        name="teacher layers put together",
        bytes=rooms * max(layers),
        how=f"{rooms} of at most {format_bytes(max(layers))}: one computes, the next arrives",
        lasting=True,
    )


def outside_layers(config: ModelConfig) -> int:
    """Numbers in embedding, last norm and head."""
    tables = 1 if config.tie_word_embeddings else 2
    return (tables * config.vocab_size + 1) * config.hidden_size


def _before_the_first_step(
    plan: MemoryPlan, parameters: int, outside: int, layer: int
) -> Iterator[BudgetItem]:
    """Where the whole student needs more than its parts do later: the rest of it."""
    parts = plan.share(12 * parameters) + 4 * outside
    inside = _gathered(plan, parameters - outside, layer)
    more = {
        _LOSS: 4 * parameters - parts - inside,
        _BACKWARD: 4 * parameters - parts - inside - 8 * layer,
        _LAST: 8 * parameters - parts - plan.share(4 * parameters) - 4 * outside,
    }
    for phase, size in more.items():
        if size > 0:
            yield BudgetItem(
                name=f"whole student, {phase}",
                bytes=size,
                how="what the checks before the first step need beyond what steps do",
                phases=(phase,),
            )
