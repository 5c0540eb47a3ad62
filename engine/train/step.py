"""The parts of one optimizer step: a micro-batch on the device, the step's numbers, its time by phase, and
the points at which an observer sees it.

    MicroBatch -> LossTerms of each -> StepNumbers of the step -> LaunchedStep -> StepDone, the record that is logged

`PhaseTimer` measures the phases of a step (`STEP_PHASES`) by the device's own clock, each from its mark to the next.
Marks are CUDA events, recorded on the stream without waiting. They are read once the step is known to be over, which
is one step later when the next step was launched meanwhile. The phases, and the time of observers that belongs to no
phase, add up to the time from the first mark to the last. The time between the previous step's end and this step's
first mark is `idle`: the device had no work. It is known only when this step was launched while the previous one was
in flight; otherwise it would measure the pause between the two.

`HostTime` divides the host's time between two records of steps, without a gap, so that every wait is in some number:
the phases are device time, and do not show what the host does between two steps.

Work of the teacher on its own stream is no phase: `teacher` is the time that the step's stream waited for it. On a
CPU, marks are times of the host's clock.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from engine.data.batches import Batch
from engine.log.beats import BeatWriter
from engine.log.events import IDLE, REST, StepDone
from engine.loss.chunks import SparseTargets
from engine.loss.kd_loss import LARGEST_DZ_SUM, LOWEST_DIVERGENCE, LossTerms
from engine.models.head import Head
from engine.runtime.ranks import Ranks
from engine.train.rollout import Written

# Shapes: B rows, T tokens, N = B*T, D student width, E teacher width, R ranks


class MicroBatch(NamedTuple):
    """A batch on the device, and its position in the data."""

    batch: Batch
    position: int
    tokens_BT: Tensor
    documents_BT: Tensor
    written: Written | None = None
    """The generated text in the batch; None for rows of the corpus."""


class TeacherOutput(NamedTuple):
    """The teacher's output for a micro-batch: hidden states with a head, or sparse targets; empty when it is not part
    of the objective."""

    hidden_NE: Tensor | None = None
    head: Head | None = None
    targets: SparseTargets | None = None


class StepObserver:
    """Base of observers, which the trainer calls at named points of each step. Does nothing by default.

        begun -> forwarded, for each micro-batch -> gradients -> updated

    An observer must not change anything. On a GPU it gets tensors whose values are still being computed:
    reading them waits for the device, copying them does not.
    """

    def begun(self, step: int) -> None:
        """Called while weights and moments are those before `step`."""

    def forwarded(
        self, micro: MicroBatch, student_hidden_BTD: Tensor, teacher: TeacherOutput
    ) -> None:
        """Called when the hidden states of student and teacher are computed, before the loss of this micro-batch."""

    def gradients(self, step: int) -> None:
        """Called when every `.grad` of this rank is the sum over the micro-batches, before clipping and update."""

    def updated(self, step: int) -> None:
        """Called when weights and moments are those after `step`."""


class BeatObserver(StepObserver):
    """Writes a rank's beat when it has done its part of a step and goes on to wait for the other ranks."""

    def __init__(self, beat: BeatWriter) -> None:
        self._beat = beat

    def gradients(self, step: int) -> None:
        self._beat.write(step)


_T = TypeVar("_T")


class StepNumbers(NamedTuple, Generic[_T]):
    """The numbers of one step: 0-d fp32 tensors on the device, later floats on the host."""

    loss: _T
    """This rank's part of the step's mean, and after `over_ranks` the mean, which is the sum of the parts. The same
    holds for the next three fields."""
    ce: _T
    kd: _T
    """0 without a teacher; `agreement` is also 0 if it is unknown."""
    agreement: _T
    asked_to_stop: _T
    """Number of ranks that were asked to stop."""
    waited_s: _T
    """Longest time that a rank waited for its rows in the previous step, in seconds: all ranks wait for it."""
    grad_norm: _T
    """The global norm before clipping."""
    lowest_kl: _T
    """Lowest divergence of a row; infinite without one."""
    largest_dz_sum: _T

    @staticmethod
    def of_rank(
        micro_batches: Sequence[LossTerms],
        grad_norm: Tensor,
        asked_to_stop: bool,
        waited_s: float = 0.0,
    ) -> StepNumbers[Tensor]:
        """Return the numbers of this rank's part of a step."""

        def over(name: str, combine: Any, absent: float) -> Tensor:
            found = (getattr(terms, name) for terms in micro_batches)
            return reduce(combine, [_number(x, absent, like=grad_norm) for x in found])

        return StepNumbers(
            loss=over("loss", torch.add, 0.0),
            ce=over("ce", torch.add, 0.0),
            kd=over("kd", torch.add, 0.0),
            agreement=over("agreement", torch.add, 0.0),
            asked_to_stop=grad_norm.new_full((), float(asked_to_stop)),
            waited_s=grad_norm.new_full((), waited_s),
            grad_norm=grad_norm,
            # The worst row of all micro-batches.
            lowest_kl=over("lowest_kl", torch.minimum, math.inf),
            largest_dz_sum=over("largest_dz_sum", torch.maximum, 0.0),
        )

    @staticmethod
    def over_ranks(own: StepNumbers[Tensor], ranks: Ranks) -> StepNumbers[Tensor]:
        """Return the numbers of the whole step; one collective with several ranks."""
        if not ranks.many:
            return own
        # In fp64: the square of a norm overflows fp32 long before the norm does.
        by_rank = StepNumbers(*ranks.gather(torch.stack(own).double()).unbind(1))
        return StepNumbers(
            loss=by_rank.loss.sum().float(),
            ce=by_rank.ce.sum().float(),
            kd=by_rank.kd.sum().float(),
            agreement=by_rank.agreement.sum().float(),
            asked_to_stop=by_rank.asked_to_stop.sum().float(),
            waited_s=by_rank.waited_s.amax().float(),
            grad_norm=by_rank.grad_norm.square().sum().sqrt().float(),
            lowest_kl=by_rank.lowest_kl.amin().float(),
            largest_dz_sum=by_rank.largest_dz_sum.amax().float(),
        )


