"""What a teacher is to the trainer: a frozen model that gives hidden states and the head that turns
them into logits.

Logits are never part of the protocol. At a vocabulary of 152k they are the largest tensors of a
step; the loss makes them in chunks from hidden states and heads, and drops them.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

# Shapes: B rows, T tokens, D teacher width, W teacher vocabulary


class Teacher(Protocol):
    """A frozen teacher. Its tensors never require gradients, so none can reach it."""

    @property
    def vocab_size(self) -> int: ...

    def hidden(self, tokens_BT: Tensor, documents_BT: Tensor) -> Tensor:
        """Final hidden states (B, T, D), after the last norm; a token sees only its own
        document.
        """
        ...

    def head_weight(self) -> Tensor:
        """The output matrix (W, D)."""
        ...
