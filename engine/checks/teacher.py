"""Checks of what the models know: the teacher, the evaluation, and the alignment of labels.

The yardstick is the cross entropy of token frequencies, counted on the training text, on the same tokens.
It is lower than ln V, and a lookup table reaches it. A model between the two has no business with this text; one
that is not better than ln V is no model at all, or of other tokens.
"""

# Shapes: B rows, T tokens, N tokens, V vocabulary, D student width

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from engine.checks.check import Answer, Numbers, passed, unknown
from engine.checks.context import Context
from engine.checks.data import next_rows
from engine.checks.logits import (
    OFFSETS,
    cross_entropies,
    few_rows,
    hidden_of,
    shifted_labels,
    student_head,
    student_hidden,
    token_frequencies,
)
from engine.data.batches import IGNORED
from engine.models.head import mean_kl
from engine.teachers.fp8 import NOISE_FLOOR_KL, rounding_of
from engine.teachers.identity import same_values
from engine.teachers.store.teacher import CachedTeacher

SMALLEST_KL = 1e-5
"""Nats at the start. Two roundings of one model differ by more, which is why values are compared too; the
same values in the same precision give 1e-7.
"""
CLEAR = 0.1
"""Nats by which one offset must beat another, or a model must beat guessing, for a verdict."""
NO_TEACHER = "there is no teacher in the objective"


def teacher_knows_text(context: Context) -> Answer:
    teacher = context.teacher
    if teacher is None:
        return unknown(NO_TEACHER)
    batch = few_rows(context.heldout[0])
    labels_N = torch.from_numpy(batch.labels_BT).flatten()
    columns = context.student.config.vocab_size
    hidden_NE = hidden_of(teacher.hidden, batch, context.device).flatten(0, 1)
    (ce,) = cross_entropies(hidden_NE, teacher.head(), columns, [labels_N])
    frequencies = token_frequencies(context.train_stream, labels_N, columns)
    ln_v = math.log(columns)
    numbers = Numbers(
        ce=ce, ln_vocabulary=ln_v, frequencies=frequencies, tokens=float((labels_N >= 0).sum())
    )
    if not math.isfinite(ce):
        return numbers.failed(f"the teacher's cross entropy on held-out text is {ce}")
    if ce > ln_v - CLEAR:
        return numbers.failed(
            f"cross entropy {ce:.2f} nats on held-out text, guessing at random has {ln_v:.2f}"
        )
    # Better than guessing, so it is a model and its tokens are the right ones. The alert
    # `teacher_off_text` warns of it for as long as the run goes on.
    if ce >= frequencies:
        return numbers.unknown(
            f"the text is outside what the teacher knows: cross entropy {ce:.2f} nats on held-out "
            f"text, token frequencies alone have {frequencies:.2f}, guessing at random {ln_v:.2f}"
        )
    return numbers.passed(
        f"cross entropy {ce:.2f} nats on held-out text; frequencies {frequencies:.2f}, ln V {ln_v:.2f}"
    )


def eval_baseline(context: Context) -> Answer:
    """Evaluate random hidden states with the student's own head."""
    batch = few_rows(context.heldout[0])
    head, columns = student_head(context), context.student.config.vocab_size

    def noise(tokens_BT: Tensor, documents_BT: Tensor) -> Tensor:
        generator = torch.Generator(tokens_BT.device).manual_seed(0)
        return torch.randn(
            *tokens_BT.shape, head.width, generator=generator, device=tokens_BT.device
        )

    loss = context.evaluate(noise, head, [batch])
    labels_N = torch.from_numpy(batch.labels_BT).flatten()
    frequencies = token_frequencies(context.train_stream, labels_N, columns)
    ln_v = math.log(columns)
    numbers = Numbers(noise=loss, frequencies=frequencies, ln_vocabulary=ln_v)
    text = f"noise is evaluated at {loss:.2f} nats; token frequencies have {frequencies:.2f}"
    # Frequencies of a different text may be worse than guessing.
    if not loss >= min(frequencies, ln_v - CLEAR):
        return numbers.failed(text)
    return numbers.passed(text)


def shift_proof(context: Context) -> Answer:
    """Find the offset at which the teacher's logits fit the labels best; it must be 0."""
    teacher = context.teacher
    if teacher is None:
        return unknown(NO_TEACHER)
    batch = few_rows(next_rows(context))
    columns = context.student.config.vocab_size
    targets = shifted_labels(batch)
    hidden_NE = hidden_of(teacher.hidden, batch, context.device).flatten(0, 1)
    found = cross_entropies(hidden_NE, teacher.head(), columns, targets)
    frequencies = token_frequencies(context.train_stream, targets[1], columns)
    numbers = _at_offsets("ce", found)
    numbers |= dict(frequencies=frequencies, tokens=float((targets[1] >= 0).sum()))
    best = min(range(len(OFFSETS)), key=lambda index: found[index])
    if not all(map(math.isfinite, found)):
        return numbers.unknown("the teacher's cross entropy is not finite or no token has labels")
    if found[best] >= frequencies:
        return numbers.unknown("the teacher knows nothing of this text, so it cannot tell")
    listed = ", ".join(
        f"{ce:.2f} at {offset:+d}" for offset, ce in zip(OFFSETS, found, strict=True)
    )
    if OFFSETS[best] != 0:
        how = "not shifted" if OFFSETS[best] > 0 else "shifted twice"
        return numbers.failed(f"the teacher's cross entropy is {listed}: labels are {how}")
    return numbers.passed(f"the teacher's cross entropy is {listed}")


