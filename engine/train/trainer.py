"""The training step: a batch in, one AdamW update out, and the numbers of the step.

    loss = alpha * CE + (1 - alpha) * T^2 * KL(teacher || student)

as a mean over the labelled tokens of the whole optimizer step.

A step is `accumulation` forward passes that share one denominator, so splitting a batch differently
changes only rounding. The teacher runs first and without autograd.

The host waits for the device in one place, where it reads the numbers of a finished step. Nothing that it
launches depends on them: the device decides whether a step's numbers are finite, and the fused optimizer
leaves every weight and moment unchanged when they are not. So the next step may be launched before the
numbers of this one are read (`may_run_ahead`), and the device never waits for the host. A caller that
needs the weights after a step says so, and finds them as that step left them.

The next batch is fetched once the backward pass of the current one has been launched. A teacher that
supports it (`prefetch`) starts on that batch before the optimizer runs.

Invariants: the rows in the logged loss are exactly the rows of the update; `lr` is read back from the
optimizer; `position` counts the rows of steps that were begun, and not those of a batch that was only
fetched ahead.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from engine.data.batches import Batch, Batches
from engine.loss.chunks import SparseTargets
from engine.loss.objective import distillation_loss
from engine.models.attention import remember
from engine.models.decoder import Decoder
from engine.models.head import Head
from engine.runtime.device import torch_dtype
from engine.runtime.ranks import Ranks, gather_early, own_part
from engine.spec import LossSection, TrainSection
from engine.teachers.protocol import GivesTargets, KnowsRows, Prefetches, Teacher
from engine.train.cuda_graphs import Graphs
from engine.train.optimizer import Looked, build_optimizer, total_norm, update_if_finite
from engine.train.schedule import learning_rate
from engine.train.step import Given, Ledger, Step, UnderWay

# Shapes: B rows, T tokens, N = B*T, D student width, E teacher width


# contract: apr-distill-smoke-validation-v1, distill-batch-honesty-v1
class Trainer:
    """Owns the student, its optimizer and the position in the data; yields a Step for each update."""

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
        ranks: Ranks | None = None,
        stop_asked: Callable[[], bool] = lambda: False,
        arrived: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`stop_asked` returns whether this process was asked to stop. `arrived` is called with the
        number of each step when this rank has done its part of it and goes on to wait for the other
        ranks.
        """
        self.ranks = ranks or Ranks()
        self.stop_asked, self.arrived = stop_asked, arrived
        self.student, self.teacher, self.batches = student, teacher, batches
        self.train, self.loss = train, loss
        self.device, self.dtype = device, torch_dtype(precision)
        self.slow_by = slow_by
        self.optimizer = build_optimizer(student, train, device)
        self.parameters = [p for p in student.parameters() if p.requires_grad]
        self._fused = train.update == "fused"
        self.graphs: Graphs | None = None
        """The CUDA graphs of the student's layers; None when the layers run without."""
        self.step = 0
        self.position = 0
        # With alpha = 1 the teacher is not part of the objective, so it is not run.
        self.teaching = teacher is not None and loss.alpha < 1.0
        self.agrees = self.teaching
        """Whether the last step measured how often teacher and student agree on the most probable token."""
        self._looks_ahead = True
        self.stops_here = False
        """Whether the step yielded last is the last of its session, because some rank was asked to stop.
        With several ranks, the request was read with the step before, so that all ranks stop after the
        same step.
        """
        self._stops_seen = False
        """Whether the numbers of some step have shown that a rank was asked to stop."""
        self._next: Given | None = None

    def forget_ahead(self) -> None:
        """Stop fetching batches ahead, and drop the one that was fetched."""
        self._looks_ahead, self._next = False, None

    def steps(self, may_run_ahead: Callable[[int], bool] = lambda step: False) -> Iterator[Step]:
        """Train to the last step of the run, one Step at a time.

        `may_run_ahead(n)` is called when step n has been launched. It returns True when nobody needs
        weights, optimizer or position as step n left them; step n + 1 may then be launched before the
        numbers of step n are yielded. Ranks may return different values: each runs the same collectives
        in the same order.
        """
        self.student.train()
        under_way: UnderWay | None = None
        while under_way is not None or self.step < self.train.steps:
            if under_way is None:
                under_way = self._begin(None)
            following = None
            more = self.step < self.train.steps and not (self.slow_by or self._stops_seen)
            if more and may_run_ahead(self.step):
                following = self._begin(under_way)
            yield self._finish(under_way)
            under_way = following

    def _begin(self, before: UnderWay | None) -> UnderWay:
        """Launch a step without waiting for the device."""
        # The clock starts here: what the caller does between two steps (evaluate, save) is not part of a
        # step.
        begun = time.perf_counter()
        ledger = Ledger(self.device, None if before is None else before.ledger)
        ledger.mark("data")
        parts, labelled = self._take_batches()
        given = self._give(*parts[0])
        data_s = time.perf_counter() - begun
        self.optimizer.zero_grad(set_to_none=True)
        totals: list[Tensor] = []
        teacher_s = 0.0
        for index in range(len(parts)):
            terms, seconds = self._forward_backward(given, float(max(labelled, 1)), ledger)
            totals.append(terms)
            teacher_s += seconds
            ledger.mark("data")
            if index + 1 < len(parts):
                given = self._give(*parts[index + 1])
                self._announce(given)
            elif self._looks_ahead and self.step + 1 < self.train.steps:
                self._next = self._give(*self._part_at(self.position, self.ranks.rank))
                self._announce(self._next)
        ledger.mark("optimizer")
        # The last two are bounds: over all micro-batches the worst row counts.
        shares = torch.stack(totals)
        numbers = self._update(shares[:, :4].sum(0), shares[:, 4:].amin(0))
        ledger.end()
        self.step += 1
        shapes = [batch.tokens_BT.shape for batch, _ in parts]
        facts = dict(
            step=self.step,
            lr=float(self.optimizer.param_groups[0]["lr"]),
            rows=self.ranks.world * sum(rows for rows, _ in shapes),
            tokens=self.ranks.world * sum(rows * length for rows, length in shapes),
            labelled=labelled,
            data_s=data_s,
            teacher_s=teacher_s if self.teaching else None,
            position=self.position,
        )
        return UnderWay(ledger, numbers, facts, begun)

    def _update(self, sums: Tensor, bounds: Tensor) -> Tensor:
        """Apply one update, unless one of its numbers is not finite; return the numbers, on their way to
        the host.

        `bounds` are reduced over the ranks by their minimum.
        """
        self.arrived(self.step + 1)
        grads = [p.grad for p in self.parameters if p.grad is not None]
        norm = total_norm([own_part(g) for g in grads], fused=self._fused)
        stop = norm.new_full((1,), float(self.ranks.many and self.stop_asked()))
        if self.ranks.many:
            # In double: a square leaves the range of fp32 long before the norm does.
            own = torch.cat([sums, stop, norm[None], bounds]).double()
            own[5].square_()
            all_RN = self.ranks.gather(own)
            sums, stop = all_RN[:, :4].sum(0).float(), all_RN[:, 4:5].sum(0).float()
            norm = all_RN[:, 5].sum().sqrt().float()
            bounds = all_RN[:, 6:].amin(0).float()
        self._set_learning_rate()
        update_if_finite(self.optimizer, sums[0], norm, clip_norm=self.train.clip_norm)
        return torch.cat([sums, stop, norm[None], bounds]).to("cpu", non_blocking=True)

    def _finish(self, done: UnderWay) -> Step:
        """Return the numbers of a launched step: the only place where the host waits."""
        done.ledger.wait()
        loss, ce, kd, agreement, stops, grad_norm, lowest_kl, least_dz = done.numbers.tolist()
        phases = done.ledger.seconds()
        # Device time, from the ledger: later work may have been launched before this is read, and the
        # host's clock would include it.
        step_s = sum(phases.values())
        if self.slow_by:
            self._wait(step_s * self.slow_by)
            step_s = time.perf_counter() - done.begun
        # Some ranks may have launched the next step and others not. A request that was read with the
        # previous step is known to all ranks, and none of them has launched a step after this one.
        stops_here = self._stops_seen
        self._stops_seen = self._stops_seen or stops > 0
        # A caller that stops finds the weights as this step left them.
        last_launched = done.facts["step"] == self.step
        self.stops_here = stops_here if self.ranks.many else last_launched and self.stop_asked()
        return Step(
            **done.facts,
            loss=loss,
            ce=ce,
            kd=kd if self.teaching else None,
            agreement=agreement if self.agrees else None,
            grad_norm=grad_norm,
            lowest_kl=None if math.isinf(lowest_kl) else lowest_kl,
            largest_dz_sum=0.0 if math.isinf(least_dz) else -least_dz,
            step_s=step_s,
            phases=phases,
        )

    def _wait(self, seconds: float) -> None:
        """Busy-wait, for an experiment whose control is a step that is slower by a known amount."""
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass

    def _take_batches(self) -> tuple[list[tuple[Batch, int]], int]:
        """Return this rank's micro-batches of the next step with their positions, and the labels of all
        ranks.

        Every rank reads the rows of all ranks, so no communication is needed to count the labels.
        """
        taken, labelled = [], 0
        for _ in range(self.train.accumulation):
            parts = [self._part_at(self.position, rank) for rank in range(self.ranks.world)]
            labelled += sum(batch.labelled for batch, _ in parts)
            taken.append(parts[self.ranks.rank])
            self.position += self.train.rows * self.ranks.world
        return taken, labelled

    def _part_at(self, position: int, rank: int) -> tuple[Batch, int]:
        """Return a rank's micro-batch when all ranks together have taken `position` rows, and its position."""
        position += rank * self.train.rows
        if self._next is not None and self._next.position == position:
            return self._next.batch, position
        return self.batches.take(position, self.train.rows), position

    def _give(self, batch: Batch, position: int) -> Given:
        """Return the batch on the device; the one fetched ahead if it is the same."""
        ahead, self._next = self._next, None
        if ahead is not None and ahead.batch is batch:
            return ahead
        tokens_BT, documents_BT, _ = batch.to_torch(self.device)
        remember(documents_BT, batch.documents_BT)
        if isinstance(self.teacher, KnowsRows):
            self.teacher.note(batch, tokens_BT, documents_BT)
        return Given(batch, position, tokens_BT, documents_BT)

    def _announce(self, given: Given) -> None:
        """Let a teacher that supports it start on the next batch."""
        if self.teaching and self._looks_ahead and isinstance(self.teacher, Prefetches):
            self.teacher.prefetch(given.tokens_BT, given.documents_BT)

    def _targets(self, given: Given) -> SparseTargets | None:
        """Return the sparse targets of a teacher that gives these instead of hidden states and a head."""
        if not self.teaching or not isinstance(self.teacher, GivesTargets):
            return None
        return self.teacher.targets(given.tokens_BT, given.documents_BT)

    def _teacher_output(self, given: Given) -> tuple[Tensor | None, Head | None]:
        """Return hidden states (N, E) and the head; None for both without a teacher in the objective."""
        if not self.teaching or self.teacher is None:
            return None, None
        hidden_BTE = self.teacher.hidden(given.tokens_BT, given.documents_BT)
        return hidden_BTE.flatten(0, 1), self.teacher.head()

    def _forward_backward(
        self, given: Given, denominator: float, ledger: Ledger
    ) -> tuple[Tensor, float]:
        """Run one micro-batch forward and backward, and return its numbers and the teacher's host
        seconds.

        The numbers are its shares of (loss, ce, kd, agreement) and its two bounds: the lowest KL, and
        minus the largest sum of dz.
        """
        # Labels stay on the host: their count determines the shapes in the loss, and reading it from a
        # GPU would be a sync.
        labels_N = torch.from_numpy(given.batch.labels_BT).flatten()
        ledger.mark("teacher")
        begun = time.perf_counter()
        gather_early(self.student)
        targets = self._targets(given)
        teacher_hidden_NE = teacher_head = None
        if targets is None:
            teacher_hidden_NE, teacher_head = self._teacher_output(given)
        teacher_s = time.perf_counter() - begun
        ledger.mark("student")
        rows = None
        if self._fused and Looked.possible(self.student):
            rows = Looked(self.student, given.tokens_BT)
        with self.autocast():
            embedded = None if rows is None else rows.rows_BTD
            hidden_BTD = self.hidden(given.tokens_BT, given.documents_BT, embedded)
        ledger.mark("loss")
        terms = distillation_loss(
            hidden_BTD.flatten(0, 1).to(self.dtype),
            self.student.head_weight,
            teacher_hidden_NE,
            teacher_head,
            labels_N,
            alpha=self.loss.alpha,
            temperature=self.loss.temperature,
            denominator=denominator,
            chunk_rows=self.loss.chunk_rows or None,
            divergence=self.loss.divergence,
            beta=self.loss.beta,
            kernel="fused" if self.loss.kernel == "fused" else "eager",
            targets=targets,
            undivided=True,
        )
        # Sampled targets do not tell the teacher's most probable token.
        self.agrees = terms.agreement is not None
        ledger.mark("backward")
        torch.autograd.backward(terms.loss)
        if rows is not None:
            rows.add_gradient()
        zero = terms.loss.new_zeros(())
        shares = [
            zero if x is None else x for x in (terms.loss, terms.ce, terms.kd, terms.agreement)
        ]
        none = terms.loss.new_full((), math.inf)
        lowest, largest = terms.lowest_kl, terms.largest_dz_sum
        bounds = [none if lowest is None else lowest, none if largest is None else -largest]
        return torch.stack([x.detach().float() for x in shares + bounds]), teacher_s

    def hidden(
        self, tokens_BT: Tensor, documents_BT: Tensor, embedded_BTD: Tensor | None = None
    ) -> Tensor:
        """Return the student's hidden states for a training batch, computed as in a training step."""
        if self.graphs is None or not self.graphs.takes(tokens_BT):
            return self.student.hidden(tokens_BT, documents_BT, embedded_BTD)
        if embedded_BTD is None:
            embedded_BTD = self.student.embed(tokens_BT)
        found_BTD = self.graphs.hidden(embedded_BTD, documents_BT)
        if found_BTD is None:
            self.graphs = None
            return self.student.hidden(tokens_BT, documents_BT, embedded_BTD)
        return found_BTD

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return bf16 autocast over fp32 master weights on a GPU; no autocast in fp32."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def _set_learning_rate(self) -> None:
        lr = learning_rate(self.step, self.train)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
