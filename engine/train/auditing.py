"""Observe the real steps of a trainer for the audit, and collect what the spec prescribes for them.

`engine.audit.judge` judges the observations. Hidden states and their gradients are copied when they are computed.
Models, loss and gradients are judged after the backward pass, before the update changes the weights. Some rows of
every parameter and of its moments are copied before and after the update; the update is judged after the step is
logged. So the audited step runs the same code as any other step.
"""

# Shapes: B rows, T tokens, N = B*T, D student width, E teacher width, R rows of a parameter

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from engine.audit import reference
from engine.audit.bounds import COMPARED_NUMBERS
from engine.audit.judge import StepJudge
from engine.audit.observed import (
    Model,
    ObservedParameter,
    ObservedPass,
    ObservedStep,
    UpdatedParameter,
)
from engine.catalogue import STAGES, About, skipped_ids
from engine.checks.result import Result
from engine.checks.weights import held, shape_of, weights_of
from engine.log.events import CHECKS, StepDone
from engine.models.adapted_linear import FrozenLayer, LoraLinear
from engine.models.adapter import is_adapted
from engine.models.decoder import Decoder
from engine.models.head import Head, OwnMatmul, operand_dtype
from engine.models.packed import tensor_names
from engine.models.transformers_decoder import TransformersDecoder
from engine.runtime.ranks import is_shard, whole
from engine.spec import RunSpec
from engine.teachers.in_context import context_of
from engine.teachers.store.teacher import CachedTeacher
from engine.train.step import MicroBatch, StepObserver, TeacherOutput
from engine.train.trainer import Trainer
from engine.verdict import Answer, unknown

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float64: 2.0**-53}
"""Largest relative error of one rounding, by dtype."""
NARROW = {"tf32": 2.0**-11, "fp8": 2.0**-4}
"""Largest relative error of one rounding of a matmul's operands, by precision. For fp8 it is that of e4m3 activations:
the weights add no error, because the reference uses the same fp8 weights.
"""
NO_TEACHER = "not compared: the teacher is run by transformers, is sharded over several GPUs, or reads teacher.context"


def is_due(spec: RunSpec, step: int, *, after: int) -> bool:
    """Return whether `step`, counted from 1, is audited in a session that resumed from step `after`; the same on every
    rank."""
    every = spec.checks.every
    if not spec.checks.enabled:
        return False
    # The second step is the first that starts with moments, and that reuses memory of an earlier step.
    early = after + 1 if every < 0 else after + 2
    return step <= early or step == spec.train.steps or (every > 0 and step % every == 0)


@dataclass(slots=True)
class _AuditedStep:
    """Observations of a step so far."""

    step: int
    rows: dict[str, Tensor]
    """Indices of the compared rows, by parameter."""
    before: dict[str, UpdatedParameter]
    passes: list[ObservedPass] = field(default_factory=list)
    teacher_head: reference.HeadRows | None = None
    """The teacher's head in the form that the loss receives."""
    judge: StepJudge | None = None
    """Judge of the step, on the first rank, once the step has its gradients."""
    error: str = ""
    """Reason why there is no judge; empty without an error."""
    after: dict[str, UpdatedParameter] = field(default_factory=dict)


