"""Find mistakes in the graph nodes next to a loss: predictions and targets that broadcast to (N, N), logits bounded by
an activation, batches with labels of one class, and terms of the loss without a gradient."""

# Shapes: N predictions

from __future__ import annotations

import math
from typing import Any

from .graph import CROSS_ENTROPIES, POINTWISE, labels_of, saved, source
from .parameters import PASS, SUSPICION, Line

_MIN_LABELS = 8
"""Minimum number of labels of a batch that is judged; fewer may be of one class by chance."""
_IN_A_ROW = 3
_BOUNDED = {
    "ReluBackward0": "a ReLU, so none is below 0",
    "SigmoidBackward0": "a sigmoid, so all are between 0 and 1",
    "TanhBackward0": "a tanh, so all are between -1 and 1",
    "SoftmaxBackward0": "a softmax, so all are between 0 and 1",
}
_POINTWISE_NODES = {
    f"{name}Backward0"
    for name in (
        *("Mean", "Sum", "Add", "Sub", "Mul", "Div", "Neg", "Abs", "Pow", "Sqrt", "Log", "Clamp"),
        *("Where", "View", "UnsafeView", "Clone", "Squeeze", "Unsqueeze"),
    )
}
"""Nodes that are pointwise, reduce or reshape, as in a loss written by hand."""
_ROUNDINGS = 64
"""Maximum difference between a loss and the sum of its terms that counts as rounding, in units of the loss's last
place."""
_MAX_DEPTH = 16
"""Maximum number of sum and factor nodes between a loss and a term."""
_BINARY = "BinaryCrossEntropyWithLogitsBackward0"


class Classes:
    """Check of whether one optimizer's batches have labels of only one class."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._labels = 0

    def add(self, lowest: int, highest: int, labels: int) -> list[Line]:
        """Return the verdict on the labels of a step."""
        if labels < _MIN_LABELS:
            return []
        self._in_a_row = self._in_a_row + 1 if lowest == highest else 0
        if not self._in_a_row:
            return [("one_class", PASS, f"{labels} labels of a batch are of several classes", {})]
        if self._in_a_row < _IN_A_ROW:
            return []
        text = (
            f"each of the last {self._in_a_row} sampled batches has labels of one class: all {labels} of the last one "
            f"are {lowest}"
        )
        return [("one_class", SUSPICION, text, {"labels": labels, "class": lowest})]


class Terms:
    """Check of whether one optimizer's losses have a term without a gradient whose value changes between steps."""

    def __init__(self) -> None:
        self._previous: float | None = None

    def add(self, loss: float, trained: float, rounding: float) -> list[Line]:
        """Return the verdict on a loss. `trained`: sum of its terms with a gradient."""
        untrained, previous = loss - trained, self._previous
        if not math.isfinite(untrained):
            return []
        self._previous = untrained
        if abs(untrained) <= rounding:
            return [("untrained_term", PASS, "all terms of the loss have a gradient", {})]
        # A constant term has no gradient by design.
        if previous is None or abs(untrained - previous) <= rounding:
            return []
        text = f"of a loss of {loss:.4g} only {trained:.4g} has a gradient: a term of {untrained:.4g} trains nothing"
        return [("untrained_term", SUSPICION, text, {"loss": loss, "trained": trained})]


