"""What a teacher is to the trainer: a frozen model that gives hidden states and the head that turns
them into logits.

Logits are never part of the protocol. At a vocabulary of 152k they are the largest tensors of a
step; the loss makes them in chunks from hidden states and heads, and drops them. Nor are weights:
what has none cannot hand them to an optimizer.

    backend       weights                                        file
    dequantized   floats, all of them in memory                  frozen.py
                  in fp8 a byte a number in the layers           fp8.py
    quantized     blocks, made floats one slice at a time        frozen.py
    cached        none: what it said before, out of a store      store/teacher.py
    none          there is no teacher                            choose.py

Both are the same `Decoder` under the same `FrozenDecoder`; `TruncatingTeacher` goes around either.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from engine.data.batches import Batch
from engine.errors import InternalError
from engine.loss.types import SparseTargets
from engine.models.head import Head

# Shapes: B rows, T tokens, E teacher width


class Teacher(Protocol):
    """A frozen teacher. Its tensors never require gradients, so none can reach it."""

    @property
    def vocab_size(self) -> int: ...

    def hidden(self, tokens_BT: Tensor, documents_BT: Tensor) -> Tensor:
        """Final hidden states (B, T, E), after the last norm; a token sees only its own
        document.
        """
        ...

    def head(self) -> Head:
        """The output matrix, `vocab_size` rows of width E."""
        ...


@runtime_checkable
class KnowsRows(Protocol):
    """A teacher that knows rows by their content."""

    def note(self, batch: Batch, tokens_BT: Tensor, documents_BT: Tensor) -> None:
        """Says that these tensors on the device hold the tokens and documents of `batch`, before they
        are asked about: reading them back would wait for the device.
        """
        ...


@runtime_checkable
class GivesTargets(Protocol):
    """A teacher that may have less than hidden states to give."""

    def targets(self, tokens_BT: Tensor, documents_BT: Tensor) -> SparseTargets | None:
        """What it says of some ids of each token; None where `hidden` and `head` are to be asked."""
        ...


@runtime_checkable
class Prefetches(Protocol):
    """A teacher that can begin with a batch before its answer is wanted."""

    def prefetch(self, tokens_BT: Tensor, documents_BT: Tensor) -> None:
        """Begins with the hidden states of a batch, after all work the device was given so far.
        `hidden` finds them when it is given these very tensors, unchanged since.
        """
        ...


class NoHiddenStates(InternalError):
    """Hidden states were asked of a teacher that gives targets."""
