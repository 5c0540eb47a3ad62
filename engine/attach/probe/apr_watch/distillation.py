"""Find a divergence from a teacher in the autograd graph of a backward pass: a product of a probability and a
logarithm, of which one comes from the student's softmax and the other has no gradient.

    p: teacher's probabilities   q: student's probabilities, which are trained   m: mean of p and q (Jensen-Shannon)

    forward   sum p (log p - log q)        autograd saves p, the factor of log q
    reverse   sum q (log q - log p)        autograd saves log p, the factor of q
    mixed     sum p (log p - log m) + ...  autograd saves p, the factor of log m

With a temperature T the logits are divided by T before the softmax (Hinton et al., 2015). The gradient of the
divergence is then smaller by T^2, unless the loss is multiplied by T^2.
"""

# Shapes: N positions, V vocabulary, R sampled positions

from __future__ import annotations

from itertools import pairwise
from typing import Any

from .coverage import is_padding, runs_at_end
from .graph import below, first, head, saved, scalar, source, weight
from .parameters import FACT, PASS, SUSPICION, Line

_MAX_POSITIONS, _MAX_ELEMENTS = 64, 1 << 20
"""Maximum number of sampled positions, and maximum number of their elements: some MiB in float64."""
_SAME = 1e-5
"""Maximum difference in log probability of a likely token between two copies of one model, in nats."""
_ALIGNED = 16
"""Number of positions at which the teacher's probabilities in the loss are compared with the teacher's output."""
_LIKELY = 1e-2
"""Minimum probability of a compared token, relative to the most likely token at the position."""
_APART = 1e-6
"""Minimum divergence between two different models, in nats."""
_FIRST_JUDGED_STEP = 3
"""First step at which equality of teacher and student is reported: a teacher that is a copy of the initial student
differs once the student has been trained."""
_NEAR = 6
"""Maximum number of nodes between a product and the softmax of one of its factors."""
_SUMS_TO_1 = 1e-2
"""Maximum deviation of a sum of 16-bit probabilities from 1."""
_DIFFERENCES = ("SubBackward0", "NegBackward0")
_MIXTURES = ("LogsumexpBackward0", "LogaddexpBackward0", "StackBackward0", "AddBackward0")