def _number(value: Tensor | None, absent: float, *, like: Tensor) -> Tensor:
    return like.new_full((), absent) if value is None else value.detach().float()


class PhaseTimer:
    """The time marks of one step."""

    def __init__(self, device: torch.device, before: PhaseTimer | None) -> None:
        """`before` is the timer of the previous step when that step was still in flight."""
        self._cuda = device.type == "cuda"
        self._before = None if before is None else before._marks[-1][1]
        self._marks: list[tuple[str, Any]] = []

    def mark(self, phase: str) -> None:
        """Count the work launched from now on as `phase`; an empty name counts it as no part of the step."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append((phase, event))
        else:
            self._marks.append((phase, time.perf_counter()))

    @property
    def phase(self) -> str:
        """Name of the current phase; empty outside of phases."""
        return self._marks[-1][0] if self._marks else ""

    def end(self) -> None:
        """Record the last mark of the step."""
        self.mark("")

    def wait(self) -> None:
        """Wait until the device has passed the last mark, and not for work launched after it."""
        if self._cuda:
            self._marks[-1][1].synchronize()

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase, and `idle` if it is known. Call `wait` first."""
        seconds: dict[str, float] = {}
        for (phase, begun), (_, ended) in zip(self._marks, self._marks[1:], strict=False):
            if phase:
                seconds[phase] = seconds.get(phase, 0.0) + self._between(begun, ended)
        if self._before is not None:
            seconds[IDLE] = self._between(self._before, self._marks[0][1])
        return seconds

    def _between(self, begun: Any, ended: Any) -> float:
        if self._cuda:
            return float(begun.elapsed_time(ended)) / 1e3
        return float(ended - begun)


class HostTime:
    """Divides the time of the host's main thread into parts, without a gap; time in no part is REST. When a nested part
    ends, the outer one continues."""

    def __init__(self) -> None:
        self._part, self._since_s = REST, time.perf_counter()
        self._spent: dict[str, float] = {}

    @contextlib.contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Count the time within the context as `part`."""
        outer = self._part
        self._switch(part)
        try:
            yield
        finally:
            self._switch(outer)

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call; they add up to the time between the two."""
        self._switch(self._part)
        spent, self._spent = self._spent, {}
        return spent

    def _switch(self, part: str) -> None:
        now_s = time.perf_counter()
        self._spent[self._part] = self._spent.get(self._part, 0.0) + now_s - self._since_s
        self._part, self._since_s = part, now_s


class Fetched(NamedTuple):
    """The rows of one forward pass on the host, and their position in the data."""

    batch: Batch
    position: int
    written: Written | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedStep:
    """A step that was launched and may still be running on the device."""

    step: int
    lr: float
    rows: int
    """Number of rows over all ranks; `tokens` and `labelled` are also over all ranks."""
    tokens: int
    labelled: int
    position: int
    teacher_s: float | None
    has_teacher: bool
    """Whether a teacher is part of the objective."""
    has_agreement: bool
    """Whether teacher and student were compared by their most probable tokens."""
    begun_s: float
    timer: PhaseTimer
    written: Sequence[Written] = ()
    """The written rows of the step."""
    write_s: float = 0.0
    """Host seconds of generating the written rows."""
    written_sums: Tensor | None = None
    """Sums of cross entropy and divergence over the written tokens, in nats, valid when `on_host` is."""
    on_host: Tensor
    """The `StepNumbers` as one tensor, valid once the timer's last mark has passed."""

    @property
    def numbers(self) -> StepNumbers[float]:
        """The numbers of the step. Call `timer.wait` first."""
        return StepNumbers[float](*self.on_host.tolist())


def broken_invariants(step: StepDone, temperature: float) -> Iterator[str]:
    """Describe the numbers of a step's loss that are mathematically impossible."""
    largest = LARGEST_DZ_SUM * max(1.0, temperature)
    if step.lowest_kl is not None and step.lowest_kl < LOWEST_DIVERGENCE:
        yield (
            f"step {step.step}: a row's divergence is {step.lowest_kl:.2e} nats: "
            f"expected at least {LOWEST_DIVERGENCE:.0e}, which is rounding"
        )
    if step.largest_dz_sum is not None and step.largest_dz_sum > largest:
        yield (
            f"step {step.step}: the gradients of a row's logits sum to {step.largest_dz_sum:.2e}: "
            f"expected at most {largest:.0e}, which is rounding"
        )
