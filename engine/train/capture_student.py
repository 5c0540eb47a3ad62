"""Capture the student's layers as CUDA graphs where configured, and prove them equal to launched ones.

Before the first step the launched and the captured layers both process the first batch of the run, and their
outputs are compared: the hidden states, and the gradient of every weight under one random upstream gradient.

Some gradients are almost zero compared with the others (the one of the bias of k is exactly zero in theory,
because softmax is invariant to it) and consist of rounding errors. Their distance is measured relative to the
whole gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from engine.errors import TrainingFailed
from engine.log.events import Note, Phase
from engine.models.activation_checkpointing import configure_layers
from engine.models.attention import record_documents
from engine.plan.knobs import give_up_graphs
from engine.plan.run_plan import Plan
from engine.runtime.ranks import own_part
from engine.train.compiles import build_cudnn_attention
from engine.train.cuda_graphs import Graphs
from engine.train.to_events import Log
from engine.train.trainer import Trainer

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Largest relative distance, by the dtype of the matmuls. With fresh weights, bf16 hidden states differ
from fp32 ones by 2 % and bf16 gradients by 3 %.
"""
SMALL = 1e-2
"""A tensor whose norm is below this share of the whole gradient's has its distance measured against that
share."""

# Shapes: B rows, T tokens, D model width

_Outputs: TypeAlias = tuple[Tensor, list[Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Relative distance between the captured and the launched layers."""

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
    trainer: Trainer, *, plan: Plan, graphs_given_up: Callable[[str], None], log: Log
) -> None:
    """Set how the student's layers run, and capture them as planned.

    Logs the distance of captured layers from launched ones. `graphs_given_up` is called with the reason when layers
    that were to be captured are not, now or in a later step. Raises TrainingFailed when the distance is more than
    rounding.
    """
    student, length = plan.spec.student, plan.spec.data.seq_len
    configure_layers(
        trainer.student,
        packed=student.attention == "packed",
        checkpointing=student.checkpointing == "on",
        kept_layers=plan.kept_layers,
    )
    trainer.student.cudnn = build_cudnn_attention(
        trainer.student, "student", plan.spec, trainer.device, log, trained=True
    )
    if student.graphs == "on":
        log(Phase(name="capturing the student's layers"))
        captured = capture_student(trainer, length=length, given_up=graphs_given_up)
        if captured is not None:
            text = f"captured layers differ from eager layers by rounding only: {captured}"
            log(Note(level="info", text=text))


def log_no_graphs(step: int, why: str, log: Log) -> None:
    """Log that the layers run without a CUDA graph from `step` on."""
    decision = give_up_graphs(step, why)
    log(decision)
    text = f"{decision.knob}: {decision.reason}: {decision.rejected[0][1]}"
    log(Note(level="warning", text=text))


def capture_student(
    trainer: Trainer, *, length: int, given_up: Callable[[str], None] = lambda why: None
) -> Agreement | None:
    """Capture the layers as CUDA graphs on the next batch, and return their distance from eager launches.

    Raises TrainingFailed when the distance is more than rounding. When capturing fails, here or in a
    later step, calls `given_up` with the reason, and the layers run without graphs; returns None when it
    failed here.
    """
    eager = _outputs(trainer)
    shape = trainer.train.rows, length
    trainer.graphs = Graphs(trainer.student, *shape, trainer.dtype, given_up)
    captured = _outputs(trainer)
    if trainer.graphs is None:
        return None
    return _agreement(
        trainer,
        captured,
        eager,
        "student.graphs: the captured layers' output differs from the eager layers'",
        hint="--set student.graphs=off launches the layers eagerly",
    )


def _outputs(trainer: Trainer) -> _Outputs:
    """Return the hidden states of the next batch, and every gradient under a fixed upstream gradient."""
    batch = trainer.batches.take(trainer.position, trainer.train.rows)
    tokens_BT, documents_BT, _ = batch.to_torch(trainer.device)
    record_documents(documents_BT, batch.documents_BT)
    weights = _weights_before_head(trainer)
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
    gradients = [own_part(p.grad) for p in weights if p.grad is not None]
    trainer.optimizer.zero_grad(set_to_none=True)
    return hidden_BTD.detach(), gradients


def _weights_before_head(trainer: Trainer) -> list[Tensor]:
    """Return the weights on which the hidden states depend: all but the head."""
    return [p for p in trainer.parameters if p is not trainer.student.head_weight]


def _agreement(
    trainer: Trainer, outputs: _Outputs, expected: _Outputs, message: str, *, hint: str
) -> Agreement:
    """Return the distance between two results for the same batch.

    Raises TrainingFailed, beginning with `message`, when the distance is more than rounding.
    """
    gaps = _norms(
        trainer, [a.float() - b.float() for a, b in zip(outputs[1], expected[1], strict=True)]
    )
    sizes = _norms(trainer, expected[1])
    hidden, whole = _norms(trainer, [outputs[0].float() - expected[0].float(), expected[0]])
    distances = gaps / sizes.clamp(min=SMALL * sizes.norm())
    worst = int(distances.argmax())
    names = {id(p): name for name, p in trainer.student.named_parameters()}
    agreement = Agreement(
        hidden=float(hidden / whole),
        gradient=float(gaps.norm() / sizes.norm()),
        worst=float(distances[worst]),
        worst_name=names[id(_weights_before_head(trainer)[worst])],
    )
    limit = TOLERANCE[trainer.dtype]
    # `not <=` instead of `>`, so that NaN fails.
    if not (agreement.hidden <= limit and agreement.gradient <= limit and agreement.worst <= limit):
        raise TrainingFailed(f"{message}: {agreement}; expected at most {limit:g}", hint=hint)
    return agreement


def _norms(trainer: Trainer, tensors: list[Tensor]) -> Tensor:
    """Return the norm of each tensor, over the parts of all ranks when the tensors are sharded."""
    squares = torch.stack([t.float().norm().double().square() for t in tensors])
    return trainer.ranks.gather(squares).sum(0).sqrt()
