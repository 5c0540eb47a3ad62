"""Observe the real steps of a trainer for the audit, and collect what spec, files and corpus prescribe for them.

Nothing is judged here (`engine.audit.judge`). Hidden states and their gradients are copied when they are computed.
Models, loss and gradients are judged after the backward pass, while the weights are those that they were computed
with. Some rows of every weight and moment are copied before and after the update, which is judged once it is logged. So
the audited step runs the same code as any other.
"""

# Shapes: B rows, T tokens, N = B*T, D student width, E teacher width, R rows of a parameter

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.audit import reference
from engine.audit.bounds import COMPARED_NUMBERS, FP32_TEACHER_PARAMETERS
from engine.audit.judge import StepJudge
from engine.audit.observed import (
    TEACHER_NOT_READABLE,
    TEACHER_TOO_LARGE,
    CorpusRows,
    Logged,
    Model,
    ObservedParameter,
    ObservedPass,
    ObservedStep,
    UpdatedParameter,
    Wanted,
)
from engine.catalogue import STAGES, About, skipped_ids
from engine.checks.result import Result
from engine.checks.weights import held, shape_of, weights_of
from engine.data.batches import IGNORED, Batch, Batches
from engine.data.tokens import TokenStream
from engine.formats.open import open_weights
from engine.log.events import CHECKS, StepDone, nan_if_absent
from engine.models.adapted_linear import FrozenLayer, LoraLinear
from engine.models.adapter import is_adapted
from engine.models.config import count_parameters
from engine.models.decoder import Decoder
from engine.models.head import Head, OwnMatmul, operand_dtype
from engine.models.load import as_floats, reader
from engine.models.packed import tensor_names
from engine.models.read_config import config_of
from engine.models.transformers_decoder import TransformersDecoder
from engine.runtime.ranks import is_shared, whole
from engine.spec import RunSpec
from engine.teachers.build import DTYPES
from engine.teachers.in_context import context_of
from engine.teachers.store.keys import Identity
from engine.teachers.store.teacher import CachedTeacher
from engine.train.rollout import Written
from engine.train.same_module import SameModule
from engine.train.step import MicroBatch, StepObserver, TeacherOutput
from engine.train.trainer import Trainer
from engine.verdict import Answer, unknown

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float64: 2.0**-53}
"""Largest relative error of one rounding, by dtype."""
NARROW = {"tf32": 2.0**-11, "fp8": 2.0**-4}
"""Largest relative error of one rounding of a matmul's operands, by precision. In fp8 these are e4m3 activations; the
reference uses the same, already rounded, weights.
"""
SAMPLED_NUMBERS = 1024
"""Number of elements of each teacher tensor that are compared before and after a step."""


def is_due(spec: RunSpec, step: int, *, after: int) -> bool:
    """Return whether `step`, counted from 1, is audited in a session that resumed from step `after`; the same on every
    rank."""
    every = spec.checks.every
    if not spec.checks.enabled:
        return False
    # The second step is the first one with moments and with the memory state that the first left.
    early = after + 1 if every < 0 else after + 2
    return step <= early or step == spec.train.steps or (every > 0 and step % every == 0)


@dataclass(slots=True, kw_only=True)
class _ObservedMicroBatch:
    """Observations of a micro-batch of one rank."""

    tokens_BT: Tensor
    documents_BT: Tensor
    labels_BT: Tensor
    row_ids: list[int]
    written: Written | None
    hidden_ND: Tensor
    gradients: list[Tensor] = field(default_factory=list)
    """Gradients that reached the hidden states, (N, D) each; they add up."""
    teacher_NE: Tensor | None
    teacher_head: Head | None
    targets: reference.Targets | None


@dataclass(slots=True)
class _AuditedStep:
    """Observations of a step so far."""

    step: int
    teacher: dict[str, Tensor]
    """Some numbers of each tensor of the teacher, before the step."""
    rows: dict[str, Tensor]
    """Indices of the compared rows, by parameter."""
    before: dict[str, UpdatedParameter]
    passes: list[_ObservedMicroBatch] = field(default_factory=list)
    judge: StepJudge | None = None
    """Judge of the step, on the first rank, once the step has its gradients."""
    error: str = ""
    """Reason why there is no judge; empty without an error."""
    after: dict[str, UpdatedParameter] = field(default_factory=dict)


