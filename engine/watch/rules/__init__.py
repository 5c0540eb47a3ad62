"""The rules that find what is wrong with a run from its logs; each is a pure function of a RunView. No torch.

There is one file per family; `rule.py` explains what a rule is and how to add one.
"""

from __future__ import annotations

from types import ModuleType

from engine.watch.rules import (
    curves,
    gpu,
    loss,
    memory,
    pace,
    stall,
    update,
    written,
)
from engine.watch.rules.rule import Rule


def rules_of(*families: ModuleType) -> tuple[Rule, ...]:
    return tuple(
        member
        for family in families
        for member in vars(family).values()
        if isinstance(member, Rule)
    )


RULES = rules_of(stall, gpu, memory, pace, loss, curves, update, written)
"""All rules, in the order of `engine diagnose --list`."""
