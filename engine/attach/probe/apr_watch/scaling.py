"""Check the factors between losses and the update: division of accumulated losses, fp16 loss scaling and clipping.

Only processes with one optimizer are judged: with several, clipping before one's step may be after another's.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

from .graph import CROSS_ENTROPIES, POINTWISE, scalar
from .parameters import FACT, PASS, SUSPICION, Line

_IN_A_ROW = 2
"""Number of consecutive steps with the same mistake from which it is reported."""
_MAX_SCALING_NODES = 8
"""Maximum number of scaling nodes between a loss and the tensor of the backward pass."""
_EQUAL = 1e-6
"""Maximum relative difference of two factors that count as equal."""
_SCALED_BY_HAND = 16.0
"""Smallest factor of a loss that counts as a loss scale."""
_MEANS = (
    *CROSS_ENTROPIES,
    *POINTWISE,
    "BinaryCrossEntropyBackward0",
    "BinaryCrossEntropyWithLogitsBackward0",
)
_MEAN = 1
"""Value of `at::Reduction::Mean`."""


class Scaling:
    """Checks of the factors. Its methods are called at batches, backward passes, clipping and steps."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._scalers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stepped: set[int] = set()
        """Ids of the optimizers that have stepped since the newest optimizer was created."""
        self._just_stepped = False
        """Whether no backward pass has begun since the last step."""
        self.is_scaled = False
        """Whether a loss was scaled since the last step."""
        self._clipped_before = self._clipped_after = False
        """Whether gradients were clipped after the last backward pass; whether they were clipped right after a step."""
        self._steps_clipped_late = self._steps_clipped_scaled = 0
        """Numbers of consecutive steps with clipping after the step, and with clipping of gradients that still had the
        loss scale."""
        self._divisions: list[tuple[list[float], bool] | None] = []
        """For each backward pass since the last step: factors between the loss and the root, and whether the loss is a
        mean."""
        self._sizes: list[float | None] = []
        """Number of elements in the mean of each of these losses; None if unknown."""
        self._is_fp16 = False
        self._max_norm: float | None = None
        self._batches = 0
        self._window: tuple[int, tuple[list[float], bool]] | None = None
        """Number of losses that the newest sampled step accumulated, and their common factors; None if it had one loss
        or the factors differ."""
        self._whole: tuple[list[float], bool] | None = None
        """Factors of each loss in a window whose losses were divided by their number."""
        self._has_short = False
        """Whether a shorter window was seen whose losses were divided as in a complete window."""
        self._alike = 0
        """Number of consecutive sampled steps with the same verdict on summed losses."""
        self._is_sampled = False
        """Whether the autograd graph is read at this step (`identities.py`)."""
        self.divisor = 0
        """Whole number by which each loss of the newest sampled step was divided; 0 if there is none."""
        self.optimizer_created()

    def optimizer_created(self) -> None:
        """Reset the checks: another training may begin."""
        self._stepped, self._whole, self._has_short = set(), None, False
        self._just_stepped = self._clipped_after = False
        self._steps_clipped_late = self._steps_clipped_scaled = self._alike = 0

    def forget(self) -> None:
        """Restart the counts of consecutive steps: some steps were not observed."""
        self._steps_clipped_late = self._steps_clipped_scaled = self._alike = 0
        self.is_scaled = self._clipped_before = self._clipped_after = False

    def scaled(self, scaler: Any) -> None:
        """Record that a gradient scaler multiplies a loss."""
        self._scalers.add(scaler)
        self.is_scaled = True

    def batch_fetched(self) -> None:
        self._batches += 1

    def backward_begins(self, tensors: list[Any], nodes: list[Any]) -> None:
        """Record a backward pass. `nodes`: nodes near the root of the graph, empty unless the step is sampled. After a
        window with divided losses the divisors are read at every step, until a shorter window is seen."""
        self._just_stepped, self._is_sampled = False, bool(nodes)
        if not nodes and (self._whole is None or self._has_short):
            return
        divisions, size = _divisions(tensors)
        self._divisions.append(divisions)
        self._sizes.append(size)
        kinds = (_dtype_of(node) for node, _ in nodes)
        self._is_fp16 = self._is_fp16 or any(kind is self._torch.float16 for kind in kinds)

    def clipped(self, max_norm: Any) -> list[Line]:
        """Record clipping to a norm of `max_norm`. Clipping to infinity only measures the norm."""
        if max_norm == float("inf"):
            return []
        if self._just_stepped:
            self._clipped_after = True
            return []
        self._clipped_before = True
        self._max_norm = float(max_norm) if isinstance(max_norm, (int, float)) else None
        if not self.is_scaled or any(_has_unscaled(scaler) for scaler in self._scalers):
            self._steps_clipped_scaled = 0
            return []
        self._steps_clipped_scaled += 1
        if self._steps_clipped_scaled < _IN_A_ROW or len(self._stepped) > 1:
            return []
        text = "gradients are clipped while they still have the loss scale: nothing unscaled them before clipping"
        return [("clipping", SUSPICION, text, {"steps": self._steps_clipped_scaled})]

    def step(self, optimizer: Any, number: int) -> list[Line]:
        """Return the verdicts before step `number` of an optimizer."""
        self._stepped.add(id(optimizer))
        name = type(optimizer).__name__
        products = {0.0 if one is None else math.prod(one[0]) for one in self._divisions}
        product = products.pop() if len(products) == 1 else 0.0
        self.divisor = round(1 / product) if 1e-6 < product <= 1 else 0
        lines = [*self._clipping(name, number), *self._short_window(name, number)]
        if self._is_sampled:
            lines += [*self._accumulation(name), *self._loss_scale()]
        self._just_stepped, self.is_scaled = True, False
        self._clipped_before = self._clipped_after = self._is_fp16 = False
        self._divisions, self._sizes, self._batches = [], [], 0
        self._is_sampled = False
        return lines if len(self._stepped) == 1 else []

    def _clipping(self, name: str, number: int) -> list[Line]:
        if self._clipped_before:
            self._steps_clipped_late = 0
            if self._steps_clipped_scaled:
                return []
            text = f"gradients are clipped before a step of {name}"
            return [("clipping", PASS, text, {"max_norm": self._max_norm})]
        self._steps_clipped_late = self._steps_clipped_late + 1 if self._clipped_after else 0
        if self._steps_clipped_late < _IN_A_ROW:
            return []
        text = (
            f"gradients are clipped after steps {number - 2} and {number - 1} of {name}, where no step uses them, and "
            f"not before them"
        )
        return [("clipping", SUSPICION, text, {"steps": self._steps_clipped_late})]

    def _short_window(self, name: str, number: int) -> list[Line]:
        """Report a step that accumulates fewer losses than usual, as at the end of an epoch, but divides by the usual
        number."""
        passes, whole = len(self._divisions), self._whole
        if whole is None or self._has_short or self._divisions != [whole] * passes or not passes:
            return []
        window = round(1 / math.prod(whole[0]))
        if passes >= window or not whole[1]:
            return []
        self._has_short = True
        text = (
            f"step {number} of {name} sums the gradients of {passes} losses, and each is divided by {window} as in a "
            f"whole window"
        )
        return [("accumulated_mean", FACT, text, {"passes": passes, "divided_by": window})]

    def _accumulation(self, name: str) -> list[Line]:
        """Judge how the losses of a step with several backward passes are divided."""
        passes = len(self._divisions)
        # Several backward passes for one batch are for different losses.
        known = [division for division in self._divisions if division is not None]
        window = None
        if passes > 1 and self._batches == passes == len(known) and known.count(known[0]) == passes:
            window = (passes, known[0])
        self._alike = self._alike + 1 if window is not None and window == self._window else 1
        self._window = window
        if window is None or self._alike < _IN_A_ROW:
            return []
        factors, is_mean = known[0]
        share = 1 / math.prod(factors)
        numbers = {"passes": passes, "divided_by": share}
        if abs(share - passes) < _EQUAL * passes:
            self._whole = known[0]
            text = f"each loss of the {passes} backward passes of a step of {name} is divided by {passes}"
            sizes = [size for size in self._sizes if size is not None]
            if not is_mean or len(sizes) < passes:
                text += "; the number of elements in each mean was not read"
            elif min(sizes) == max(sizes):
                return [("accumulated_mean", PASS, text, numbers)]
            else:
                text += f", though they are means of {min(sizes):g} to {max(sizes):g} elements"
            return [("accumulated_mean", FACT, text, numbers)]
        if known[0] == self._whole:
            return []  # a window cut short by the end of an epoch (`_short_window`)
        times = sum(abs(1 / factor - passes) < _EQUAL * passes for factor in factors)
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

    def _loss_scale(self) -> list[Line]:
        if not self._is_fp16:
            return []
        factors = [
            factor for division in self._divisions if division is not None for factor in division[0]
        ]
        if self.is_scaled or any(factor >= _SCALED_BY_HAND for factor in factors):
            text = "losses computed in fp16 are scaled before their backward pass"
            return [("loss_scale", PASS, text, {})]
        text = "the backward pass goes through fp16 tensors, and nothing scales the loss before it"
        return [("loss_scale", SUSPICION, text, {})]


