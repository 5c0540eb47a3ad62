"""Limits of the audit: the share of a step that it compares, and the memory that it uses at a time.

The memory plan reads these limits too, so torch is not imported here.
"""

from __future__ import annotations

REFERENCE_FLOPS = {"cpu": 2e10, "cuda": 4e13}
"""Maximum FLOPs of the reference's weight gradients in one audit, by device type; they take tenths of a second on two
cores or on one GPU."""
HIDDEN_STATES_SHARE = 0.25
"""Share of `REFERENCE_FLOPS`, 0 to 1, for the hidden states of the teacher, and for those of a student whose weight
gradients would exceed `REFERENCE_FLOPS`. As many rows are drawn and compared as fit in this budget, at least one."""
COMPARED_TOKENS = 4096
"""Maximum number of tokens compared in each drawn row."""
COMPARED_NUMBERS = 1 << 22
"""Maximum number of student weights whose update is compared, over all parameters."""
GROUP_NUMBERS = 1 << 24
"""Maximum number of elements of a feed-forward activation of the rows that the reference computes at a time; at least
one row is computed."""
ATTENTION_WEIGHTS = 1 << 20
"""Maximum number of attention weights of one head, over all rows, in memory at a time (`engine.audit.reference`)."""
LOGITS = {"cpu": 1 << 19, "cuda": 1 << 25}
"""Maximum number of fp32 logits of one model in memory at a time, by device type. On a CPU they fit in its cache."""
MAX_SCALE = 8
"""Maximum factor by which the reference's chunks may grow if the step has freed enough memory. Larger chunks need
fewer kernel launches."""


def group_tokens(intermediate_size: int) -> int:
    """Return the number of tokens that the reference's forward pass computes at a time."""
    return GROUP_NUMBERS // intermediate_size


def layer_bytes(
    *, intermediate: int, width: int, heads: int, tokens: int, row_tokens: int, backward: bool
) -> int:
    """Return the bytes that one layer of the reference needs for `tokens` tokens in rows of `row_tokens`: the
    activations of the rows that are computed at a time, and their attention weights."""
    at_once = min(max(group_tokens(intermediate), row_tokens), tokens)
    # A backward pass holds 6 tensors of the feed-forward width and 12 of the model width; a forward pass holds half.
    numbers = at_once * (6 * intermediate + 12 * width) // (1 if backward else 2)
    return 4 * (numbers + 4 * heads * max(ATTENTION_WEIGHTS, row_tokens))


def logits_bytes(tokens: int, vocabulary: int) -> int:
    """Return the GPU bytes of all logit matrices that are in memory at a time."""
    return 10 * 4 * min(LOGITS["cuda"], tokens * vocabulary)


def memory_scale(chunk_bytes: int, free_bytes: int) -> int:
    """Return the largest power of two n, 1 to `MAX_SCALE`, for which n * `chunk_bytes` fits in `free_bytes`; 1 if
    none fits."""
    scale = MAX_SCALE
    while scale > 1 and scale * chunk_bytes > free_bytes:
        scale //= 2
    return scale
