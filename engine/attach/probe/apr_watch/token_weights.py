"""Check that each label has the same weight in all batches whose gradients a step sums, or averages over ranks.

The weight of a label is the derivative of the step's objective with respect to the label's negative log-likelihood.
Autograd computes it as the gradient at the node of the log-likelihoods, whichever code divides or multiplies the loss;
a hook keeps it during the backward passes before sampled steps. Not judged are class weights, losses that weigh labels
differently within a batch, and backward passes of different losses.
"""

from __future__ import annotations

import sys
from typing import Any

from .graph import head, saved
from .losses import targets_of
from .parameters import FACT, PASS, SUSPICION, Line
from .sampled import SampledStep
from .values import is_capturing

_MAX_LOSSES = 16
"""Maximum number of losses of a backward pass, such as chunks of one loss."""
_ROUNDING = 0.01
"""Maximum relative difference of two weights that count as equal: a few units in the last place of 16 bits."""
_APART = 0.1
"""Minimum relative difference of the batches' label counts at which unequal weights are reported."""
_IN_A_ROW = 2
"""Number of sampled steps with unequal weights from which this is reported."""
_REDUCED = ("MeanBackward1", "SumBackward1", "StackBackward0", "CatBackward0")
"""Nodes that reduce each row separately, or collect the losses of rows."""


class _HookedLoss:
    """A loss in a backward pass, and the gradient that reaches it."""

    def __init__(self, torch: Any, node: Any) -> None:
        targets, ignored = targets_of(node)
        self._torch, self._targets, self._ignored = torch, targets.detach(), ignored
        self._is_mean = getattr(node, "_saved_reduction", 0) == 1
        self._gradient: Any = None
        self.remove = node.register_prehook(self._keep).remove

    def _keep(self, gradients: tuple[Any, ...]) -> None:
        self._gradient = gradients[0]

    def numbers(self) -> Any:
        """Return on the device: lowest weight of a label, highest weight, number of labels, number of positions. None
        if the backward pass did not reach the loss."""
        torch, gradient, targets = self._torch, self._gradient, self._targets
        if type(gradient) is not torch.Tensor or gradient.numel() not in (1, targets.numel()):
            return None
        gradients = gradient.detach().reshape(-1).double().expand(targets.numel())
        # A factor of 0 masks a position.
        known = gradients != 0
        if self._ignored is not None:
            known = known & (targets.reshape(-1) != self._ignored)
        count = known.sum()
        lowest = gradients.where(known, float("inf")).amin()
        highest = gradients.where(known, -float("inf")).amax()
        divisor = count if self._is_mean else torch.ones_like(count)
        return torch.stack(
            [lowest / divisor, highest / divisor, count.double(), count * 0.0 + targets.numel()]
        )


class Pass:
    """Losses of one backward pass. No hooks are installed if it is captured in a CUDA graph or compiled."""

    def __init__(self, torch: Any, nodes: list[Any]) -> None:
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        is_eager = not getattr(compiled, "compiled_autograd_enabled", False)
        self._torch = torch
        self._hooked_losses: list[_HookedLoss] = []
        self.numbers: Any = None
        """`_HookedLoss.numbers` over all losses of the pass; None if the weights are unknown."""
        self.is_by_row = False
        self.heads: set[int] = set()
        """Ids of the parameters nearest to the losses, that is of the output layers."""
        for node, way in nodes if is_eager and not is_capturing(torch) else ():
            targets = targets_of(node)[0]
            if targets is None or not targets.numel():
                continue
            if len(self._hooked_losses) == _MAX_LOSSES or saved(node, "weight") is not None:
                self.drop()
                return
            self._hooked_losses.append(_HookedLoss(torch, node))
            self.heads.add(head(node))
            self.is_by_row |= any(_is_by_row(other) for other in way)

    def drop(self) -> None:
        for loss in self._hooked_losses:
            loss.remove()
        self._hooked_losses = []

    def end(self) -> None:
        """Remove the hooks and compute the numbers."""
        numbers = [loss.numbers() for loss in self._hooked_losses]
        self.drop()
        if numbers and all(
            loss is not None and loss.device == numbers[0].device for loss in numbers
        ):
            table = self._torch.stack(numbers)
            lowest, highest = table[:, 0].amin(), table[:, 1].amax()
            self.numbers = self._torch.stack([lowest, highest, *table[:, 2:].sum(0)])


