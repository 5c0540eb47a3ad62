"""What a divergence from a teacher is, as the graph behind the tensor of the backward pass has it: a product of
probabilities that are not trained with the logarithm of the student's softmax, or the other way round.

    forward   sum p (log p - log q)        p is kept by autograd as the factor of log q, which is trained
    reverse   sum q (log q - log p)        log p is kept as the factor of q
    mixed     sum p (log p - log m) + ...  m is the mean of p and q (Jensen-Shannon); p is kept as the factor of log m

p and q are at a temperature T when a division by T lies below the softmax (Hinton et al., 2015), and then the
divergence's gradient is T^2 too small unless something multiplies it.
"""

# Shapes: N places, V vocabulary, R places that are looked at

from __future__ import annotations

from typing import Any

from .graph import saved, scalar, source, weight
from .parameters import FACT, PASS, SUSPICION, Line

_PLACES, _NUMBERS = 64, 1 << 20
"""So many places are looked at, and so many numbers of them: some MiB in float64."""
_SAME = 1e-5
"""Between the logarithms that two models which are one give of a likely token."""
_LIKELY = 1e-2
"""Of the most likely token of its place, so many are compared: of a large vocabulary none need be likely."""
_APART = 1e-6
"""Nats between two models that are not."""
_LOOK = 3
"""The step at which that counts: a copy, as of the start of the run, is another model once the student has moved."""
_SUMS_TO_1 = 1e-2
"""In 16 bits."""
_DIFFERENCES = ("SubBackward0", "NegBackward0")
_MIXTURES = ("LogsumexpBackward0", "LogaddexpBackward0", "StackBackward0", "AddBackward0")


