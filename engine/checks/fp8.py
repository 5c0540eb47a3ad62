"""The check of a teacher in 8-bit floats: whether its answers are near enough to its exact ones."""

from __future__ import annotations

import math

from engine.checks.check import Answer, failed, passed, unknown
from engine.checks.context import Context
from engine.teachers.fp8 import NOISE_FLOOR_KL, rounding_of


def teacher_fp8_within_noise_floor(context: Context) -> Answer:
    """What was measured while the teacher was loaded, beside what 4-bit weights cost."""
    if context.spec.teacher.precision != "fp8":
        return passed("no product of the teacher is in 8-bit floats")
    rounding = None if context.teacher is None else rounding_of(context.teacher)
    if rounding is None:
        return unknown("there is no teacher in 8-bit floats in the objective")
    numbers = dict(
        kl=rounding.kl,
        noise_floor=NOISE_FLOOR_KL,
        agreement=rounding.agreement,
        relative_rms=rounding.relative_rms,
        tokens=rounding.tokens,
    )
    if not math.isfinite(rounding.kl):
        return failed(f"its KL from the exact teacher is {rounding.kl}", **numbers)
    text = (
        f"KL {rounding.kl:.2g} nats from the exact teacher on {rounding.tokens} held-out tokens, "
        f"{rounding.agreement:.1%} rank the same token first; 4-bit weights cost {NOISE_FLOOR_KL:.2g}"
    )
    if rounding.kl > NOISE_FLOOR_KL:
        return failed(text, **numbers)
    return passed(text, **numbers)
