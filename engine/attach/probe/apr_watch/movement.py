"""Check whether weights move, by how much, whether their gradients are other than 0, and whether only the optimizer
writes them. The checks count elements, so that they apply to any optimizer and to sharded parameters.

Some elements of each tensor of an optimizer are copied and compared:
    first step                    with the weights after later sampled steps, once the learning rate no longer rises
    sampled step                  before and after it
    between two sampled steps     after a step and before the next one: nothing else should write them. A write that is
                                  reverted in between (averaged weights for an evaluation) is not detected.
Only the local shard of a sharded tensor is read.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from .parameters import FACT, FAIL, PASS, SUSPICION, Line, Modules, named
from .sampled import Rows, Sample, SampledStep, local_of

_ELEMENTS, _MIN_ELEMENTS = 1 << 14, 4
_MAX_TENSORS = 4096
_ANY, _EACH = 4, 16
"""First step at which the weights are judged as a whole; first step at which each tensor is judged."""
_ZEROS = 64
"""First step at which gradients that have always been 0 are reported."""
_IN_A_ROW = 2
"""Number of consecutive sampled steps at which frozen weights must move to be reported."""
_TOLERANCE_ULP = 8.0
"""Tolerated change of a weight outside of steps, in units of the last place."""
_MAX_UNCHANGED = 0.5
"""Share of 16-bit weights unchanged by an update above which this is reported as a mistake, 0 to 1."""
_LARGE_STEP = 0.1
"""Size of an update relative to the weights from which it is reported; about 0.001 in healthy training."""


class Movement:
    """Checks of one optimizer's sampled elements, which are held in one vector for each device and dtype."""

    def __init__(self, torch: Any, optimizer: Any) -> None:
        self._torch = torch
        every = [
            (parameter, local, group_index, place)
            for group_index, group in enumerate(optimizer.param_groups)
            for place, parameter in enumerate(group["params"])
            if (local := local_of(torch, parameter)) is not None
        ][:_MAX_TENSORS]
        elements_each = max(_MIN_ELEMENTS, _ELEMENTS // max(1, len(every)))
        by_kind: dict[Any, tuple[list[Rows], Any]] = {}
        for parameter, local, group_index, place in every:
            rows = Rows(parameter, local, group_index, place, elements_each)
            by_kind.setdefault((local.device, local.dtype), ([], local))[0].append(rows)
        self._samples = [Sample(torch, *rows_and_like) for rows_and_like in by_kind.values()]
        optim, kind = torch.optim, type(optimizer)
        self._rounds = kind in (optim.AdamW, optim.Adam, optim.SGD)
        """Whether updates of 16-bit weights are rounded to nearest. Unknown optimizers may round stochastically."""
        # Gradients shrink as a training converges. Updates of SGD shrink with them; Adam's do not.
        self._level_of_vanishing = SUSPICION if kind is optim.SGD else FAIL
        self._first = self._before = self._read("data")
        self._sizes: dict[str, float] = {}
        """Size of each matrix when it was first measured, by its label."""
        self._after: list[Any] = []
        """Weights after the newest step, if they are compared before the next step; else empty."""
        self._exclusive_ids: set[int] = set()
        """Ids of the parameters that only this optimizer should write."""
        self._gradients: list[Any] = []
        self._moved = [weights != weights for weights in self._first]
        self._pushed = list(self._moved)
        """Elements that have had a gradient larger than rounding."""
        self._nonzero: set[str] = set()
        """Labels of the tensors that have had a gradient other than 0 at a sampled step."""
        self._knows_zeros = False
        """Whether the verdict on gradients that are always 0 has been given."""
        self._has_gradients = False
        self._highest = [0.0] * len(optimizer.param_groups)
        self._frozen_steps = 0
        self.is_settled = False
        """Whether the weights are known to move, or another verdict explains why they do not."""

    def _read(self, part: str) -> list[Any]:
        """Return the elements of each sample (`Sample.read`); an empty list if one cannot be read."""
        vectors = [sample.read(part) for sample in self._samples]
        return [] if any(vector is None for vector in vectors) else vectors

    def step_begins(self, sampled: SampledStep) -> None:
        """Copy the weights before a sampled step, and compare them with the weights after the previous step."""
        weights_after, self._after = self._after, []
        self._before = self._read("data")
        changed = {}
        for index, (old, new) in enumerate(zip(weights_after, self._before, strict=False)):
            # Adding and removing a perturbation (sharpness-aware minimisation) leaves rounding errors.
            size = old.abs().clamp_min(old.abs().mean())
            rounding = _TOLERANCE_ULP * self._torch.finfo(old.dtype).eps
            changed[index] = ~((new - old).abs() <= rounding * size) & ~(new.isnan() & old.isnan())
        if changed:
            exclusive_ids = self._exclusive_ids
            sampled.judge_later(
                lambda tensors: self._judge_outside_writes(sampled, exclusive_ids, tensors), changed
            )

    def step_ends(self, sampled: SampledStep, is_asked: bool, exclusive_ids: set[int]) -> None:
        """Compare the weights after a sampled step, on the device. `is_asked`: give the verdict on NaN at this step
        even if it passes; `exclusive_ids`: ids of the parameters that only this optimizer should write."""
        number, tensors = sampled.number, dict[str, Any]()
        # A learning rate in a tensor may be on a GPU: assume that it is above 0.
        likely = [1.0 if rate is None else rate for rate in sampled.rates]
        self._highest = list(map(max, likely, self._highest + [0.0] * len(likely)))
        weights_now, gradients = self._read("data"), self._read("grad")
        self._has_gradients |= any(sample.has_gradients for sample in self._samples)
        previous, self._gradients = self._gradients, gradients
        self._after, self._exclusive_ids = weights_now if exclusive_ids else [], exclusive_ids
        if not (self._first and self._before and weights_now and gradients):
            return
        state = [
            [
                (
                    not rows.of().requires_grad,  # type: ignore[union-attr]
                    sampled.is_settled and bool(sampled.rates[rows.group]),
                    sampled.is_settled and not self._highest[rows.group],
                )
                for rows in sample.rows
            ]
            for sample in self._samples
        ]
        pairs = zip(self._samples, weights_now, gradients, strict=True)
        for index, (sample, weights, slopes) in enumerate(pairs):
            # A smaller gradient may be rounding only, as for a bias before a batch norm.
            size = slopes.abs()
            smallest = size.max() * self._torch.finfo(slopes.dtype).eps ** 0.5
            self._pushed[index] = self._pushed[index] | (size > smallest)
            tensors[f"pushed {index}"] = self._pushed[index]
            tensors[f"nonzero {index}"] = slopes != 0
            if number >= _EACH and not self._knows_zeros:
                # Read the whole tensor: the sampled rows of an embedding may belong to tokens that do not occur.
                tensors[f"whole {index}"] = self._torch.stack(
                    list(map(self._largest_gradient, sample.rows))
                )
            # Keep earlier changes: weights may return to their first values.
            self._moved[index] = self._moved[index] | (weights != self._first[index])
            tensors[f"moved {index}"] = self._moved[index]
            tensors[f"nan {index}"] = weights.isnan()
            tensors[f"before {index}"] = self._before[index]
            tensors[f"change {index}"] = weights - self._before[index]
            if previous and not sampled.runs_script:
                # Gradients that are 0 or unchanged were not written since the previous sampled step.
                stale = (slopes == 0) | (slopes == previous[index])
                tensors[f"frozen {index}"] = (weights != self._before[index]) & stale
        sampled.judge_later(lambda read: self._lines(sampled, state, is_asked, read), tensors)

    def _largest_gradient(self, rows: Rows) -> Any:
        """Return the largest gradient of a whole tensor; 1 if it has no gradient or cannot be read."""
        gradient = getattr(rows.of(), "grad", None)
        local = None if gradient is None else local_of(self._torch, gradient)
        if local is None:
            return self._torch.ones((), device=rows.of().device)  # type: ignore[union-attr]
        return self._torch.linalg.vector_norm(local, math.inf).float()

    # Once the device has passed the step.

    def _judge_outside_writes(
        self, sampled: SampledStep, exclusive_ids: set[int], changed: dict[int, Any]
    ) -> list[Line]:
        """Return the verdict on writes to the weights between the previous step and this one."""
        name, step = sampled.name, sampled.number
        columns = (
            changed[index].split(sample.counts) for index, sample in enumerate(self._samples)
        )
        pairs = [
            (rows, int(element.sum()))
            for sample, column in zip(self._samples, columns, strict=True)
            for rows, element in zip(sample.rows, column, strict=True)
            if id(rows.of()) in exclusive_ids
        ]
        numbers, written = sum(rows.count for rows, _ in pairs), sum(count for _, count in pairs)
        if not written:
            text = f"{numbers} weights of {name} did not change between steps {step - 1} and {step}"
            return [("outside_writes", PASS, text, {"numbers": numbers})]
        text = (
            f"between steps {step - 1} and {step} of {name} something else wrote its weights: {written} of "
            f"{numbers} elements changed, in {self._named([rows for rows, count in pairs if count])}"
        )
        return [("outside_writes", SUSPICION, text, {"numbers": numbers, "changed": written})]

    def _lines(
        self,
        sampled: SampledStep,
        state: list[list[tuple[bool, bool, bool]]],
        is_asked: bool,
        tensors: dict[str, Any],
    ) -> list[Line]:
        """Return the verdicts. `state`, three booleans for each tensor: it requires no gradient; it is trained at a
        learning rate above 0 that no longer rises; its learning rate was 0 at every step."""
        # If another check has failed, it explains why weights do not move.
        self.is_settled |= sampled.has_failed
        trained: list[Any] = []
        moved, still, with_nan, driven, resting, zero = [], [], [], [], [], []
        numbers = frozen_tensors = changing = unchanged = 0
        shares: list[float] = []
        for index, sample in enumerate(self._samples):
            none = self._torch.zeros(sum(sample.counts), dtype=self._torch.bool, device="cpu")
            columns = [
                tensors.pop(f"{kind} {index}", none).split(sample.counts)
                for kind in ("pushed", "moved", "nan", "frozen", "nonzero", "before", "change")
            ]
            norms = tensors.pop(f"whole {index}", self._torch.zeros(len(sample.rows)))
            for (
                rows,
                (frozen, works, rests),
                pushed,
                moves,
                nan,
                drives,
                nonzero,
                before,
                change,
                norm,
            ) in zip(sample.rows, state[index], *columns, norms.tolist(), strict=True):
                if frozen:
                    frozen_tensors += 1
                    driven += [rows] * bool(drives.any())
                    continue
                numbers += rows.count
                self._nonzero |= {rows.label} if norm or nonzero.any() else set()
                with_nan += [rows] * bool(nan.any())
                resting += [rows] * bool(rests and pushed.any() and not moves.any())
                if rows.is_matrix and nonzero.any():
                    shares.append(self._share(rows.label, before, change))
                if works and before.element_size() == 2:
                    changing += int(nonzero.sum())
                    unchanged += int((nonzero & (change == 0)).sum())
                if works:
                    trained.append(rows)
                    zero += [rows] * (rows.label not in self._nonzero)
                    moved += [rows] * bool(moves.any())
                    still += [rows] * bool(pushed.any() and not (pushed & moves).any())
        name = sampled.name
        lines = self._finite(name, with_nan, numbers, is_asked)
        self._frozen_steps = self._frozen_steps + 1 if driven else 0
        if self._frozen_steps >= _IN_A_ROW:
            text = (
                f"{name} moves {len(driven)} tensors whose requires_grad is False, by momentum, decay or a gradient "
                f"that was left: {self._named(driven)}"
            )
            lines.append(("frozen_weights", SUSPICION, text, {"tensors": len(driven)}))
        elif frozen_tensors and not driven:
            text = f"{name} moves none of its {frozen_tensors} tensors whose requires_grad is False"
            lines.append(("frozen_weights", PASS, text, {"tensors": frozen_tensors}))
        if with_nan:
            return lines
        lines += self._updates(sampled, changing, unchanged, shares)
        lines += self._moves(name, sampled.number, trained, moved, still, resting)
        return [*lines, *self._zero_gradients(name, sampled.number, trained, zero)]

    def _share(self, label: str, weights: Any, change: Any) -> float:
        """Return the size of a step relative to the size of the matrix when first measured; 0 if not finite."""
        first_size = self._sizes.setdefault(label, _size(weights))
        share = _size(change) / first_size if first_size else math.inf
        return share if math.isfinite(share) else 0.0

    def _updates(
        self, sampled: SampledStep, changing: int, unchanged: int, shares: list[float]
    ) -> list[Line]:
        """Judge whether updates below their precision leave most 16-bit weights unchanged. That is normal during a
        warm-up and once the learning rate has fallen by half, where it is not judged. Report an update that is large
        relative to the matrices as a fact: it is no mistake in a small problem. The rule `update_too_large` checks
        whether the loss falls."""
        lines: list[Line] = []
        rate = max(filter(None, sampled.rates), default=0.0)
        if changing and self._rounds:
            about = {"numbers": changing, "still": unchanged, "lr": rate}
            text = (
                f"{unchanged} of {changing} 16-bit weights with a gradient did not change at a learning rate of "
                f"{rate:.3g}"
            )
            level = FACT if unchanged else PASS
            if unchanged > _MAX_UNCHANGED * changing:
                level = self._level_of_vanishing
                text += ": the update is below half a unit in their last place"
                # This explains why weights do not move.
                self.is_settled |= level == FAIL
            lines.append(("vanishing_updates", level, text, about))
        share = statistics.median(shares) if shares else 0.0
        if share >= _LARGE_STEP:
            text = (
                f"a step at a learning rate of {rate:.3g} changes half of the matrices by "
                f"{100 * share:.0f} % of their size"
            )
            lines.append(("update_size", FACT, text, {"share": share, "lr": rate}))
        return lines

    def _zero_gradients(
        self, name: str, number: int, trained: list[Any], zero: list[Any]
    ) -> list[Line]:
        """Return the verdict on gradients that have been exactly 0 at all sampled steps. A bias alone is not reported:
        its gradient cancels where a loss only has differences of outputs, as in a Wasserstein GAN."""
        if zero and not any(rows.is_matrix for rows in zero):
            return []
        if self._knows_zeros or not trained or number < _EACH or (zero and number < _ZEROS):
            return []
        self._knows_zeros = True
        about = {"tensors": len(trained), "zero": len(zero)}
        if not zero:
            text = (
                f"each tensor of {name} with a gradient has had one other than 0 by step {number}"
            )
            return [("zero_gradient", PASS, text, about)]
        text = (
            f"{len(zero)} of {len(trained)} tensors of {name} have a gradient, and it was exactly 0 at every sampled "
            f"step up to {number}: {self._named(zero)}"
        )
        return [("zero_gradient", SUSPICION, text, about)]

    def _moves(
        self,
        name: str,
        number: int,
        trained: list[Any],
        moved: list[Any],
        still: list[Any],
        resting: list[Any],
    ) -> list[Line]:
        if self.is_settled or not trained or number < _ANY:
            return []
        about = {"tensors": len(trained), "moved": len(moved), "still": len(still)}
        if not moved:
            # Gradients of exactly 0 move nothing, as those of a policy while all rewards are equal.
            if not (still if self._has_gradients else number >= _EACH):
                return []
            self.is_settled = True
            text = f"none of {len(trained)} tensors of {name} has changed in {number} steps, and {len(still)} have "
            text += "gradients" if self._has_gradients else "ever had a gradient"
            return [("weights_move", FAIL, text, about)]
        if number < _EACH:
            return []
        self.is_settled = True
        if resting and not still:
            text = (
                f"{len(resting)} tensors of {name} have gradients and had the learning rate 0 in all {number} steps: "
                f"{self._named(resting)}"
            )
            return [("weights_move", SUSPICION, text, {**about, "resting": len(resting)})]
        if not still:
            text = f"sampled elements of {len(moved)} of {len(trained)} tensors of {name} have changed in "
            text += f"{number} steps"
            return [("weights_move", PASS, text, about)]
        dtypes = {
            str(rows.of().dtype).rpartition(".")[2] for rows in still if rows.of() is not None
        }
        text = (
            f"{len(still)} of {len(trained)} tensors of {name} have gradients and have not changed in {number} steps, "
            f"in {' and '.join(sorted(dtypes))}: {self._named(still)}"
        )
        return [("weights_move", SUSPICION, text, about)]

    def _finite(self, name: str, wrong: list[Any], numbers: int, is_asked: bool) -> list[Line]:
        if wrong:
            text = f"{len(wrong)} tensors of {name} hold NaN: {self._named(wrong)}"
            return [("finite_weights", FAIL, text, {"tensors": len(wrong)})]
        text = f"none of {numbers} sampled weights of {name} is NaN, where the loss is not finite"
        return (
            [("finite_weights", PASS, text, {"numbers": numbers})] if is_asked and numbers else []
        )

    def _named(self, found: list[Any]) -> str:
        return named(Modules(self._torch), [(rows.of(), rows.label) for rows in found])


def _size(values: Any) -> float:
    return float(values.double().square().mean().sqrt())
