"""Find in the autograd graph of a backward pass a divergence from a teacher: a product of probabilities without
gradients and the logarithm of the student's softmax, or the other way round.

    forward   sum p (log p - log q)        p is kept by autograd as the factor of log q, which is trained
    reverse   sum q (log q - log p)        log p is kept as the factor of q
    mixed     sum p (log p - log m) + ...  m is the mean of p and q (Jensen-Shannon); p is kept as the factor of log m

p and q have a temperature T if the logits are divided by T before the softmax (Hinton et al., 2015); the gradient of
the divergence is then T^2 too small unless something multiplies it.
"""

# Shapes: N positions, V vocabulary, R sampled positions

from __future__ import annotations

from itertools import pairwise
from typing import Any

from .coverage import is_padding, runs_at_end
from .graph import first, saved, scalar, source, weight
from .parameters import FACT, PASS, SUSPICION, Line

_MAX_POSITIONS, _MAX_ELEMENTS = 64, 1 << 20
"""Maximum number of sampled positions, and of their elements: some MiB in float64."""
_SAME = 1e-5
"""Maximum difference in log probability of a likely token between two copies of one model, in nats."""
_ALIGNED = 16
"""Number of positions at which the teacher's probabilities are compared with its output."""
_LIKELY = 1e-2
"""Minimum probability of a compared token, relative to the most likely one of its position."""
_APART = 1e-6
"""Minimum divergence between two different models, in nats."""
_FIRST_JUDGED_STEP = 3
"""First step at which equality is reported: a copy of the initial student differs once the student has moved."""
_SUMS_TO_1 = 1e-2
"""Maximum deviation of a sum of 16-bit probabilities from 1."""
_DIFFERENCES = ("SubBackward0", "NegBackward0")
_MIXTURES = ("LogsumexpBackward0", "LogaddexpBackward0", "StackBackward0", "AddBackward0")


