"""Limits of the audit: how much of a step it compares, and how much of that is in memory at a time.

The memory plan reads these limits too, so torch is not imported here.
"""

from __future__ import annotations

REFERENCE_FLOPS = {"cpu": 2e10, "cuda": 4e13}
"""Maximum FLOPs of the reference's weight gradients in one audit, by device type: tenths of a second on two cores or on
one GPU."""
HIDDEN_STATES_SHARE = 0.25
"""Share of `REFERENCE_FLOPS` for the hidden states of one model where only some rows are compared, 0 to 1. At least one
row is always compared."""
COMPARED_TOKENS = 4096
"""Maximum number of tokens compared in each row where only some rows are compared."""
COMPARED_NUMBERS = 1 << 22
"""Maximum number of student weights whose update is compared, over all parameters."""
GROUP_NUMBERS = 1 << 24
"""Activations of the widest part of a layer that the reference keeps in memory at a time: a count of numbers. At least
one row is computed at a time."""
PAIRS = 1 << 20
"""Attention weights of one head, over all rows, in memory at a time (`engine.audit.reference`): a count of numbers."""
LOGITS = {"cpu": 1 << 19, "cuda": 1 << 25}
"""fp32 logits of one model in memory at a time, by device type: a count of numbers. On a CPU they fit in its cache."""
FP32_TEACHER_PARAMETERS = 2 * 10**9
"""Maximum number of parameters of a teacher that the audit copies to fp32 to run its module again."""
MAX_SCALE = 8
"""Maximum factor by which the reference's chunks grow when the step has freed the memory for them. Larger chunks need
fewer kernel launches."""


def group_tokens(intermediate_size: int) -> int:
    """Return the number of tokens that the reference's forward pass computes at a time."""
    return GROUP_NUMBERS // intermediate_size


def layer_bytes(
    *, intermediate: int, width: int, heads: int, tokens: int, row: int, backward: bool
) -> int:
    """Return the bytes of one reference layer: its activations for one chunk of `tokens` tokens in rows of `row`, and
    its attention weights."""
    at_once = min(max(group_tokens(intermediate), row), tokens)
    numbers = at_once * (6 * intermediate + 12 * width) // (1 if backward else 2)
    return 4 * (numbers + 4 * heads * max(PAIRS, row))


def logits_bytes(tokens: int, vocabulary: int) -> int:
    """Return the GPU bytes of all logit matrices that are in memory at a time."""
    return 10 * 4 * min(LOGITS["cuda"], tokens * vocabulary)


def memory_scale(chunk_bytes: int, free_bytes: int) -> int:
    """Return the largest power of two, 1 to `MAX_SCALE`, for which that many times `chunk_bytes` fit in `free_bytes`;
    1 where none fits."""
    scale = MAX_SCALE
    while scale > 1 and scale * chunk_bytes > free_bytes:
        scale //= 2
    return scale
