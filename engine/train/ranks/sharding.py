"""A student over several GPUs: sharded for the steps, whole for everything between them.

Checks, evaluations and files want a plain model. Before the first step it still is one, and is
checked as one; after that a copy is put together of the parts when it is needed. That costs one
pass over the weights and keeps every rule of sharding inside the step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.machine.reading import Reading, absent, measured
from engine.models.decoder import Decoder
from engine.runtime.ranks import Ranks, is_shared, shard, whole
from engine.spec import RunSpec
from engine.train.checkpoint.state import capture_trainer, restore_trainer
from engine.train.trainer import Trainer


def shard_trainer(
    alone: Trainer,
    spec: RunSpec,
    ranks: Ranks,
    *,
    build: Callable[[Decoder], Trainer],
    reshard: bool,
    entering: Callable[[], None],
) -> Trainer:
    """The same trainer with its student shared out over the ranks, in place; until here every rank has
    done the same on its own. `build` makes a trainer of a student that is sharded already. `reshard` and
    `entering` are those of `engine.runtime.ranks.shard`.
    """
    captured = capture_trainer(alone, spec)
    student = alone.student
    shard(student, student.layers, ranks, alone.device, reshard=reshard, entering=entering)
    trainer = build(student)
    restore_trainer(captured, trainer)
    return trainer


@torch.no_grad()
def whole_student(student: Decoder) -> Decoder:
    """The student itself, or, where it is sharded, a plain copy of all of it on every rank. Then
    it is a collective.
    """
    if not any(is_shared(parameter) for parameter in student.parameters()):
        return student
    with torch.device("meta"):
        copy = Decoder(student.config)
    copy.to_empty(device=next(student.parameters()).device)
    for target, parameter in zip(copy.parameters(), student.parameters(), strict=True):
        target.copy_(whole(parameter))
    copy.packed = student.packed
    return copy.train(student.training)


def least_available(ranks: Ranks, own: Reading, device: torch.device) -> Reading:
    """The least memory that any rank may take, which every rank then plans with: ranks that chose
    otherwise would launch other collectives. Unknown where it is on any of them. A collective.
    """
    known = -1.0 if own.number is None else own.number
    all_R = ranks.gather(torch.tensor([known], dtype=torch.float64, device=device))
    least = int(all_R.min())
    if own.number is None or least == own.number:
        return own
    if least < 0:
        return absent("not known to every rank", own.source)
    return measured(least, f"{own.source}, the least of {ranks.world} ranks")
