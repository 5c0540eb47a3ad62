"""Define what a check can read: the built objects of a run, and the functions that it trains with.

What is in layers above this package is passed in as functions.
"""

# Shapes: B rows, T tokens, N tokens of a micro-batch, D student width, E teacher width, V vocabulary

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.data.batches import Batch, Batches
from engine.data.tokens import TokenStream
from engine.formats.tokenizer import Tokenizer
from engine.models.decoder import Decoder
from engine.spec import RunSpec
from engine.teachers.protocol import Teacher


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Peak bytes on the device; when `measured_bytes` is None, `source` has the reason."""

    predicted_bytes: float
    measured_bytes: float | None
    source: str
    does_all_work: bool = True
    """Whether this process does all of the planned work: with several ranks only the first audits steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A run that is about to train or is training. Checks restore whatever they change in it."""

    spec: RunSpec
    device: torch.device
    step: int
    """Number of optimizer steps done."""
    position: int
    """Number of training rows taken."""

    student: Decoder
    teacher: Teacher | None
    """The teacher; None when the objective uses none."""
    teacher_decoder: Decoder | None
    """The decoder inside the teacher, for access to its weights."""

    batches: Batches
    train_stream: TokenStream
    heldout_stream: TokenStream
    heldout: Sequence[Batch]
    tokenizers: Mapping[str, Tokenizer | None]
    """Tokenizers by owner; None for an unknown one."""

    autocast: Callable[[], contextlib.AbstractContextManager[object]]
    """The autocast context of the student's training steps."""
    memory: Callable[[], Memory | None]
    """Function that returns the measured peak; None when no memory was planned."""
    late_compiles: Callable[[], Sequence[str]]
    """Function that returns descriptions of the kernels whose compilation delayed a step."""

    @property
    def streams(self) -> dict[str, TokenStream]:
        """The tokens of both splits."""
        return {"training": self.train_stream, "held-out": self.heldout_stream}

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The first known tokenizer; `vocabulary_by_bytes` checks that all are alike."""
        return next((known for known in self.tokenizers.values() if known is not None), None)
