"""The interface between a teacher and the trainer: a frozen model that gives hidden states, and the
head that turns them into logits.

Logits are never part of the protocol. At a vocabulary of 152k they are the largest tensors of a
step; the loss computes them in chunks from hidden states and heads, and drops them. Weights are not
part of it either, so a teacher cannot pass them to an optimizer.

    backend       weights                                        module
    dequantized   floats, all of them in memory                  frozen.py
                  in fp8, one byte per weight in the layers      fp8.py
    quantized     blocks, dequantised one slice at a time        frozen.py
    cached        none: outputs are read from a store            store/teacher.py
    none          there is no teacher

`engine.teachers.backend.choose_backend` chooses among them. `dequantized` and `quantized` are the same
`Decoder` under the same `FrozenDecoder`; `TruncatingTeacher` wraps either.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from engine.data.batches import Batch
from engine.errors import InternalError
from engine.loss.chunks import SparseTargets
from engine.models.head import Head

# Shapes: B rows, T tokens, E teacher width


class Teacher(Protocol):
    """A frozen teacher. Its tensors never require gradients, so no gradient can reach it."""

    @property
    def vocab_size(self) -> int: ...

    def hidden(self, tokens_BT: Tensor, documents_BT: Tensor) -> Tensor:
        """Return the final hidden states (B, T, E), after the last norm. A token attends only to
        its own document.
        """
        ...

    def head(self) -> Head:
        """Return the output matrix, `vocab_size` rows of width E."""
        ...


@runtime_checkable
class KnowsRows(Protocol):
    """A teacher that identifies rows by their content."""

    def note(self, batch: Batch, tokens_BT: Tensor, documents_BT: Tensor) -> None:
        """Tell the teacher, before it is called with them, that these device tensors hold the
        tokens and documents of `batch`. Reading them back would synchronise with the device.
        """
        ...


@runtime_checkable
class GivesTargets(Protocol):
    """A teacher that may give sparse targets instead of hidden states."""

    def targets(self, tokens_BT: Tensor, documents_BT: Tensor) -> SparseTargets | None:
        """Return the teacher's probabilities of a few token ids per token, or None if `hidden` and
        `head` are to be used instead.
        """
        ...


@runtime_checkable
class Prefetches(Protocol):
    """A teacher that can start computing a batch before its output is needed."""

    def prefetch(self, tokens_BT: Tensor, documents_BT: Tensor) -> None:
        """Start computing the hidden states of a batch, after all work launched on the device so
        far. A later `hidden` returns them if it gets the same tensor objects, unmodified.
        """
        ...


class NoHiddenStates(InternalError):
    """Hidden states were requested from a teacher that only gives sparse targets."""
