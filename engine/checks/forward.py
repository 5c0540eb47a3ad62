"""The check of the forward pass, for what the audit of a step (`engine.audit`) cannot see: what 16 bits hide of the
student's formula and of a norm's eps, and the mask of a model without a reference.
"""

# Shapes: B rows, T tokens, N = B*T, D width

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from engine.audit.reference import PlainDecoder
from engine.checks.check import Answer, Numbers
from engine.checks.context import Context
from engine.checks.logits import Hidden
from engine.checks.weights import shape_of, weights_of
from engine.models.decoder import Decoder, RMSNorm

ROWS, LENGTH = 2, 24
OF_TRANSFORMERS = "not proved: transformers runs every model, and there is no other forward pass to compare it with"
LEAK = 1e-4
"""Largest allowed change of tokens that must not change, relative to the change of those that may. Masked
tokens have a weight of exactly 0, and equal shapes give equal sums, so a correct model has no leak at
all.
"""
FP32_ERROR = 2e-4
"""Of the student in fp32, relative to a plain forward pass."""


@torch.no_grad()
def forward_is_the_model(context: Context) -> Answer:
    student = context.student
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
    # Without autocast: rounding would hide a wrong formula.
    models: dict[str, tuple[Decoder, Hidden]] = {"student": (student, student.hidden)}
    if context.teacher is not None and context.teacher_decoder is not None:
        models["teacher"] = (context.teacher_decoder, context.teacher.hidden)
    numbers = Numbers()
    for whose, (decoder, hidden) in models.items():
        wanted = decoder.config.rms_norm_eps
        for name, eps in _eps_of_norms(decoder):
            if not 0.9 < eps / wanted < 1.1:
                return numbers.failed(
                    f"{whose}: {name} behaves as with eps {eps:.1e}, config.json says {wanted:.1e}"
                )
        before_BTD = hidden(tokens_BT, documents_BT)
        moved_BT = (hidden(changed_BT, documents_BT) - before_BTD).float().norm(dim=2)
        own = float(moved_BT[:, middle:end].norm())
        if own == 0:
            return numbers.failed(f"{whose}: a changed token changes nothing")
        for what, others in (
            ("tokens before it", slice(middle)),
            ("another document", slice(end, None)),
        ):
            leak = float(moved_BT[:, others].norm()) / own
            if not leak <= LEAK:
                return numbers.failed(
                    f"{whose}: a changed token moves {what} by {leak:.1e} of what it may move"
                )
        if whose == "student" and decoder.config.native:
            plain = PlainDecoder(shape_of(decoder.config), weights_of(decoder))
            plain_ND = plain.forward(tokens_BT, documents_BT).hidden_ND
            error_N = (before_BTD.flatten(0, 1) - plain_ND).norm(dim=1)
            numbers["error"] = error = float(error_N.norm() / plain_ND.norm())
            if not error <= FP32_ERROR:
                far_N = ~(error_N <= FP32_ERROR * plain_ND.norm(dim=1))
                first = int(far_N.nonzero()[0]) % tokens_BT.shape[1]
                return numbers.failed(
                    f"{whose}: hidden states in fp32 are {error:.2g} (relative) from a plain forward pass; first at "
                    f"position {first} of a row"
                )
    if not numbers:
        return numbers.unknown(OF_TRANSFORMERS)
    return numbers.passed(
        f"a changed token moves only later ones of its document; the student in fp32 is within {error:.1e} of a plain "
        "forward pass"
    )


def _eps_of_norms(decoder: Decoder) -> Iterator[tuple[str, float]]:
    """Yield the name of each norm with the eps that it has in effect.

    In a row whose mean square is eps, eps is half of the sum under the root, so y = w / sqrt(2).
    """
    wanted = decoder.config.rms_norm_eps
    for name, module in decoder.named_modules():
        if not isinstance(module, RMSNorm):
            continue
        decoder.reach(name)
        weight_D: Tensor = module.factor_D
        row_D = torch.full_like(weight_D, math.sqrt(wanted))[None, None, None]
        answer_D = module(row_D).float().flatten()
        share = float((answer_D * weight_D.float()).sum() / weight_D.float().square().sum())
        # y = x / sqrt(x^2 + eps) with x^2 = wanted
        yield name, wanted * (1 / share**2 - 1) if share > 0 else math.inf
