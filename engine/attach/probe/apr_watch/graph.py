"""The graph that autograd keeps behind a tensor: what computed it from what."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

_NEAR = 300
"""Nodes between a loss and its logits, with all that other losses have."""
_SHAPES = frozenset(
    f"{name}Backward{number}"
    for name in (
        "View",
        "UnsafeView",
        "ReshapeAlias",
        "Clone",
        "Transpose",
        "Permute",
        "T",
        "Squeeze",
        "Unsqueeze",
        "Slice",
        "Select",
        "Index",
        "ToCopy",
        "Expand",
        "Alias",
        "AsStrided",
        "MaskedSelect",
    )
    for number in (0, 1, 2)
)
"""What leaves the numbers as they are."""


def near(tensors: list[Any]) -> Iterator[tuple[Any, list[Any]]]:
    """Yield the nodes behind some tensors, the nearest first, each with those on the way to it."""
    roots = [one.grad_fn for one in tensors if getattr(one, "grad_fn", None) is not None]
    above: dict[Any, Any] = dict.fromkeys(roots)
    left = deque(above)
    while left and len(above) < _NEAR:
        node = left.popleft()
        way, at = [], above[node]
        while at is not None:
            way.append(at)
            at = above[at]
        yield node, way
        for after, _ in node.next_functions:
            if after is not None and after not in above:
                above[after] = node
                left.append(after)


def saved(node: Any, name: str) -> Any:
    """A tensor that autograd keeps; None where asking would compute it again, or copy it from elsewhere."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None or getattr(raw, "unpack_hook", raw) is not None:
        return None
    return getattr(node, f"_saved_{name}")


def source(node: Any) -> tuple[Any, list[Any]]:
    """What computed the numbers that a node takes, and the slices that were taken of them."""
    slices = []
    node = _first(node)
    while node is not None and type(node).__name__ in _SHAPES:
        if type(node).__name__ == "SliceBackward0":
            slices.append(node)
        node = _first(node)
    return node, slices


def _first(node: Any) -> Any:
    return next((after for after, _ in node.next_functions if after is not None), None)


def weight(way: list[Any]) -> float:
    """What the numbers at the end of the way are multiplied with; means and divisions, by counts, are not counted."""
    product = 1.0
    for node in way:
        if type(node).__name__.startswith("MulBackward"):
            product *= scalar(node)
    return product


def scalar(node: Any) -> float:
    """The number that a node multiplies or divides by; 1 where it is none, or on a GPU."""
    other = getattr(node, "_saved_other", None)
    if isinstance(other, (int, float)):
        return float(other)
    for name in ("other", "self"):
        one = saved(node, name)
        if one is not None and one.dim() == 0 and one.is_cpu:
            return float(one)
    return 1.0
