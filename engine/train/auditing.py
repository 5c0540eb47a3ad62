"""Observe the real steps of a trainer for the audit, and say what spec, files and corpus have of the same step.

Nothing is judged here (`engine.audit.judge`). What is observed is copied when it exists: hidden states before the loss
gets them, gradients before the update, some rows of every weight and moment before and after it. So the audited step
runs the same code as any other, and may be judged after the next one has begun.
"""

# Shapes: B rows, T tokens, N = B*T, D student width, E teacher width, R rows of a parameter

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from engine.audit import reference
from engine.audit.bounds import COMPARED_NUMBERS
from engine.audit.judge import judge
from engine.audit.observed import (
    CorpusRows,
    Logged,
    Model,
    ObservedParameter,
    ObservedPass,
    ObservedStep,
    Wanted,
)
from engine.audit.stages import STAGES
from engine.checks.catalogue import skipped_ids
from engine.checks.check import About, Answer, Result, unknown
from engine.checks.forward import FP8_ROUNDING, ROUNDING, TF32_ROUNDING
from engine.checks.weights import held, names, shape_of, weights_of
from engine.data.batches import IGNORED
from engine.data.tokens import TokenStream
from engine.log.events import StepDone, nan_if_absent
from engine.models.decoder import Decoder
from engine.models.head import Head, operand_dtype
from engine.runtime.ranks import is_shared, whole
from engine.spec import RunSpec
from engine.train.step import MicroBatch, StepObserver, TeacherOutput
from engine.train.trainer import Trainer

TEACHER_NUMBERS = 1024
"""Of each tensor of the teacher, that are looked at before and after the step."""
RARELY = 500
"""Steps between two audits at least, where checks.every chooses; later as many as were done so far."""


def is_due(spec: RunSpec, step: int, *, first: bool) -> bool:
    """Return whether `step`, counted from 1, is audited; the same on every rank and in every session."""
    every = spec.checks.every
    if not spec.checks.enabled:
        return False
    if first or step == spec.train.steps:
        return True
    if every:
        return every > 0 and step % every == 0
    (word,) = np.random.Philox(key=np.array([spec.train.seed, step], dtype=np.uint64)).random_raw(1)
    return int(word) % max(RARELY, step) == 0


@dataclass(slots=True, kw_only=True)
class _SeenPass:
    """A micro-batch of one rank."""

    tokens_BT: Tensor
    documents_BT: Tensor
    labels_BT: Tensor
    row_ids: list[int]
    hidden_ND: Tensor
    gradients: list[Tensor] = field(default_factory=list)
    """What arrived at the hidden states, (N, D) each; they add up."""
    teacher_NE: Tensor | None
    teacher_head: Head | None
    targets: reference.Targets | None


@dataclass(slots=True)
class _Seen:
    """A step that is being observed."""

    step: int
    position: int
    weights: dict[str, Tensor]
    """The student's, before the step."""
    teacher: dict[str, Tensor]
    """Some numbers of each tensor of the teacher, before the step."""
    rows: dict[str, Tensor]
    moments: dict[str, tuple[Tensor, Tensor]]
    passes: list[_SeenPass] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    squares: list[Tensor] = field(default_factory=list)
    teacher_changed: list[str] = field(default_factory=list)
    after: dict[str, Tensor] = field(default_factory=dict)
    moments_after: dict[str, tuple[Tensor, Tensor, int]] = field(default_factory=dict)


