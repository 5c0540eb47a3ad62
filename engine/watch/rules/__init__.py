"""What is wrong with a run, from its logs: rules, each a pure function of a RunView. No torch.

One file for each family; `rule.py` says what a rule is and how one is added.
"""

from __future__ import annotations

from types import ModuleType

from engine.watch.rules import gpu, loss, memory, pace, settings, stall, update
from engine.watch.rules.rule import Rule


def rules_of(*families: ModuleType) -> tuple[Rule, ...]:
    return tuple(
        found for family in families for found in vars(family).values() if isinstance(found, Rule)
    )


RULES = rules_of(stall, gpu, memory, pace, loss, update, settings)
"""Every rule there is, in the order in which they are listed."""
