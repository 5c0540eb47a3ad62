"""Compile or capture the student as configured, and prove its layers equal to the eager ones.

A compiler is a second author of the forward and the backward pass. So before the first step both go
over the first batch of the run, and their outputs are compared: the hidden states, and the gradient of
every weight under one random upstream gradient. That is also the warm-up, after which no step compiles.

Both round bf16 products, each in its own places, and are then some percent apart; a wrong term is far
more. The gradient of a tensor that is almost nothing beside the others (of the bias of k it is exactly
nothing, because a softmax does not see it) is rounding alone, and is measured against the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from engine.errors import TrainingFailed
from engine.log.events import Note, Phase
from engine.models.attention import remember
from engine.models.running import CompiledLayers, set_running
from engine.plan.knobs import give_up_graphs
from engine.plan.run_plan import Plan
from engine.runtime.ranks import own_part
from engine.train.compiles import Compiles
from engine.train.cuda_graphs import Graphs
from engine.train.record import Logged
from engine.train.trainer import Trainer

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Relative distance, by the dtype of the products. In bf16 hidden states of fresh weights are 2 % from
those in fp32 and gradients 3 %, compiled or not."""
SMALL = 1e-2
"""Share of the whole gradient's norm below which a tensor's distance is measured against that."""


_Answers: TypeAlias = tuple[Tensor, list[Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far compiled layers are from the eager layers, relative."""

    hidden: float
    gradient: float
    worst: float
    worst_name: str

    def __str__(self) -> str:
        return (
            f"hidden states {self.hidden:.2g}, gradients {self.gradient:.2g}, "
            f"the farthest {self.worst_name} {self.worst:.2g}"
        )


def configure_student(
    trainer: Trainer,
    *,
    compiles: Compiles,
    plan: Plan,
    length: int,
    compiled: bool,
    graphs_given_up: Callable[[str], None],
) -> Logged[None]:
    """Configures the student's layers as planned, for rows of `length` tokens; yields how far their output is
    from the eager layers'. `compiled`: whether they are compiled now. `graphs_given_up` is
    told why, when layers that were to be captured are not: now, or in a later step. Raises TrainingFailed.
    """
    if compiled:
        yield Phase(name="compiling the student's layers")
    agreement = compile_student(
        trainer,
        length=length,
        compiled=compiled,
        packed=plan.running.packed,
        checkpointing=plan.memory.checkpointing,
    )
    yield from compiles.done()
    if agreement is not None:
        text = f"compiled layers are as far from the layers as written as rounding takes them: {agreement}"
        yield Note(level="info", text=text)
    if plan.memory.graphs:
        yield Phase(name="capturing the student's layers")
        captured = capture_student(trainer, length=length, given_up=graphs_given_up)
        if captured is not None:
            text = f"captured layers are as far from layers launched one by one as rounding takes them: {captured}"
            yield Note(level="info", text=text)


def go_on_without_graphs(step: int, why: str) -> Logged[None]:
    """That the layers are launched one by one from `step` on."""
    given_up = give_up_graphs(step, why)
    yield given_up
    text = f"{given_up.knob}: {given_up.reason}: {given_up.rejected[0][1]}"
    yield Note(level="warning", text=text)


def compile_student(
    trainer: Trainer,
    *,
    length: int,
    compiled: bool,
    packed: bool,
    checkpointing: bool,
    backend: str = "inductor",
) -> Agreement | None:
    """Sets how the student's layers are run, and compiles them now where they are compiled; then
    their distance from the eager layers. Weights, gradients and random numbers stay as they
    were. Raises TrainingFailed when the distance is more than rounding.
    """
    student = trainer.student
    if not compiled:
        set_running(student, compiled=None, packed=packed, checkpointing=checkpointing)
        return None
    # Eager layers keep more; recomputed, they need no more memory than the steps will.
    set_running(student, compiled=None, packed=packed, checkpointing=True)
    written = _answers(trainer)
    layers = CompiledLayers(trainer.train.rows, length, backend)
    set_running(student, compiled=layers, packed=packed, checkpointing=checkpointing)
    return _agreement(
        trainer,
        _answers(trainer),
        written,
        "student.compile: compiled layers answer otherwise than the layers as written",
        hint="--set student.compile=off trains with the layers as written",
    )


def capture_student(
    trainer: Trainer, *, length: int, given_up: Callable[[str], None] = lambda why: None
) -> Agreement | None:
    """Has the layers launched as CUDA graphs from now on, captured on the next batch; then their distance
    from layers launched one by one. TrainingFailed when it is more than rounding. None when they could not
    be captured: now or in a later step `given_up` is told why, and they are launched one by one.
    """
    launched = _answers(trainer)
    shape = trainer.train.rows, length
    trainer.graphs = Graphs(trainer.student, *shape, trainer.dtype, given_up)
    found = _answers(trainer)
    if trainer.graphs is None:
        return None
    return _agreement(
        trainer,
        found,
        launched,
        "student.graphs: captured layers answer otherwise than layers launched one by one",
        hint="--set student.graphs=off launches them one by one",
    )


def _answers(trainer: Trainer) -> _Answers:
    """Hidden states of the next batch, and every gradient under a fixed upstream one."""
    batch = trainer.batches.take(trainer.position, trainer.train.rows)
    tokens_BT, documents_BT, _ = batch.to_torch(trainer.device)
    remember(documents_BT, batch.documents_BT)
    weights = _inside(trainer)
    with torch.enable_grad(), trainer.autocast():
        hidden_BTD = trainer.hidden(tokens_BT, documents_BT)
    generator = torch.Generator(hidden_BTD.device).manual_seed(0)
    upstream_BTD = torch.randn(
        hidden_BTD.shape, generator=generator, device=hidden_BTD.device, dtype=hidden_BTD.dtype
    )
    if not trainer.ranks.many and trainer.graphs is None:
        return hidden_BTD.detach(), list(torch.autograd.grad(hidden_BTD, weights, upstream_BTD))
    # Sharded weights get their gradients from hooks, which only a backward pass calls; captured ones from
    # their graph.
    torch.autograd.backward(hidden_BTD, upstream_BTD)
    found = [own_part(p.grad) for p in weights if p.grad is not None]
    trainer.optimizer.zero_grad(set_to_none=True)
    return hidden_BTD.detach(), found


def _inside(trainer: Trainer) -> list[Tensor]:
    """The weights that hidden states depend on through layers, and the last norm: not the head."""
    return [p for p in trainer.parameters if p is not trainer.student.head_weight]


def _agreement(
    trainer: Trainer, found: _Answers, expected: _Answers, otherwise: str, *, hint: str
) -> Agreement:
    """How far two answers to one batch are apart. Raises TrainingFailed, that they are `otherwise`, when it is
    more than rounding.
    """
    gaps = _norms(
        trainer, [a.float() - b.float() for a, b in zip(found[1], expected[1], strict=True)]
    )
    sizes = _norms(trainer, expected[1])
    hidden, whole = _norms(trainer, [found[0].float() - expected[0].float(), expected[0]])
    each = gaps / sizes.clamp(min=SMALL * sizes.norm())
    worst = int(each.argmax())
    names = {id(p): name for name, p in trainer.student.named_parameters()}
    agreement = Agreement(
        hidden=float(hidden / whole),
        gradient=float(gaps.norm() / sizes.norm()),
        worst=float(each[worst]),
        worst_name=names[id(_inside(trainer)[worst])],
    )
    limit = TOLERANCE[trainer.dtype]
    # Written so that NaN fails.
    if not (agreement.hidden <= limit and agreement.gradient <= limit and agreement.worst <= limit):
        raise TrainingFailed(f"{otherwise}: {agreement}; expected at most {limit:g}", hint=hint)
    return agreement


def _norms(trainer: Trainer, tensors: list[Tensor]) -> Tensor:
    """Of each tensor; of what all ranks have, where each has a part."""
    squares = torch.stack([t.float().norm().double().square() for t in tensors])
    return trainer.ranks.gather(squares).sum(0).sqrt()