def numbers_to_compare(
    torch: Any, passes: list[Pass], batch_passes: list[Any]
) -> tuple[Any, bool] | None:
    """Return the numbers of a step's backward passes on the device, (passes, 4) as in `_HookedLoss.numbers`, and
    whether each pass certainly has its own batch; None if they cannot be compared. `batch_passes`: the `data.Pass` of
    each batch since the previous step."""
    numbers = [backward_pass.numbers for backward_pass in passes]
    if not passes or any(backward_pass is None for backward_pass in numbers):
        return None
    if len({backward_pass.device for backward_pass in numbers}) > 1 or any(
        backward_pass.is_by_row for backward_pass in passes
    ):
        return None
    # Do not compare different losses: losses of different heads, of one batch, or of batches from several loaders.
    if any(
        backward_pass.heads != passes[0].heads or len(backward_pass.heads - {0}) != 1
        for backward_pass in passes
    ):
        return None
    count, batches = len(passes), len(batch_passes)
    if batches and (len(set(batch_passes)) > 1 or not count <= batches <= count + 1):
        return None
    return torch.stack(numbers), batches > 0


class TokenWeights:
    """Checks of token weights at one optimizer's steps."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._heaviest: set[int] = set()

    def judge(self, sampled: SampledStep, numbers: Any, is_own: bool) -> None:
        """Judge a sampled step; `numbers` and `is_own`: the results of `numbers_to_compare`."""
        sampled.judge_later(
            lambda one: self._lines(sampled.name, sampled.number, one[0].tolist(), is_own),
            {0: numbers},
        )

    def _lines(
        self, optimizer: str, step: int, passes: list[list[float]], is_own: bool
    ) -> list[Line]:
        weights, counts = _weights(passes), [count for _, _, count, _ in passes]
        if len(passes) < 2 or not weights:
            return []
        numbers = {"passes": len(passes), "least": min(counts), "most": max(counts)}
        if _are_equal(weights):
            if max(counts) > min(counts):
                self._in_a_row = 0
            text = (
                f"a label weighs the same in each of the {len(passes)} backward passes of step {step} of "
                f"{optimizer}, of {min(counts):.0f} to {max(counts):.0f} labels"
            )
            return [("token_weights", PASS, text, numbers)]
        positions = [position for _, _, _, position in passes]
        by_labels = _are_equal([w * n for w, n in zip(weights, counts, strict=True)])
        by_positions = _are_equal([w * n for w, n in zip(weights, positions, strict=True)])
        extra = 0 if by_labels or by_positions else _surplus_labels(weights, counts)
        if not by_labels and not by_positions and not extra:
            return []
        divisors = positions if by_positions and not by_labels else counts
        heaviest, lightest = divisors.index(min(divisors)), divisors.index(max(divisors))
        if divisors[lightest] < (1 + _APART) * divisors[heaviest]:
            return []
        self._in_a_row += 1
        self._heaviest.add(heaviest)
        # Without a data loader, the passes may be for different losses in a fixed order.
        if self._in_a_row < _IN_A_ROW or not (is_own or len(self._heaviest) > 1):
            return []
        times = weights[heaviest] / weights[lightest]
        verb = "the mean over" if by_labels else "divided by"
        kind = "labels" if by_labels else "positions, with a label or without"
        if extra:
            kind = f"labels and {extra} more, as if counted before the shift"
        text = (
            f"a label of backward pass {heaviest + 1} of step {step} of {optimizer} weighs {times:.3g} times one "
            f"of pass {lightest + 1}: each loss is {verb} its own {divisors[heaviest]:.0f} and "
            f"{divisors[lightest]:.0f} {kind}"
        )
        return [("token_weights", SUSPICION, text, {**numbers, "times": times})]


def across_ranks(
    optimizer: str, step: int, ranks: dict[int, list[list[float]]], world: int
) -> list[Line]:
    """Return the verdict on a step of ranks whose gradients are averaged. `ranks`: the numbers of each rank's passes,
    for some or all of the `world` ranks."""
    weights = {rank: _weights(passes) for rank, passes in ranks.items()}
    counts = {rank: sum(row[2] for row in passes) for rank, passes in ranks.items()}
    if not all(rank_weights and _are_equal(rank_weights) for rank_weights in weights.values()):
        return []
    heaviest, lightest = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
    if counts[lightest] < (1 + _APART) * counts[heaviest]:
        return []
    numbers = {"ranks": len(ranks), "least": counts[heaviest], "most": counts[lightest]}
    first = [rank_weights[0] for rank_weights in weights.values()]
    if _are_equal(first):
        labels = sum(counts.values())
        if len(ranks) == world and _are_equal([first[0] * labels, 1.0]):
            text = (
                f"the loss of step {step} of {optimizer} is divided by the {labels:.0f} labels of all ranks, "
                f"and the average over {world} ranks divides it again: the gradients are {world} times too small"
            )
            return [("token_weights", SUSPICION, text, numbers)]
        text = f"a label weighs the same on {len(ranks)} ranks in step {step} of {optimizer}"
        return [("token_weights", PASS, text, numbers)]
    if not _are_equal([w * n for w, n in zip(first, counts.values(), strict=True)]):
        return []
    text = (
        f"a label of rank {heaviest} weighs {counts[lightest] / counts[heaviest]:.3g} times one of rank {lightest} in "
        f"step {step} of {optimizer}: each rank divides by its own {counts[heaviest]:.0f} and "
        f"{counts[lightest]:.0f} labels"
    )
    # Averaging the mean of one batch per rank is common practice. A script that counts the labels of several batches
    # for its divisor intends to count those of all ranks.
    counted = any(len({row[2] for row in passes}) > 1 for passes in ranks.values())
    return [("token_weights", SUSPICION if counted else FACT, text, numbers)]


def _surplus_labels(weights: list[float], counts: list[float]) -> int:
    """Return by how many labels the divisor of each pass exceeds its label count, if that number is the same for all
    passes and at least three passes have different counts; else 0."""
    (fewest, heavy), *_, (most, light) = sorted(zip(counts, weights, strict=True))
    if len(set(counts)) < 3 or heavy == light:
        return 0
    extra = round((light * most - heavy * fewest) / (heavy - light))
    fitted = [w * (n + extra) for w, n in zip(weights, counts, strict=True)]
    return extra if 0 < extra < most and _are_equal(fitted) else 0


def _weights(passes: list[list[float]]) -> list[float]:
    """Return the weight of a label in each pass; an empty list if a pass has several weights or no labels."""
    if not all(count and _are_equal([lowest, highest]) for lowest, highest, count, _ in passes):
        return []
    return [(lowest + highest) / 2 for lowest, highest, _, _ in passes]


def _are_equal(numbers: list[float]) -> bool:
    """Return whether numbers have the same sign and differ only by rounding."""
    low, high = min(numbers), max(numbers)
    return low * high > 0 and high - low <= _ROUNDING * max(abs(low), abs(high))


def _is_by_row(node: Any) -> bool:
    """Return whether a node reduces rows separately, or collects the losses of rows."""
    if type(node).__name__ not in _REDUCED:
        return False
    return len(getattr(node, "_saved_self_sym_sizes", (0, 0))) > 1