def _at_offsets(what: str, values: list[float]) -> Numbers:
    named = {f"{what}_at_{offset:+d}": x for offset, x in zip(OFFSETS, values, strict=True)}
    return Numbers(named)


class StudentShift:
    """The same for the student, once it has learnt: the offset at which it has improved."""

    def __init__(self, context: Context) -> None:
        self.begun = self._measure(context)

    @staticmethod
    def _measure(context: Context) -> list[float]:
        batch = few_rows(context.heldout[0])
        tokens_BT = torch.from_numpy(batch.tokens_BT)
        documents_BT = torch.from_numpy(batch.documents_BT)
        # The tokens themselves, because the labels may be what is wrong: the current token, the next and
        # the one after it, where all are of the same document.
        length = tokens_BT.shape[1] - 2
        same_BT = documents_BT[:, :-2] == documents_BT[:, 2:]
        # Of a conversation where something is trained on: elsewhere the student learns nothing.
        same_BT &= torch.from_numpy(batch.labels_BT[:, :length] != IGNORED)
        same_BT = same_BT.flatten()
        targets = [
            torch.where(same_BT, tokens_BT[:, 1 + o : 1 + o + length].flatten(), -1)
            for o in OFFSETS
        ]
        hidden_BTD = hidden_of(student_hidden(context), batch, context.device)[:, :length]
        return cross_entropies(
            hidden_BTD.flatten(0, 1),
            student_head(context),
            context.student.config.vocab_size,
            targets,
        )

    def at_checkpoint(self, context: Context, path: Path) -> Answer:
        now = self._measure(context)
        gained = [before - after for before, after in zip(self.begun, now, strict=True)]
        numbers = _at_offsets("ce", now)
        numbers |= _at_offsets("gained", gained)
        for offset, ce, gain in zip(OFFSETS, now, gained, strict=True):
            if offset and gain > max(gained[1], 0) + CLEAR and ce < now[1] - CLEAR:
                what = "the token it was given" if offset < 0 else "the token after the next"
                return numbers.failed(
                    f"since the start it has learnt to predict {what}: cross entropy {ce:.2f} nats, "
                    f"for the next token {now[1]:.2f}"
                )
        if not gained[1] >= CLEAR:
            return numbers.unknown(
                f"the student has gained {gained[1]:.2f} nats since the start: too little to tell"
            )
        return numbers.passed(
            f"it predicts the next token, {gained[1]:.2f} nats better than at the start"
        )


def teacher_not_student(context: Context) -> Answer:
    teacher, decoder = context.teacher, context.teacher_decoder
    if teacher is None:
        return unknown(NO_TEACHER)
    batch = few_rows(next_rows(context))
    columns = context.student.config.vocab_size
    kl, agreement = mean_kl(
        hidden_of(teacher.hidden, batch, context.device).flatten(0, 1),
        teacher.head(),
        hidden_of(student_hidden(context), batch, context.device).flatten(0, 1),
        student_head(context),
        columns,
    )
    # A teacher read from stored outputs has no values; the KL tells as much.
    digest = same_values(decoder, context.student) if decoder is not None else None
    numbers = Numbers(kl=kl, agreement=agreement, same_values=float(digest is not None))
    if digest is not None or kl < SMALLEST_KL:
        found = (
            f"the same values (sha256 {digest[:12]} in bf16)" if digest else "the same distribution"
        )
        text = f"teacher and student have {found}, KL {kl:.1e} nats"
        if context.spec.teacher.allow_identical:
            return numbers.unknown(f"{text}, as teacher.allow_identical says they may")
        return numbers.failed(text)
    if not math.isfinite(kl):
        return numbers.unknown(f"the KL is {kl}")
    return numbers.passed(f"other values, KL {kl:.3g} nats, {agreement:.0%} agreement")


def stored_outputs(context: Context) -> Answer:
    """Report what comparing stored rows with the teacher has shown, before it was used."""
    teacher = context.teacher
    if not isinstance(teacher, CachedTeacher):
        return passed("the teacher's outputs are computed, not read")
    if isinstance(teacher.proof, str):
        return unknown(teacher.proof)
    found, limit = teacher.proof, context.spec.gate.cache_cosine
    numbers = Numbers(
        least=found.least_cosine,
        limit=limit,
        distance=found.largest_distance,
        rows=found.rows,
        tokens=found.tokens,
    )
    if found.within(limit):
        return numbers.passed(found.text(limit))
    return numbers.failed(f"stored outputs are not the teacher's: {found.text(limit)}")


def teacher_fp8_within_noise_floor(context: Context) -> Answer:
    """Compare the rounding error measured when the teacher was loaded with that of 4-bit weights."""
    if context.spec.teacher.precision != "fp8":
        return passed("no product of the teacher is in 8-bit floats")
    rounding = None if context.teacher is None else rounding_of(context.teacher)
    if rounding is None:
        return unknown("there is no teacher in 8-bit floats in the objective")
    numbers = Numbers(
        kl=rounding.kl,
        noise_floor=NOISE_FLOOR_KL,
        agreement=rounding.agreement,
        relative_rms=rounding.relative_rms,
        tokens=rounding.tokens,
    )
    if not math.isfinite(rounding.kl):
        return numbers.failed(f"its KL from the exact teacher is {rounding.kl}")
    text = (
        f"KL {rounding.kl:.2g} nats from the exact teacher on {rounding.tokens} held-out tokens, "
        f"{rounding.agreement:.1%} rank the same token first; 4-bit weights cost {NOISE_FLOOR_KL:.2g}"
    )
    if rounding.kl > NOISE_FLOOR_KL:
        return numbers.failed(text)
    return numbers.passed(text)