class StepAudit(StepObserver):
    """Observes the audited steps and passes them to the judge."""

    def __init__(
        self,
        trainer: Trainer,
        spec: RunSpec,
        stream: TokenStream,
        teacher_decoder: Decoder | None,
    ) -> None:
        self.trainer, self.spec = trainer, spec
        train = spec.train
        self.prescribed = Batches(
            stream, seq_len=spec.data.seq_len, rows_per_batch=train.rows, seed=train.seed
        )
        """The rows that spec and corpus prescribe, independent of the trainer's."""
        self.teacher_decoder = teacher_decoder if trainer.has_teacher else None
        self._began_at, self._began_position = trainer.step, trainer.position
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
        self._audited = _AuditedStep(
            step=step,
            teacher=self._teacher_samples(),
            rows=rows,
            before=self._parameters(rows),
        )

    def _parameters(self, rows: Mapping[str, Tensor]) -> dict[str, UpdatedParameter]:
        """Return a copy of some rows of every parameter of the student and of its moments, as they are now."""
        copies: dict[str, tuple[Tensor, tuple[Tensor, Tensor] | None]] = {}
        counts: dict[str, Tensor] = {}
        for name, p in self.trainer.student.named_parameters():
            rows_R, moments = rows[name], None
            if state := self.trainer.optimizer.state.get(p):
                mean, square = (whole(state[key])[rows_R] for key in ("exp_avg", "exp_avg_sq"))
                moments, counts[name] = (mean, square), whole(state["step"])
            copies[name] = whole(p.detach())[rows_R], moments
        # One transfer for all counts: each one waits for the device.
        host_counts = torch.stack(list(counts.values())).tolist() if counts else []
        updates = dict(zip(counts, map(int, host_counts), strict=True))
        return {
            name: UpdatedParameter(after=after, moments=moments, updates=updates.get(name, 0))
            for name, (after, moments) in copies.items()
        }

    def _teacher_samples(self) -> dict[str, Tensor]:
        decoder = self.teacher_decoder
        if decoder is None or decoder.shards is not None:
            return {}
        return {name: _sample(tensor) for name, tensor in _weights_of(decoder).items()}

    def forwarded(
        self, micro: MicroBatch, student_hidden_BTD: Tensor, teacher: TeacherOutput
    ) -> None:
        audited = self._audited
        if audited is None:
            return
        micro_batch = _ObservedMicroBatch(
            tokens_BT=micro.tokens_BT,
            documents_BT=micro.documents_BT,
            labels_BT=torch.from_numpy(micro.batch.labels_BT),
            row_ids=micro.batch.row_ids.tolist(),
            written=micro.written,
            hidden_ND=student_hidden_BTD.detach().flatten(0, 1).clone(),
            teacher_NE=_as_read(teacher),
            teacher_head=teacher.head,
            targets=None
            if teacher.targets is None
            else reference.Targets(
                ids_NK=teacher.targets.ids_NK, log_probs_NK=teacher.targets.log_probs_NK
            ),
        )
        if student_hidden_BTD.requires_grad:
            student_hidden_BTD.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient_BTD: micro_batch.gradients.append(
                    gradient_BTD.detach().flatten(0, 1).clone()
                )
            )
        audited.passes.append(micro_batch)

    @torch.no_grad()
    def gradients(self, step: int) -> None:
        """Judge all stages before the update. With several ranks this is a collective: the first judges all passes."""
        if (audited := self._audited) is not None:
            with self.trainer.host.measure(CHECKS):
                self._judge_models(audited)

    def _judge_models(self, audited: _AuditedStep) -> None:
        trainer = self.trainer
        weights, gradients, squares = {}, {}, []
        for name, p in trainer.student.named_parameters():
            weights[name] = whole(p.detach())
            if is_shared(p):
                # Without the audit no rank holds all weights at once.
                weights[name] = weights[name].cpu()
            if p.grad is not None:
                gradient = whole(p.grad)
                gradients[name] = gradient[audited.rows[name]]
                squares.append(torch.linalg.vector_norm(gradient, dtype=torch.float64).square())
        ranks = trainer.ranks
        passes = ranks.collect(
            [_on_host(micro_batch) for micro_batch in audited.passes]
            if ranks.many
            else audited.passes
        )
        samples = self._teacher_samples()
        changed = [n for n, t in audited.teacher.items() if not torch.equal(t, samples[n])]
        if ranks.first:
            try:
                norm = float(torch.stack(squares).sum().sqrt()) if squares else 0.0
                with torch.enable_grad(), contextlib.ExitStack() as opened:
                    audited.judge = StepJudge(
                        self._observed(audited, passes, weights, gradients, norm, changed, opened)
                    )
            except Exception as error:  # noqa: BLE001 - an audit that breaks must not end the run
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
            answers = audited.judge.after_update(_logged(step, updates), audited.after)
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
        passes: list[list[_ObservedMicroBatch]],
        weights: dict[str, Tensor],
        gradients: dict[str, Tensor],
        gradient_norm: float,
        teacher_changed: list[str],
        opened: contextlib.ExitStack,
    ) -> ObservedStep:
        """Collect the observed step; `opened` closes the files of a teacher that is not in memory."""
        trainer, spec = self.trainer, self.spec
        student = trainer.student
        narrow = operand_dtype(audited.passes[0].hidden_ND.to(trainer.dtype))
        if is_adapted(student):
            weights = {**dict(student.named_buffers()), **weights}
        student_head, head_name = reference.LOGITS, _head_name(student)
        if head_name:
            # In the dtype of the matmul to logits; read for every chunk of the loss.
            head = weights[head_name].to(trainer.device, narrow)

            def student_head(first: int, count: int) -> Tensor:
                return head[first : first + count]

        teacher = next(
            (observed for observed in audited.passes if observed.teacher_head is not None), None
        )
        position = self._position(audited.step - 1)
        return ObservedStep(
            step=audited.step,
            passes=[
                self._pass(position, rank_passes[index], index * trainer.ranks.world + rank)
                for index in range(len(audited.passes))
                for rank, rank_passes in enumerate(passes)
            ],
            student=Model(
                shape=shape_of(student.config),
                weight=_weight(weights, trainer.device),
                head_name=head_name,
                runs=self._student_runs(weights),
                proved=student.config.native,
                vocabulary=student.config.vocab_size,
                rounding=NARROW.get(spec.student.adapter_base, ROUNDING[trainer.dtype]),
                parameters=sum(p.numel() for p in weights.values()),
                # A resumed session has its weights from a checkpoint.
                files=(spec.student.path or spec.student.config)
                if audited.step == 1 and student.config.native
                else "",
            ),
            teacher=self._teacher(audited.step == self._began_at + 1, opened),
            teacher_changed=teacher_changed,
            student_head=student_head,
            teacher_head=None if teacher is None else _head_rows(teacher),
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
            wanted=self._wanted(audited.step, audited.passes),
            seed=spec.train.seed,
            free_bytes=_free_bytes(trainer.device),
            no_teacher=TEACHER_TOO_LARGE if self._too_large else TEACHER_NOT_READABLE,
        )

    def _student_runs(self, weights: dict[str, Tensor]) -> reference.Runs:
        student, device = self.trainer.student, self.trainer.device
        if isinstance(student, TransformersDecoder):
            buffers = dict(student.named_buffers())
            return SameModule(student, {**buffers, **weights}, device)
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

        plain = reference.PlainDecoder(shape, reference.merged(frozen, adapters))
        return reference.AdaptedDecoder(plain, adapters)

    def _wanted(self, step: int, passes: Sequence[_ObservedMicroBatch]) -> Wanted:
        trainer, train = self.trainer, self.spec.train
        begun, ended = self._position(step - 1), self._position(step)
        per_epoch = self.prescribed.rows_per_epoch
        return Wanted(
            objective=self._objective(passes[0]),
            mixed=len({self._objective(micro_batch) for micro_batch in passes}) > 1,
            adam=reference.AdamW(beta1=train.beta1, beta2=train.beta2, eps=train.eps),
            rate=reference.learning_rate(
                step,
                peak=train.lr,
                warmup=reference.warmup_steps(train.warmup_steps, train.steps),
                steps=train.steps,
                schedule=train.schedule,
                final_ratio=train.final_lr_ratio,
            ),
            decay=train.weight_decay,
            clip_norm=train.clip_norm,
            passes=train.accumulation * trainer.ranks.world,
            rows_distinct=begun // per_epoch == (ended - 1) // per_epoch,
        )

    def _objective(self, micro_batch: _ObservedMicroBatch) -> reference.Objective:
        loss, rollout, has_teacher = self.spec.loss, self.spec.rollout, self.trainer.has_teacher
        written = micro_batch.written is not None
        return reference.Objective(
            # Text that a model wrote is no label for cross entropy.
            alpha=0.0 if written else loss.alpha if has_teacher else 1.0,
            temperature=loss.temperature if has_teacher else 1.0,
            divergence=rollout.divergence if written else loss.divergence,
            beta=loss.beta,
        )

    def _pass(self, first_row: int, micro_batch: _ObservedMicroBatch, index: int) -> ObservedPass:
        """Return what was observed of a micro-batch, and the corpus rows that belong there. `index` counts the
        micro-batches of all ranks in the step, whose first row has the position `first_row`.
        """
        rows, device = self.spec.train.rows, self.trainer.device
        targets = micro_batch.targets
        corpus = self.prescribed.rows(self.prescribed.row_ids_at(first_row + index * rows, rows))
        return ObservedPass(
            tokens_BT=micro_batch.tokens_BT.to(device),
            documents_BT=micro_batch.documents_BT.to(device),
            labels_BT=micro_batch.labels_BT,
            row_ids=micro_batch.row_ids,
            student_hidden_ND=micro_batch.hidden_ND.to(device, self.trainer.dtype),
            student_gradient_ND=sum(
                (g.to(device) for g in micro_batch.gradients[1:]),
                micro_batch.gradients[0].to(device),
            )
            if micro_batch.gradients
            else None,
            teacher_hidden_NE=None
            if micro_batch.teacher_NE is None
            else micro_batch.teacher_NE.to(device),
            targets=targets,
            corpus=_corpus_rows(corpus)
            if micro_batch.written is None
            else _written_rows(corpus, micro_batch.written),
            objective=self._objective(micro_batch),
        )

    def _position(self, step: int) -> int:
        """Return the number of rows that all ranks have taken after `step`, by the spec."""
        train = self.spec.train
        step_rows = train.rows * train.accumulation * self.trainer.ranks.world
        return self._began_position + (step - self._began_at) * step_rows

    def _teacher(self, first: bool, opened: contextlib.ExitStack) -> Model | None:
        decoder = self.teacher_decoder
        if isinstance(self.trainer.teacher, CachedTeacher):
            return self._stored_teacher(self.trainer.teacher.store.identity, opened)
        # Gathering a sharded layer is a collective, and only the first rank calls this.
        if decoder is None or decoder.shards is not None or self._too_large:
            return None
        rounding = NARROW.get(self.spec.teacher.precision, ROUNDING[decoder.dtype])
        shape, weight = shape_of(decoder.config), weights_of(decoder)
        runs: reference.Runs = reference.PlainDecoder(shape, weight)
        if isinstance(decoder, TransformersDecoder):
            tensors = dict(decoder.named_parameters()) | dict(decoder.named_buffers())
            runs = SameModule(decoder, tensors, self.trainer.device)
        if context := context_of(self.trainer.teacher):
            runs = reference.InContext(runs, context)
        return Model(
            shape=shape,
            weight=weight,
            vocabulary=decoder.config.vocab_size,
            rounding=rounding,
            parameters=_size(decoder),
            head_name=_head_name(decoder),
            runs=runs,
            proved=decoder.config.native,
            files=self.spec.teacher.path if first and decoder.config.native else "",
        )

    def _stored_teacher(self, identity: Identity, opened: contextlib.ExitStack) -> Model | None:
        """Return the teacher whose outputs were stored. Its weights are read from its files when they are needed, so it
        is never in memory as a whole."""
        if not Path(self.spec.teacher.path).exists():
            return None
        weights = opened.enter_context(open_weights(self.spec.teacher.path))
        config = config_of(weights, self.spec.model)
        parameters = count_parameters(config)
        if not config.native or parameters > FP32_TEACHER_PARAMETERS:
            return None
        dtype, device = DTYPES[identity.precision], self.trainer.device
        shape, read = shape_of(config), reader(weights, config)

        def weight(name: str, rows_N: Tensor | None = None) -> Tensor:
            values = as_floats(read(name), dtype, device).float()
            return values if rows_N is None else values[rows_N]

        return Model(
            shape=shape,
            weight=weight,
            vocabulary=config.vocab_size,
            rounding=NARROW.get(identity.precision, ROUNDING[dtype]),
            parameters=parameters,
            head_name="embed.weight" if shape.tied else "head.weight",
            runs=reference.PlainDecoder(shape, weight),
        )

    @property
    def _too_large(self) -> bool:
        """Whether an fp32 copy of the teacher is too large for the audit."""
        decoder = self.teacher_decoder
        return (
            isinstance(decoder, TransformersDecoder)
            and decoder.config.counted > FP32_TEACHER_PARAMETERS
        )


