"""What a teacher is to the trainer: a frozen model that gives hidden states and the head that turns
them into logits.

Logits are never part of the protocol. At a vocabulary of 152k they are the largest tensors of a
step; the loss makes them in chunks from hidden states and heads, and drops them. Nor are weights:
what has none cannot hand them to an optimizer.

    backend       weights                                        file
    dequantized   floats, all of them in memory                  dequantized.py
    quantized     blocks, made floats one slice at a time        quantized.py
    none          there is no teacher                            choose.py

Both are the same `Decoder` under the same `FrozenDecoder`; `TruncatingTeacher` goes around either.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

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
