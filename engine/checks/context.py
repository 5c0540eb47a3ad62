"""What a check may look at: the built objects of a run, and the functions that it trains with.

The loss, the step and the schedule live above this package and come in as functions: what is proved
is what trains, not a copy of it.
"""

# Shapes: B rows, T tokens, N tokens of a micro-batch, D student width, E teacher width, V vocabulary

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.data.batches import Batch, Batches
from engine.data.tokens import TokenStream
from engine.formats.tokenizer import Tokenizer
from engine.loss.types import LossTerms
from engine.models.decoder import Decoder
from engine.models.head import Head
from engine.spec import RunSpec
from engine.teachers.protocol import Teacher


class Objective(Protocol):
    """The loss of the run, with its alpha and temperature in it."""

    def __call__(
        self,
        hidden_ND: Tensor,
        head_VD: Tensor,
        teacher_hidden_NE: Tensor | None,
        teacher_head: Head | None,
        labels_N: Tensor,
        *,
        denominator: float,
    ) -> LossTerms: ...


class StepNumbers(Protocol):
    """What a check reads of a finished step."""

    @property
    def step(self) -> int: ...
    @property
    def lr(self) -> float: ...
    @property
    def rows(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def updated(self) -> bool: ...
    @property
    def position(self) -> int: ...


MOST_MICRO_BATCHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Peak bytes on the device; `measured` is None with the reason in `source`."""

    predicted_bytes: float
    measured_bytes: float | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A run that is about to train, or does. Checks change nothing in it that they do not put
    back."""

    spec: RunSpec
    device: torch.device
    step: int
    """Optimizer steps done."""
    position: int
    """Rows of the training walk that were taken."""

    student: Decoder
    optimizer: torch.optim.Optimizer
    teacher: Teacher | None
    """None when there is none in the objective."""
    teacher_decoder: Decoder | None
    """What computes inside it, for its weights."""

    batches: Batches
    train_stream: TokenStream
    heldout_stream: TokenStream
    heldout: Sequence[Batch]
    tokenizers: Mapping[str, Tokenizer | None]
    """By whose they are, None where one is not known."""

    objective: Objective
    gradients: Callable[[Sequence[Batch]], float]
    """One optimizer step over these micro-batches but for its update: the loss it would log, and its
    gradients, before clipping, in the student's `.grad`."""
    evaluate: Callable[[Callable[[Tensor, Tensor], Tensor], Head, Sequence[Batch]], float]
    """The held-out loss of hidden states and a head on some batches."""
    learning_rate: Callable[[int], float]
    """What the spec says the rate of a step, counted from 0, is."""
    autocast: Callable[[], contextlib.AbstractContextManager[object]]
    """The student's arithmetic."""
    whole_rows: bool = False
    """Whether the teacher knows whole rows alone: of a row that is cut, nothing is stored."""
    memory: Callable[[], Memory | None]
    """None where nothing was planned."""
    late_compiles: Callable[[], Sequence[str]]
    """Kernels that a step had to wait for, in words."""

    def micro_batches(self) -> list[Batch]:
        """The first micro-batches of the next step, as the trainer will take them: a few show what
        many would, and a step may accumulate any number."""
        rows = self.spec.train.rows
        return [
            self.batches.take(self.position + index * rows, rows)
            for index in range(min(self.spec.train.accumulation, MOST_MICRO_BATCHES))
        ]