def _corpus_rows(batch: Batch) -> CorpusRows:
    return CorpusRows(
        row_ids=batch.row_ids.tolist(),
        tokens_BT=torch.from_numpy(batch.tokens_BT),
        documents_BT=torch.from_numpy(batch.documents_BT),
        predicted_BT=torch.from_numpy(batch.labels_BT != IGNORED),
        after_B=torch.from_numpy(batch.labels_BT[:, -1]),
    )


def _written_rows(batch: Batch, written: Written) -> CorpusRows:
    """Return the rows that a model wrote after the prompts of corpus rows."""
    rows, length = batch.tokens_BT.shape
    tokens_BT = torch.zeros(rows, length, dtype=torch.int64)
    documents_BT = torch.ones_like(tokens_BT)
    predicted_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
    for row, (prompt, text) in enumerate(zip(written.prompts, written.texts, strict=True)):
        end = len(prompt) + len(text)
        tokens_BT[row, :end] = torch.tensor(prompt + text)
        documents_BT[row, :end] = 0
        # From the last token of the prompt to the last but one of the text.
        predicted_BT[row, len(prompt) - 1 : end - 1] = True
    return CorpusRows(
        row_ids=batch.row_ids.tolist(),
        tokens_BT=tokens_BT,
        documents_BT=documents_BT,
        predicted_BT=predicted_BT,
        after_B=torch.full((rows,), IGNORED),
    )


