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
    """Put a NaN into the hidden states that the loss gets of each model."""
    batch = few_rows(next_rows(context), TOKENS)
    labels_N = torch.from_numpy(batch.labels_BT).flatten()
    hidden_ND = hidden_of(student_hidden(context), batch, context.device)
    models = {"student": hidden_ND}
    teacher_head = None
    if context.teacher is not None:
        teacher_NE = hidden_of(context.teacher.hidden, batch, context.device)
        models["teacher"], teacher_head = teacher_NE, context.teacher.head()
    # The first token's label, whatever the rows have: only the loss is asked.
    labels_N[0] = 0
    numbers = Numbers()
    for whose, hidden in models.items():
        spoilt = hidden.clone()
        spoilt[0] = math.nan
        given = models | {whose: spoilt}
        terms = context.objective(
            given["student"],
            context.student.head_weight,
            given.get("teacher"),
            teacher_head,
            labels_N,
            denominator=float((labels_N != IGNORED).sum()),
        )
        numbers[f"with_{whose}_nan"] = found = float(terms.loss)
        if math.isfinite(found):
            return numbers.failed(
                f"with NaN in the {whose}'s hidden states the loss is {found:.4g} and not NaN"
            )
    return numbers.passed(f"a NaN in the {' or the '.join(models)} makes the loss NaN")
