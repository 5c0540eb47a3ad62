"""A teacher that reads a context before each document, which the student does not (context distillation).

    teacher   context, document        student   document

The student learns to behave without the context as the teacher does with it (Askell et al. 2021, arXiv 2112.00861;
Snell et al. 2022, arXiv 2209.15189). Hidden states are those of the document's tokens alone.

Documents with their contexts are put one after the other into passes of a fixed number of tokens: those of the batch,
or of one context and one row where these are more. So memory is that of a batch, and kernels see one shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.models.attention import remember, starts_on_host
from engine.models.head import Head
from engine.teachers.protocol import Teacher

_Pass: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]

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
            known_1M = torch.from_numpy(documents_1M).to(device)
            remember(known_1M, documents_1M)
            places_M = torch.from_numpy(pass_M).to(device)
            hidden_ME = self.inner.hidden(source_N[places_M][None], known_1M)[0]
            if out_NE is None:
                out_NE = hidden_ME.new_empty(rows * length, hidden_ME.shape[1])
            kept = torch.from_numpy(kept_K).to(device)
            out_NE[places_M[kept]] = hidden_ME[kept]
        assert out_NE is not None, "a batch has tokens"
        return out_NE.view(rows, length, -1)


def context_of(teacher: Teacher | None) -> list[int]:
    """Return the context of a teacher, or of the teacher that it wraps; empty without one."""
    inner: Any = teacher
    while inner is not None and not isinstance(inner, TeacherInContext):
        inner = getattr(inner, "inner", None)
    return [] if inner is None else inner.context


def pass_tokens(rows: int, length: int, context: int) -> int:
    """Return how many tokens a pass has for a batch of `rows` rows of `length` tokens."""
    return max(rows * length, length + context)


def passes(starts: Sequence[int], context: int, size: int) -> Iterator[_Pass]:
    """Yield for each pass the places of its tokens in the flattened batch followed by the context, their documents,
    and which of them are kept.

    `starts` are the first tokens of the documents, and the end. What is left of a pass is filled with the last token of
    the context, as a document of its own.
    """
    total = starts[-1]
    before = np.arange(total, total + context, dtype=np.int64)
    places: list[NDArray[np.int64]] = []
    used = 0

    def filled() -> _Pass:
        rest = np.full(size - used, total + context - 1, dtype=np.int64)
        parts = [*places, rest]
        pass_M = np.concatenate(parts)
        documents_M = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        kept_K = np.flatnonzero(pass_M < total)
        return pass_M, documents_M[None], kept_K

    for first, end in pairwise(starts):
        document = np.concatenate([before, np.arange(first, end, dtype=np.int64)])
        if used + len(document) > size:
            yield filled()
            places, used = [], 0
        places.append(document)
        used += len(document)
    yield filled()