class Pitfalls:
    """Verdicts from the nodes of one backward pass."""

    def __init__(self, torch: Any, nodes: list[Any], tensors: list[Any]) -> None:
        self.lines: list[Line] = []
        self.terms = _terms(torch, tensors[0]) if len(tensors) == 1 else None
        """On the device: the loss, the sum of its terms with a gradient, and the rounding tolerance; None if
        unknown."""
        self.labels: Any = None
        """Lowest label, highest label and number of labels of a cross entropy, on the device."""
        for node, way in nodes:
            kind = type(node).__name__
            if kind in CROSS_ENTROPIES:
                self._cross_entropy(torch, node)
            elif kind == _BINARY:
                self._bounded(node)
            elif kind in POINTWISE or (kind == "SubBackward0" and _is_pointwise(way)):
                self._pairs(node, kind)

    def _cross_entropy(self, torch: Any, node: Any) -> None:
        log_softmax = source(node)[0]
        if type(log_softmax).__name__ == "LogSoftmaxBackward0":
            self._bounded(log_softmax)
        targets, ignored = labels_of(node)
        if self.labels is None and targets is not None and targets.numel():
            # Labels may be uint8, which cannot hold the limits below.
            targets = targets.long()
            known = targets != ignored
            lowest = torch.where(known, targets, 1 << 40).min()
            highest = torch.where(known, targets, -1).max()
            self.labels = torch.stack([lowest, highest, known.sum()])

    def _bounded(self, node: Any) -> None:
        producer = source(node)[0]
        bound = _BOUNDED.get(type(producer).__name__)
        if bound is None:
            self._add(
                "bounded_logits",
                PASS,
                "the logits of a cross entropy are unbounded",
                {},
            )
        elif "softmax" not in bound or type(node).__name__ == _BINARY:
            text = f"the logits of a cross entropy come out of {bound}"
            self._add("bounded_logits", SUSPICION, text, {})

    def _pairs(self, node: Any, kind: str) -> None:
        """Judge the shape of the difference of predictions and targets: right is the shape of the predictions, wrong is
        (N, N) for N predictions."""
        shape = _shape(saved(node, "self")) if kind in POINTWISE else _shape_after(node, 0)
        if shape is None:
            return
        inputs = [edge for edge in node.next_functions if edge[0] is not None]
        if len(inputs) != 1:
            return
        prediction, output = inputs[0]
        if (
            type(prediction).__name__ == "ExpandBackward0"
            and prediction.next_functions[0][0] is not None
        ):
            prediction, output = prediction.next_functions[0]
        prediction_shape = _shape_after(prediction, output)
        if prediction_shape == shape:
            text = f"predictions and targets of a loss have one shape: {shape}"
            self._add("broadcast_loss", PASS, text, {})
        elif (
            len(shape) == 2
            and 2 <= shape[0] == shape[1]
            and prediction_shape in (shape[:1], (shape[0], 1))
        ):
            text = (
                f"the difference of {shape[0]} predictions {prediction_shape} and their targets has the shape {shape}: "
                f"each prediction is compared with every target"
            )
            self._add("broadcast_loss", SUSPICION, text, {"predictions": shape[0]})

    def _add(self, *line: Any) -> None:
        if line[:2] not in [one[:2] for one in self.lines]:
            self.lines.append(line)


def _terms(torch: Any, loss: Any) -> Any:
    """Return a loss, the sum of its terms with a gradient, and the rounding tolerance; None unless all these terms are
    cross entropies."""
    root = getattr(loss, "grad_fn", None)
    trained = None if root is None or loss.dim() else _value(torch, root, 0)
    if trained is None:
        return None
    values = torch.stack([loss.detach().double(), trained])
    rounding = _ROUNDINGS * torch.finfo(loss.dtype).eps * values.abs().sum()
    return torch.cat([values, rounding[None]])


def _value(torch: Any, node: Any, depth: int) -> Any:
    """Return the sum of the terms with a gradient below a node, computed from sums, factors and cross entropies; None
    if there are other nodes."""
    kind = type(node).__name__
    children = [child for child, _ in node.next_functions]
    if kind in CROSS_ENTROPIES:
        logs, (targets, ignored) = saved(node, "self"), labels_of(node)
        reduction = {1: "mean", 2: "sum"}.get(int(node._saved_reduction))
        if logs is None or targets is None or reduction is None or node._saved_weight is not None:
            return None
        if torch.finfo(logs.dtype).bits < 32:
            return None
        nll = torch.nn.functional.nll_loss
        return nll(logs, targets, ignore_index=ignored, reduction=reduction).double()
    if depth > _MAX_DEPTH or kind not in (
        "AddBackward0",
        "SubBackward0",
        "MulBackward0",
        "DivBackward0",
    ):
        return None
    if kind in ("AddBackward0", "SubBackward0"):
        values = [0.0 if child is None else _value(torch, child, depth + 1) for child in children]
        if any(child is None for child in values) or type(node._saved_alpha) not in (int, float):
            return None
        return values[0] + values[1] * (node._saved_alpha if kind[0] == "A" else -node._saved_alpha)
    # A product of two trained values is not a sum of terms.
    trained = [index for index, child in enumerate(children) if child is not None]
    value = _value(torch, children[trained[0]], depth + 1) if len(trained) == 1 else None
    factor = saved(node, "self" if trained == [1] else "other")
    if value is None or factor is None or factor.dim():
        return None
    return value * factor.double() if kind[0] == "M" else value / factor.double()


def _is_pointwise(way: list[Any]) -> bool:
    """Return whether all nodes between a node and the loss are pointwise or reductions; else the node belongs to the
    model."""
    return all(_kind_of(node) in _POINTWISE_NODES for node in way)


def _kind_of(node: Any) -> str:
    return type(node).__name__[:-1] + "0"


def _shape(tensor: Any) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(map(int, tensor.shape))


def _shape_after(node: Any, at: int) -> tuple[int, ...] | None:
    """Return the shape of a node's `at`-th output."""
    if type(node).__name__ == "AccumulateGrad":
        return _shape(node.variable)
    metadata = getattr(node, "_input_metadata", None)
    if not metadata or at >= len(metadata):
        return None
    try:
        return tuple(map(int, metadata[at].shape))
    except Exception:  # noqa: BLE001  a nested tensor has no size
        return None
