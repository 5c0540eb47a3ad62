"""Judge each stage of an observed step against plain references: models, loss and gradients before the update, and then
the update.

Each stage is judged from the input that was observed at that stage, with the rounding of its own arithmetic as the
tolerance. The input of a stage is the observed output of the stage before, so together the stages follow the step from
the corpus and the model files to the updated weights. The first failure is the diagnosis.

Where the FLOP budget does not allow all rows, the hidden states of some rows are compared, drawn by the seed. The
numbers of each stage report how many positions and parameters were compared, out of how many.
"""

# Shapes: B rows, T tokens, N = B*T, D student width, E teacher width, V vocabulary, R rows of a parameter

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

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
    Logged,
    Model,
    ObservedParameter,
    ObservedPass,
    ObservedStep,
    UpdatedParameter,
)
from engine.audit.reference import IGNORED, Forward
from engine.audit.shapes import shape_in_files
from engine.catalogue import STAGES, About
from engine.errors import BadInput
from engine.verdict import Answer, Level, Numbers, unknown

ROUNDING, TF32 = 2.0**-24, 2.0**-11
"""Largest relative error of one rounding in fp32, and of one rounding of a TF32 matmul's operands."""
HEAD_ROWS_COMPARED = 256
"""Number of rows of the teacher's head that are compared."""
MIN_MOVED_SHARE = 0.01
"""Minimum share of the weights due an update that must change, 0 to 1; below it the stage is unknown."""
NOT_APPLIED = "the update was skipped: the loss or a gradient is not finite"
MOSTLY_ROUNDING = 0.1
"""Maximum relative error of the hidden states' gradient, 0 to 1; above it rounding hides other errors."""
TARGETS_COMPARED = 64
"""Minimum number of positions at which stored teacher targets are compared."""
TARGETS_ALLOWED = 8
"""Factor of the tolerance of stored targets over that of hidden states: logits are larger than hidden states."""
DEVIATIONS = 6
"""Maximum distance of the mean of draws from its expectation, in standard deviations: chance exceeds it in one audit
of a billion."""
LOG_ROUNDINGS = 8
"""Roundings of a token's gradient where it is q (log q - log p - KL) and not q - p: two logits and two normalisers, and
the same in the mean."""
ROUNDED_ROWS = 2
"""Number of rows that are recomputed with rounding errors added, to measure the effect of rounding alone."""
ROUNDED_PER_SHOWN = 4
"""Maximum number of differing positions accepted for each position at which the recomputed rows show that rounding
alone makes the difference."""


@dataclass(slots=True)
class _Loss:
    """The reference of the loss, computed from the hidden states that the step's loss received."""

    labelled: int
    ce: float
    kd: float
    total: float
    """The objective, from its parts in each micro-batch."""
    agreement: float
    hidden_gradients: list[Tensor]
    head_gradient_VD: Tensor | None
    """Gradient of the head; None where it is frozen, or the hidden states are the logits."""
    largest_logit: float


class Difference(NamedTuple):
    """The first position at which two matrices differ, both values, and the number of differing positions."""

    row: int
    token: int
    found: int
    wanted: int
    differing: int


def first_difference(found_BT: Tensor, wanted_BT: Tensor) -> Difference | None:
    differing = (found_BT != wanted_BT).nonzero()
    if not len(differing):
        return None
    row, token = differing[0].tolist()
    found, wanted = int(found_BT[row, token]), int(wanted_BT[row, token])
    return Difference(row, token, found, wanted, len(differing))


def _position_text(number: int, row: int, token: int) -> str:
    return f"pass {number + 1}, row {row + 1}, token {token + 1}"


