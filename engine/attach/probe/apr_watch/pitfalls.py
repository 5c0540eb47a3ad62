"""Find mistakes in the graph nodes next to a loss: predictions and targets that broadcast to (N, N), logits bounded by
an activation, and batches with labels of one class."""

# Shapes: N predictions

from __future__ import annotations

from typing import Any

from .graph import CROSS_ENTROPIES, POINTWISE, labels_of, saved, source
from .losses import vocabulary_of_mean
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
_BINARY = "BinaryCrossEntropyWithLogitsBackward0"


class Classes:
    """Check of whether one optimizer's batches have labels of only one class."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._classes: set[int] = set()
        """Classes of these batches: always the same one is a convention, as in contrastive losses."""

    def add(self, lowest: int, highest: int, labels: int, classes: int) -> list[Line]:
        """Return the verdict on the labels of a step."""
        if labels < _MIN_LABELS:
            return []
        if lowest == highest:
            self._in_a_row, self._classes = self._in_a_row + 1, {*self._classes, lowest}
        else:
            self._in_a_row, self._classes = 0, set()
            text = f"{labels} labels of a batch are of several classes"
            return [("one_class", PASS, text, {"classes": classes})]
        if self._in_a_row < _IN_A_ROW or len(self._classes) < 2:
            return []
        text = (
            f"each of the last {self._in_a_row} sampled batches has labels of one class: all {labels} of the last one "
            f"are {lowest}"
        )
        return [("one_class", SUSPICION, text, {"labels": labels, "class": lowest})]


class Pitfalls:
    """Verdicts from the nodes of one backward pass."""

    def __init__(self, torch: Any, nodes: list[Any]) -> None:
        self.lines: list[Line] = []
        self.labels: Any = None
        """Lowest label, highest label, number of labels and number of classes (0 if the loss is no mean) of a cross
        entropy, on the device."""
        for node, way in nodes:
            kind = type(node).__name__
            if kind in CROSS_ENTROPIES:
                self._cross_entropy(torch, node, way)
            elif kind == _BINARY:
                self._bounded(node)
            elif kind in POINTWISE or (kind == "SubBackward0" and _is_pointwise(way)):
                self._pairs(node, kind)

    def _cross_entropy(self, torch: Any, node: Any, way: list[Any]) -> None:
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
            count = known.sum()
            classes = count * 0 + vocabulary_of_mean(node, way)
            self.labels = torch.stack([lowest, highest, count, classes])

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
