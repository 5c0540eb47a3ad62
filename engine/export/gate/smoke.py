"""Judge the smoke gate: train the run's student on one batch for some steps, with its teacher, loss and optimizer.

    final loss < initial loss        over gate.smoke_steps steps; the final loss is taken before the last update

The batch is the run's first. Every step has the same rows, so the loss falls if the model learns. Whether the batch can
be learnt at all is computed first, from the labels: a model gives one distribution for equal contexts, so that its
cross entropy cannot be lower than

    H = mean over labels of -log (fraction of this label among the labels of its context)

For example, a batch of equal inputs with different labels has H = ln(rows). If H is too high, the loss is no evidence
about the training step, and the result is unknown. The context of a token consists of its document's tokens in the row,
up to and including it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace

import torch

from engine.data.batches import Batch, Batches, Int64Array
from engine.errors import TrainingFailed
from engine.export.gate.gate import Subject
from engine.export.outcome import Outcome, answered, unknown
from engine.log.events import nan_if_absent
from engine.models.decoder import Decoder
from engine.models.load import load_decoder, new_decoder
from engine.train.trainer import Trainer
from engine.verdict import Level

ID = "smoke"
LEARNABLE = 0.5
"""Largest allowed H, as a fraction of the first cross entropy."""


class OneBatch(Batches):
    """Data source that returns the first batch of a run for every request."""

    def __init__(self, batches: Batches) -> None:
        self._all = batches
        self.rows_per_epoch = self.rows_per_batch = batches.rows_per_batch

    def take(self, position: int, rows: int) -> Batch:
        return self._all.take(0, rows)

    def row_ids_at(self, position: int, rows: int) -> Int64Array:
        return self._all.row_ids_at(0, rows)


# contract: phase-gates-v1
def smoke(subject: Subject) -> Outcome:
    """Train for some steps; nothing is written."""
    spec, steps = subject.spec, subject.spec.gate.smoke_steps
    batches = OneBatch(subject.rows.batches)
    batch = batches.take(0, spec.train.rows)
    least = least_cross_entropy(batch)
    if least is None:
        return unknown(ID, "the first batch of the run has no label")
    teaches = spec.has_teacher and spec.loss.alpha < 1.0
    trainer = Trainer(
        student=_student(subject),
        teacher=subject.teacher.teacher if teaches else None,
        batches=batches,
        train=replace(
            spec.train,
            steps=steps,
            accumulation=1,
            warmup_steps=min(spec.train.warmup, steps // 2),
            schedule="constant",
        ),
        loss=spec.loss,
        device=subject.device,
        precision=subject.precision,
    )
    subject.say(f"{steps} steps on one batch of {spec.train.rows} rows")
    losses, entropies = [], []
    try:
        for step in trainer.steps():
            losses.append(nan_if_absent(step.loss))
            entropies.append(nan_if_absent(step.ce))
    except TrainingFailed as error:
        return answered(ID, Level.FAIL, error.message)
    first_loss, last_loss = losses[0], losses[-1]
    numbers = {
        "initial_loss": first_loss,
        "final_loss": last_loss,
        "initial_cross_entropy": entropies[0],
        "least_cross_entropy": least,
        "steps": steps,
    }
    if not all(math.isfinite(loss) for loss in losses):
        index = next(i for i, loss in enumerate(losses) if not math.isfinite(loss))
        return answered(
            ID, Level.FAIL, f"the loss of step {index + 1} is {losses[index]}", **numbers
        )
    if least > LEARNABLE * entropies[0]:
        text = (
            f"the first batch cannot be learnt: {least:.2f} of the {entropies[0]:.2f} nats of its labels cannot be "
            f"predicted by any model"
        )
        return unknown(ID, text, **numbers)
    text = f"loss {first_loss:.4f} -> {last_loss:.4f} in {steps} steps on one batch; no model can go below {least:.2f}"
    return answered(ID, Level.PASS if last_loss < first_loss else Level.FAIL, text, **numbers)


# contract: phase-gates-v1
def least_cross_entropy(batch: Batch) -> float | None:
    """Return H of the labels, in nats per label; None without labels."""
    labels: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for tokens_T, documents_T, labels_T in zip(
        batch.tokens_BT, batch.documents_BT, batch.labels_BT, strict=True
    ):
        start = 0
        for position, label in enumerate(labels_T.tolist()):
            if position and documents_T[position] != documents_T[position - 1]:
                start = position
            if label >= 0:
                labels[_digest(tokens_T[start : position + 1])][label] += 1
    count = sum(counts.total() for counts in labels.values())
    if not count:
        return None
    nats = sum(
        -times * math.log(times / counts.total())
        for counts in labels.values()
        for times in counts.values()
    )
    return nats / count


def _digest(tokens: Int64Array) -> tuple[int, ...]:
    # A hash of the bytes: two different contexts of one length collide with probability 2^-64.
    return (len(tokens), hash(tokens.tobytes()))


def _student(subject: Subject) -> Decoder:
    student, seed = subject.spec.student, subject.spec.train.seed
    if student.path:
        return load_decoder(student.path, torch.float32, subject.device)
    return new_decoder(subject.inputs.student, seed, torch.float32, subject.device)
