"""A teacher that reads a context before each document, which the student does not (context distillation).

    teacher   context, document        student   document

The student learns to behave without the context as the teacher does with it (Askell et al. 2021, arXiv 2112.00861;
Snell et al. 2022, arXiv 2209.15189). Hidden states are those of the document's tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.models.attention import record_documents, starts_on_host
from engine.models.head import Head
from engine.teachers.context_passes import pass_tokens, passes
from engine.teachers.protocol import Teacher

# Shapes: B rows, T tokens, N = B*T, P tokens of the context, M tokens of a pass, K of them kept, E teacher width


class TeacherInContext:
    """Wraps `inner`, which reads `context` before each document of a row."""

    def __init__(self, inner: Teacher, context: Sequence[int]) -> None:
        self.inner = inner
        self.context = list(context)

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    def head(self) -> Head:
        return self.inner.head()

    @torch.inference_mode()
    def hidden(self, tokens_BT: Tensor, documents_BT: Tensor) -> Tensor:
        device, (rows, length) = tokens_BT.device, tokens_BT.shape
        context_P = torch.tensor(self.context, dtype=tokens_BT.dtype, device=device)
        source_N = torch.cat([tokens_BT.flatten(), context_P])
        out_NE: Tensor | None = None
        for pass_M, documents_1M, kept_K in passes(
            starts_on_host(documents_BT),
            len(self.context),
            pass_tokens(rows, length, len(self.context)),
        ):
            pass_documents_1M = torch.from_numpy(documents_1M).to(device)
            record_documents(pass_documents_1M, documents_1M)
            source_M = torch.from_numpy(pass_M).to(device)
            hidden_ME = self.inner.hidden(source_N[source_M][None], pass_documents_1M)[0]
            if out_NE is None:
                out_NE = hidden_ME.new_empty(rows * length, hidden_ME.shape[1])
            kept = torch.from_numpy(kept_K).to(device)
            out_NE[source_M[kept]] = hidden_ME[kept]
        assert out_NE is not None, "a batch has tokens"
        return out_NE.view(rows, length, -1)


def context_of(teacher: Teacher | None) -> list[int]:
    """Return the context of a teacher, or of the teacher that it wraps; empty without one."""
    inner: Any = teacher
    while inner is not None and not isinstance(inner, TeacherInContext):
        inner = getattr(inner, "inner", None)
    return [] if inner is None else inner.context
