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


MOST_TIMES = 8
"""Times as much at a time where the step itself took the memory for it: a host starts as many kernels fewer."""


def group_tokens(intermediate_size: int) -> int:
    """Return the tokens of a plain forward pass at a time."""
    return GROUP_NUMBERS // intermediate_size


def layer_bytes(
    *, intermediate: int, width: int, heads: int, tokens: int, row: int, backward: bool
) -> int:
    """Return the bytes of a layer's numbers for the tokens that are in memory at a time, of `tokens` in rows of `row`,
    and of its attention weights."""
    at_once = min(max(group_tokens(intermediate), row), tokens)
    numbers = at_once * (6 * intermediate + 12 * width) // (1 if backward else 2)
    return 4 * (numbers + 4 * heads * max(PAIRS, row))


def logits_bytes(tokens: int, vocabulary: int) -> int:
    """Return the bytes on a GPU of all matrices of logits that are in memory at a time."""
    return 10 * 4 * min(LOGITS["cuda"], tokens * vocabulary)


def times_at_once(counted: int, room: int) -> int:
    """Return how many times as much may be in memory at a time: a power of two, by which the `counted` bytes stay
    within `room`."""
    times = MOST_TIMES
    while times > 1 and times * counted > room:
        times //= 2
    return times
