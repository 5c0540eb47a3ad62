"""Read the autograd graph of a tensor: its nodes, their saved tensors, shapes and factors."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any

_NEAR = 300
"""Maximum number of nodes that are read of a backward pass, enough to reach the logits of several losses."""
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
        "IndexSelect",
        "ToCopy",
        "Expand",
        "Alias",
        "AsStrided",
        "MaskedSelect",
    )
    for number in (0, 1, 2)
)
"""Nodes that do not change values: they reshape, copy or select."""
CROSS_ENTROPIES = ("NllLossBackward0", "NllLoss2DBackward0")
POINTWISE = ("MseLossBackward0", "L1LossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0")
_PARTS = ("SliceBackward0", "IndexBackward0", "IndexSelectBackward0", "MaskedSelectBackward0")


def below(roots: list[Any]) -> Iterator[tuple[Any, list[Any]]]:
    """Yield nodes and their inputs by breadth-first search from `roots`, each with the nodes on the path to it."""
    above: dict[Any, Any] = dict.fromkeys(roots)
    pending = deque(above)
    while pending and len(above) < _NEAR:
        node = pending.popleft()
        way, above_node = [], above[node]
        while above_node is not None:
            way.append(above_node)
            above_node = above[above_node]
        yield node, way
        for child, _ in node.next_functions:
            if child is not None and child not in above:
                above[child] = node
                pending.append(child)


def saved(node: Any, name: str) -> Any:
    """Return a tensor saved by autograd; None if saved-tensor hooks would recompute it or copy it from the host."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None or getattr(raw, "unpack_hook", raw) is not None:
        return None
    return getattr(node, f"_saved_{name}")


def labels_of(node: Any) -> tuple[Any, int]:
    """Return the labels of a cross entropy (None if they cannot be read) and the ignored label."""
    ignored = int(node._saved_ignore_index)
    # Autograd returns the index as an unsigned 64-bit integer.
    return saved(node, "target"), ignored - (1 << 64) * (ignored >= 1 << 63)


def places(node: Any) -> tuple[Any, int, int] | None:
    """Return for a node that selects rows: indices or mask, number of rows, and number of selected rows; None if
    unknown."""
    if type(node).__name__ == "IndexSelectBackward0":
        index, sizes = saved(node, "index"), node._saved_self_sym_sizes
        dims = 1 if node._saved_dim == 0 else 0
    elif type(node).__name__ == "IndexBackward0":
        raw = node._raw_saved_indices
        if len(raw) != 1 or getattr(raw[0], "unpack_hook", raw[0]) is not None:
            return None
        (index,), sizes = node._saved_indices, node._saved_self_sym_sizes
        dims = 0 if index is None else index.dim() if str(index.dtype) == "torch.bool" else 1
    else:
        return None
    outputs = getattr(node, "_input_metadata", None)
    if (
        index is None
        or dims not in (1, 2)
        or dims >= len(sizes)
        or index.dim() != dims
        or not outputs
    ):
        return None
    return index.reshape(-1), math.prod(sizes[:dims]), outputs[0].shape[0]


def source(node: Any) -> tuple[Any, list[Any]]:
    """Return the node that computed the input of `node`, and the selecting nodes between the two."""
    selections = []
    node = first(node)
    while node is not None and type(node).__name__ in _SHAPES:
        if type(node).__name__ in _PARTS:
            selections.append(node)
        node = first(node)
    return node, selections


def first(node: Any) -> Any:
    """Return the node of the first input that has a gradient."""
    return next((child for child, _ in node.next_functions if child is not None), None)


def weight(way: list[Any]) -> float:
    """Return the product of the scalar factors on a path; means and divisions by counts are ignored."""
    product = 1.0
    for node in way:
        if type(node).__name__.startswith("MulBackward"):
            product *= scalar(node)
    return product


def scalar(node: Any) -> float:
    """Return the scalar that a node multiplies or divides by; 1 if it is not a scalar or is on a GPU."""
    other = getattr(node, "_saved_other", None)
    if isinstance(other, (int, float)):
        return float(other)
    for name in ("other", "self"):
        tensor = saved(node, name)
        if tensor is not None and tensor.dim() == 0 and tensor.is_cpu:
            return float(tensor)
    return 1.0


def head(node: Any) -> int:
    """Return the id of the parameter nearest to a loss; 0 if none is near."""
    leaves = (one for one, _ in below([node]) if type(one).__name__ == "AccumulateGrad")
    leaf = next(leaves, None)
    return 0 if leaf is None else id(leaf.variable)
