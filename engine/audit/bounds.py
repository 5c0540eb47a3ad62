"""How much of a step is compared, and at a time. The memory plan counts with these, so torch is not imported here."""

from __future__ import annotations

MOST_FLOPS = {"cpu": 2e10, "cuda": 4e13}
"""Of the gradients of all weights in one audit, by device: some tenths of a second on two cores, or on one GPU."""
OF_STATES = 0.25
"""Of these for the hidden states of a model, where not all rows are compared; at least one row is."""
MOST_TOKENS = 4096
"""Of a row whose hidden states are compared, where not all rows are."""
COMPARED_NUMBERS = 1 << 22
"""Numbers of the student whose update is compared, in all its parameters together."""
GROUP_NUMBERS = 1 << 24
"""Of the widest part of a layer, for the tokens of a plain forward pass at a time; at least one row."""
PAIRS = 1 << 20
"""Attention weights of a head, of all rows, that are in memory at a time (`engine.audit.reference`)."""
LOGITS = {"cpu": 1 << 19, "cuda": 1 << 25}
"""Logits of one side that are in memory at a time, in fp32: few enough for the cache of a CPU."""


WIDENED = 2 * 10**9
"""Parameters of a teacher up to which its module is run again in fp32, with a copy of all its weights."""


def group_tokens(intermediate_size: int) -> int:
    """Return the tokens of a plain forward pass at a time."""
    return GROUP_NUMBERS // intermediate_size