class StepAudit(StepObserver):
    """Observes the audited steps and passes the observations to the judge."""

    def __init__(self, trainer: Trainer, spec: RunSpec, teacher_decoder: Decoder | None) -> None:
        self.trainer, self.spec = trainer, spec
        self.teacher_decoder = teacher_decoder if trainer.has_teacher else None
        self._began_at = trainer.step
        self._updates = max(
            (int(whole(state["step"])) for state in trainer.optimizer.state.values()), default=0
        )
        """Number of updates applied in the logged steps."""
        self._skipped = skipped_ids(spec.checks.skip)
        self._audited: _AuditedStep | None = None
        trainer.observers = (*trainer.observers, self)

    def due(self, step: int) -> bool:
        return is_due(self.spec, step, after=self._began_at)

    # What is observed

    @torch.no_grad()
    def begun(self, step: int) -> None:
        self._audited = None
        if not self.due(step):
            return
        parameters = dict(self.trainer.student.named_parameters())
        total = sum(p.numel() for p in parameters.values())
        share = min(1.0, COMPARED_NUMBERS / total)
        rows = {name: _some_rows(p, share, step) for name, p in parameters.items()}
        self._audited = _AuditedStep(step=step, rows=rows, before=self._parameters(rows))

    def _parameters(self, rows: Mapping[str, Tensor]) -> dict[str, UpdatedParameter]:
        """Return copies of the given rows of every parameter of the student and of its moments."""
        copies: dict[str, tuple[Tensor, tuple[Tensor, Tensor] | None]] = {}
        counts: dict[str, Tensor] = {}
        for name, p in self.trainer.student.named_parameters():
            rows_R, moments = rows[name], None
            if state := self.trainer.optimizer.state.get(p):
                mean, square = (whole(state[key])[rows_R] for key in ("exp_avg", "exp_avg_sq"))
                moments, counts[name] = (mean, square), whole(state["step"])
            copies[name] = whole(p.detach())[rows_R], moments
        # One transfer for all counts, because each transfer waits for the device.
        host_counts = torch.stack(list(counts.values())).tolist() if counts else []
        updates = dict(zip(counts, map(int, host_counts), strict=True))
        return {
            name: UpdatedParameter(after=after, moments=moments, updates=updates.get(name, 0))
            for name, (after, moments) in copies.items()
        }

    def forwarded(
        self, micro: MicroBatch, student_hidden_BTD: Tensor, teacher: TeacherOutput
    ) -> None:
        audited = self._audited
        if audited is None:
            return
        # Taken from the batch on the host, so that a wrong copy on the device differs from the reference.
        tokens_BT, documents_BT, labels_BT = micro.batch.to_torch(torch.device("cpu"))
        targets = teacher.targets
        observed = ObservedPass(
            tokens_BT=tokens_BT,
            documents_BT=documents_BT,
            labels_BT=labels_BT,
            student_hidden_ND=student_hidden_BTD.detach()
            .flatten(0, 1)
            .to(self.trainer.dtype, copy=True),
            teacher_hidden_NE=_head_input(teacher),
            targets=None
            if targets is None
            else reference.Targets(ids_NK=targets.ids_NK, log_probs_NK=targets.log_probs_NK),
            objective=self._objective(written=micro.written is not None),
        )
        if teacher.head is not None and observed.teacher_hidden_NE is not None:
            audited.teacher_head = _head_rows(teacher.head, observed.teacher_hidden_NE)

        def add_gradient(gradient_BTD: Tensor) -> None:
            gradient_ND = gradient_BTD.detach().flatten(0, 1)
            earlier_ND = observed.student_gradient_ND
            observed.student_gradient_ND = (
                gradient_ND.clone() if earlier_ND is None else earlier_ND + gradient_ND
            )

        if student_hidden_BTD.requires_grad:
            student_hidden_BTD.register_hook(add_gradient)  # type: ignore[no-untyped-call]
        audited.passes.append(observed)

    @torch.no_grad()
    def gradients(self, step: int) -> None:
        """Judge all stages before the update. With several ranks this is a collective: the first rank judges the passes
        of all ranks."""
        if (audited := self._audited) is not None:
            with self.trainer.host.measure(CHECKS):
                self._judge_models(audited)

    def _judge_models(self, audited: _AuditedStep) -> None:
        trainer = self.trainer
        weights, gradients, squares = {}, {}, []
        for name, p in trainer.student.named_parameters():
            weights[name] = whole(p.detach())
            if is_shard(p):
                # In host memory, because a GPU need not have space for all weights of a sharded student.
                weights[name] = weights[name].cpu()
            if p.grad is not None:
                gradient = whole(p.grad)
                gradients[name] = gradient[audited.rows[name]]
                squares.append(torch.linalg.vector_norm(gradient, dtype=torch.float64).square())
        ranks = trainer.ranks
        passes = ranks.collect(
            [observed.to(torch.device("cpu")) for observed in audited.passes]
            if ranks.many
            else audited.passes
        )
        if ranks.first:
            try:
                norm = float(torch.stack(squares).sum().sqrt()) if squares else 0.0
                with torch.enable_grad():
                    audited.judge = StepJudge(
                        self._observed(audited, passes, weights, gradients, norm)
                    )
            except Exception as error:  # noqa: BLE001 - an exception in the audit must not end the run
                audited.error = f"the audit raised {type(error).__name__}: {error}"
        audited.passes = []

    @torch.no_grad()
    def updated(self, step: int) -> None:
        if (audited := self._audited) is not None:
            audited.after = self._parameters(audited.rows)

    # What is judged

    def after(self, step: StepDone) -> Iterator[Result]:
        """Yield the answer of every stage of an observed step after it is logged. With several ranks this is a
        collective."""
        updates = self._updates
        self._updates += step.updated
        audited = self._audited
        # The observed step may be the next one, which has already begun.
        if audited is None or audited.step != step.step:
            return
        self._audited = None
        answers: list[tuple[About, Answer, float]] = []
        if audited.judge is not None:
            answers = audited.judge.after_update(step, updates, audited.after)
        elif self.trainer.ranks.first:
            answers = [(about, unknown(audited.error), 0.0) for about in STAGES]
        for about, answer, cost_s in cast(list[Any], self.trainer.ranks.tell(answers)):
            if about.id not in self._skipped:
                yield Result(
                    about=about,
                    verdict=answer.verdict,
                    numbers=answer.numbers,
                    cost_s=cost_s,
                    step=step.step,
                )

    def _observed(
        self,
        audited: _AuditedStep,
        passes: list[list[ObservedPass]],
        weights: dict[str, Tensor],
        gradients: dict[str, Tensor],
        gradient_norm: float,
    ) -> ObservedStep:
        """Collect the observed step."""
        trainer, spec, train = self.trainer, self.spec, self.spec.train
        student = trainer.student
        narrow = operand_dtype(audited.passes[0].student_hidden_ND)
        if is_adapted(student):
            weights = {**dict(student.named_buffers()), **weights}
        student_head, head_name = reference.LOGITS, _head_name(student)
        if head_name:
            # Cast once to the dtype of the matmul to logits, because every chunk of the loss reads it.
            head = weights[head_name].to(trainer.device, narrow)

            def student_head(first: int, count: int) -> Tensor:
                return head[first : first + count]

        return ObservedStep(
            step=audited.step,
            passes=[
                rank_passes[index].to(trainer.device)
                for index in range(len(audited.passes))
                for rank_passes in passes
            ],
            student=Model(
                shape=shape_of(student.config),
                weight=_weight(weights, trainer.device),
                head_name=head_name,
                runs=self._student_runs(weights),
                vocabulary=student.config.vocab_size,
                rounding=NARROW.get(spec.student.adapter_base, ROUNDING[trainer.dtype]),
                parameters=sum(p.numel() for p in weights.values()),
            ),
            teacher=self._teacher(),
            no_teacher=NO_TEACHER,
            stored=trainer.has_teacher and isinstance(trainer.teacher, CachedTeacher),
            student_head=student_head,
            teacher_head=audited.teacher_head,
            logit_rounding=ROUNDING[torch.float32],
            parameters=[
                ObservedParameter(
                    name=name,
                    rows_R=audited.rows[name],
                    before=before.after,
                    gradient=gradients.get(name),
                    moments=before.moments,
                    updates=before.updates,
                    numbers=weights[name].numel(),
                    decays=weights[name].ndim >= 2,
                )
                for name, before in audited.before.items()
            ],
            gradient_norm=gradient_norm,
            adam=reference.AdamW(beta1=train.beta1, beta2=train.beta2, eps=train.eps),
            decay=train.weight_decay,
            clip_norm=train.clip_norm,
            free_bytes=_free_bytes(trainer.device),
        )

    def _student_runs(self, weights: dict[str, Tensor]) -> reference.PlainDecoder | None:
        student, device = self.trainer.student, self.trainer.device
        if isinstance(student, TransformersDecoder):
            return None
        layers = {
            f"{path}.weight": module
            for path, module in student.named_modules()
            if isinstance(module, FrozenLayer)
        }
        biases = {
            name.removesuffix("weight") + "bias": layer.base.bias
            for name, layer in layers.items()
            if layer.base.bias is not None
        }
        shape, weight = shape_of(student.config), _weight({**biases, **weights}, device)
        held_weight = weights_of(student)
        adapters = {
            f"{path}.weight": reference.LowRank(
                weights[f"{path}.lora_A"], weights[f"{path}.lora_B"], module.scale
            )
            for path, module in student.named_modules()
            if isinstance(module, LoraLinear)
        }
        if not adapters:
            return reference.PlainDecoder(shape, weight)

        def frozen(name: str, rows_N: Tensor | None = None) -> Tensor:
            return (held_weight if name in layers else weight)(name, rows_N)

        return reference.PlainDecoder(shape, reference.merged(frozen, adapters), adapters)

    def _objective(self, *, written: bool) -> reference.Objective:
        loss, rollout, has_teacher = self.spec.loss, self.spec.rollout, self.trainer.has_teacher
        return reference.Objective(
            # Generated tokens are not labels for cross entropy.
            alpha=0.0 if written else loss.alpha if has_teacher else 1.0,
            temperature=loss.temperature if has_teacher else 1.0,
            divergence=rollout.divergence if written else loss.divergence,
            beta=loss.beta,
        )

    def _teacher(self) -> Model | None:
        decoder = self.teacher_decoder
        # Gathering a sharded layer is a collective, and only the first rank calls this.
        if (
            decoder is None
            or decoder.shards is not None
            or isinstance(decoder, TransformersDecoder)
            or context_of(self.trainer.teacher)
        ):
            return None
        rounding = NARROW.get(self.spec.teacher.precision, ROUNDING[decoder.dtype])
        shape, weight = shape_of(decoder.config), weights_of(decoder)
        return Model(
            shape=shape,
            weight=weight,
            vocabulary=decoder.config.vocab_size,
            rounding=rounding,
            parameters=_size(decoder),
            head_name=_head_name(decoder),
            runs=reference.PlainDecoder(shape, weight),
        )