class StepAudit(StepObserver):
    """Observes the steps that are due, and has them judged."""

    def __init__(
        self, trainer: Trainer, spec: RunSpec, stream: TokenStream, teacher_decoder: Decoder | None
    ) -> None:
        self.trainer, self.spec, self.stream = trainer, spec, stream
        self.teacher_decoder = teacher_decoder if trainer.has_teacher else None
        self._first = trainer.step + 1
        self._skipped = skipped_ids(spec.checks.skip)
        self._seen: _Seen | None = None
        trainer.observers = (*trainer.observers, self)

    def due(self, step: int) -> bool:
        return is_due(self.spec, step, first=step == self._first)

    # What is observed

    @torch.no_grad()
    def begun(self, step: int) -> None:
        self._seen = None
        if not self.due(step):
            return
        parameters = dict(self.trainer.student.named_parameters())
        total = sum(p.numel() for p in parameters.values())
        share = min(1.0, COMPARED_NUMBERS / total)
        self._seen = _Seen(
            step=step,
            position=self.trainer.position,
            weights={name: _whole_copy(p) for name, p in parameters.items()},
            teacher=self._teacher_samples(),
            rows={name: _some_rows(p, share, step) for name, p in parameters.items()},
            moments={},
        )
        for name, p in parameters.items():
            if state := self.trainer.optimizer.state.get(p):
                rows_R = self._seen.rows[name]
                self._seen.moments[name] = _moments(state, rows_R)

    def _teacher_samples(self) -> dict[str, Tensor]:
        decoder = self.teacher_decoder
        if decoder is None or decoder.shards is not None:
            return {}
        tensors = dict(decoder.named_buffers()) | dict(decoder.named_parameters())
        return {
            name: tensor.detach().reshape(-1)[:: max(1, tensor.numel() // TEACHER_NUMBERS)].clone()
            for name, tensor in tensors.items()
        }

    def forwarded(
        self, micro: MicroBatch, student_hidden_BTD: Tensor, teacher: TeacherOutput
    ) -> None:
        seen = self._seen
        if seen is None:
            return
        one = _SeenPass(
            tokens_BT=micro.tokens_BT,
            documents_BT=micro.documents_BT,
            labels_BT=torch.from_numpy(micro.batch.labels_BT),
            row_ids=micro.batch.row_ids.tolist(),
            hidden_ND=student_hidden_BTD.detach().flatten(0, 1).clone(),
            teacher_NE=None if teacher.hidden_NE is None else teacher.hidden_NE.detach().clone(),
            teacher_head=teacher.head,
            targets=None
            if teacher.targets is None
            else reference.Targets(
                ids_NK=teacher.targets.ids_NK, log_probs_NK=teacher.targets.log_probs_NK
            ),
        )
        if student_hidden_BTD.requires_grad:
            student_hidden_BTD.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient_BTD: one.gradients.append(
                    gradient_BTD.detach().flatten(0, 1).clone()
                )
            )
        seen.passes.append(one)

    @torch.no_grad()
    def gradients(self, step: int) -> None:
        if (seen := self._seen) is None:
            return
        for name, p in self.trainer.student.named_parameters():
            if p.grad is not None:
                gradient = whole(p.grad)
                seen.gradients[name] = _rows(gradient, seen.rows[name])
                norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
                seen.squares.append(norm.square())

    @torch.no_grad()
    def updated(self, step: int) -> None:
        if (seen := self._seen) is None:
            return
        now = self._teacher_samples()
        seen.teacher_changed = [n for n, t in seen.teacher.items() if not torch.equal(t, now[n])]
        for name, p in self.trainer.student.named_parameters():
            rows_R = seen.rows[name]
            seen.after[name] = _rows(p.detach(), rows_R)
            if state := self.trainer.optimizer.state.get(p):
                seen.moments_after[name] = (*_moments(state, rows_R), int(whole(state["step"])))

    # What is judged

    def after(self, step: StepDone) -> Iterator[Result]:
        """Judge a step that was observed, once it is logged; yields nothing for another.

        With several ranks this is a collective: the first judges what all have seen, and tells them.
        """
        seen = self._seen
        # The next step may have begun, and be the one that is observed.
        if seen is None or seen.step != step.step:
            return
        self._seen = None
        ranks = self.trainer.ranks
        passes = ranks.collect(
            [_on_host(one) for one in seen.passes] if ranks.many else seen.passes
        )
        found: list[Result] = []
        if ranks.first:
            answers = self._judge(seen, passes, step)
            found = [
                Result(
                    about=about,
                    verdict=answer.verdict,
                    numbers=answer.numbers,
                    cost_s=cost_s,
                    step=step.step,
                )
                for about, answer, cost_s in answers
                if about.id not in self._skipped
            ]
        yield from cast(list[Result], ranks.tell(found))

    def _judge(
        self, seen: _Seen, passes: list[list[_SeenPass]], step: StepDone
    ) -> list[tuple[About, Answer, float]]:
        try:
            return judge(self._observed(seen, passes, step))[0]
        except Exception as error:  # noqa: BLE001 - an audit that breaks must not end the run
            broke = unknown(f"the audit broke: {type(error).__name__}: {error}")
            return [(about, broke, 0.0) for about in STAGES]

    def _observed(self, seen: _Seen, passes: list[list[_SeenPass]], step: StepDone) -> ObservedStep:
        trainer, spec = self.trainer, self.spec
        student = trainer.student
        narrow = operand_dtype(seen.passes[0].hidden_ND.to(trainer.dtype))
        # As the matmul to logits takes it: read for every chunk of the loss.
        tied = student.head is None
        head = seen.weights["embed.weight" if tied else "head.weight"].to(trainer.device, narrow)
        teacher = next((one for one in seen.passes if one.teacher_head is not None), None)
        train = spec.train
        position, per_epoch = seen.position, trainer.batches.rows_per_epoch
        last = position + train.rows * train.accumulation * trainer.ranks.world - 1
        return ObservedStep(
            step=seen.step,
            passes=[
                self._pass(seen.position, one, index * trainer.ranks.world + rank)
                for index in range(len(seen.passes))
                for rank, one in enumerate(of_rank[index] for of_rank in passes)
            ],
            student=Model(
                shape=shape_of(student.config),
                weight=_weight(seen.weights, trainer.device),
                vocabulary=student.config.vocab_size,
                rounding=ROUNDING[trainer.dtype],
                parameters=sum(p.numel() for p in seen.weights.values()),
            ),
            teacher=self._teacher(),
            teacher_changed=seen.teacher_changed,
            applied=step.updated,
            student_head=lambda first, count: head[first : first + count],
            teacher_head=None if teacher is None else _head_rows(teacher),
            logit_rounding=ROUNDING[torch.float32],
            parameters=[self._parameter(seen, name, p) for name, p in student.named_parameters()],
            gradient_norm=float(torch.stack(seen.squares).sum().sqrt()) if seen.squares else 0.0,
            logged=Logged(
                loss=nan_if_absent(step.loss),
                ce=nan_if_absent(step.ce),
                kd=step.kd,
                agreement=step.agreement,
                lr=nan_if_absent(step.lr),
                grad_norm=nan_if_absent(step.grad_norm),
                labelled=step.labelled or 0,
            ),
            wanted=Wanted(
                objective=reference.Objective(
                    alpha=spec.loss.alpha if trainer.has_teacher else 1.0,
                    temperature=spec.loss.temperature if trainer.has_teacher else 1.0,
                    divergence=spec.loss.divergence,
                    beta=spec.loss.beta,
                ),
                adam=reference.AdamW(beta1=train.beta1, beta2=train.beta2, eps=train.eps),
                rate=reference.learning_rate(
                    seen.step,
                    peak=train.lr,
                    warmup=train.warmup,
                    steps=train.steps,
                    schedule=train.schedule,
                    final_ratio=train.final_lr_ratio,
                ),
                decay=train.weight_decay,
                clip_norm=train.clip_norm,
                rows_distinct=position // per_epoch == last // per_epoch,
            ),
            seed=train.seed,
        )

    def _pass(self, begun: int, one: _SeenPass, place: int) -> ObservedPass:
        """`place` counts the micro-batches of all ranks from the step's first position, `begun`."""
        rows, device = self.spec.train.rows, self.trainer.device
        targets = one.targets
        return ObservedPass(
            tokens_BT=one.tokens_BT.to(device),
            documents_BT=one.documents_BT.to(device),
            labels_BT=one.labels_BT,
            row_ids=one.row_ids,
            student_hidden_ND=one.hidden_ND.to(device, self.trainer.dtype),
            student_gradient_ND=sum(
                (g.to(device) for g in one.gradients[1:]), one.gradients[0].to(device)
            )
            if one.gradients
            else None,
            teacher_hidden_NE=None if one.teacher_NE is None else one.teacher_NE.to(device),
            targets=targets,
            corpus=_corpus_rows(
                self.stream,
                self.trainer.batches.row_ids_at(begun + place * rows, rows),
                one.tokens_BT.shape[1],
            ),
        )

    def _teacher(self) -> Model | None:
        decoder = self.teacher_decoder
        # A layer that is spread over the ranks is gathered by all of them.
        if decoder is None or decoder.shards is not None:
            return None
        rounding = ROUNDING[decoder.norm.weight.dtype]
        precision = self.spec.teacher.precision
        if precision in ("tf32", "fp8"):
            rounding = {"tf32": TF32_ROUNDING, "fp8": FP8_ROUNDING}[precision]
        return Model(
            shape=shape_of(decoder.config),
            weight=weights_of(decoder),
            vocabulary=decoder.config.vocab_size,
            rounding=rounding,
            parameters=_size(decoder),
        )

    def _parameter(self, seen: _Seen, name: str, p: Tensor) -> ObservedParameter:
        rows_R = seen.rows[name]
        after = seen.moments_after.get(name)
        return ObservedParameter(
            name=name,
            rows_R=rows_R,
            before=seen.weights[name][rows_R.cpu()],
            after=seen.after[name],
            gradient=seen.gradients.get(name),
            moments_before=seen.moments.get(name),
            moments_after=None if after is None else after[:2],
            updates=0 if after is None else after[2],
            numbers=p.numel(),
            decays=p.ndim >= 2,
        )


def _some_rows(parameter: Tensor, share: float, step: int) -> Tensor:
    """Return which rows of a parameter are compared: evenly spread, other ones in other steps."""
    count = parameter.shape[0]
    wanted = max(1, round(share * count))
    every = count // wanted
    return torch.arange(step % every, count, every, device=parameter.device)


def _weight(weights: dict[str, Tensor], device: torch.device) -> reference.Weight:
    def weight(name: str, rows_N: Tensor | None = None) -> Tensor:
        tensor = weights["embed.weight"] if name not in weights else weights[name]
        if rows_N is not None:
            tensor = tensor[rows_N.to(tensor.device)]
        return tensor.to(device, torch.float32)

    return weight


def _size(decoder: Decoder) -> int:
    return sum(math.prod(held(decoder, name).shape) for name in names(decoder))


def _whole_copy(parameter: Tensor) -> Tensor:
    """Return a copy of a parameter, gathered if it is in parts; that of a GPU in host memory, where there is room."""
    found = whole(parameter.detach())
    if found.device.type != "cpu":
        return found.cpu()
    return found if is_shared(parameter) else found.clone()


def _rows(tensor: Tensor, rows_R: Tensor) -> Tensor:
    """Return a copy of some rows in host memory."""
    return whole(tensor)[rows_R].cpu()


def _moments(state: dict[str, Tensor], rows_R: Tensor) -> tuple[Tensor, Tensor]:
    mean, square = (_rows(state[name], rows_R) for name in ("exp_avg", "exp_avg_sq"))
    return mean, square


def _on_host(one: _SeenPass) -> _SeenPass:
    """Return a pass that can be sent to another rank; the teacher's head stays where it is."""

    def moved(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.cpu()

    targets = one.targets
    return replace(
        one,
        tokens_BT=one.tokens_BT.cpu(),
        documents_BT=one.documents_BT.cpu(),
        hidden_ND=one.hidden_ND.cpu(),
        gradients=[gradient.cpu() for gradient in one.gradients],
        teacher_NE=moved(one.teacher_NE),
        teacher_head=None,
        targets=None
        if targets is None
        else reference.Targets(
            ids_NK=targets.ids_NK.cpu(), log_probs_NK=moved(targets.log_probs_NK)
        ),
    )


def _head_rows(teacher: _SeenPass) -> reference.HeadRows:
    head, hidden_NE = teacher.teacher_head, teacher.teacher_NE
    assert head is not None and hidden_NE is not None
    dtype = operand_dtype(hidden_NE)

    def rows(first: int, count: int) -> Tensor:
        parts, known = [], head
        for begun, weight_RE in known.slices(min(first + count, known.vocab_size), dtype):
            end = begun + len(weight_RE)
            if end > first:
                parts.append(weight_RE[max(0, first - begun) :].clone())
        return torch.cat(parts)

    return rows


def _corpus_rows(stream: TokenStream, row_ids: np.ndarray, length: int) -> CorpusRows:
    """Return what the corpus holds in some rows: row r is the tokens r*T to (r+1)*T of its stream."""
    places_BT = row_ids[:, None] * length + np.arange(length)
    exists_BT = places_BT + 1 < len(stream)
    next_BT = np.where(exists_BT, places_BT + 1, 0)
    documents_BT = np.searchsorted(stream.starts, places_BT, side="right") - 1
    following_BT = np.searchsorted(stream.starts, next_BT, side="right") - 1
    predicted_BT = exists_BT & (following_BT == documents_BT)
    if stream.labelled is not None:
        predicted_BT &= stream.labelled[next_BT]
    after_B = np.where(predicted_BT[:, -1], stream.tokens[next_BT[:, -1]].astype(np.int64), IGNORED)
    return CorpusRows(
        row_ids=row_ids.tolist(),
        tokens_BT=torch.from_numpy(stream.tokens[places_BT].astype(np.int64)),
        documents_BT=torch.from_numpy(documents_BT.astype(np.int64)),
        predicted_BT=torch.from_numpy(predicted_BT),
        after_B=torch.from_numpy(after_B),
    )