class Divergence:
    """A divergence between the student's softmax, which is trained, and probabilities without a gradient."""

    def __init__(
        self,
        torch: Any,
        softmax: Any,
        teacher: Any,
        way: list[Any],
        is_mixed: bool,
        is_exp: bool,
        student: Any,
        begin: int,
    ) -> None:
        """Read a divergence. `softmax`: node of the student's softmax; `is_exp`: the loss takes the exponential of its
        result; `way`: nodes from the divergence to the root of the backward pass; `student`: the softmax's result at
        the positions in the divergence, which begin at position `begin` of it."""
        self._torch = torch
        self._is_mixed, self._is_exp = is_mixed, is_exp
        self._is_forward = type(softmax).__name__ == "LogSoftmaxBackward0" and not is_exp
        # A squared or absolute difference is one of attention maps, whose dropout mask is the other factor.
        kinds = [type(node).__name__ for node in way[:2]]
        self._is_difference = kinds[:1] == ["SubBackward0"] and kinds[1:] not in (
            ["PowBackward0"],
            ["AbsBackward0"],
        )
        self.vocabulary = teacher.shape[-1]
        self.positions = teacher.numel() // self.vocabulary
        temperature = _temperature(softmax)
        self.temperature = temperature or 1.0
        self.knows_temperature = temperature is not None
        start = _start(softmax)
        self.start = None if start is None else start + begin
        """First position of the student's logits in the divergence; None if positions were selected by index or
        mask."""
        self._first = teacher.detach().reshape(-1, self.vocabulary)[:_ALIGNED].clone()
        self._weight = weight(way)
        self._is_mean_of_all = any(
            type(node).__name__ == "MeanBackward0"
            and node._saved_self_sym_numel == teacher.numel() > self.positions
            for node in way
        )
        self._rows = _rows_of_batchmean(teacher, way)
        self.padding: Any = None
        """Runs of equal tokens at the end of the rows (`runs_at_end`) for each embedding; None unless all positions of
        the rows are in the divergence."""
        self._shape = (0, 0)
        """Number of rows, and number of positions of each row in the divergence; known if `padding` is."""
        self._is_masked = any(map(_selects, way))
        self.numbers = self._compare(teacher, student)

    def sample(self) -> Any:
        """Return the teacher's probabilities at the first positions, (R, V). Synchronises with the device."""
        first_RV = self._first.double()
        return first_RV if self._is_forward and bool((first_RV >= 0).all()) else first_RV.exp()

    def read_padding(self, ids: list[Any]) -> None:
        """Find the padding of the rows in `ids`: input ids of embeddings, (B, T) each, which are tokens or
        positions."""
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
        """Return six numbers on the device:

        1. deviation from 1 of the sum of p over the classes
        2. divergence in nats
        3. share of positions at which both have the same most likely token
        4. largest difference in log probability of likely tokens
        5. 1 if the teacher's tensor holds probabilities instead of logarithms, or logarithms instead of probabilities;
           2 if it holds neither
        6. deviation from 1 of the sum of p over the positions
        """
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
        # Whether the tensor holds probabilities instead of logarithms, or logarithms instead of probabilities.
        swapped_RV = teacher_RV.exp() if self._is_forward else teacher_RV
        is_right = (swapped_RV >= 0).all() & ((swapped_RV.sum(1) - 1).abs().max() <= _SUMS_TO_1)
        # A probability is never negative, and its logarithm is never positive.
        is_neither = (p_RV < 0).any() if self._is_forward else (teacher_RV > _SUMS_TO_1).any()
        # The softmax may have been taken over the axis of positions by mistake.
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
        """Return the verdicts at step `step` of the optimizer. `counts`: the numbers of `_compare`; `others`: weights
        of the cross entropies in the loss; `padding`: `self.padding`; all on the host."""
        deviation, divergence, agreement, difference, is_other, off_positions = counts
        if deviation > _SUMS_TO_1 >= off_positions:
            text = (
                "the teacher's probabilities in the divergence sum to 1 over the positions, the student's over the "
                f"{self.vocabulary} classes"
            )
            return [("divergence_axis", SUSPICION, text, {})]
        # Soft labels (smoothing, mixup) do not come from a teacher.
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
        """Judge whether the factor of the divergence compensates for the temperature."""
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
    """Return whether a node between a divergence and the root may leave out positions."""
    kind = type(node).__name__
    if kind.startswith("MulBackward"):
        return any(
            factor is not None and factor.dim()
            for factor in (saved(node, "self"), saved(node, "other"))
        )
    return kind.startswith(("Masked", "Index", "Where", "Gather", "Slice", "Select"))


def _is_share(weight: float, others: list[float]) -> bool:
    """Return whether a weight is 1, or whether its sum with the weight of a cross entropy is 1."""
    return any(abs(weight + other_weight - 1) < 1e-6 for other_weight in (0.0, *others))


def _rows_of_batchmean(teacher: Any, way: list[Any]) -> int:
    """Return the number of rows, if the sum over positions and vocabulary is divided by it, as `batchmean` does; 0 if
    it is divided by another number, or if each row is one position."""
    rows = teacher.shape[0]
    for node, next_node in pairwise(way):
        if type(node).__name__ == "SumBackward0" and type(next_node).__name__.startswith(
            "DivBackward"
        ):
            is_mean = scalar(next_node) == rows and teacher.numel() > rows * teacher.shape[-1]
            return rows if is_mean else 0
    return 0


def _start(softmax: Any) -> int | None:
    """Return the first position of the logits that a softmax reads; None if rows or positions were selected by
    index."""
    _, selections = source(softmax)
    if any(type(selection).__name__ != "SliceBackward0" for selection in selections):
        return None
    return sum(
        int(selection._saved_start or 0) for selection in selections if selection._saved_dim == 1
    )


class Misuse(Divergence):
    """A divergence that is certainly wrong by its graph, with the verdict on it."""

    def __init__(self, torch: Any, id: str, text: str) -> None:
        self._line: Line = (id, SUSPICION, text, {})
        self.positions = 0
        self.start, self.numbers, self.padding = None, torch.zeros(1), None

    def sample(self) -> Any:
        return None

    def lines(
        self, counts: list[float], others: list[float], step: int, padding: list[list[int]]
    ) -> list[Line]:
        """Return the verdict."""
        return [self._line]


def _gives_classes_last(softmax: Any) -> bool:
    """Return whether the last axis of a softmax's input is the output axis of a matmul."""
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
    """Return the number that divides the logits before a softmax; 1 if they are not divided, None if unknown."""
    node, _ = source(softmax)
    if node is None or not type(node).__name__.startswith(("DivBackward", "MulBackward")):
        return 1.0
    number = scalar(node)
    # `scalar` also returns 1 for a divisor that is on a GPU or is not a scalar.
    if number in (0.0, 1.0):
        return None
    return number if type(node).__name__.startswith("Div") else 1.0 / number