def _divisions(tensors: list[Any]) -> tuple[tuple[list[float], bool] | None, float | None]:
    """Return (factors between the loss and the root of the backward pass, whether the loss is a mean), and the number
    of elements of that mean (None if unknown). Return None twice if there are several roots."""
    if len(tensors) != 1:
        return None, None
    node: Any = getattr(tensors[0], "grad_fn", None)
    factors: list[float] = []
    for _ in range(_MAX_SCALING_NODES):
        kind = type(node).__name__
        if not kind.startswith(("DivBackward", "MulBackward")):
            break
        factor = scalar(node)
        if factor not in (0.0, 1.0):
            factors.append(1 / factor if kind.startswith("Div") else factor)
        node = next((child for child, _ in node.next_functions if child is not None), None)
    kind = type(node).__name__
    is_mean = kind == "MeanBackward0" or (kind in _MEANS and node._saved_reduction == _MEAN)
    return (factors, is_mean), _size_of_mean(node) if is_mean else None


def _size_of_mean(node: Any) -> float | None:
    """Return the number of elements in a mean, or the total weight of its labels; None if that is unknown or on a GPU,
    since reading it would synchronise."""
    weight = getattr(node, "_saved_total_weight", None)
    if weight is not None:
        return float(weight) if weight.is_cpu else None
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    saved = getattr(node, "_saved_self", None) if sizes is None else None
    sizes = sizes if saved is None else saved.shape
    return None if sizes is None else float(math.prod(sizes))


def _dtype_of(node: Any) -> Any:
    """Return the dtype of a node's output; None if torch does not record it."""
    metadata = getattr(node, "_input_metadata", None)
    return metadata[0].dtype if metadata else None


def _has_unscaled(scaler: Any) -> bool:
    """Return whether the gradients of an optimizer were unscaled since the scaler's last update."""
    states = getattr(scaler, "_per_optimizer_states", {})
    return any(
        getattr(state.get("stage"), "name", "") == "UNSCALED" for state in list(states.values())
    )
