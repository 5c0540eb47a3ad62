"""The check that the loss hides no NaN. What it computes otherwise is judged in a real step (`engine.audit`)."""

# Shapes: N tokens, D student width, E teacher width, V vocabulary

from __future__ import annotations

import math

import torch

from engine.checks.check import Answer, Numbers
from engine.checks.context import Context
from engine.checks.data import next_rows
from engine.checks.logits import few_rows, hidden_of, student_hidden
from engine.data.batches import IGNORED

TOKENS = 64


@torch.no_grad()
def nan_not_masked(context: Context) -> Answer:
    """Put a NaN into the hidden states that the loss gets of each model, where there is a label."""
    batch = few_rows(next_rows(context), TOKENS)
    labels_N = torch.from_numpy(batch.labels_BT).flatten()
    hidden_ND = hidden_of(student_hidden(context), batch, context.device).flatten(0, 1)
    models = {"student": hidden_ND}
    teacher_head = None
    if context.teacher is not None:
        teacher_NE = hidden_of(context.teacher.hidden, batch, context.device).flatten(0, 1)
        models["teacher"], teacher_head = teacher_NE, context.teacher.head()
    labelled = (labels_N != IGNORED).nonzero().flatten()

    def loss(spoilt: str | None) -> float:
        given = {whose: hidden.clone() for whose, hidden in models.items()}
        if spoilt is not None:
            given[spoilt][int(labelled[0])] = math.nan
        terms = context.objective(
            given["student"],
            context.student.head_weight,
            given.get("teacher"),
            teacher_head,
            labels_N,
            denominator=float(max(len(labelled), 1)),
        )
        return float(terms.loss)

    found = loss(None)
    numbers = Numbers(loss=found)
    if not math.isfinite(found) or not len(labelled):
        return numbers.unknown(
            f"the loss is {found} of {len(labelled)} labels without a NaN put in"
        )
    for whose in models:
        found = loss(whose)
        numbers[f"with_{whose}_nan"] = found
        if math.isfinite(found):
            return numbers.failed(
                f"with NaN in the {whose}'s hidden states the loss is {found:.4g} and not NaN"
            )
    return numbers.passed(f"a NaN in the {' or the '.join(models)} makes the loss NaN")
