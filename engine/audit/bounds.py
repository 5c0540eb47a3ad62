"""How much of a step is compared, and at a time. The memory plan counts with these, so torch is not imported here."""

from __future__ import annotations

MOST_FLOPS = {"cpu": 4e10, "cuda": 4e13}
"""Of the reference of a model in one audit, by device: half a second on two cores, or on one GPU."""
MOST_TOKENS = 4096
"""Of a row whose hidden states are compared, where not all rows are."""
COMPARED_NUMBERS = 1 << 22
"""Numbers of the student whose update is compared, in all its parameters together."""
GROUP_NUMBERS = 1 << 24
"""Of the widest part of a layer, for the tokens of a plain forward pass at a time; at least one row."""
PAIRS = 1 << 20
"""Attention weights of a head, of all rows, that are in memory at a time (`engine.audit.reference`)."""
LOGITS = 1 << 25
"""Logits of one side that are in memory at a time, in fp32."""


WIDENED = 2 * 10**9
"""Parameters of a teacher up to which its module is run again in fp32, with a copy of all its weights."""


def group_tokens(intermediate_size: int) -> int:
    """Return the tokens of a plain forward pass at a time."""
    return GROUP_NUMBERS // intermediate_size
