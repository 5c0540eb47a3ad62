"""Teacher parity: a teacher whose products are not exact, against the model it stands for.

    KL(reference || teacher)  <=  the published noise of 4-bit weights, or gate.teacher_kl

as a mean over labelled tokens of held-out rows, at temperature 1, over the student's ids. The reference is
the model in gate.teacher_reference, the one that the blocks were made from; without it, the values that the
blocks stand for, in fp32: then the arithmetic is judged and not the quantization. A teacher of dense weights
in a float type has nothing that could be compared.
"""

from __future__ import annotations

import torch

from engine.export.gate.gate import Gate, answered, does_not_apply
from engine.export.gate.subject import Subject, frozen, log_probabilities
from engine.models.load import load_decoder
from engine.models.packed import head_of
from engine.quant.noise import NOISE_FLOORS
from engine.verdict import Level

# Shapes: B rows, T tokens, N labelled tokens, V vocabulary, E width

ID = "teacher"
ROWS = 8
_CHUNK = 256


@torch.inference_mode()
def teacher_parity(subject: Subject) -> Gate:
    spec = subject.spec
    if not spec.has_teacher:
        return does_not_apply(ID, "the run has no teacher")
    given = spec.gate.teacher_reference
    inexact = subject.teacher_backend == "quantized" or subject.teacher_precision == "fp8"
    if not inexact and not given:
        return does_not_apply(
            ID,
            f"the teacher is dense, in {subject.teacher_precision}: nothing of it is quantized on the way "
            "(gate.teacher_reference compares it with another model)",
        )
    parts = list(subject.rows.heldout.split(ROWS))[:1]
    path = given or spec.teacher.path
    teacher = subject.teacher.teacher
    columns = subject.inputs.student.vocab_size
    subject.say(f"loading the reference: {path} (fp32)")
    reference = frozen(load_decoder(path, torch.float32, subject.device))
    if reference.config.vocab_size < columns:
        text = f"{path} has {reference.config.vocab_size:,} ids, expected {columns:,} or more"
        return answered(ID, Level.UNKNOWN, text)
    kl = agreed = 0.0
    count = 0
    for batch in parts:
        tokens_BT, documents_BT, labels_BT = batch.to_torch(subject.device)
        kept = (labels_BT.flatten() >= 0).nonzero().squeeze(1)
        ours_NE = teacher.hidden(tokens_BT, documents_BT).flatten(0, 1)[kept]
        theirs_NE = reference.hidden(tokens_BT, documents_BT).flatten(0, 1)[kept]
        for first in range(0, len(kept), _CHUNK):
            part = slice(first, first + _CHUNK)
            q_NV = log_probabilities(ours_NE[part], teacher.head(), columns).double()
            p_NV = log_probabilities(theirs_NE[part], head_of(reference), columns).double()
            kl += float((p_NV.exp() * (p_NV - q_NV)).sum())
            agreed += float((p_NV.argmax(-1) == q_NV.argmax(-1)).sum())
        count += len(kept)
    if not count:
        return answered(ID, Level.UNKNOWN, "the held-out rows have no label")
    limit = spec.gate.teacher_kl or NOISE_FLOORS["q4_k_m"].kl
    mean = kl / count
    which = given or "the values in its blocks, in fp32"
    text = (
        f"{subject.teacher_backend}, {subject.teacher_precision}: KL {mean:.2g} from {which}, at most "
        f"{limit:.2g}; {agreed / count:.1%} rank the same id first ({count:,} tokens)"
    )
    # Written so that NaN fails.
    level = Level.PASS if mean <= limit else Level.FAIL
    return answered(ID, level, text, kl=mean, limit=limit, agreement=agreed / count, tokens=count)