def _free_bytes(device: torch.device) -> int:
    """Return the GPU bytes between the peak of allocated memory and its present size."""
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)


def _head_name(decoder: Decoder) -> str:
    """Return the tensor that is the decoder's head; empty where its hidden states are logits."""
    if not isinstance(decoder, TransformersDecoder):
        return "embed.weight" if decoder.head is None else "head.weight"
    if (weight := decoder.head_weight) is None:
        return ""
    tensors = (*decoder.named_parameters(), *decoder.named_buffers())
    return next(name for name, tensor in tensors if tensor is weight)


def _some_rows(parameter: Tensor, share: float, step: int) -> Tensor:
    """Return the indices of the compared rows of a parameter: evenly spread, and different in each step."""
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


def _weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers except those that are not saved with a model, such as rotary frequencies, which
    some models recompute for the length of the rows."""
    not_saved = {
        f"{path}.{name}".lstrip(".")
        for path, part in module.named_modules()
        for name in part._non_persistent_buffers_set
    }
    tensors = dict(module.named_buffers()) | dict(module.named_parameters())
    return {name: tensor for name, tensor in tensors.items() if name not in not_saved}


def _sample(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:: max(1, tensor.numel() // SAMPLED_NUMBERS)].clone()


def _on_host(observed: _ObservedMicroBatch) -> _ObservedMicroBatch:
    """Return a pass that can be sent to another rank; the teacher's head stays where it is."""

    def to_cpu(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.cpu()

    targets = observed.targets
    return replace(
        observed,
        tokens_BT=observed.tokens_BT.cpu(),
        documents_BT=observed.documents_BT.cpu(),
        hidden_ND=observed.hidden_ND.cpu(),
        gradients=[gradient.cpu() for gradient in observed.gradients],
        teacher_NE=to_cpu(observed.teacher_NE),
        teacher_head=None,
        targets=None
        if targets is None
        else reference.Targets(
            ids_NK=targets.ids_NK.cpu(), log_probs_NK=to_cpu(targets.log_probs_NK)
        ),
    )


def _as_read(teacher: TeacherOutput) -> Tensor | None:
    """Return a copy of the teacher's hidden states as the matmul of its head reads them."""
    if teacher.hidden_NE is None:
        return None
    hidden_NE = teacher.hidden_NE.detach()
    slices = () if teacher.head is None else teacher.head.slices(1, hidden_NE.dtype)
    return slices.operand(hidden_NE) if isinstance(slices, OwnMatmul) else hidden_NE.clone()


def _head_rows(teacher: _ObservedMicroBatch) -> reference.HeadRows:
    head, hidden_NE = teacher.teacher_head, teacher.teacher_NE
    assert head is not None and hidden_NE is not None
    dtype = operand_dtype(hidden_NE)
    if not head.slices(1, dtype):
        return reference.LOGITS

    def rows(first: int, count: int) -> Tensor:
        slices = head.slices(first + count, dtype, first=first)
        return torch.cat([weight_RE.clone() for _, weight_RE in slices])

    return rows


def _logged(step: StepDone, updates: int) -> Logged:
    return Logged(
        loss=nan_if_absent(step.loss),
        ce=nan_if_absent(step.ce),
        kd=step.kd,
        agreement=step.agreement,
        lr=nan_if_absent(step.lr),
        grad_norm=nan_if_absent(step.grad_norm),
        labelled=step.labelled or 0,
        updates=updates,
        applied=step.updated,
    )
