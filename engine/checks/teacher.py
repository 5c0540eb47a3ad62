"""Check how well the teacher and the evaluation predict text.

The baseline is the cross entropy, on the same tokens, of token frequencies counted on the training text. It is lower
than ln V, and a lookup table reaches it. A model between the two was not trained on text of this kind; a model above
ln V has random weights or another tokenizer.
"""

# Shapes: B rows, T tokens, N tokens, V vocabulary, D student width

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.checks.context import Context
from engine.checks.data import next_rows
from engine.checks.logits import (
    cross_entropy,
    few_rows,
    hidden_of,
    student_hidden,
    token_frequencies,
)
from engine.data.batches import Batch
from engine.models.head import mean_kl
from engine.models.packed import head_of
from engine.teachers.fp8 import NOISE_FLOOR_KL, rounding_of
from engine.teachers.store.teacher import CachedTeacher
from engine.verdict import Answer, Numbers, passed, unknown

MIN_KL = 1e-5
"""Minimum KL of teacher and student at the start, in nats. Two roundings of one model differ by more, so weights are
compared too; the same weights in the same precision give 1e-7.
"""
MARGIN = 0.1
"""Minimum distance of a cross entropy below that of guessing at random, in nats."""
NO_TEACHER = "there is no teacher in the objective"


def teacher_knows_text(context: Context) -> Answer:
    teacher = context.teacher
    if teacher is None:
        return unknown(NO_TEACHER)
    batch = few_rows(context.heldout[0])
    labels_N, frequencies, ln_v = _baselines(context, batch)
    hidden_NE = hidden_of(teacher.hidden, batch, context.device)
    ce = cross_entropy(hidden_NE, teacher.head(), context.student.config.vocab_size, labels_N)
    numbers = Numbers(
        ce=ce, ln_vocabulary=ln_v, frequencies=frequencies, tokens=float((labels_N >= 0).sum())
    )
    if not math.isfinite(ce):
        return numbers.failed(f"the teacher's cross entropy on held-out text is {ce}")
    if ce > ln_v - MARGIN:
        return numbers.failed(
            f"the teacher's cross entropy on held-out text is {ce:.2f} nats, guessing at random gives {ln_v:.2f}"
        )
    # Better than guessing, so it is a trained model with the right tokenizer. The alert
    # `teacher_off_text` stays active for as long as the run does.
    if ce >= frequencies:
        return numbers.unknown(
            f"the teacher does not predict this kind of text: its cross entropy on held-out text is {ce:.2f} nats, "
            f"token frequencies alone give {frequencies:.2f}, guessing at random {ln_v:.2f}"
        )
    return numbers.passed(
        f"cross entropy {ce:.2f} nats on held-out text; frequencies {frequencies:.2f}, ln V {ln_v:.2f}"
    )


def _baselines(context: Context, batch: Batch) -> tuple[Tensor, float, float]:
    """Return the labels of a batch, the cross entropy of token frequencies on them, and that of guessing, ln V."""
    labels_N = torch.from_numpy(batch.labels_BT).flatten()
    columns = context.student.config.vocab_size
    return labels_N, token_frequencies(context.train_stream, labels_N, columns), math.log(columns)


def teacher_not_student(context: Context) -> Answer:
    teacher = context.teacher
    if teacher is None:
        return unknown(NO_TEACHER)
    batch = few_rows(next_rows(context))
    columns = context.student.config.vocab_size
    kl, agreement = mean_kl(
        hidden_of(teacher.hidden, batch, context.device),
        teacher.head(),
        hidden_of(student_hidden(context), batch, context.device),
        head_of(context.student),
        columns,
    )
    numbers = Numbers(kl=kl, agreement=agreement)
    if kl < MIN_KL:
        text = f"teacher and student have the same distribution, KL {kl:.1e} nats"
        if context.spec.teacher.allow_identical:
            return numbers.unknown(f"{text}, which teacher.allow_identical allows")
        return numbers.failed(text)
    if not math.isfinite(kl):
        return numbers.unknown(f"the KL is {kl}")
    return numbers.passed(
        f"teacher and student differ: KL {kl:.3g} nats, {agreement:.0%} agreement"
    )


def stored_outputs(context: Context) -> Answer:
    """Report the comparison of stored rows with the teacher, made before the store was used."""
    teacher = context.teacher
    if not isinstance(teacher, CachedTeacher):
        return passed("the teacher's outputs are computed, not read")
    if isinstance(teacher.proof, str):
        return unknown(teacher.proof)
    proof, limit = teacher.proof, context.spec.gate.cache_cosine
    numbers = Numbers(
        least=proof.least_cosine,
        limit=limit,
        distance=proof.largest_distance,
        rows=proof.rows,
        tokens=proof.tokens,
    )
    if proof.within(limit):
        return numbers.passed(proof.text(limit))
    return numbers.failed(f"stored outputs differ from the teacher's: {proof.text(limit)}")


def teacher_fp8_within_noise_floor(context: Context) -> Answer:
    """Compare the rounding error measured when the teacher was loaded with that of 4-bit weights."""
    if context.spec.teacher.precision != "fp8":
        return passed("no matmul of the teacher is in fp8")
    rounding = None if context.teacher is None else rounding_of(context.teacher)
    if rounding is None:
        return unknown("the objective has no teacher in fp8")
    numbers = Numbers(
        kl=rounding.kl,
        noise_floor=NOISE_FLOOR_KL,
        agreement=rounding.agreement,
        relative_rms=rounding.relative_rms,
        tokens=rounding.tokens,
    )
    if not math.isfinite(rounding.kl):
        return numbers.failed(f"the KL of the fp8 teacher to the exact teacher is {rounding.kl}")
    text = (
        f"the fp8 teacher has a KL of {rounding.kl:.2g} nats to the exact one on {rounding.tokens} held-out tokens, "
        f"{rounding.agreement:.1%} have the same top token; 4-bit weights have a KL of {NOISE_FLOOR_KL:.2g}"
    )
    if rounding.kl > NOISE_FLOOR_KL:
        return numbers.failed(text)
    return numbers.passed(text)
