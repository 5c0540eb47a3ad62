"""Judge each stage of an observed step against plain references: models, loss and gradients before the update, and then
the update.

Each stage is judged from the input that was observed at that stage, with the rounding error of the stage's arithmetic
as the tolerance. The input of a stage is the observed output of the preceding stage, so together the stages cover the
step from the rows on the host to the updated weights. The first failure is the diagnosis. Only stages that the user's
compiler, device, kernels or model code can break are judged; the other stages are compared in tests.

If the FLOP budget does not allow all rows, only the hidden states of randomly drawn rows are compared; the step seeds
the draw. The numbers of each stage report how many of the positions and parameters were compared.
"""

# Shapes: B rows, T tokens, N = B*T, D student width, E teacher width, V vocabulary, R rows of a parameter

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from engine.audit import reference
from engine.audit.bounds import (
    COMPARED_TOKENS,
    HIDDEN_STATES_SHARE,
    LOGITS,
    REFERENCE_FLOPS,
    group_tokens,
    layer_bytes,
    logits_bytes,
    memory_scale,
)
from engine.audit.observed import (
    Model,
    ObservedParameter,
    ObservedPass,
    ObservedStep,
    UpdatedParameter,
)
from engine.audit.reference import IGNORED, Forward
from engine.catalogue import STAGES, About
from engine.log.events import StepDone
from engine.verdict import Answer, Level, Numbers, passed, unknown

ROUNDING, TF32 = 2.0**-24, 2.0**-11
"""Maximum relative error of one rounding in fp32, and of one rounding of a TF32 matmul's operands."""
HEAD_ROWS_COMPARED = 256
"""Number of rows of the teacher's head that are compared."""
MIN_MOVED_SHARE = 0.01
"""Minimum share, 0 to 1, of the weights with a nonzero update that must change; below it the stage is unknown."""
NO_REFERENCE = (
    "not compared: transformers runs the model, for which the audit has no reference implementation"
)
NOT_APPLIED = "the update was skipped: the loss or a gradient is not finite"
MOSTLY_ROUNDING = 0.1
"""Maximum relative error of the hidden states' gradient, 0 to 1; above it rounding hides other errors."""
LOG_ROUNDINGS = 8
"""Number of roundings in a token's logit gradient if it is q (log q - log p - KL) instead of q - p: two logits and
two normalisers, and the same in the mean."""
ROUNDED_ROWS = 2
"""Number of rows that are recomputed with rounding errors added, to measure the effect of rounding alone."""
ROUNDED_PER_SHOWN = 4
"""Maximum number of differing positions accepted for each position whose difference the recomputed rows show to be
due to rounding alone."""


@dataclass(slots=True)
class _Loss:
    """The reference of the loss, computed from the hidden states that the step's loss received."""

    labelled: int
    ce: float
    kd: float
    total: float
    """The value of the objective, summed from its terms in each micro-batch."""
    agreement: float
    temperature: float
    hidden_gradients: list[Tensor]
    head_gradient_VD: Tensor | None
    """Gradient of the head; None if the head is frozen, or if the hidden states are the logits."""
    largest_logit: float


def _position_text(number: int, row: int, token: int) -> str:
    return f"pass {number + 1}, row {row + 1}, token {token + 1}"


@dataclass(frozen=True, slots=True)
class _Sample:
    """The rows and tokens of a step at which a model's hidden states are compared."""

    rows: list[list[int]]
    """Row indices, one list per pass."""
    tokens: int
    """Number of leading tokens compared in each row; later tokens do not affect their hidden states."""
    gradients: bool
    """Whether the sample is the whole step, so that the weights' gradients are also compared."""


