"""What multiplies gradients between the losses of a step and its update: the division of losses that are summed over
several batches, the scale that keeps them above what fp16 holds, and clipping.

Only processes that step one optimizer are judged: of several, clipping in front of one is behind another.
"""

from __future__ import annotations

import weakref
from typing import Any

from .graph import near, scalar
from .parameters import PASS, SUSPICION, Line

_IN_A_ROW = 2
"""Steps that have to agree."""
_DIVISIONS = 8
"""Nodes between a loss and the tensor of the backward pass that multiply it by a number."""
_SCALED_BY_HAND = 16.0
"""What multiplies a loss by so much is a loss scale."""
_MEANS = (
    "NllLossBackward0",
    "NllLoss2DBackward0",
    "MseLossBackward0",
    "L1LossBackward0",
    "SmoothL1LossBackward0",
    "HuberLossBackward0",
    "BinaryCrossEntropyBackward0",
    "BinaryCrossEntropyWithLogitsBackward0",
)
_MEAN = 1
"""`at::Reduction::Mean`."""


class Scaling:
    """Told of backward passes, batches, clipping and steps, in their order."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._scalers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stepped: set[int] = set()
        """Optimizers since the newest was made."""
        self._is_behind = self._is_scaled = False
        """Since the newest step: no backward pass yet; a loss was scaled."""
        self._in_front = self._behind = False
        """Whether gradients were clipped in front of this step, and behind the one before."""
        self._late = self._unscaled = 0
        """Steps in a row that were clipped too late; with their scale."""
        self._divisions: list[tuple[list[float], bool] | None] = []
        """Of each backward pass since the newest step."""
        self._is_fp16 = False
        self._most: float | None = None
        """What they were clipped to."""
        self._batches = 0
        self._window: Any = None
        self._alike = 0
        """Steps in a row that summed the same."""
        self.optimizer_made()

    def optimizer_made(self) -> None:
        """What follows may be another training."""
        self._stepped = set()
        self._is_behind = self._behind = False
        self._late = self._unscaled = self._alike = 0

    def scaled(self, scaler: Any) -> None:
        """A gradient scaler multiplies a loss."""
        self._scalers.add(scaler)
        self._is_scaled = True

    def batch_fetched(self) -> None:
        self._batches += 1

    def backward_begins(self, tensors: list[Any], is_due: bool) -> None:
        """`is_due` where its graph is looked at."""
        self._is_behind = False
        self._divisions.append(_divisions(tensors) if is_due else None)
        if is_due and not self._is_fp16:
            self._is_fp16 = any(
                _kept_type(node) is self._torch.float16 for node, _ in near(tensors)
            )

    def clipped(self, most: Any) -> list[Line]:
        """Gradients were clipped to a norm of `most`, which may be more than they can have."""
        if most == float("inf"):
            return []
        if self._is_behind:
            self._behind = True
            return []
        self._in_front = True
        self._most = float(most) if isinstance(most, (int, float)) else None
        if not self._is_scaled or any(_has_unscaled(one) for one in self._scalers):
            self._unscaled = 0
            return []
        self._unscaled += 1
        if self._unscaled < _IN_A_ROW or len(self._stepped) > 1:
            return []
        text = "gradients are clipped while they still hold the scale of the loss: nothing unscaled them in front of it"
        return [("clipping", SUSPICION, text, {"steps": self._unscaled})]

    def step(self, optimizer: Any, number: int) -> list[Line]:
        """In front of step `number` of an optimizer."""
        self._stepped.add(id(optimizer))
        name = type(optimizer).__name__
        lines = [*self._clipping(name, number), *self._sum(name), *self._of_fp16()]
        self._is_behind, self._is_scaled = True, False
        self._in_front = self._behind = self._is_fp16 = False
        self._divisions, self._batches = [], 0
        return lines if len(self._stepped) == 1 else []

    def _clipping(self, name: str, number: int) -> list[Line]:
        if self._in_front:
            self._late = 0
            if self._unscaled:
                return []
            text = f"gradients are clipped in front of a step of {name}"
            return [("clipping", PASS, text, {"max_norm": self._most})]
        self._late = self._late + 1 if self._behind else 0
        if self._late < _IN_A_ROW:
            return []
        text = (
            f"gradients are clipped behind steps {number - 2} and {number - 1} of {name}, where no step uses them any "
            f"more, and not in front of them"
        )
        return [("clipping", SUSPICION, text, {"steps": self._late})]

    def _sum(self, name: str) -> list[Line]:
        """How the losses of a step that sums several are divided."""
        passes = len(self._divisions)
        # Several backward passes of one batch are of several losses.
        known = [one for one in self._divisions if one is not None]
        window = None
        if passes > 1 and self._batches == passes == len(known) and known.count(known[0]) == passes:
            window = (passes, known[0])
        self._alike = self._alike + 1 if window is not None and window == self._window else 1
        self._window = window
        if window is None or self._alike < _IN_A_ROW:
            return []
        factors, is_mean = known[0]
        share = 1.0
        for factor in factors:
            share /= factor
        numbers = {"passes": passes, "divided_by": share}
        if abs(share - passes) < 1e-6 * passes:
            text = f"each loss of the {passes} backward passes of a step of {name} is divided by {passes}"
            return [("accumulated_mean", PASS, text, numbers)]
        times = sum(abs(1 / factor - passes) < 1e-6 * passes for factor in factors)
        if times > 1:
            text = (
                f"each loss of the {passes} backward passes of a step of {name} is divided by {passes} {times} times: "
                f"the gradients are {passes ** (times - 1)} times too small"
            )
        elif is_mean and share == 1.0:
            text = (
                f"a step of {name} sums the gradients of {passes} losses, each a mean, and nothing divides them: they "
                f"are {passes} times those of a batch"
            )
        elif is_mean and share > 1 and share == round(share) and not times:
            text = f"each loss is divided by {share:g}, and a step of {name} sums those of {passes} backward passes"
        else:
            return []
        return [("accumulated_mean", SUSPICION, text, numbers)]

    def _of_fp16(self) -> list[Line]:
        if not self._is_fp16:
            return []
        factors = [factor for one in self._divisions if one is not None for factor in one[0]]
        if self._is_scaled or any(factor >= _SCALED_BY_HAND for factor in factors):
            text = "losses that are computed in fp16 are scaled in front of their backward pass"
            return [("loss_scale", PASS, text, {})]
        text = "the backward pass goes through numbers in fp16, and nothing scales the loss in front of it"
        return [("loss_scale", SUSPICION, text, {})]


def _divisions(tensors: list[Any]) -> tuple[list[float], bool] | None:
    """What multiplies a loss on its way to the tensor of a backward pass, and whether it is a mean; None where it is
    not one tensor."""
    if len(tensors) != 1:
        return None
    node: Any = getattr(tensors[0], "grad_fn", None)
    found: list[float] = []
    for _ in range(_DIVISIONS):
        kind = type(node).__name__
        if not kind.startswith(("DivBackward", "MulBackward")):
            break
        factor = scalar(node)
        if factor not in (0.0, 1.0):
            found.append(1 / factor if kind.startswith("Div") else factor)
        node = next((after for after, _ in node.next_functions if after is not None), None)
    kind = type(node).__name__
    is_mean = kind == "MeanBackward0" or (kind in _MEANS and node._saved_reduction == _MEAN)
    return found, is_mean


def _kept_type(node: Any) -> Any:
    """The type of the numbers that a node gave."""
    metadata = getattr(node, "_input_metadata", None)
    return metadata[0].dtype if metadata else None


def _has_unscaled(scaler: Any) -> bool:
    """Whether the gradients of an optimizer were unscaled since the scaler's last update."""
    states = getattr(scaler, "_per_optimizer_states", {})
    return any(
        getattr(state.get("stage"), "name", "") == "UNSCALED" for state in list(states.values())
    )
