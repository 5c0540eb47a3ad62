"""Check the forward pass of a model that transformers runs, for which the audit of a step has no reference."""

# Shapes: B rows, T tokens, D width

from __future__ import annotations

import torch

from engine.checks.context import Context
from engine.checks.logits import Hidden
from engine.verdict import Answer, Numbers, passed

ROWS, LENGTH = 2, 24
"""Number of rows, and of tokens in each, that the models run on."""
LEAK = 1e-4
"""Maximum change of hidden states that must not change, relative to the change of those that may. Masked tokens have a
weight of exactly 0 and equal shapes give equal sums, so a correct model has no leak at all.
"""


@torch.no_grad()
def no_token_leaks(context: Context) -> Answer:
    student, teacher = context.student, context.teacher_decoder
    models: dict[str, Hidden] = {}
    # Without autocast, whose rounding depends on the summed numbers.
    if not student.config.native:
        models["student"] = student.hidden
    if context.teacher is not None and teacher is not None and not teacher.config.native:
        models["teacher"] = context.teacher.hidden
    if not models:
        return passed(
            "transformers runs no model: the audit compares the first steps with references"
        )
    batch = context.heldout[0]
    tokens_BT = torch.from_numpy(batch.tokens_BT[:ROWS, :LENGTH]).to(context.device)
    # Each row has two documents. A token in the middle of the first is changed.
    end = max(1, 2 * tokens_BT.shape[1] // 3)
    middle = end // 2
    # Numbered like the last documents of the text, where an index in a narrow type would overflow.
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
            return numbers.failed(f"{whose}: a changed token changes no hidden state")
        for unrelated, positions in (
            ("earlier tokens", slice(middle)),
            ("tokens of another document", slice(end, None)),
        ):
            numbers[f"{whose} leak"] = leak = float(moved_BT[:, positions].norm()) / own
            if not leak <= LEAK:
                return numbers.failed(
                    f"{whose}: a changed token changes {unrelated} by {leak:.1e} of the change of its own document's "
                    f"later tokens, expected up to {LEAK:.0e}"
                )
    return numbers.passed(
        f"a changed token changes only later tokens of its document, in the {' and the '.join(models)}"
    )