@dataclass
class _Step:
    """An observed step with the references that several stages share, each computed once when it is first needed."""

    observed: ObservedStep

    @property
    def device(self) -> torch.device:
        return self.observed.passes[0].student_hidden_ND.device

    @property
    def positions(self) -> int:
        return sum(pass_.tokens_BT.numel() for pass_ in self.observed.passes)

    @cached_property
    def student_sample(self) -> _Sample:
        """All rows if the budget allows their gradients, otherwise some rows."""
        size = self.observed.student.parameters
        whole = 8 * size * self.positions <= REFERENCE_FLOPS[self.device.type]
        return self._sample(self.observed.student, 0 if whole else 2 * size)

    @cached_property
    def teacher_sample(self) -> _Sample:
        assert self.observed.teacher is not None
        taught = [pass_.teacher_hidden_NE is not None for pass_ in self.observed.passes]
        return self._sample(self.observed.teacher, 2 * self.observed.teacher.parameters, taught)

    def _sample(self, model: Model, flops: int, of_passes: Sequence[bool] | None = None) -> _Sample:
        """Draw the rows that the budget allows at `flops` per token; the step is the seed. Rows are drawn from the
        passes for which `of_passes` is True, by default from all. If `flops` is 0, all rows are taken."""
        observed = self.observed
        all_rows = [
            (index, row)
            for index, pass_ in enumerate(observed.passes)
            if of_passes is None or of_passes[index]
            for row in range(pass_.tokens_BT.shape[0])
        ]
        tokens = observed.passes[0].tokens_BT.shape[1]
        # LongRoPE uses different rotations for short and long documents.
        if flops and not model.shape.long_factors:
            tokens = min(tokens, COMPARED_TOKENS)
        count = len(all_rows)
        if flops:
            budget = HIDDEN_STATES_SHARE * REFERENCE_FLOPS[self.device.type]
            count = max(1, int(budget // (flops * tokens)))
        if count < len(all_rows):
            generator = torch.Generator().manual_seed(observed.step)
            drawn = torch.randperm(len(all_rows), generator=generator)[:count].tolist()
            all_rows = sorted(all_rows[index] for index in drawn)
        rows = [
            [row for index, row in all_rows if index == number]
            for number in range(len(observed.passes))
        ]
        return _Sample(rows, tokens, gradients=not flops)

    @cached_property
    def scale(self) -> int:
        """Factor by which the student's reference uses larger chunks than the memory plan assumes."""
        runs, pass_ = self.observed.student.runs, self.observed.passes[0]
        if runs is None:
            return 1
        counted = layer_bytes(
            intermediate=runs.shape.intermediate_size,
            width=pass_.student_hidden_ND.shape[1],
            heads=runs.shape.heads,
            tokens=pass_.tokens_BT.numel(),
            row_tokens=pass_.tokens_BT.shape[1],
            backward=True,
        ) + logits_bytes(pass_.tokens_BT.numel(), self.observed.student.vocabulary)
        return memory_scale(counted, self.observed.free_bytes)

    @cached_property
    def student(self) -> Model:
        model = self.observed.student
        if model.runs is None:
            return model
        return replace(
            model,
            runs=replace(model.runs, attention_weights=self.scale * model.runs.attention_weights),
        )

    def forwards(
        self, model: Model, chosen: _Sample, *, keep: bool = False, rounding: float = 0.0
    ) -> list[list[Forward]]:
        """Run the reference over the chosen rows of each pass, a chunk of rows at a time."""
        scale = self.scale if model is self.student else 1
        assert model.runs is not None
        size = max(1, scale * group_tokens(model.shape.intermediate_size) // chosen.tokens)
        with self.matmul_precision(model):
            return [
                [
                    model.runs.forward(
                        pass_.tokens_BT[chunk, : chosen.tokens],
                        pass_.documents_BT[chunk, : chosen.tokens],
                        keep=keep,
                        rounding=rounding,
                    )
                    for chunk in (rows[i : i + size] for i in range(0, len(rows), size))
                ]
                for pass_, rows in zip(self.observed.passes, chosen.rows, strict=True)
            ]

    @contextlib.contextmanager
    def matmul_precision(self, model: Model) -> Iterator[None]:
        """Allow TF32 matmuls on a GPU for the reference of a model in 16 bits or fewer: they are five times as fast,
        and their rounding error is an eighth of the model's."""
        previous = torch.get_float32_matmul_precision()
        if self.device.type == "cuda" and model.rounding >= 8 * TF32:
            torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(previous)

    @cached_property
    def student_forwards(self) -> list[list[Forward]]:
        chosen = self.student_sample
        return self.forwards(self.student, chosen, keep=chosen.gradients)

    @cached_property
    def teacher_forwards(self) -> list[list[Forward]]:
        assert self.observed.teacher is not None
        return self.forwards(self.observed.teacher, self.teacher_sample)

    @cached_property
    def loss(self) -> _Loss:
        """The reference loss of the hidden states that the step's loss received."""
        observed = self.observed
        count = max(sum(int((_labels(pass_) != IGNORED).sum()) for pass_ in observed.passes), 1)
        head_gradient_VD = None
        if any(parameter.name == observed.student.head_name for parameter in observed.parameters):
            shape = observed.student.vocabulary, observed.passes[0].student_hidden_ND.shape[1]
            head_gradient_VD = torch.zeros(shape, device=self.device)
        total, gradients, objective = reference.LossSums(), [], 0.0
        for pass_ in observed.passes:
            teacher: tuple[Tensor, reference.HeadRows] | reference.Targets | None = pass_.targets
            if pass_.teacher_hidden_NE is not None and observed.teacher_head is not None:
                teacher = (pass_.teacher_hidden_NE, observed.teacher_head)
            # TF32 represents 16-bit operands exactly, so their products are exact.
            with self.matmul_precision(observed.student):
                sums, gradient_ND = reference.loss(
                    pass_.objective,
                    pass_.student_hidden_ND,
                    observed.student_head,
                    _labels(pass_),
                    teacher,
                    vocabulary=observed.student.vocabulary,
                    denominator=count,
                    head_gradient_VD=head_gradient_VD,
                    chunk_numbers=self.scale * LOGITS[self.device.type],
                )
            gradients.append(gradient_ND)
            alpha, T = pass_.objective.alpha, pass_.objective.temperature
            objective += alpha * sums.ce + (1 - alpha) * T**2 * sums.divergence
            total.ce += sums.ce
            total.divergence += sums.divergence
            total.agreeing += sums.agreeing
            total.largest_logit = max(total.largest_logit, sums.largest_logit)
        return _Loss(
            labelled=count,
            ce=total.ce / count,
            kd=total.divergence / count * observed.passes[0].objective.temperature ** 2,
            total=objective / count,
            agreement=total.agreeing / count,
            temperature=observed.passes[0].objective.temperature,
            hidden_gradients=gradients,
            head_gradient_VD=head_gradient_VD,
            largest_logit=total.largest_logit,
        )


def _join_hidden(groups: Sequence[Forward]) -> Tensor:
    return torch.cat([group.hidden_ND for group in groups])


def _labels(pass_: ObservedPass) -> Tensor:
    """Return the labels of a pass on the device of its hidden states, (N,)."""
    return pass_.labels_BT.flatten().to(pass_.student_hidden_ND.device)


@dataclass(frozen=True, slots=True)
class _Updated:
    """A finished step: its observations before and after the update."""

    observed: ObservedStep
    loss: _Loss | str
    """The reference loss, or the reason why there is none."""
    logged: StepDone
    updates: int
    """Number of updates applied before the step."""
    after: Mapping[str, UpdatedParameter]


# contract: distill-batch-honesty-v1
class StepJudge:
    """Judges a step in two parts: models, loss and gradients before the update changes the weights, and the update
    after the step is logged. A stage whose judge function raises an error is unknown, with the error as the
    reason."""

    def __init__(self, observed: ObservedStep) -> None:
        """Judge the stages before the update, then release the whole tensors."""
        step = _Step(observed)
        self._found = {id: _timed(judge, step) for id, judge in BEFORE_UPDATE.items()}
        self._loss: _Loss | str = "its reference could not be computed"
        if "loss" in step.__dict__:
            self._loss = replace(step.loss, hidden_gradients=[], head_gradient_VD=None)
        self._observed = replace(
            observed, passes=(), student_head=reference.LOGITS, teacher_head=None
        )

    def after_update(
        self, logged: StepDone, updates: int, after: Mapping[str, UpdatedParameter]
    ) -> list[tuple[About, Answer, float]]:
        """Return the results of all stages, with the seconds that each took. `updates` is the number of updates
        before the step."""
        done = _Updated(self._observed, self._loss, logged, updates, after)
        found = self._found | {id: _timed(judge, done) for id, judge in AFTER_UPDATE.items()}
        return [(about, *found[about.id]) for about in STAGES]


_T = TypeVar("_T")


def _timed(judge: Callable[[_T], Answer], subject: _T) -> tuple[Answer, float]:
    begun_s = time.perf_counter()
    try:
        answer = judge(subject)
    except Exception as error:  # noqa: BLE001 - an audit that breaks must not end the run
        answer = unknown(f"the audit raised {type(error).__name__}: {error}")
    return answer, time.perf_counter() - begun_s


# Models


def _allowed(model: Model) -> float:
    """Return the allowed relative error of hidden states.

    Each layer adds two rounded branches to the residual, and rounding errors add up like a random walk.
    """
    return max(2e-4, 4 * model.rounding * math.sqrt(2 * model.shape.layers))


@dataclass(frozen=True, slots=True)
class _Errors:
    """The errors of the hidden states at the sampled positions of all passes, in order, (P,) each."""

    error_P: Tensor
    size_P: Tensor
    places: list[tuple[int, int, int]]
    """Pass, row and token of each position, counted from 0."""

    def relative(self, kept_P: Tensor) -> float:
        square = float(self.error_P[kept_P].double().square().sum())
        size = float(self.size_P[kept_P].double().square().sum())
        return math.sqrt(square / size) if size else 0.0


def _errors(
    step: _Step,
    chosen: _Sample,
    forwards: Sequence[Sequence[Forward]],
    hidden: Sequence[Tensor | None],
) -> _Errors:
    errors, sizes, places = [], [], []
    for number, (groups, hidden_ND) in enumerate(zip(forwards, hidden, strict=True)):
        rows = chosen.rows[number]
        if not rows or hidden_ND is None:
            continue
        length = step.observed.passes[number].tokens_BT.shape[1]
        wanted_ND = _join_hidden(groups).float()
        found_BTD = hidden_ND.view(-1, length, hidden_ND.shape[1])
        found_ND = found_BTD[rows, : chosen.tokens].flatten(0, 1).float()
        errors.append((found_ND - wanted_ND).norm(dim=1))
        sizes.append(wanted_ND.norm(dim=1))
        places += [(number, row, token) for row in rows for token in range(chosen.tokens)]
    return _Errors(torch.cat(errors), torch.cat(sizes), places)


def _forward_pass(
    step: _Step,
    model: Model,
    chosen: _Sample,
    forwards: Sequence[Sequence[Forward]],
    hidden: Sequence[Tensor | None],
    role: str,
) -> Answer:
    allowed = _allowed(model)
    errors = _errors(step, chosen, forwards, hidden)
    relative_P = (errors.error_P / errors.size_P).nan_to_num(math.inf)
    # The error of one position is a mean over fewer numbers than the error of all positions.
    over_P = relative_P > 4 * allowed
    positions = len(relative_P)
    error = errors.relative(torch.ones_like(over_P))
    numbers = Numbers(
        error=error,
        worst=float(relative_P.amax()),
        allowed=allowed,
        positions=positions,
        all_positions=step.positions,
    )
    text = (
        f"the relative error of the hidden states to a plain forward pass is {error:.2g}, expected up to "
        f"{allowed:.1g}"
    )
    decided = ""
    if over_P.any() or not error <= allowed:
        # Some models, mostly with random weights, amplify rounding errors until the hidden states differ.
        rounding_P, checked_P = _moved_by_rounding(
            step, model, chosen.tokens, forwards, errors, over_P
        )
        numbers["decided_by_rounding"] = int(rounding_P.sum())
        accepted = ROUNDED_PER_SHOWN * int(rounding_P.sum())
        ratio = positions / int(checked_P.sum())
        if int((over_P & checked_P).sum()) > accepted or int(over_P.sum()) > accepted * ratio:
            first_over = int(over_P.nonzero()[0])
            return numbers.failed(
                f"{text}; first at {_position_text(*errors.places[first_over])}: {float(relative_P[first_over]):.2g}"
            )
        kept_P = ~(over_P | rounding_P)
        error = errors.relative(kept_P)
        if not error <= allowed:
            return numbers.failed(text)
        excluded = positions - int(kept_P.sum())
        decided = f", except {excluded:,} whose values rounding decides"
        if 2 * excluded > positions:
            return numbers.unknown(
                f"rounding decides the hidden states of {excluded:,} of {positions:,} tokens"
            )
    return numbers.passed(
        f"hidden states of {positions:,} tokens of the {role} are within {error:.1e} of a plain forward pass{decided}"
    )


def _moved_by_rounding(
    step: _Step,
    model: Model,
    length: int,
    forwards: Sequence[Sequence[Forward]],
    errors: _Errors,
    over_P: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return which sampled positions exceed the tolerance if errors of one rounding are added, and which positions
    were checked in this way: those of the rows that differ most; (P,) each."""
    plain_ND = torch.cat([_join_hidden(groups) for groups in forwards if groups])
    plain_RTD = plain_ND.view(-1, length, plain_ND.shape[1])
    moved_P, checked_P = torch.zeros_like(over_P), torch.zeros_like(over_P)
    worst_R = over_P.view(-1, length).sum(1).sort(descending=True, stable=True).indices
    for place in worst_R[:ROUNDED_ROWS].tolist():
        number, row, _ = errors.places[place * length]
        pass_, begin = step.observed.passes[number], place * length
        assert model.runs is not None
        with step.matmul_precision(model):
            change_TD = model.runs.forward(
                pass_.tokens_BT[row : row + 1, :length],
                pass_.documents_BT[row : row + 1, :length],
                rounding=model.rounding,
            ).hidden_ND
        plain_TD = plain_RTD[place].float()
        moved_T = (change_TD.float() - plain_TD).norm(dim=1) > _allowed(model) * plain_TD.norm(
            dim=1
        )
        moved_P[begin : begin + length] = moved_T
        checked_P[begin : begin + length] = True
    return moved_P, checked_P


def _student(step: _Step) -> Answer:
    observed = step.observed
    if observed.student.runs is None:
        return unknown(NO_REFERENCE)
    hidden = [pass_.student_hidden_ND for pass_ in observed.passes]
    return _forward_pass(
        step, observed.student, step.student_sample, step.student_forwards, hidden, "student"
    )


def _teacher(step: _Step) -> Answer:
    observed = step.observed
    if observed.stored:
        return passed(
            "the outputs are read from a store: stored_outputs compares them with the teacher"
        )
    if all(pass_.teacher_hidden_NE is None for pass_ in observed.passes):
        return passed("the objective has no teacher")
    if observed.teacher is None:
        return unknown(observed.no_teacher)
    # The sample has no rows of a pass whose objective has no teacher.
    hidden = [pass_.teacher_hidden_NE for pass_ in observed.passes]
    answer = _forward_pass(
        step, observed.teacher, step.teacher_sample, step.teacher_forwards, hidden, "teacher"
    )
    if answer.verdict.level is Level.FAIL or observed.teacher_head in (None, reference.LOGITS):
        return answer
    assert observed.teacher_head is not None
    count = observed.student.vocabulary
    rows = torch.arange(0, count, max(1, count // HEAD_ROWS_COMPARED), device=step.device)
    wanted_RE = observed.teacher.weight(observed.teacher.head_name, rows)
    found_RE = torch.cat([observed.teacher_head(int(row), 1).float() for row in rows.tolist()])
    error = float((found_RE - wanted_RE).norm() / wanted_RE.norm())
    numbers = Numbers(**answer.numbers, head_error=error)
    if not error <= 2 * observed.teacher.rounding + 4 * ROUNDING:
        return numbers.failed(
            f"the relative error of the head in the loss to the teacher's head is {error:.2g}, expected up to "
            f"{2 * observed.teacher.rounding + 4 * ROUNDING:.1g}"
        )
    return replace(answer, numbers=dict(numbers))


# Loss


def _logged_loss(step: _Updated) -> Answer:
    ref, logged = step.loss, step.logged
    if not logged.updated:
        return unknown(NOT_APPLIED)
    if isinstance(ref, str):
        return unknown(ref)
    # A logit is a sum of rounded products; a log-sum-exp changes by no more than the largest change of a logit, and a
    # divergence of two softmaxes at temperature T, times T^2, by 2 T of it.
    rounding = 16 * max(ref.temperature, 1.0) * step.observed.logit_rounding * ref.largest_logit
    pairs = {
        "ce": (logged.ce, ref.ce),
        "kd": (logged.kd, ref.kd),
        "loss": (logged.loss, ref.total),
    }
    numbers = Numbers()
    for name, (found, wanted) in pairs.items():
        if found is None:
            continue
        numbers |= {name: found, f"{name}_reference": wanted}
        allowed = 2e-5 * (1 + abs(wanted)) + rounding
        if not abs(found - wanted) <= allowed:
            return numbers.failed(
                f"{name} is logged as {found:.6g}, the step's hidden states and labels give {wanted:.6g} (rounding "
                f"explains up to {allowed:.1g})"
            )
    if logged.agreement is not None:
        numbers |= dict(agreement=logged.agreement, agreement_reference=ref.agreement)
        # Rounding decides ties, but they are few.
        if not abs(logged.agreement - ref.agreement) <= 0.005 + 2 / ref.labelled:
            return numbers.failed(
                f"agreement is logged as {logged.agreement:.2%}, the step's hidden states give {ref.agreement:.2%}"
            )
    return numbers.passed(
        f"the loss of {logged.loss:.6g} and its parts match the step's hidden states"
    )


# Gradients


def _gradients(step: _Step) -> Answer:
    observed = step.observed
    answer = _hidden_gradients(step)
    if answer.verdict.level is not Level.PASS:
        return answer
    if step.student.runs is None:
        reason = f"{answer.verdict.reason}; the weights' gradients are {NO_REFERENCE}"
        return unknown(reason, **answer.numbers)
    if not step.student_sample.gradients:
        return unknown(
            f"{answer.verdict.reason}; the weights' gradients are not compared: the reference of all rows needs more "
            "FLOPs than the audit's budget",
            **answer.numbers,
        )
    upstream = [pass_.student_gradient_ND.float() for pass_ in observed.passes]  # type: ignore[union-attr]
    weight_answer = _weight_gradients(step, upstream, step.loss.head_gradient_VD)
    return replace(weight_answer, numbers={**answer.numbers, **weight_answer.numbers})


def _hidden_gradients(step: _Step) -> Answer:
    """Compare the loss's gradients of the hidden states with the reference's at every position."""
    ref, observed = step.loss, step.observed
    square = size = 0.0
    worst: tuple[float, int, int] = (0.0, 0, 0)
    # Rounding a logit adds an error to the gradient of its position that grows with the norm of the head's rows.
    length = 1.0
    if observed.student_head is not reference.LOGITS:
        rows_RD = observed.student_head(0, min(64, observed.student.vocabulary)).float()
        length = float(rows_RD.norm(dim=1).mean())
    floor = 16 * observed.logit_rounding * ref.largest_logit * length / ref.labelled
    relative = max(1e-4, 4 * observed.student.rounding)
    for number, (pass_, wanted_ND) in enumerate(
        zip(observed.passes, ref.hidden_gradients, strict=True)
    ):
        if pass_.student_gradient_ND is None:
            labelled = int((_labels(pass_) != IGNORED).sum())
            if labelled:
                return Numbers(labelled=labelled).failed(
                    f"no gradient reached the student's hidden states of pass {number + 1}"
                )
            continue
        found_ND = pass_.student_gradient_ND.double()
        without_N = (_labels(pass_) == IGNORED) & (found_ND.abs().sum(1) > 0)
        if without_N.any():
            row, token = divmod(int(without_N.nonzero()[0]), pass_.tokens_BT.shape[1])
            return Numbers(leaking=int(without_N.sum())).failed(
                f"{int(without_N.sum())} positions without a label receive a gradient, first "
                f"{_position_text(number, row, token)}"
            )
        error_N = (found_ND - wanted_ND).norm(dim=1)
        square += float(error_N.square().sum())
        size += float(wanted_ND.square().sum())
        roundings = LOG_ROUNDINGS if pass_.objective.divergence != "forward_kl" else 1
        allowed_N = relative * 8 * wanted_ND.norm(dim=1) + roundings * floor
        excess_N = (error_N / allowed_N).nan_to_num(math.inf)
        if len(excess_N) and float(excess_N.amax()) > worst[0]:
            worst = (float(excess_N.amax()), number, int(excess_N.argmax()))
    error = math.sqrt(square / size) if size else 0.0
    numbers = Numbers(hidden_error=error, hidden_allowed=relative, floor=floor)
    if worst[0] > 1:
        _, number, place = worst
        pass_ = observed.passes[number]
        row, token = divmod(place, pass_.tokens_BT.shape[1])
        found = float(pass_.student_gradient_ND[place].double().norm())  # type: ignore[index]
        wanted = float(ref.hidden_gradients[number][place].norm())
        return numbers.failed(
            f"the relative error of the hidden states' gradient to that of the loss is {error:.2g}; largest at "
            f"{_position_text(number, row, token)}: norm {found:.3g}, expected {wanted:.3g}"
        )
    if not error <= MOSTLY_ROUNDING:
        return numbers.unknown(
            f"{error:.0%} of the hidden states' gradient is rounding error, expected up to {MOSTLY_ROUNDING:.0%}; "
            "student.precision=fp32 or loss.kernel=eager would round less"
        )
    return numbers.passed(
        f"gradients of the hidden states match the loss's within {error:.1e} at all {step.positions:,} positions"
    )


@dataclass(frozen=True, slots=True)
class _OutOfTolerance:
    """A tensor whose gradient differs from the reference's by more than the tolerance."""

    found: Tensor
    wanted: Tensor
    error: float
    allowed: float

    def explained_by_rounding(self, moved: Tensor) -> bool:
        """Return whether rounding alone changes the reference's gradient as much; `moved` is that gradient with
        rounding errors added."""
        return self.error <= self.allowed + ROUNDED_PER_SHOWN * float((moved - self.wanted).norm())


def _weight_gradients(
    step: _Step, upstream: Sequence[Tensor], head_gradient_VD: Tensor | None
) -> Answer:
    """Compare the gradients of the weights with those of the plain decoder."""
    observed, model = step.observed, step.student
    if not math.isfinite(observed.gradient_norm):
        return unknown(f"the norm of the gradients is {observed.gradient_norm}")
    total = max(sum(parameter.numbers for parameter in observed.parameters), 1)
    # In 16 bits the backward pass of each layer adds an error of a few percent.
    relative = max(2e-3, 32 * model.rounding)
    # Tolerance of a gradient that is zero except for rounding, such as that of a key's bias.
    floor = 64 * model.rounding * observed.gradient_norm
    head_floor = 0.0 if head_gradient_VD is None else _head_rounding(step)
    worst, compared = 0.0, 0
    outside: dict[str, _OutOfTolerance] = {}
    for parameter, wanted in _wanted_gradients(
        step, step.student_forwards, upstream, head_gradient_VD
    ):
        if parameter.gradient is None:
            if float(wanted.norm()) > floor:
                return Numbers(wanted=float(wanted.norm())).failed(
                    f"{parameter.name} has no gradient: it is frozen, or detached from the loss"
                )
            continue
        found = parameter.gradient.double()
        share = math.sqrt(found.numel() / total)
        # One transfer for both numbers: each one waits for the device.
        error, length = torch.stack([(found - wanted).norm(), wanted.norm()]).tolist()
        allowed = relative * length + floor * max(share, 1e-3)
        if parameter.name == model.head_name:
            allowed += head_floor
        compared += 1
        if error <= allowed:
            worst = max(worst, error / allowed)
        else:
            outside[parameter.name] = _OutOfTolerance(found, wanted, error, allowed)
    numbers = Numbers(tensors=compared, of_allowed=worst)
    decided = ""
    if outside:
        # If the gradients of many tokens cancel, the remainder may be rounding error.
        forwards = step.forwards(model, step.student_sample, keep=True, rounding=model.rounding)
        for parameter, moved in _wanted_gradients(step, forwards, upstream, head_gradient_VD):
            mismatch = outside.get(parameter.name)
            if mismatch is not None and not mismatch.explained_by_rounding(moved):
                length = float(mismatch.wanted.norm())
                numbers["of_allowed"] = mismatch.error / mismatch.allowed
                return numbers.failed(
                    f"the relative error of the gradient of {parameter.name} to the plain decoder's is "
                    f"{mismatch.error / max(length, 1e-300):.2g}: norm {float(mismatch.found.norm()):.3g}, "
                    f"expected {length:.3g}"
                )
        numbers["decided_by_rounding"] = len(outside)
        if 2 * len(outside) > compared:
            return numbers.unknown(
                f"rounding decides the gradients of {len(outside)} of {compared} tensors"
            )
        decided = f", except {len(outside)} that rounding decides"
    return numbers.passed(
        f"gradients of {compared} tensors match those of the logged loss over all rows of {len(observed.passes)} "
        f"micro-batches{decided}"
    )


def _head_rounding(step: _Step) -> float:
    """Return the norm of the error that rounding the logits adds to the gradient of the head: the sum over positions
    of each position's error times its hidden state. If teacher and student are nearly equal, it is a large part of
    the gradient."""
    ref, observed = step.loss, step.observed
    logs = any(pass_.objective.divergence != "forward_kl" for pass_ in observed.passes)
    per_position = 16 * observed.logit_rounding * ref.largest_logit / max(ref.labelled, 1)
    square = sum(
        float(pass_.student_hidden_ND.double().square().sum()) for pass_ in observed.passes
    )
    return (LOG_ROUNDINGS if logs else 1) * per_position * math.sqrt(square)


def _wanted_gradients(
    step: _Step,
    forwards: Sequence[Sequence[Forward]],
    upstream: Sequence[Tensor],
    head_gradient_VD: Tensor | None,
) -> Iterator[tuple[ObservedParameter, Tensor]]:
    """Yield each observed parameter with the reference's gradient of its observed rows, on the CPU.

    `upstream` is the gradient of each pass's hidden states, (N, D).
    """
    observed = {parameter.name: parameter for parameter in step.observed.parameters}
    flows = [
        flow_ND
        for groups, of_pass_ND in zip(forwards, upstream, strict=True)
        for flow_ND in torch.split(of_pass_ND, [len(group.tokens_N) for group in groups])
    ]
    passes = [group for groups in forwards for group in groups]
    student = step.student
    assert student.runs is not None
    with step.matmul_precision(student):
        for name, gradients in _with_head(
            student.runs.backward(passes, flows), head_gradient_VD, student.head_name
        ):
            parameter = observed.get(name)
            if parameter is None:
                continue
            places_R = parameter.rows_R.to(step.device)
            zero = torch.zeros((), device=step.device)
            yield parameter, sum((g[places_R].double() for g in gradients), zero)


def _with_head(
    gradients: Iterator[tuple[str, Tensor]], head_gradient_VD: Tensor | None, head_name: str
) -> Iterator[tuple[str, Sequence[Tensor]]]:
    """Yield the name of each tensor with its gradients, which must be summed: a tied head has two."""
    for name, gradient in gradients:
        if head_gradient_VD is not None and name == head_name:
            yield name, [gradient, head_gradient_VD]
            head_gradient_VD = None
        else:
            yield name, [gradient]
    if head_gradient_VD is not None:
        yield head_name, [head_gradient_VD]


# The update


def _weights(step: _Updated) -> Answer:
    """Compare the gradient norm, and the moments and weights after AdamW's update, with the reference update."""
    observed, logged, adam = step.observed, step.logged, step.observed.adam
    if not logged.updated or logged.grad_norm is None or logged.lr is None:
        return unknown(NOT_APPLIED)
    norm, rate = observed.gradient_norm, logged.lr
    factor = reference.clip_factor(logged.grad_norm, observed.clip_norm)
    numbers = Numbers(grad_norm=logged.grad_norm, reference=norm, clip_factor=factor, rate=rate)
    # Summed in fp32 on a CPU, the squares of a large matrix lose some 1e-4.
    if not abs(logged.grad_norm - norm) <= 2e-3 * norm:
        return numbers.failed(
            f"the gradient norm is logged as {logged.grad_norm:.6g}, the norm of the gradients is {norm:.6g}"
        )
    compared = moved = expected = 0
    for parameter in observed.parameters:
        after = step.after[parameter.name]
        if after.moments is None:
            return numbers.failed(f"{parameter.name} is not in the optimizer: it is never trained")
        if parameter.gradient is None:
            continue
        if (parameter.updates, after.updates) != (step.updates, step.updates + 1):
            return numbers.failed(
                f"the optimizer counts {parameter.updates:,} updates of {parameter.name} before the step and "
                f"{after.updates:,} after it, expected {step.updates:,} and {step.updates + 1:,}. AdamW's bias "
                "correction uses that count"
            )
        gradient = factor * parameter.gradient.double()
        zero = torch.zeros_like(gradient)
        mean, square = (zero, zero) if parameter.moments is None else parameter.moments
        wanted_mean, wanted_square = reference.moments(adam, gradient, mean, square)
        decay = observed.decay if parameter.decays else 0.0
        before = parameter.before.double()
        update = reference.step_of_adamw(
            adam, before, *after.moments, rate=rate, decay=decay, count=after.updates
        )
        # The error of a moment is proportional to its terms, the error of a weight to the weight.
        pairs = {
            "mean": (after.moments[0], wanted_mean, 1e-5 * (mean.abs() + gradient.abs())),
            "mean square": (after.moments[1], wanted_square, 1e-5 * (square + gradient**2)),
            "update": (
                after.after.double() - before,
                update,
                2e-3 * update.abs() + 4 * ROUNDING * before.abs(),
            ),
        }
        for name, (found, wanted, allowed) in pairs.items():
            if text := _out_of_tolerance(parameter, found, wanted, allowed + 1e-36):
                return numbers.failed(
                    f"the {name} of {text}: AdamW's of gradients clipped by {factor:.4g} at a learning rate of "
                    f"{rate:.3g}"
                )
        compared += before.numel()
        expected += int((update != 0).sum())
        moved += int((after.after != parameter.before).sum())
    total = sum(parameter.numbers for parameter in observed.parameters)
    numbers |= dict(compared=compared, all_parameters=total, moved=moved)
    if moved < MIN_MOVED_SHARE * expected:
        return numbers.unknown(
            f"{moved:,} of {expected:,} weights changed at a learning rate of {rate:.2g}: the other updates are "
            "smaller than the last bit of their weights"
        )
    clipped = f" of gradients clipped to {factor:.2%}" if factor < 1 else ""
    return numbers.passed(
        f"{moved:,} of {compared:,} weights changed, each by AdamW's update{clipped} at a learning rate of {rate:.4g}"
    )


def _out_of_tolerance(
    parameter: ObservedParameter, found: Tensor, wanted: Tensor, allowed: Tensor
) -> str:
    """Name the first element out of tolerance, with both values, and count the others; empty if there is none."""
    outside = (~((found - wanted).abs() <= allowed)).nonzero()
    if not len(outside):
        return ""
    place = tuple(outside[0].tolist())
    indices = (int(parameter.rows_R[place[0]]), *place[1:])
    element = f"{parameter.name}[{', '.join(map(str, indices))}]"
    return (
        f"{element}, and {len(outside) - 1:,} others of {found.numel():,}, is {float(found[place]):.6g}, expected "
        f"{float(wanted[place]):.6g}"
    )


BEFORE_UPDATE: dict[str, Callable[[_Step], Answer]] = {
    "step_teacher": _teacher,
    "step_student": _student,
    "step_gradients": _gradients,
}
AFTER_UPDATE: dict[str, Callable[[_Updated], Answer]] = {
    "step_loss": _logged_loss,
    "step_weights": _weights,
}