class Divergence:
    """A divergence of a softmax that is trained from one that is not."""

    def __init__(
        self, torch: Any, softmax: Any, teacher: Any, way: list[Any], is_mixed: bool
    ) -> None:
        """`softmax` is the student's; `way` are the nodes between it and the tensor of the backward pass."""
        self._torch = torch
        self._is_mixed = is_mixed
        self._is_forward = type(softmax).__name__ == "LogSoftmaxBackward0"
        self.vocabulary = teacher.shape[-1]
        self._places = teacher.numel() // self.vocabulary
        self.temperature = _temperature(softmax)
        self._weight = weight(way)
        self._is_mean_of_all = any(
            type(node).__name__ == "MeanBackward0"
            and node._saved_self_sym_numel == teacher.numel() > self._places
            for node in way
        )
        self.counts = self._compare(teacher, saved(softmax, "result"))

    def _compare(self, teacher: Any, student: Any) -> Any:
        """On the device: how far the sum of p is from 1, the divergence, and the share of places with the same best."""
        torch, flat = self._torch, (-1, self.vocabulary)
        places = max(1, min(_PLACES, _NUMBERS // self.vocabulary))
        stride = max(1, self._places // places)
        teacher_RV = teacher.detach().reshape(flat)[::stride][:places].double()
        student_RV = student.detach().reshape(flat)[::stride][:places].double()
        p_RV = teacher_RV if self._is_forward else teacher_RV.exp()
        log_q_RV = student_RV if self._is_forward else student_RV.log()
        off = (p_RV.sum(1) - 1).abs().max()
        divergence = (torch.xlogy(p_RV, p_RV) - p_RV * log_q_RV).sum(1).mean()
        alike = (p_RV.argmax(1) == log_q_RV.argmax(1)).double().mean()
        apart = (p_RV.log() - log_q_RV).abs()
        apart = torch.where(p_RV > _LIKELY * p_RV.amax(1, keepdim=True), apart, 0.0).amax()
        return torch.stack([off, divergence, alike, apart])

    def lines(self, counts: list[float], others: list[float], step: int) -> list[Line]:
        """At a step of its optimizer; `others` are the weights of cross entropies beside it."""
        off, divergence, alike, apart = counts
        # Labels as probabilities, smoothed or mixed, are no teacher's.
        if not off <= _SUMS_TO_1:
            return []
        numbers = {"divergence": divergence, "agreement": alike, "temperature": self.temperature}
        direction = "forward" if self._is_forward else "reverse"
        if self._is_mixed:
            direction = "Jensen-Shannon"
        text = (
            f"{direction} divergence over {self._places} places at temperature {self.temperature:g}: "
            f"{divergence:.3g} nats, {alike:.0%} with the same best token"
        )
        lines: list[Line] = [("distillation", FACT, text, numbers)]
        if apart <= _SAME:
            text = f"teacher and student give the same probabilities ({divergence:.1g} nats apart)"
            if step >= _LOOK:
                lines.append(("teacher_is_student", SUSPICION, text, numbers))
        elif divergence > _APART:
            text = f"teacher and student are {divergence:.3g} nats apart"
            lines.append(("teacher_is_student", PASS, text, numbers))
        if self._is_mean_of_all:
            text = (
                f"the divergence is a mean over {self._places} places and all {self.vocabulary} tokens of the "
                f"vocabulary: {self.vocabulary} times too small"
            )
            lines.append(("divergence_mean", SUSPICION, text, {"vocabulary": self.vocabulary}))
        elif self.temperature != 1.0:
            lines += self._scaling(others)
        return lines

    def _scaling(self, others: list[float]) -> list[Line]:
        """Whether something makes up for the temperature."""
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


def _is_share(weight: float, others: list[float]) -> bool:
    """Whether it is 1, or makes 1 together with the weight of a cross entropy."""
    return any(abs(weight + other - 1) < 1e-6 for other in (0.0, *others))


def teachers_in_training(models: list[str]) -> list[Line]:
    """`models` are those that nothing trains and whose dropout acts, by their classes."""
    if not models:
        return [("teacher_mode", PASS, "no model that is not trained draws dropout", {})]
    text = f"{', '.join(models)}: dropout acts in a model that is not trained, beside a divergence from a teacher"
    return [("teacher_mode", SUSPICION, text, {"models": len(models)})]


def _temperature(softmax: Any) -> float:
    """What the logits are divided by, below a softmax; 1 where nothing is seen."""
    node, _ = source(softmax)
    if node is None or not type(node).__name__.startswith(("DivBackward", "MulBackward")):
        return 1.0
    number = scalar(node)
    if not number:
        return 1.0
    return number if type(node).__name__.startswith("Div") else 1.0 / number


def divergence_at(torch: Any, node: Any, way: list[Any]) -> Divergence | None:
    """The divergence whose product of probabilities and logarithms is this node, if it is one."""
    if type(node).__name__ != "MulBackward0":
        return None
    factors = [one for one in (saved(node, "self"), saved(node, "other")) if one is not None]
    # With two, both are trained.
    if len(factors) != 1 or factors[0].dim() < 2 or factors[0].requires_grad:
        return None
    softmax, is_mixed = _softmax_below(node)
    if softmax is None:
        return None
    result = saved(softmax, "result")
    if result is None or result.numel() != factors[0].numel():
        return None
    if int(softmax._saved_dim) not in (result.dim() - 1, (1 << 64) - 1):
        return None
    if result.device != factors[0].device or result.shape[-1] != factors[0].shape[-1]:
        return None
    return Divergence(torch, softmax, factors[0], way, is_mixed)


def _softmax_below(node: Any) -> tuple[Any, bool]:
    """The softmax whose logarithm, or the difference of it to something that is not trained, a product takes, and
    whether it is first mixed with something that is not trained."""
    below, _ = source(node)
    is_mixed = False
    for _ in range(6):
        kind = type(below).__name__
        if kind in ("LogSoftmaxBackward0", "SoftmaxBackward0"):
            return below, is_mixed
        is_mixed = is_mixed or kind in ("LogsumexpBackward0", "LogaddexpBackward0")
        trained = [one for one, _ in getattr(below, "next_functions", ()) if one is not None]
        if kind not in _DIFFERENCES + _MIXTURES * is_mixed or len(trained) != 1:
            return None, False
        below = trained[0]
    return None, False
