"""Measure how far the outputs of two implementations of one model are apart.

    tokens        the first greedy token that differs; a tie if both tokens are equally likely up to rounding
    distance      the largest difference of two logits, relative to the root mean square of all
    divergence    mean over positions from 1 on of KL(reference || other), and how often the top token is the same

Position 0 is left out of KL: there every rotary embedding is the identity, which would hide errors in them.

Outputs are compared with the reference's in one of two ways:

    as_float    for fp32 from the same weights: token ids, greedy tokens and text must be the same, logits up to
                FLOAT_TOLERANCE
    within      for quantised weights: token ids must be the same, logits within the noise of the block type

The result of an implementation that is not installed is unknown. An implementation that crashes or gives other outputs
fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.export.outcome import Outcome, answered
from engine.export.peers import Absent, Answered, Crashed, Logits
from engine.verdict import Level

# Shapes: T tokens of a row, V vocabulary

FLOAT_TOLERANCE = 1e-3
"""Tolerance of logits, relative to their root mean square. fp32 sums in another order differ by some 1e-6 after each
matmul, and by 1e-4 after a hundred layers; a wrong eps, mask or RoPE pairing changes logits by a tenth or more."""


class Difference(NamedTuple):
    step: int
    ours: int
    theirs: int
    gap: float
    """Margin by which the reference prefers its own token, in logits relative to their root mean square."""

    @property
    def tie(self) -> bool:
        return self.gap <= FLOAT_TOLERANCE

    def __str__(self) -> str:
        size_text = "a tie" if self.tie else f"{self.gap:.2g} RMS of the logits apart"
        return f"step {self.step + 1}: token {self.theirs} instead of {self.ours}, {size_text}"


def first_difference(
    prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int], logits_TV: Logits
) -> Difference | None:
    """Return the first difference of two continuations of `prompt`. `logits_TV`: the reference's logits over prompt and
    continuation."""
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            row_V = logits_TV[len(prompt) - 1 + step]
            gap = float(row_V[a] - row_V[b]) if 0 <= b < len(row_V) else float("inf")
            return Difference(step, a, b, gap / _size([logits_TV]))
    return None


def distance(reference: Sequence[Logits], other: Sequence[Logits]) -> float:
    """Return the largest difference of two logits, relative to the root mean square; NaN if a logit is not finite."""
    largest = max(float(np.abs(a - b).max()) for a, b in zip(reference, other, strict=True))
    finite = all(bool(np.isfinite(logits).all()) for logits in other)
    return largest / _size(reference) if finite else float("nan")


def divergence(reference: Sequence[Logits], other: Sequence[Logits]) -> tuple[float, float]:
    """Return the mean KL in nats, and the fraction of positions with the same top token; from position 1 on."""
    kls, is_same_top = [], []
    for a, b in zip(reference, other, strict=True):
        p_TV, q_TV = (torch.from_numpy(logits[1:]).double().log_softmax(-1) for logits in (a, b))
        kls.append((p_TV.exp() * (p_TV - q_TV)).sum(-1))
        is_same_top.append((p_TV.argmax(-1) == q_TV.argmax(-1)).double())
    return float(torch.cat(kls).mean()), float(torch.cat(is_same_top).mean())


# contract: publication-v1
def as_float(id_: str, answer: Answered | Absent | Crashed, reference: Answered) -> Outcome:
    """Judge an implementation that computes in fp32 from the same weights: all outputs must be the same up to
    FLOAT_TOLERANCE."""
    if not isinstance(answer, Answered):
        return _no_answer(id_, answer)
    numbers: dict[str, float] = {}
    level, text = _compare_floats(answer, reference, numbers)
    return answered(id_, level, f"{answer.version}: {text}", **numbers)


def _compare_floats(
    answer: Answered, reference: Answered, numbers: dict[str, float]
) -> tuple[Level, str]:
    if problem := _other_ids(answer, reference):
        return Level.FAIL, problem
    if _other_shapes(answer, reference):
        sizes = f"{answer.logits[0].shape[1]:,} logits, expected {reference.logits[0].shape[1]:,}"
        return Level.FAIL, sizes
    relative = distance(reference.logits, answer.logits)
    steps = len(reference.tokens[0])
    numbers |= {"logits_apart": relative, "limit": FLOAT_TOLERANCE, "steps": float(steps)}
    ties = []
    for row, ours, theirs, logits_TV in zip(
        reference.rows, reference.tokens, answer.tokens, reference.logits, strict=True
    ):
        difference = first_difference(row[: len(row) - len(ours)], ours, theirs, logits_TV)
        if difference is not None and not difference.tie:
            return Level.FAIL, str(difference)
        ties += [difference] if difference is not None else []
    # The comparison is written so that NaN fails.
    if not relative <= FLOAT_TOLERANCE:
        return Level.FAIL, f"logits {relative:.2g} RMS apart, expected at most {FLOAT_TOLERANCE:g}"
    if ties:
        text = f"{len(ties)} of {len(reference.rows)} continuations differ after a tie: {ties[0]}"
        return Level.UNKNOWN, text
    if answer.text != reference.text:
        problem = next(a for a, b in zip(answer.text, reference.text, strict=True) if a != b)
        return Level.FAIL, f"the same tokens are decoded to other text: {problem[:60]!r}"
    return Level.PASS, (
        f"the same token ids, {steps} greedy tokens and text of {len(reference.rows)} prompts; "
        f"logits {relative:.1e} RMS apart"
    )


def _other_ids(answer: Answered, reference: Answered) -> str:
    """Describe the first text whose token ids differ; empty if all are equal."""
    for index, (ours, theirs) in enumerate(zip(reference.ids, answer.ids, strict=False)):
        if ours != theirs:
            position = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), 0
            )
            near = slice(max(0, position - 2), position + 6)
            return (
                f"text {index + 1}, token {position + 1} of {len(ours)}: expected {ours[near]}, found {theirs[near]}: "
                "another tokenizer"
            )
    return ""


# contract: publication-v1
def within(
    id_: str, answer: Answered | Absent | Crashed, reference: Answered, limit: float, origin: str
) -> Outcome:
    """Judge an implementation that computes from quantised weights: its KL from the reference must be at most `limit`
    nats. `origin` names the reference in the result."""
    if not isinstance(answer, Answered):
        return _no_answer(id_, answer)
    if _other_shapes(answer, reference):
        return answered(id_, Level.FAIL, f"{answer.version}: another vocabulary size")
    if problem := _other_ids(answer, reference):
        return answered(id_, Level.FAIL, f"{answer.version}: {problem}")
    kl, agreement = divergence(reference.logits, answer.logits)
    text = f"{answer.version}: KL {kl:.2g} from {origin}, same top token {agreement:.1%}; limit {limit:.2g}"
    level = Level.PASS if kl <= limit else Level.FAIL
    return answered(id_, level, text, kl=kl, limit=limit, top1_agreement=agreement)


def _no_answer(id_: str, answer: Absent | Crashed) -> Outcome:
    level = Level.UNKNOWN if isinstance(answer, Absent) else Level.FAIL
    return answered(id_, level, answer.reason)


def _other_shapes(answer: Answered, reference: Answered) -> bool:
    return any(a.shape != b.shape for a, b in zip(answer.logits, reference.logits, strict=True))


def _size(rows: Sequence[Logits]) -> float:
    total = sum(float(np.square(one, dtype=np.float64).sum()) for one in rows)
    return float(np.sqrt(total / sum(one.size for one in rows)))