def _free_bytes(device: torch.device) -> int:
    """Return the bytes of GPU memory by which the current allocation is below its peak; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)


def _head_name(decoder: Decoder) -> str:
    """Return the name of the decoder's head tensor; empty if its hidden states are logits."""
    if not isinstance(decoder, TransformersDecoder):
        return "embed.weight" if decoder.head is None else "head.weight"
    if (weight := decoder.head_weight) is None:
        return ""
    tensors = (*decoder.named_parameters(), *decoder.named_buffers())
    return next(name for name, tensor in tensors if tensor is weight)


def _some_rows(parameter: Tensor, share: float, step: int) -> Tensor:
    """Return the indices of the compared rows of a parameter: evenly spaced, and shifted from step to step."""
    count = parameter.shape[0]
    compared = max(1, round(share * count))
    stride = count // compared
    return torch.arange(step % stride, count, stride, device=parameter.device)


def _weight(weights: dict[str, Tensor], device: torch.device) -> reference.Weight:
    def weight(name: str, rows_N: Tensor | None = None) -> Tensor:
        tensor = weights["embed.weight"] if name not in weights else weights[name]
        if rows_N is not None:
            tensor = tensor[rows_N.to(tensor.device)]
        return tensor.to(device, torch.float32)

    return weight


def _size(decoder: Decoder) -> int:
    return sum(math.prod(held(decoder, name).shape) for name in tensor_names(decoder))


def _head_input(teacher: TeacherOutput) -> Tensor | None:
    """Return a copy of the teacher's hidden states in the form that the matmul of its head reads."""
    if teacher.hidden_NE is None:
        return None
    hidden_NE = teacher.hidden_NE.detach()
    slices = () if teacher.head is None else teacher.head.slices(1, hidden_NE.dtype)
    return slices.operand(hidden_NE) if isinstance(slices, OwnMatmul) else hidden_NE.clone()


def _head_rows(head: Head, hidden_NE: Tensor) -> reference.HeadRows:
    dtype = operand_dtype(hidden_NE)
    if not head.slices(1, dtype):
        return reference.LOGITS

    def rows(first: int, count: int) -> Tensor:
        slices = head.slices(first + count, dtype, first=first)
        return torch.cat([weight_RE.clone() for _, weight_RE in slices])

    return rows
