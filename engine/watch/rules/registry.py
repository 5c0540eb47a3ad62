"""Every rule there is, in the order in which they are listed."""

from __future__ import annotations

from engine.watch.rules import asked, gpu, loss, memory, pace, stall, update
from engine.watch.rules.rule import Rule

RULES: tuple[Rule, ...] = (
    *stall.RULES,
    *gpu.RULES,
    *memory.RULES,
    *pace.RULES,
    *loss.RULES,
    *update.RULES,
    *asked.RULES,
)
