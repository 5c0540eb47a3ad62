"""The check of the forward pass of a model that transformers runs, for which the audit of a step has no reference."""

# Shapes: B rows, T tokens, D width

from __future__ import annotations

import torch

from engine.checks.context import Context
from engine.checks.logits import Hidden
from engine.verdict import Answer, Numbers, passed

ROWS, LENGTH = 2, 24
LEAK = 1e-4
"""Largest allowed change of tokens that must not change, relative to the change of those that may. Masked
tokens have a weight of exactly 0, and equal shapes give equal sums, so a correct model has no leak at
all.
"""


@torch.no_grad()
def no_token_leaks(context: Context) -> Answer:
    student, teacher = context.student, context.teacher_decoder
    models: dict[str, Hidden] = {}
    # Without autocast, whose rounding differs with what is summed.
    if not student.config.native:
        models["student"] = student.hidden
    if context.teacher is not None and teacher is not None and not teacher.config.native:
        models["teacher"] = context.teacher.hidden
    if not models:
        return passed("transformers runs no model: the first steps are compared with references")
    batch = context.heldout[0]
    tokens_BT = torch.from_numpy(batch.tokens_BT[:ROWS, :LENGTH]).to(context.device)
    # Two documents a row. A token in the middle of the first is changed.
    end = max(1, 2 * tokens_BT.shape[1] // 3)
    middle = end // 2
    # Numbered as the last ones of the text: what tells two apart must do so there.
    documents_BT = torch.full_like(tokens_BT, max(0, len(context.train_stream.lengths) - 2))
    documents_BT[:, end:] += 1
    changed_BT = tokens_BT.clone()
    vocabulary = student.config.vocab_size
    # Away from the special tokens at the ends of the vocabulary.
    changed_BT[:, middle] = (tokens_BT[:, middle] + vocabulary // 2) % vocabulary
    numbers = Numbers()
    for whose, hidden in models.items():
        before_BTD = hidden(tokens_BT, documents_BT)
        moved_BT = (hidden(changed_BT, documents_BT) - before_BTD).float().norm(dim=2)
        own = float(moved_BT[:, middle:end].norm())
        if own == 0:
            return numbers.failed(f"{whose}: a changed token changes nothing")
        for what, others in (
            ("tokens before it", slice(middle)),
            ("another document", slice(end, None)),
        ):
            numbers[f"{whose} leak"] = leak = float(moved_BT[:, others].norm()) / own
            if not leak <= LEAK:
                return numbers.failed(
                    f"{whose}: a changed token moves {what} by {leak:.1e} of what it may move"
                )
    return numbers.passed(
        f"a changed token moves only later ones of its document, of the {' and the '.join(models)}"
    )
