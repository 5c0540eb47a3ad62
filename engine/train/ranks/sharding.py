"""Shard the student over several GPUs for training, and gather a full copy of it for everything else.

Checks, evaluations and saved files need an unsharded model. The student is unsharded until the first step, and
the first-minute checks run on it. After that, a full copy is gathered for each evaluation and each saved student.
A copy costs one pass over the weights; in return, only the step has to handle sharded tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from engine.errors import TrainingFailed
from engine.machine.reading import Reading, absent, measured
from engine.models.decoder import Decoder
from engine.models.whole_copy import empty_copy, gather_weights, is_sharded
from engine.runtime.ranks import Ranks, shard
from engine.spec import RunSpec
from engine.train.checkpoint.state import capture_trainer, restore_trainer
from engine.train.trainer import Trainer

SAMPLED_ELEMENTS = 1024
"""Approximate number of evenly spaced elements of each tensor that the ranks compare."""


def check_same_weights(model: Decoder, what: str, ranks: Ranks) -> None:
    """Compare a sample of every tensor of a model that each rank holds in full. A collective. Raises TrainingFailed
    when the sample of a rank differs from the first rank's."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // SAMPLED_ELEMENTS)].contiguous().cpu()
        digest.update(name.encode() + sample.view(torch.uint8).numpy().tobytes())
    digests = ranks.collect(digest.digest())
    if differing := [rank for rank, rank_digest in enumerate(digests) if rank_digest != digests[0]]:
        raise TrainingFailed(
            f"rank {differing[0]} has another {what} than the first rank: expected the same weights on every rank",
            hint=f"compare the files of the {what}, or the seed of its fresh weights, on the hosts of these ranks",
        )


def shard_trainer(
    alone: Trainer,
    spec: RunSpec,
    ranks: Ranks,
    *,
    build: Callable[[Decoder], Trainer],
    reshard: bool,
    entering: Callable[[], None],
) -> Trainer:
    """Shard the student in place over the ranks, and return an equivalent trainer with it. A student with adapters
    stays whole on each rank.

    Until this call every rank holds the same full student and has done the same work. `build` returns a
    trainer for the sharded student. `reshard` and `entering` are passed to `engine.runtime.ranks.shard`.
    """
    captured = capture_trainer(alone, spec)
    student = alone.student
    if spec.student.adapter == "none":
        shard(student, student.layers, ranks, alone.device, reshard=reshard, entering=entering)
    trainer = build(student)
    restore_trainer(captured, trainer)
    return trainer


def whole_student(student: Decoder) -> Decoder:
    """Return the student itself, or, when it is sharded, a full unsharded copy on every rank.

    For a sharded student this is a collective.
    """
    if not is_sharded(student):
        return student
    copy = empty_copy(student)
    gather_weights(student, copy)
    return copy


def least_available(ranks: Ranks, own: Reading, device: torch.device) -> Reading:
    """Return the smallest available memory of any rank, with which every rank then plans.

    Ranks with different plans would launch different collectives. The result is absent if any rank does not
    know its available memory. This is a collective.
    """
    own_bytes = -1.0 if own.number is None else own.number
    all_R = ranks.gather(torch.tensor([own_bytes], dtype=torch.float64, device=device))
    min_bytes = int(all_R.min())
    if own.number is None or min_bytes == own.number:
        return own
    if min_bytes < 0:
        return absent("not known to every rank", own.source)
    return measured(min_bytes, f"{own.source}, the smallest of {ranks.world} ranks")