def divergence_at(torch: Any, node: Any, way: list[Any]) -> Divergence | None:
    """Return the divergence if this node is its product of probabilities and logarithms; else None."""
    if type(node).__name__ != "MulBackward0":
        return None
    factors = [
        tensor for tensor in (saved(node, "self"), saved(node, "other")) if tensor is not None
    ]
    # If autograd saved both factors, both have gradients, so that none is a frozen teacher's.
    if len(factors) == 2 and _has_two_models(node):
        text = "both sides of the divergence get gradients, from parameters of two models"
        return Misuse(torch, "teacher_trained", text)
    if len(factors) != 1 or factors[0].dim() < 2 or factors[0].requires_grad:
        return None
    softmax, is_mixed, is_exp, selections = _softmax_below(node)
    if softmax is None:
        return None
    result, begin = _at_positions(saved(softmax, "result"), selections)
    if result is None or result.numel() != factors[0].numel():
        return None
    axis = int(softmax._saved_dim)
    axis -= (1 << 64) * (axis >= 1 << 63)
    if axis % result.dim() != result.dim() - 1:
        if axis % result.dim() and _gives_classes_last(softmax):
            size, classes = result.shape[axis], result.shape[-1]
            text = f"the softmax in the divergence is over {size} positions, not over the {classes} classes"
            return Misuse(torch, "divergence_axis", text)
        return None
    if result.device != factors[0].device or result.shape[-1] != factors[0].shape[-1]:
        return None
    return Divergence(torch, softmax, factors[0], way, is_mixed, is_exp, result, begin)


def _at_positions(result: Any, selections: list[Any]) -> tuple[Any, int]:
    """Return a softmax's result at the positions that slices select, and the first of these; None if the positions are
    selected otherwise."""
    begin = 0
    for selection in reversed(selections if result is not None else []):
        if type(selection).__name__ != "SliceBackward0" or selection._saved_dim >= result.dim():
            return None, 0
        start, length = int(selection._saved_start or 0), result.shape[selection._saved_dim]
        end = min(length, int(selection._saved_end))
        # Autograd returns a negative end as an unsigned 64-bit integer.
        if selection._saved_end >= 1 << 63:
            end = length + int(selection._saved_end) - (1 << 64)
        if start >= 1 << 63 or selection._saved_step != 1:
            return None, 0
        result = result.narrow(selection._saved_dim, start, max(0, end - start))
        begin += start if selection._saved_dim == 1 else 0
    return result, begin


def _has_two_models(node: Any) -> bool:
    """Return whether a product is one of a softmax and of a logarithm of another model's softmax, both trained."""
    heads: set[int] = set()
    kinds: set[str] = set()
    for child, _ in node.next_functions:
        for softmax, way in below([child]):
            if len(way) > _NEAR:
                break
            if type(softmax).__name__ in ("SoftmaxBackward0", "LogSoftmaxBackward0"):
                kinds.add(type(softmax).__name__)
                heads.add(head(softmax))
    return len(heads - {0}) > 1 and "LogSoftmaxBackward0" in kinds


def _softmax_below(node: Any) -> tuple[Any, bool, bool, list[Any]]:
    """Return the student's softmax node that a factor of a product is computed from, whether its probabilities are
    mixed with probabilities without a gradient, whether the exponential of its logarithm is taken, and the nodes that
    select some of its positions."""
    input_node, selections = source(node)
    is_mixed = is_exp = False
    if type(input_node).__name__ == "ExpBackward0":
        is_exp, (input_node, more) = True, source(input_node)
        selections = selections + more
        if type(input_node).__name__ != "LogSoftmaxBackward0":
            return None, False, False, []
    for _ in range(6):
        kind = type(input_node).__name__
        if kind in ("LogSoftmaxBackward0", "SoftmaxBackward0"):
            return input_node, is_mixed, is_exp, selections
        is_mixed = is_mixed or kind in ("LogsumexpBackward0", "LogaddexpBackward0")
        trained = [
            child for child, _ in getattr(input_node, "next_functions", ()) if child is not None
        ]
        if kind not in _DIFFERENCES + _MIXTURES * is_mixed or len(trained) != 1:
            return None, False, False, []
        input_node, more = source(input_node)
        selections = selections + more
    return None, False, False, []
