"""The interface between a teacher and the trainer: a frozen model that gives hidden states, and the
head that turns them into logits.

Logits are never part of the protocol. At a vocabulary of 152k they are the largest tensors of a
step; the loss computes them in chunks from hidden states and heads, and drops them. Weights are not
part of it either, so a teacher cannot pass them to an optimizer.

    backend       weights                                        module
    dequantized   floats, all of them in memory                  frozen.py
                  in fp8, one byte per weight in the layers      fp8.py
    quantized     blocks, dequantised before each matmul         frozen.py
    cached        none: outputs are read from a store            store/teacher.py
    none          there is no teacher

`engine.teachers.backend.choose_backend` chooses among them. `dequantized` and `quantized` are the same
`Decoder` under the same `FrozenDecoder`; `TruncatingTeacher` and `TeacherInContext` wrap either.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from engine.errors import InternalError
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


class NoHiddenStates(InternalError):
    """Hidden states were requested from a teacher that only gives sparse targets."""
