"""Which teacher backend a run uses, and why."""

from __future__ import annotations

from engine.decision import Decision
from engine.models.config import ModelConfig, count_parameters
from engine.units import format_bytes, format_count


def choose_backend(wanted: str, *, config: ModelConfig | None, bytes_per_weight: int) -> Decision:
    """`dequantized` when a teacher is given, `none` when not (`config` is None)."""
    if config is None:
        why = "switched off by the user" if wanted == "none" else "no teacher.path is given"
        return Decision(
            knob="teacher.backend",
            choice="none",
            reason=f"{why}: the objective is cross entropy alone",
            rejected=(("dequantized", "needs teacher.path"),),
            overridden=wanted == "none",
        )
    parameters = count_parameters(config)
    size = format_bytes(parameters * bytes_per_weight)
    return Decision(
        knob="teacher.backend",
        choice="dequantized",
        reason=f"{format_count(parameters)} weights are {size} as dense {bytes_per_weight * 8}-bit numbers",
        rejected=(("none", "a teacher is given"),),
        overridden=wanted == "dequantized",
    )
