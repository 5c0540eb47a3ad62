"""What a setting may change in a run: what must stay equal between the arms when it is flipped.

A flip asks whether a setting changes the time, the memory or the energy of a run, and nothing else.
Settings that are part of what is learnt (the objective, the data, the models) change the losses on
purpose; all others must leave them as they are, within the plan's tolerance. A setting that is not
named here is held to the stricter rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

CHANGES_RESULTS = (
    *("teacher.path", "teacher.allow_identical", "student.path", "student.config"),
    *("vocab.", "data.", "loss.alpha", "loss.temperature", "train."),
)
"""Settings, or sections of them, that change the losses on purpose: parity is not asked of these."""

FACTS: dict[str, tuple[str, ...]] = {
    "device": ("compute.device",),
    "student precision": ("student.precision", "compute.device"),
    "teacher precision": (
        *("teacher.precision", "teacher.backend", "teacher.path"),
        *("compute.device", "memory."),
    ),
    "rows per step": ("train.rows", "train.accumulation"),
    "tokens per step": ("train.rows", "train.accumulation", "data."),
    "seq_len": ("data.seq_len",),
    "training tokens": ("data.", "teacher.path", "student.path"),
    "held-out tokens": ("data.", "teacher.path", "student.path"),
    "trainable parameters": ("student.path", "student.config", "vocab."),
    "teacher": ("teacher.path", "teacher.backend", "teacher.precision", "compute.device"),
    "engine": (),
    "torch": (),
}
"""What a run says of itself that must be equal in both arms, and the settings that may change it."""


def matches(key: str, patterns: Iterable[str]) -> bool:
    """Whether a dotted key is one of `patterns`, or lies in a section (`data.`) that is."""
    return any(key == p or (p.endswith(".") and key.startswith(p)) for p in patterns)


def asks_parity(keys: Iterable[str]) -> bool:
    """Whether runs that differ in `keys` must give the same losses."""
    return not any(matches(key, CHANGES_RESULTS) for key in keys)


def is_choice_of_the_engine(value: Any) -> bool:
    """Whether a value asks the engine to choose: `auto`, or 0 where that means the same."""
    return value == "auto" or (value == 0 and not isinstance(value, bool))


def as_choice(value: Any) -> str:
    """A value as a Decision writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)