@dataclass(frozen=True, slots=True)
class _Sample:
    """The rows and tokens of a step at which a model's hidden states are compared."""

    rows: list[list[int]]
    """Row indices, one list per pass."""
    tokens: int
    """Number of leading tokens compared in each row: later tokens do not change them."""
    gradients: bool
    """Whether the sample is the whole step, so that the weights' gradients are compared too."""


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
        """All rows where the budget allows their gradients, otherwise some rows."""
        size = self.observed.student.parameters
        whole = 8 * size * self.positions <= REFERENCE_FLOPS[self.device.type]
        return self._sample(self.observed.student, 0 if whole else 2 * size)

    @cached_property
    def teacher_sample(self) -> _Sample:
        assert self.observed.teacher is not None
        taught = [
            pass_.teacher_hidden_NE is not None or pass_.targets is not None
            for pass_ in self.observed.passes
        ]
        return self._sample(self.observed.teacher, 2 * self.observed.teacher.parameters, taught)

    def _sample(self, model: Model, flops: int, of_passes: Sequence[bool] | None = None) -> _Sample:
        """Draw the rows that the budget allows at `flops` per token, seeded by the run's seed and the step, of the
        passes for which `of_passes` is True, by default of all. All rows where `flops` is 0."""
        observed = self.observed
        all_rows = [
            (index, row)
            for index, pass_ in enumerate(observed.passes)
            if of_passes is None or of_passes[index]
            for row in range(pass_.tokens_BT.shape[0])
        ]
        tokens = observed.passes[0].tokens_BT.shape[1]
        # LongRoPE turns short and long documents differently.
        if flops and not model.shape.long_factors:
            tokens = min(tokens, COMPARED_TOKENS)
        count = len(all_rows)
        if flops:
            budget = HIDDEN_STATES_SHARE * REFERENCE_FLOPS[self.device.type]
            count = max(1, int(budget // (flops * tokens)))
        if count < len(all_rows):
            generator = torch.Generator().manual_seed(observed.seed * 1_000_003 + observed.step)
            drawn = torch.randperm(len(all_rows), generator=generator)[:count].tolist()
            all_rows = sorted(all_rows[index] for index in drawn)
        rows = [
            [row for index, row in all_rows if index == number]
            for number in range(len(observed.passes))
        ]
        return _Sample(rows, tokens, gradients=not flops)

    @cached_property
    def scale(self) -> int:
        """Factor by which the student's reference uses larger chunks than the memory plan counts."""
        runs, pass_ = self.observed.student.runs, self.observed.passes[0]
        if not isinstance(runs, reference.PlainDecoder):
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
        if not isinstance(model.runs, reference.PlainDecoder):
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
        """Allow TF32 matmuls on a GPU for the reference of a model in 16 bits or fewer: they are five times as fast and
        round an eighth as much as the model does."""
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
            kd=total.divergence / count * observed.wanted.objective.temperature**2,
            total=objective / count,
            agreement=total.agreeing / count,
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
    """A finished step: what was observed before its update and after it."""

    observed: ObservedStep
    loss: _Loss | str
    """The reference loss, or the reason why there is none."""
    logged: Logged
    after: Mapping[str, UpdatedParameter]


# contract: distill-batch-honesty-v1
class StepJudge:
    """Judges a step in two parts: models, loss and gradients before the update changes the weights; the update once the
    step is logged. A stage whose judgement raises an error is unknown, with the error as the reason."""

    def __init__(self, observed: ObservedStep) -> None:
        """Judge the first part; whole tensors are released afterwards."""
        step = _Step(observed)
        self._found = {id: _timed(judge, step) for id, judge in BEFORE_UPDATE.items()}
        self._loss: _Loss | str = "its reference could not be computed"
        if "loss" in step.__dict__:
            self._loss = replace(step.loss, hidden_gradients=[], head_gradient_VD=None)
        self._observed = replace(
            observed, passes=(), student_head=reference.LOGITS, teacher_head=None
        )

    def after_update(
        self, logged: Logged, after: Mapping[str, UpdatedParameter]
    ) -> list[tuple[About, Answer, float]]:
        """Return the answers of all stages, with the seconds that each took."""
        done = _Updated(self._observed, self._loss, logged, after)
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


# Rows and labels


def _rows(step: _Step) -> Answer:
    row_ids: list[int] = []
    passes, wanted = len(step.observed.passes), step.observed.wanted.passes
    if passes != wanted:
        return Numbers(passes=passes, wanted=wanted).failed(
            f"the step trained on {passes} micro-batches, expected {wanted}"
        )
    for number, pass_ in enumerate(step.observed.passes):
        corpus = pass_.corpus
        shapes = tuple(pass_.tokens_BT.shape), tuple(corpus.tokens_BT.shape)
        if shapes[0] != shapes[1] or len(pass_.row_ids) != len(corpus.row_ids):
            return Numbers(rows=len(pass_.row_ids), wanted=len(corpus.row_ids)).failed(
                f"micro-batch {number + 1} has {shapes[0][0]} rows of {shapes[0][1]} tokens, the spec sets "
                f"{shapes[1][0]} of {shapes[1][1]}"
            )
        if list(pass_.row_ids) != list(corpus.row_ids):
            pairs = enumerate(zip(pass_.row_ids, corpus.row_ids, strict=True))
            place = next(i for i, (a, b) in pairs if a != b)
            return Numbers(taken=pass_.row_ids[place], wanted=corpus.row_ids[place]).failed(
                f"micro-batch {number + 1}, row {place + 1}: expected row {corpus.row_ids[place]:,} of the corpus, "
                f"found row {pass_.row_ids[place]:,}"
            )
        for kind, trained_BT, corpus_BT in (
            ("token", pass_.tokens_BT.cpu(), corpus.tokens_BT),
            ("document number", pass_.documents_BT.cpu(), corpus.documents_BT),
        ):
            if difference := first_difference(trained_BT, corpus_BT):
                return Numbers(differing=difference.differing).failed(
                    f"{_position_text(number, difference.row, difference.token)}: the step trained on {kind} "
                    f"{difference.found}, the corpus has {difference.wanted}; {difference.differing:,} of "
                    f"{trained_BT.numel():,} differ"
                )
        row_ids += pass_.row_ids
    repeated = len(row_ids) - len(set(row_ids))
    numbers = Numbers(rows=len(row_ids), repeated=repeated)
    if repeated and step.observed.wanted.rows_distinct:
        return numbers.failed(f"{repeated} of {len(row_ids)} rows of the step are duplicates")
    return numbers.passed(f"all {len(row_ids)} rows are those of the spec, token by token")


def _labels_are_next(step: _Step) -> Answer:
    labelled = 0
    for number, pass_ in enumerate(step.observed.passes):
        corpus = pass_.corpus
        wanted_BT = reference.next_tokens(
            pass_.tokens_BT.cpu(), pass_.documents_BT.cpu(), corpus.after_B
        )
        wanted_BT = torch.where(corpus.predicted_BT, wanted_BT, IGNORED)
        labels_BT = pass_.labels_BT.cpu()
        if difference := first_difference(labels_BT, wanted_BT):
            return Numbers(differing=difference.differing).failed(
                f"{_position_text(number, difference.row, difference.token)}: the label is "
                f"{_label_text(difference.found)}, expected {_label_text(difference.wanted)}; "
                f"{difference.differing:,} of {labels_BT.numel():,} differ"
            )
        labelled += int((labels_BT != IGNORED).sum())
    numbers = Numbers(labelled=labelled)
    if not labelled:
        return numbers.failed("no position of the step has a label: there is nothing to train on")
    return numbers.passed(f"all {labelled:,} labels are the next token of their document")


def _label_text(label: int) -> str:
    return "none" if label == IGNORED else f"token {label}"


# Models


def _allowed(model: Model) -> float:
    """Return the allowed relative error of hidden states.

    Each layer adds two rounded branches to the residual, and rounding errors add up like a random walk.
    """
    return max(2e-4, 4 * model.rounding * math.sqrt(2 * model.shape.layers))


@dataclass(frozen=True, slots=True)
class _Errors:
    """The errors of the sampled positions of all passes, in order, (P,) each."""

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
    # The error of one position averages over fewer numbers than that of all positions.
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
        # Some models, above all those of random weights, amplify rounding errors into other hidden states.
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
    found_text = f"hidden states of {positions:,} tokens of the {role} are within {error:.1e} of"
    if not model.proved:
        return numbers.unknown(
            f"not proved: the reference is the same module in fp32. {found_text} it{decided}"
        )
    return numbers.passed(f"{found_text} a plain forward pass{decided}")


def _moved_by_rounding(
    step: _Step,
    model: Model,
    length: int,
    forwards: Sequence[Sequence[Forward]],
    errors: _Errors,
    over_P: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return which sampled positions exceed the tolerance when errors of one rounding are added, and which were checked
    this way: those of the rows that differ most; (P,) each."""
    plain_ND = torch.cat([_join_hidden(groups) for groups in forwards if groups])
    plain_RTD = plain_ND.view(-1, length, plain_ND.shape[1])
    moved_P, checked_P = torch.zeros_like(over_P), torch.zeros_like(over_P)
    worst_R = over_P.view(-1, length).sum(1).sort(descending=True, stable=True).indices
    for place in worst_R[:ROUNDED_ROWS].tolist():
        number, row, _ = errors.places[place * length]
        pass_, begin = step.observed.passes[number], place * length
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
    hidden = [pass_.student_hidden_ND for pass_ in observed.passes]
    answer = _forward_pass(
        step, observed.student, step.student_sample, step.student_forwards, hidden, "student"
    )
    return _with_shape_check(answer, observed.student)


def _teacher(step: _Step) -> Answer:
    observed = step.observed
    if all(pass_.teacher_hidden_NE is None and pass_.targets is None for pass_ in observed.passes):
        return Numbers().passed("the objective has no teacher")
    if changed := observed.teacher_changed:
        return Numbers(changed=len(changed)).failed(
            f"the step changed {len(changed)} tensors of the teacher, first {changed[0]}"
        )
    if observed.teacher is None:
        return unknown(observed.no_teacher)
    if any(pass_.targets is not None for pass_ in observed.passes):
        return _targets(step, observed.teacher)
    # A pass whose objective has no teacher has no rows in the sample.
    hidden = [pass_.teacher_hidden_NE for pass_ in observed.passes]
    answer = _forward_pass(
        step, observed.teacher, step.teacher_sample, step.teacher_forwards, hidden, "teacher"
    )
    answer = _with_shape_check(answer, observed.teacher)
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


def _targets(step: _Step, model: Model) -> Answer:
    """Compare stored teacher targets with the reference's distribution at the loss's temperature: the probabilities of
    the top tokens, or the likelihood of sampled tokens."""
    ids, log_probs, hidden = [], [], []
    for number, pass_ in enumerate(step.observed.passes):
        rows, tokens = step.teacher_sample.rows[number], step.teacher_sample.tokens
        if pass_.targets is None or not rows:
            continue
        shape = (*pass_.tokens_BT.shape, -1)
        hidden.append(_join_hidden(step.teacher_forwards[number]))
        ids.append(pass_.targets.ids_NK.view(shape)[rows, :tokens].flatten(0, 1))
        if pass_.targets.log_probs_NK is not None:
            log_probs.append(pass_.targets.log_probs_NK.view(shape)[rows, :tokens].flatten(0, 1))
    hidden_PE, vocabulary = torch.cat(hidden), step.observed.student.vocabulary
    stride = -(-len(hidden_PE) // max(TARGETS_COMPARED, 4 * LOGITS[step.device.type] // vocabulary))
    ids_PK = torch.cat(ids).to(step.device)[::stride].long()
    logits = [
        hidden_PE[::stride] @ model.weight(model.head_name, rows_R).T
        for rows_R in torch.split(torch.arange(vocabulary), reference.HEAD_ROWS)
    ]
    scaled_PV = torch.cat(logits, dim=1).double() / step.observed.wanted.objective.temperature
    log_p_PV = torch.log_softmax(scaled_PV, dim=1)
    allowed = TARGETS_ALLOWED * _allowed(model)
    numbers = Numbers(positions=len(ids_PK), all_positions=step.positions, allowed=allowed)
    if log_probs:
        p_PK = torch.cat(log_probs).to(step.device)[::stride].double().exp()
        wanted_PK = log_p_PV.gather(1, ids_PK).exp()
        best_PK = log_p_PV.topk(ids_PK.shape[1], dim=1).values.exp()
        error = float((p_PK - wanted_PK).norm() / wanted_PK.norm())
        missed = 1 - float(wanted_PK.sum() / best_PK.sum())
        numbers |= dict(error=error, missed=missed)
        text = (
            f"probabilities have a relative error of {error:.2g} to a plain forward pass, and lack "
            f"{max(missed, 0):.2g} of the top tokens' probability"
        )
        differs = not max(error, missed) <= allowed
    else:
        p_PV = log_p_PV.exp()
        entropy_P = -(p_PV * log_p_PV).sum(1)
        variance_P = (p_PV * log_p_PV.square()).sum(1) - entropy_P.square()
        drawn, entropy = -float(log_p_PV.gather(1, ids_PK).mean()), float(entropy_P.mean())
        deviation = math.sqrt(float(variance_P.sum()) / ids_PK.shape[1]) / len(ids_PK)
        numbers |= dict(drawn=drawn, entropy=entropy, deviation=deviation)
        text = f"samples have {drawn:.4g} nats under a plain forward pass, whose entropy is {entropy:.4g}"
        differs = not abs(drawn - entropy) <= DEVIATIONS * deviation + allowed * (1 + entropy)
    if differs:
        return numbers.failed(f"stored {text}; expected a difference of up to {allowed:.1g}")
    return numbers.passed(f"stored {text}, at {len(ids_PK):,} positions")


def _with_shape_check(answer: Answer, model: Model) -> Answer:
    """Return the answer, or a failure if the model in memory has another shape than the files that it was read from."""
    if answer.verdict.level is Level.FAIL or not model.files:
        return answer
    try:
        expected = shape_in_files(model.files)
    except BadInput as error:
        reason = f"{answer.verdict.reason}; not compared with its files: {error}"
        return replace(answer, verdict=replace(answer.verdict, reason=reason))
    of_model = asdict(model.shape)
    of_model |= of_model["stretch"] or {}
    for name, wanted in expected.items():
        found = of_model.get(name)
        if (found or 0) != (wanted or 0) and not (
            isinstance(found, int | float)
            and isinstance(wanted, int | float)
            and math.isclose(found, wanted, rel_tol=1e-6)
        ):
            return Numbers().failed(f"{name} is {found} in the model, its files have {wanted}")
    return answer


def _first_out_of_tolerance(error: Tensor, allowed: Tensor) -> tuple[int, int] | None:
    """Return the index of the first number out of tolerance and the count of the others, or None."""
    outside = (~(error <= allowed)).flatten().nonzero()
    return (int(outside[0]), len(outside) - 1) if len(outside) else None


def _locate(differing: tuple[int, int], parameters: Sequence[ObservedParameter]) -> tuple[int, str]:
    """Return the index and its name in the sampled rows of all parameters, which are concatenated."""
    index, others = differing
    sizes = [parameter.before.numel() for parameter in parameters]
    ends = list(itertools.accumulate(sizes))
    number = bisect.bisect(ends, index)
    parameter = parameters[number]
    place = index - ends[number] + sizes[number]
    return index, _weight_text(
        parameter.name, place, parameter.before, parameter.rows_R, others, ends[-1]
    )


def _weight_text(
    name: str, index: int, weights: Tensor, rows: Sequence[int] | Tensor, others: int, total: int
) -> str:
    row, *columns = (
        int(dimension) for dimension in torch.unravel_index(torch.tensor(index), weights.shape)
    )
    element = f"{name}[{', '.join(map(str, (int(rows[row]), *columns)))}]"
    return f"{element}, and {others:,} others of {total:,},"


# Loss


def _loss_parts(step: _Updated) -> Answer:
    ref, observed, logged = step.loss, step.observed, step.logged
    if isinstance(ref, str):
        return unknown(ref)
    # A logit is a sum of rounded products; a log-sum-exp changes by no more than the largest change of a logit.
    rounding = 8 * step.observed.logit_rounding * ref.largest_logit
    T = observed.wanted.objective.temperature
    numbers = Numbers()
    pairs = [("ce", "the cross entropy", logged.ce, ref.ce, 1.0)]
    if logged.kd is not None:
        # A divergence of two softmaxes at temperature T, times T^2.
        pairs.append(("kd", "T^2 times the divergence", logged.kd, ref.kd, 2 * max(T, 1.0)))
    for key, what, found, wanted, factor in pairs:
        allowed = 2e-5 * (1 + abs(wanted)) + rounding * factor
        numbers |= {key: found, f"{key}_reference": wanted}
        if not abs(found - wanted) <= allowed:
            return numbers.failed(
                f"{what} is logged as {found:.6g}, the step's hidden states and labels give {wanted:.6g} (rounding "
                f"explains up to {allowed:.1g})"
            )
    if logged.agreement is not None:
        numbers |= dict(agreement=logged.agreement, agreement_reference=ref.agreement)
        # Rounding decides few ties.
        if not abs(logged.agreement - ref.agreement) <= 0.005 + 2 / ref.labelled:
            return numbers.failed(
                f"agreement is logged as {logged.agreement:.2%}, the step's hidden states give {ref.agreement:.2%}"
            )
    return numbers.passed("cross entropy and divergence match the step's hidden states")


def _total_loss(step: _Updated) -> Answer:
    logged, ref = step.logged, step.loss
    alpha, mixed = step.observed.wanted.objective.alpha, step.observed.wanted.mixed
    loss = alpha * logged.ce + (1 - alpha) * (logged.kd or 0.0)
    allowed = 4e-6 * (1 + abs(logged.ce) + abs(logged.kd or 0.0))
    if mixed:
        # Then only the reference knows the parts of each micro-batch.
        if isinstance(ref, str):
            return unknown(ref)
        loss = ref.total
        allowed = 2e-5 * (1 + abs(loss)) + 16 * step.observed.logit_rounding * ref.largest_logit
    numbers = Numbers(loss=logged.loss, reference=loss, alpha=alpha)
    if not logged.applied:
        return numbers.unknown(NOT_APPLIED)
    if not abs(logged.loss - loss) <= allowed:
        parts = (
            "the sum over its micro-batches"
            if mixed
            else f"{alpha:g} x cross entropy + {1 - alpha:g} x divergence"
        )
        return numbers.failed(f"the logged loss is {logged.loss:.6g}, expected {loss:.6g}: {parts}")
    return numbers.passed(f"the loss of {logged.loss:.6g} is the weighted sum of its parts")


# Gradients


def _gradients(step: _Step) -> Answer:
    observed = step.observed
    answer = _hidden_gradients(step)
    if answer.verdict.level is not Level.PASS:
        return answer
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
    # The error that rounding a logit adds to the gradient of its position grows with the norm of the head's rows.
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
    """The gradient of a tensor that differs from the reference's by more than the tolerance."""

    found: Tensor
    wanted: Tensor
    error: float
    allowed: float

    def explained_by_rounding(self, moved: Tensor) -> bool:
        """Return whether rounding alone moves the reference as far, given its gradient with rounding errors added."""
        return self.error <= self.allowed + ROUNDED_PER_SHOWN * float((moved - self.wanted).norm())


def _weight_gradients(
    step: _Step, upstream: Sequence[Tensor], head_gradient_VD: Tensor | None
) -> Answer:
    """Compare the gradients of the weights with those of the plain decoder."""
    observed, model = step.observed, step.student
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
        # Where the gradients of many tokens cancel, the remainder may be rounding.
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
    """Return the norm of the error that rounding the logits adds to the gradient of the head: that of each position
    times its hidden state. Where teacher and student are nearly equal it is much of the gradient."""
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
    """Yield the name of each tensor with its gradients, which add up: a tied head has two."""
    for name, gradient in gradients:
        if head_gradient_VD is not None and name == head_name:
            yield name, [gradient, head_gradient_VD]
            head_gradient_VD = None
        else:
            yield name, [gradient]
    if head_gradient_VD is not None:
        yield head_name, [head_gradient_VD]


# The update


def _clipping(step: _Updated) -> Answer:
    # Summed in fp32 on a CPU, the squares of a large matrix lose some 1e-4.
    found, wanted = step.logged.grad_norm, step.observed.gradient_norm
    numbers = Numbers(logged=found, reference=wanted, limit=step.observed.wanted.clip_norm)
    if not abs(found - wanted) <= 2e-3 * wanted:
        return numbers.failed(
            f"the gradient norm is logged as {found:.6g}, the norm of the gradients is {wanted:.6g}"
        )
    factor = reference.clip_factor(wanted, step.observed.wanted.clip_norm)
    clipped = f", clipped to {factor:.2%}" if factor < 1 else ""
    return numbers.passed(f"the logged {found:.6g} is the norm of the gradients{clipped}")


def _moments(step: _Updated) -> Answer:
    observed, adam = step.observed, step.observed.wanted.adam
    if not step.logged.applied:
        return unknown(NOT_APPLIED)
    factor = reference.clip_factor(step.logged.grad_norm, observed.wanted.clip_norm)
    compared: list[ObservedParameter] = []
    updated_moments: list[tuple[Tensor, Tensor]] = []
    counted = step.logged.updates
    for parameter in observed.parameters:
        after = step.after[parameter.name]
        if parameter.gradient is None or after.moments is None:
            continue
        if (parameter.updates, after.updates) != (counted, counted + 1):
            reset = "; its state was reset" if parameter.moments is None else ""
            return Numbers(before=parameter.updates, after=after.updates, wanted=counted).failed(
                f"the optimizer counts {parameter.updates:,} updates of {parameter.name} before the step and "
                f"{after.updates:,} after it, expected {counted:,} and {counted + 1:,}{reset}. AdamW's bias correction "
                "uses that count"
            )
        compared.append(parameter)
        updated_moments.append(after.moments)
    if not compared:
        return unknown("the optimizer has no moments for any parameter")
    gradients = _flat(
        parameter.gradient for parameter in compared if parameter.gradient is not None
    )
    g = gradients * factor
    mean, square = (
        _flat(
            torch.zeros_like(parameter.before)
            if parameter.moments is None
            else parameter.moments[place]
            for parameter in compared
        )
        for place in (0, 1)
    )
    scales = (mean.abs() + g.abs(), square + g * g)
    for place, (moment, want, scale, floor) in enumerate(
        zip(
            ("mean", "mean square"),
            reference.moments(adam, g, mean, square),
            scales,
            (1e-37, 1e-36),
            strict=True,
        )
    ):
        updated = _flat(moments[place] for moments in updated_moments)
        differing = _first_out_of_tolerance((updated - want).abs(), 1e-5 * scale + floor)
        if differing is not None:
            index, text = _locate(differing, compared)
            return Numbers(clip_factor=factor).failed(
                f"the {moment} of {text} is {float(updated[index]):.6g}, AdamW computes {float(want[index]):.6g} from "
                f"the gradient {float(gradients[index]):.4g} clipped by {factor:.4g}"
            )
    return Numbers(compared=len(g), clip_factor=factor).passed(
        f"{len(g):,} moments match AdamW's of the clipped gradients"
    )


def _weights(step: _Updated) -> Answer:
    observed, logged, wanted = step.observed, step.logged, step.observed.wanted
    numbers = Numbers(rate=wanted.rate, logged=logged.lr)
    if not abs(logged.lr - wanted.rate) <= 1e-9 + 1e-6 * wanted.rate:
        return numbers.failed(
            f"the learning rate is logged as {logged.lr:.4g}, the schedule of the spec gives {wanted.rate:.4g}"
        )
    if not logged.applied:
        return numbers.unknown(NOT_APPLIED)
    moments: list[tuple[Tensor, Tensor]] = []
    for parameter in observed.parameters:
        if (parameter_moments := step.after[parameter.name].moments) is None:
            return numbers.failed(f"{parameter.name} is not in the optimizer: it is never trained")
        moments.append(parameter_moments)
    before = _flat(parameter.before for parameter in observed.parameters)
    after = _flat(step.after[parameter.name].after for parameter in observed.parameters)
    decays = [wanted.decay if parameter.decays else 0.0 for parameter in observed.parameters]
    counts = [float(step.after[parameter.name].updates) for parameter in observed.parameters]
    sizes = torch.tensor([parameter.before.numel() for parameter in observed.parameters])
    decay, count = (
        torch.tensor(values, dtype=torch.float64).repeat_interleave(sizes).to(before)
        for values in (decays, counts)
    )
    update = reference.step_of_adamw(
        wanted.adam,
        before,
        _flat(mean for mean, _ in moments),
        _flat(square for _, square in moments),
        rate=wanted.rate,
        decay=decay,
        count=count,
    )
    allowed = 2e-3 * update.abs() + 4 * ROUNDING * before.abs() + 1e-30
    differing = _first_out_of_tolerance((after - before - update).abs(), allowed)
    if differing is not None:
        index, text = _locate(differing, observed.parameters)
        return numbers.failed(
            f"{text} went from {float(before[index]):.7g} to {float(after[index]):.7g}, AdamW at the spec's learning "
            f"rate of {wanted.rate:.3g} moves it by {float(update[index]):.4g}"
        )
    expected, moved = int((update != 0).sum()), int((after != before).sum())
    total = sum(parameter.numbers for parameter in observed.parameters)
    numbers |= dict(compared=len(before), all_parameters=total, moved=moved)
    if moved < MIN_MOVED_SHARE * expected:
        return numbers.unknown(
            f"{moved:,} of {expected:,} weights changed at a learning rate of {wanted.rate:.2g}: the other updates are "
            "smaller than the last bit of their weights"
        )
    return numbers.passed(
        f"{moved:,} of {len(before):,} weights changed, each by AdamW's update at a learning rate of {wanted.rate:.4g}"
    )


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    """Concatenate many small tensors, so that a GPU compares them in one kernel."""
    return torch.cat([tensor.flatten() for tensor in tensors]).double()


BEFORE_UPDATE: dict[str, Callable[[_Step], Answer]] = {
    "step_rows": _rows,
    "step_labels": _labels_are_next,
    "step_teacher": _teacher,
    "step_student": _student,
    "step_gradients": _gradients,
}
AFTER_UPDATE: dict[str, Callable[[_Updated], Answer]] = {
    "step_loss_parts": _loss_parts,
    "step_loss": _total_loss,
    "step_clipping": _clipping,
    "step_moments": _moments,
    "step_weights": _weights,
}
