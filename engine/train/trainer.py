"""One training step: a batch in, one AdamW update out, and the numbers of the step.

    loss = alpha * CE + (1 - alpha) * T^2 * KL(teacher || student)

as a mean over the labelled tokens of the whole optimizer step. `launch` reads from top to bottom:

    fetch -> write, if text is generated -> teacher -> student -> loss -> backward, for each micro-batch
    -> norm -> update

A step is `accumulation` forward passes that share one denominator, so splitting a batch differently
changes only rounding. The teacher runs first and without autograd.

Unless a step generates text, the host waits for the device in one place, `finish`. Nothing that it launches depends
on the numbers it reads there: the device decides whether a step's numbers are finite, and the fused optimizer leaves
every weight and moment unchanged when they are not. So a step may be launched before the previous one is finished,
and the device never waits for the host. After `launch`, weights, optimizer and position are those of the step
launched last. Ranks may differ in how far they launch ahead: each runs the same collectives in the same order.

Unless text is generated, the next batch is fetched once the backward pass of the current one has been launched. Stored
teacher outputs of that batch are read from then on, before the optimizer runs.

Invariants: the rows in the logged loss are exactly the rows of the update; `lr` is read back from the
optimizer; `position` counts the rows of steps that were begun, and not those of a batch that was only
fetched ahead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from engine.data.batches import Batches
from engine.log.events import DATA, DEVICE, LAUNCH, OBSERVERS, OUTSIDE, ROLLOUT, StepDone
from engine.loss.kd_loss import LossTerms, distillation_loss
from engine.models.attention import record_documents
from engine.models.decoder import Decoder
from engine.runtime.device import torch_dtype
from engine.runtime.ranks import Ranks, gather_early, is_shard, own_part, sum_gradients
from engine.spec import LossSection, TrainSection
from engine.teachers.protocol import Teacher
from engine.teachers.store.teacher import CachedTeacher
from engine.train.cuda_graphs import Graphs
from engine.train.optimizer import EmbeddingRows, build_optimizer, total_norm, update_if_finite
from engine.train.rollout import Rollout, is_written
from engine.train.schedule import learning_rate
from engine.train.step import (
    Fetched,
    HostTime,
    LaunchedStep,
    MicroBatch,
    PhaseTimer,
    StepNumbers,
    StepObserver,
    TeacherOutput,
)

# Shapes: B rows, T tokens, N = B*T, D student width, E teacher width


# contract: apr-distill-smoke-validation-v1, distill-batch-honesty-v1
class Trainer:
    """Owns the student, its optimizer and the position in the data, and takes one step at a time."""

    def __init__(
        self,
        *,
        student: Decoder,
        teacher: Teacher | None,
        batches: Batches,
        train: TrainSection,
        loss: LossSection,
        device: torch.device,
        precision: str,
        slow_by: float = 0.0,
        rollout: Rollout | None = None,
        ranks: Ranks | None = None,
        stop_asked: Callable[[], bool] = lambda: False,
        observers: Sequence[StepObserver] = (),
    ) -> None:
        """`stop_asked` returns whether this rank was asked to stop; each step passes the answer on to all ranks."""
        self.ranks = ranks or Ranks()
        self.stop_asked, self.observers = stop_asked, observers
        self.student, self.teacher, self.batches = student, teacher, batches
        self.train, self.loss = train, loss
        self.device, self.dtype = device, torch_dtype(precision)
        self.slow_by = slow_by
        self.optimizer = build_optimizer(student, train, device)
        self.parameters = [p for p in student.parameters() if p.requires_grad]
        self._fused = train.update == "fused"
        self._is_replicated = self.ranks.many and not any(map(is_shard, self.parameters))
        """Whether each rank holds every trained parameter, as it does for adapters."""
        self.graphs: Graphs | None = None
        """The CUDA graphs of the student's layers; None when the layers run without."""
        self.step = 0
        """The step launched last; 0 before the first."""
        self.position = 0
        # With alpha = 1 the teacher is not part of the objective, so it is not run.
        self.has_teacher = teacher is not None and (loss.alpha < 1.0 or rollout is not None)
        self.host = HostTime()
        self.timer: PhaseTimer | None = None
        """Timer of the step launched last."""
        self.rollout = rollout
        # Generated rows need the weights of the step that trains on them.
        self._fetches_ahead = rollout is None
        self._ahead: MicroBatch | None = None
        self._waited_s = 0.0
        """Time that this rank waited for rows in the step finished last, in seconds."""

    def steps(self) -> Iterator[StepDone]:
        """Take every step that is left, each finished before the next is launched."""
        self.student.train()
        while self.step < self.train.steps:
            yield self.finish(self.launch())

    def launch(self, before: LaunchedStep | None = None) -> LaunchedStep:
        """Launch the next step, without waiting for the device unless text is generated; `before` is a step that is
        still in flight."""
        # The clock starts here: what the caller does between two steps (evaluate, save) is not part of a
        # step.
        begun_s, number = time.perf_counter(), self.step + 1
        with self.host.measure(LAUNCH):
            return self._launch(number, begun_s, before)

    def _launch(self, number: int, begun_s: float, before: LaunchedStep | None) -> LaunchedStep:
        with self.host.measure(OBSERVERS):
            for observer in self.observers:
                observer.begun(number)
        timer = self.timer = PhaseTimer(self.device, None if before is None else before.timer)
        timer.mark(DATA)
        with self.host.measure(DATA):
            fetched, labelled = self._fetch()
        write_s = 0.0
        if self.rollout is not None:
            timer.mark(ROLLOUT)
            with self.host.measure(ROLLOUT):
                begun_write_s = time.perf_counter()
                fetched = self._write(self.rollout, fetched, number)
                labelled = self._labelled(fetched)
                write_s = time.perf_counter() - begun_write_s
            timer.mark(DATA)
        with self.host.measure(DATA):
            micro = self._on_device(fetched[0])
        teacher_s = 0.0
        self.optimizer.zero_grad(set_to_none=True)
        loss_terms: list[LossTerms] = []
        for following in (*fetched[1:], None):
            terms, seconds = self._forward_backward(micro, float(max(labelled, 1)), timer)
            loss_terms.append(terms)
            teacher_s += seconds
            timer.mark(DATA)
            with self.host.measure(DATA):
                if following is not None:
                    micro = self._on_device(following)
                elif self._fetches_ahead and number < self.train.steps:
                    self._ahead = self._on_device(self._part_at(self.position, self.ranks.rank))
        if self._is_replicated:
            sum_gradients(self.parameters)
        # The time of observers is not part of any phase of the step.
        timer.mark("")
        with self.host.measure(OBSERVERS):
            for observer in self.observers:
                observer.gradients(number)
        timer.mark("optimizer")
        numbers = self._update(loss_terms)
        on_host = torch.stack(numbers).to("cpu", non_blocking=True)
        written_sums = self._written_sums(fetched, loss_terms, float(max(labelled, 1)))
        timer.end()
        self.step = number
        with self.host.measure(OBSERVERS):
            for observer in self.observers:
                observer.updated(number)
        shapes = [micro_batch.batch.tokens_BT.shape for micro_batch in fetched]
        return LaunchedStep(
            step=number,
            lr=float(self.optimizer.param_groups[0]["lr"]),
            rows=self.ranks.world * sum(rows for rows, _ in shapes),
            tokens=self.ranks.world * sum(rows * length for rows, length in shapes),
            labelled=labelled,
            position=self.position,
            teacher_s=teacher_s if self.has_teacher else None,
            has_teacher=any(terms.kd is not None for terms in loss_terms),
            # Sampled targets may lack the teacher's most probable token.
            has_agreement=loss_terms[-1].agreement is not None,
            begun_s=begun_s,
            timer=timer,
            written=[
                micro_batch.written for micro_batch in fetched if micro_batch.written is not None
            ],
            write_s=write_s,
            written_sums=written_sums,
            on_host=on_host,
        )

    def finish(self, launched: LaunchedStep) -> StepDone:
        """Wait for a launched step, and return its record."""
        with self.host.measure(DEVICE):
            launched.timer.wait()
        numbers, phases = launched.numbers, launched.timer.seconds()
        self._waited_s = phases[DATA]
        # Device time, from the timer: later work may have been launched before this is read, and the
        # host's clock would include it.
        step_s = sum(phases.values())
        if self.slow_by:
            with self.host.measure(LAUNCH):
                self._wait(step_s * self.slow_by)
            step_s = time.perf_counter() - launched.begun_s
        host = self.host.take()
        return StepDone(
            step=launched.step,
            loss=numbers.loss,
            ce=numbers.ce,
            kd=numbers.kd if launched.has_teacher else None,
            agreement=numbers.agreement if launched.has_agreement else None,
            lr=launched.lr,
            grad_norm=numbers.grad_norm,
            rows=launched.rows,
            tokens=launched.tokens,
            labelled=launched.labelled,
            step_s=step_s,
            data_s=max(phases[DATA], numbers.waited_s) if self.ranks.many else phases[DATA],
            wall_s=sum(host.values()),
            outside_s=sum(host.get(part, 0.0) for part in OUTSIDE),
            teacher_s=launched.teacher_s,
            position=launched.position,
            lowest_kl=None if numbers.lowest_kl == math.inf else numbers.lowest_kl,
            largest_dz_sum=numbers.largest_dz_sum,
            phases=phases,
            host=host,
        )

    def _wait(self, seconds: float) -> None:
        """Busy-wait, for an experiment whose control is a step that is slower by a known amount."""
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass

    def _fetch(self) -> tuple[list[Fetched], int]:
        """Return this rank's micro-batches of the next step with their positions, and the labels of all
        ranks.

        Every rank reads the rows of all ranks, so no communication is needed to count the labels.
        """
        fetched, labelled = [], 0
        for _ in range(self.train.accumulation):
            parts = [self._part_at(self.position, rank) for rank in range(self.ranks.world)]
            labelled += sum(part.batch.labelled for part in parts)
            fetched.append(parts[self.ranks.rank])
            self.position += self.train.rows * self.ranks.world
        return fetched, labelled

    def _part_at(self, position: int, rank: int) -> Fetched:
        """Return a rank's micro-batch when all ranks together have taken `position` rows, and its position."""
        position += rank * self.train.rows
        if self._ahead is not None and self._ahead.position == position:
            return Fetched(self._ahead.batch, position)
        return Fetched(self.batches.take(position, self.train.rows), position)

    def _write(self, rollout: Rollout, fetched: list[Fetched], step: int) -> list[Fetched]:
        """Return the micro-batches of a step, with generated rows in some of them."""
        first, share = (step - 1) * self.train.accumulation, rollout.section.share
        indices = [index for index in range(len(fetched)) if is_written(share, first + index)]
        if not indices:
            return fetched
        rollouts = rollout.write([fetched[index].batch for index in indices], step)
        result = list(fetched)
        for index, (batch, written) in zip(indices, rollouts, strict=True):
            result[index] = Fetched(batch, fetched[index].position, written)
        return result

    def _labelled(self, fetched: Sequence[Fetched]) -> int:
        """Return the number of labels of a step on all ranks. A collective: a rank knows only its own written rows."""
        own = sum(micro_batch.batch.labelled for micro_batch in fetched)
        return int(self.ranks.gather(torch.tensor([own], device=self.device)).sum())

    def _written_sums(
        self, fetched: Sequence[Fetched], loss_terms: Sequence[LossTerms], denominator: float
    ) -> Tensor | None:
        """Return the sums of cross entropy and divergence over the written tokens of a step, nats, (2)."""
        sums = [
            torch.stack([terms.ce, terms.ce if terms.kd is None else terms.kd]) * denominator
            for micro_batch, terms in zip(fetched, loss_terms, strict=True)
            if micro_batch.written is not None
        ]
        return torch.stack(sums).sum(0).to("cpu", non_blocking=True) if sums else None

    def _on_device(self, fetched: Fetched) -> MicroBatch:
        """Return the batch on the device; the one fetched ahead if it is the same."""
        batch, position, written = fetched
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.batch is batch:
            return ahead
        tokens_BT, documents_BT, _ = batch.to_torch(self.device)
        record_documents(documents_BT, batch.documents_BT)
        if isinstance(self.teacher, CachedTeacher):
            self.teacher.note(batch, tokens_BT, documents_BT)
        return MicroBatch(batch, position, tokens_BT, documents_BT, written)

    def _objective(self, micro: MicroBatch) -> LossSection:
        """Return the objective of a micro-batch."""
        if micro.written is None or self.rollout is None:
            return self.loss
        # Generated text is no label for cross entropy.
        return dataclasses.replace(self.loss, alpha=0.0, divergence=self.rollout.section.divergence)

    def _teach(self, micro: MicroBatch) -> TeacherOutput:
        """Run the teacher on a micro-batch."""
        if self.teacher is None or self._objective(micro).alpha == 1:
            return TeacherOutput()
        if isinstance(self.teacher, CachedTeacher):
            targets = self.teacher.targets(micro.tokens_BT, micro.documents_BT)
            if targets is not None:
                return TeacherOutput(targets=targets)
        hidden_BTE = self.teacher.hidden(micro.tokens_BT, micro.documents_BT)
        return TeacherOutput(hidden_BTE.flatten(0, 1), self.teacher.head())

    def _forward_backward(
        self, micro: MicroBatch, denominator: float, timer: PhaseTimer
    ) -> tuple[LossTerms, float]:
        """Run one micro-batch forward and backward, and return its loss and the teacher's host seconds."""
        # Labels stay on the host: their count determines the shapes in the loss, and reading it from a
        # GPU would be a sync.
        labels_N = torch.from_numpy(micro.batch.labels_BT).flatten()
        timer.mark("teacher")
        begun_s = time.perf_counter()
        gather_early(self.student)
        teacher = self._teach(micro)
        teacher_s = time.perf_counter() - begun_s
        timer.mark("student")
        rows = None
        if self._fused and EmbeddingRows.applies_to(self.student):
            rows = EmbeddingRows(self.student, micro.tokens_BT)
        with self.autocast():
            embedded = None if rows is None else rows.rows_BTD
            hidden_BTD = self.hidden(micro.tokens_BT, micro.documents_BT, embedded)
        with self.host.measure(OBSERVERS):
            for observer in self.observers:
                observer.forwarded(micro, hidden_BTD, teacher)
        timer.mark("loss")
        objective = self._objective(micro)
        terms = distillation_loss(
            hidden_BTD.flatten(0, 1).to(self.dtype),
            self.student.head_weight,
            teacher.hidden_NE,
            teacher.head,
            labels_N,
            alpha=objective.alpha,
            temperature=self.loss.temperature,
            denominator=denominator,
            chunk_rows=self.loss.chunk_rows or None,
            divergence=objective.divergence,
            beta=self.loss.beta,
            kernel="fused" if self.loss.kernel == "fused" else "eager",
            targets=teacher.targets,
            backward_from_loss=True,
        )
        timer.mark("backward")
        torch.autograd.backward(terms.loss)
        if rows is not None:
            rows.add_gradient()
        # Detached, so that nothing of the backward pass is kept.
        return dataclasses.replace(terms, loss=terms.loss.detach()), teacher_s

    def _update(self, micro_batches: Sequence[LossTerms]) -> StepNumbers[Tensor]:
        """Apply one update, unless a number of the step is not finite, and return the step's numbers."""
        grads = [own_part(p.grad) for p in self.parameters if p.grad is not None]
        norm = total_norm(grads, fused=self._fused)
        if self._is_replicated:
            # Ranks hold equal gradients, and the sum over ranks of their squared norms must be the squared global norm.
            norm = norm / math.sqrt(self.ranks.world)
        own = StepNumbers.of_rank(
            micro_batches,
            norm,
            self.ranks.many and self.stop_asked(),
            self._waited_s,
        )
        numbers = StepNumbers.over_ranks(own, self.ranks)
        lr = learning_rate(self.step, self.train)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        clip_norm = self.train.clip_norm
        update_if_finite(self.optimizer, numbers.loss, numbers.grad_norm, clip_norm=clip_norm)
        return numbers

    def hidden(
        self, tokens_BT: Tensor, documents_BT: Tensor, embedded_BTD: Tensor | None = None
    ) -> Tensor:
        """Return the student's hidden states for a training batch, computed as in a training step."""
        if self.graphs is None or not self.graphs.takes(tokens_BT):
            return self.student.hidden(tokens_BT, documents_BT, embedded_BTD)
        if embedded_BTD is None:
            embedded_BTD = self.student.embed(tokens_BT)
        hidden_BTD = self.graphs.hidden(self.student.scaled(embedded_BTD), documents_BT)
        if hidden_BTD is None:
            self.graphs = None
            return self.student.hidden(tokens_BT, documents_BT, embedded_BTD)
        return hidden_BTD

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return autocast to the student's precision, over fp32 master weights; no autocast in fp32."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)