class Divergence:
    """A divergence between a trained softmax and probabilities without gradients."""

    def __init__(
        self, torch: Any, softmax: Any, teacher: Any, way: list[Any], is_mixed: bool, is_exp: bool
    ) -> None:
        """Read a divergence. `softmax`: the student's, `is_exp` if the loss takes its exponential; `way`: nodes between
        it and the tensor of the backward pass."""
        self._torch = torch
        self._is_mixed, self._is_exp = is_mixed, is_exp
        self._is_forward = type(softmax).__name__ == "LogSoftmaxBackward0" and not is_exp
        self._is_difference = bool(way) and type(way[0]).__name__ == "SubBackward0"
        self.vocabulary = teacher.shape[-1]
        self.positions = teacher.numel() // self.vocabulary
        temperature = _temperature(softmax)
        self.temperature = temperature or 1.0
        self.knows_temperature = temperature is not None
        self.start = _start(softmax)
        """First position of the student's logits in the divergence; None where some were selected otherwise."""
        self._first = teacher.detach().reshape(-1, self.vocabulary)[:_ALIGNED].clone()
        self._weight = weight(way)
        self._is_mean_of_all = any(
            type(node).__name__ == "MeanBackward0"
            and node._saved_self_sym_numel == teacher.numel() > self.positions
            for node in way
        )
        self._rows = _rows_of_batchmean(teacher, way)
        self.padding: Any = None
        """Tokens at the end of the rows (`runs_at_end`) where all their positions are in the divergence, for each
        embedding."""
        self._shape = (0, 0)
        """Rows, and positions of each in the divergence, where `padding` is known."""
        self._is_masked = any(map(_selects, way))
        self.numbers = self._compare(teacher, saved(softmax, "result"))

    def sample(self) -> Any:
        """Return the teacher's probabilities at the first positions, (R, V). Waits for the device."""
        first_RV = self._first.double()
        return first_RV if self._is_forward and bool((first_RV >= 0).all()) else first_RV.exp()

    def read_padding(self, ids: list[Any]) -> None:
        """Compare the positions with what embeddings looked up, (B, T) each: tokens, or their places."""
        if self.start != 0 or self._is_masked:
            return
        runs_of_ids = []
        for tokens_BT in ids:
            rows, length = tokens_BT.shape
            if self.positions in (rows * length, rows * (length - 1)):
                self._shape = (rows, self.positions // rows)
                runs = runs_at_end(self._torch, tokens_BT[:, : self._shape[1]])
                runs_of_ids.append(
                    self._torch.stack([number.to(self._torch.int64) for number in runs])
                )
        if runs_of_ids:
            self.padding = self._torch.stack(runs_of_ids)

    def _compare(self, teacher: Any, student: Any) -> Any:
        """Return six numbers on the device: the deviation of the sum of p over the classes from 1; the divergence in
        nats; the share of positions with the same best token; the largest difference in log probability of likely
        tokens; 1 if the teacher's tensor holds probabilities where logarithms are expected or the other way round, 2 if
        it holds neither; and the deviation of the sum of p over the positions from 1."""
        torch, flat = self._torch, (-1, self.vocabulary)
        positions = max(1, min(_MAX_POSITIONS, _MAX_ELEMENTS // self.vocabulary))
        stride = max(1, self.positions // positions)
        teacher_RV = teacher.detach().reshape(flat)[::stride][:positions].double()
        student_RV = student.detach().reshape(flat)[::stride][:positions].double()
        if self._is_exp:
            student_RV = student_RV.exp()
        p_RV = teacher_RV if self._is_forward else teacher_RV.exp()
        log_q_RV = student_RV if self._is_forward else student_RV.log()
        deviation = (p_RV.sum(1) - 1).abs().max()
        divergence = (torch.xlogy(p_RV, p_RV) - p_RV * log_q_RV).sum(1).mean()
        agreement = (p_RV.argmax(1) == log_q_RV.argmax(1)).double().mean()
        difference = (p_RV.log() - log_q_RV).abs()
        difference = torch.where(
            p_RV > _LIKELY * p_RV.amax(1, keepdim=True), difference, 0.0
        ).amax()
        # Probabilities where their logarithms are expected, or the other way round.
        swapped_RV = teacher_RV.exp() if self._is_forward else teacher_RV
        is_right = (swapped_RV >= 0).all() & ((swapped_RV.sum(1) - 1).abs().max() <= _SUMS_TO_1)
        # No probability is negative, and no logarithm of one positive.
        is_neither = (p_RV < 0).any() if self._is_forward else (teacher_RV > _SUMS_TO_1).any()
        # The other axis that a softmax may have been taken over by mistake.
        off_positions = deviation
        if teacher.dim() == 3 and teacher.shape[1] > 1:
            columns = teacher.detach()[:1, :, : 4 * positions].double()
            columns = columns if self._is_forward else columns.exp()
            off_positions = (columns.sum(1) - 1).abs().max()
        return torch.stack(
            [
                deviation,
                divergence,
                agreement,
                difference,
                is_right + 2.0 * is_neither,
                off_positions,
            ]
        )

    def lines(
        self, counts: list[float], others: list[float], step: int, padding: list[list[int]]
    ) -> list[Line]:
        """Return the verdicts at step `step` of its optimizer. `counts`: the numbers of `_compare`; `others`: the
        weights of cross entropies in the loss; `padding`: `self.padding` on the host."""
        deviation, divergence, agreement, difference, is_other, off_positions = counts
        if deviation > _SUMS_TO_1 >= off_positions:
            text = (
                "the teacher's probabilities in the divergence sum to 1 over the positions, the student's over the "
                f"{self.vocabulary} classes"
            )
            return [("divergence_axis", SUSPICION, text, {})]
        # Soft labels (smoothing, mixup) are no teacher's.
        if not deviation <= _SUMS_TO_1:
            if not (is_other and self._is_difference):
                return []
            kinds = ("logarithms of probabilities", "probabilities")
            given, expected = kinds if self._is_forward else reversed(kinds)
            if is_other == 2:
                given = "negative numbers" if self._is_forward else "positive numbers"
            text = f"the divergence gets {given} of the teacher where it expects {expected}"
            return [("divergence_arguments", SUSPICION, text, {})]
        numbers = {
            "divergence": divergence,
            "agreement": agreement,
            "temperature": self.temperature,
        }
        direction = "forward" if self._is_forward else "reverse"
        if self._is_mixed:
            direction = "Jensen-Shannon"
        text = (
            f"{direction} divergence over {self.positions} positions at temperature {self.temperature:g}: "
            f"{divergence:.3g} nats, {agreement:.0%} with the same best token"
        )
        lines: list[Line] = [("distillation", FACT, text, numbers)]
        text = f"the teacher's probabilities sum to 1 over the {self.vocabulary} classes, as the student's do"
        lines += [(id, PASS, text, {}) for id in ("divergence_axis", "divergence_arguments")]
        rows, length = self._shape
        runs = next((runs_of_ids for runs_of_ids in padding if is_padding(runs_of_ids, rows)), None)
        if runs is not None:
            text = (
                f"{runs[0]} of {rows} rows end in up to {runs[2]} tokens that are all {runs[4]}, and the "
                f"divergence is over all {length} positions of each row: padding seems to be in it"
            )
            lines.append(("padding_labels", SUSPICION, text, {"rows": runs[0]}))
        if difference <= _SAME:
            text = f"teacher and student give the same probabilities ({divergence:.1g} nats apart)"
            if step >= _FIRST_JUDGED_STEP:
                lines.append(("teacher_is_student", SUSPICION, text, numbers))
        elif divergence > _APART:
            text = f"teacher and student are {divergence:.3g} nats apart"
            lines.append(("teacher_is_student", PASS, text, numbers))
        if self._is_mean_of_all:
            text = (
                f"the divergence is a mean over {self.positions} positions and all {self.vocabulary} tokens of the "
                f"vocabulary: {self.vocabulary} times too small"
            )
            lines.append(("divergence_mean", SUSPICION, text, {"vocabulary": self.vocabulary}))
        elif self._rows and others:
            width = self.positions // self._rows
            text = (
                f"the divergence is summed over the {width} positions of a row and divided by {self._rows} rows alone: "
                f"relative to the cross entropy it has {width} times its weight"
            )
            lines.append(("divergence_mean", SUSPICION, text, {"positions": width}))
        else:
            if not self._rows:
                text = "the divergence is no mean over the vocabulary, and is not divided by rows alone"
                lines.append(("divergence_mean", PASS, text, {}))
            if self.temperature != 1.0:
                lines += self._scaling(others)
        return lines

    def _scaling(self, others: list[float]) -> list[Line]:
        """Judge whether a factor compensates for the temperature."""
        square, weight = self.temperature**2, self._weight
        numbers = {"temperature": self.temperature, "weight": weight}
        if _is_share(weight / square, others):
            text = f"the divergence at temperature {self.temperature:g} is multiplied by {square:g}"
            return [("temperature_squared", PASS, text, numbers)]
        if not _is_share(weight, others):
            return []
        text = (
            f"the divergence at temperature {self.temperature:g} is weighted with {weight:g}: nothing multiplies it by "
            f"T^2 = {square:g}"
        )
        return [("temperature_squared", SUSPICION, text, numbers)]


def _selects(node: Any) -> bool:
    """Return whether a node between a divergence and the loss may leave out positions."""
    kind = type(node).__name__
    if kind.startswith("MulBackward"):
        return any(
            factor is not None and factor.dim()
            for factor in (saved(node, "self"), saved(node, "other"))
        )
    return kind.startswith(("Masked", "Index", "Where", "Gather", "Slice", "Select"))


def _is_share(weight: float, others: list[float]) -> bool:
    """Return whether a weight is 1, or sums to 1 with the weight of a cross entropy."""
    return any(abs(weight + other_weight - 1) < 1e-6 for other_weight in (0.0, *others))


def _rows_of_batchmean(teacher: Any, way: list[Any]) -> int:
    """Return the number of rows that divides a sum over positions and vocabulary, as `batchmean` does; 0 if something
    else divides it, or if each row is one position."""
    rows = teacher.shape[0]
    for node, next_node in pairwise(way):
        if type(node).__name__ == "SumBackward0" and type(next_node).__name__.startswith(
            "DivBackward"
        ):
            is_mean = scalar(next_node) == rows and teacher.numel() > rows * teacher.shape[-1]
            return rows if is_mean else 0
    return 0


def _start(softmax: Any) -> int | None:
    """Return the first position of the logits below a softmax; None where rows or positions were selected."""
    _, selections = source(softmax)
    if any(type(selection).__name__ != "SliceBackward0" for selection in selections):
        return None
    return sum(
        int(selection._saved_start or 0) for selection in selections if selection._saved_dim == 1
    )


class SoftmaxOverPositions(Divergence):
    """A divergence whose trained softmax is over another axis than the classes that its matmul gives."""

    def __init__(self, torch: Any, size: int, classes: int) -> None:
        self._sizes, self.start, self.numbers = (size, classes), None, torch.zeros(1)
        self.padding = None

    def sample(self) -> Any:
        return None

    def lines(
        self, counts: list[float], others: list[float], step: int, padding: list[list[int]]
    ) -> list[Line]:
        """Return the verdict."""
        text = "the softmax in the divergence is over {} positions, not over the {} classes".format(
            *self._sizes
        )
        return [("divergence_axis", SUSPICION, text, {})]


def _gives_classes_last(softmax: Any) -> bool:
    """Return whether the last axis of the input of a softmax is that of the outputs of a matmul."""
    node = first(softmax)
    while node is not None:
        kind = type(node).__name__.removesuffix("0").removesuffix("Backward")
        if kind in ("Addmm", "Mm", "Linear"):
            return True
        if kind not in (
            "View",
            "UnsafeView",
            "ReshapeAlias",
            "Clone",
            "ToCopy",
            "Slice",
            "Div",
            "Mul",
        ):
            return False
        node = first(node)
    return False


def _temperature(softmax: Any) -> float | None:
    """Return the number that divides the logits before a softmax, 1 where nothing does; None where it is unknown."""
    node, _ = source(softmax)
    if node is None or not type(node).__name__.startswith(("DivBackward", "MulBackward")):
        return 1.0
    number = scalar(node)
    # `scalar` returns 1 also for a divisor that is on a GPU or is no scalar.
    if number in (0.0, 1.0):
        return None
    return number if type(node).__name__.startswith("Div") else 1.0 / number


def divergence_at(torch: Any, node: Any, way: list[Any]) -> Divergence | None:
    """Return the divergence whose product of probabilities and logarithms is this node; None if it is none."""
    if type(node).__name__ != "MulBackward0":
        return None
    factors = [
        tensor for tensor in (saved(node, "self"), saved(node, "other")) if tensor is not None
    ]
    # If autograd saved both factors, both are trained.
    if len(factors) != 1 or factors[0].dim() < 2 or factors[0].requires_grad:
        return None
    softmax, is_mixed, is_exp = _softmax_below(node)
    if softmax is None:
        return None
    result = saved(softmax, "result")
    if result is None or result.numel() != factors[0].numel():
        return None
    axis = int(softmax._saved_dim)
    axis -= (1 << 64) * (axis >= 1 << 63)
    if axis % result.dim() != result.dim() - 1:
        if axis % result.dim() and _gives_classes_last(softmax):
            return SoftmaxOverPositions(torch, result.shape[axis], result.shape[-1])
        return None
    if result.device != factors[0].device or result.shape[-1] != factors[0].shape[-1]:
        return None
    return Divergence(torch, softmax, factors[0], way, is_mixed, is_exp)


def _softmax_below(node: Any) -> tuple[Any, bool, bool]:
    """Return the trained softmax whose logarithm, perhaps minus a constant, enters a product, whether it is mixed with
    untrained probabilities first, and whether the exponential of its logarithm is taken."""
    input_node, _ = source(node)
    is_mixed = is_exp = False
    if type(input_node).__name__ == "ExpBackward0":
        is_exp, (input_node, _) = True, source(input_node)
        if type(input_node).__name__ != "LogSoftmaxBackward0":
            return None, False, False
    for _ in range(6):
        kind = type(input_node).__name__
        if kind in ("LogSoftmaxBackward0", "SoftmaxBackward0"):
            return input_node, is_mixed, is_exp
        is_mixed = is_mixed or kind in ("LogsumexpBackward0", "LogaddexpBackward0")
        trained = [
            child for child, _ in getattr(input_node, "next_functions", ()) if child is not None
        ]
        if kind not in _DIFFERENCES + _MIXTURES * is_mixed or len(trained) != 1:
            return None, False, False
        input_node = trained[0]
    return None, False, False
