"""Cut a teacher with a larger vocabulary down to the student's, and measure the probability that the cut drops.

Two checkpoints of one family pad the same tokenizer to different widths: Qwen2.5-7B has 152064 rows
where Qwen2.5-0.5B has 151936. The teacher's columns beyond the student's are cut before the
softmax, so its distribution is renormalised over the token ids that both have:

    p_v = e^{t_v / T} / sum_{u < V} e^{t_u / T}                      v < V

Padding the student instead would give a made-up logit, and so a probability, to ids that it does
not have. What the cut drops is the probability that the teacher gives to the ids beyond,

    dropped = sum_{V <= v < W} e^{t_v / T} / sum_{v < W} e^{t_v / T}

which is measured on real rows instead of assumed to be small: it is about 1e-6 where the rows
beyond are padding, and large where they are tokens that the student lacks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.data.batches import Batch
from engine.errors import BadInput
from engine.models.head import Head, Slices, multiply, operand_dtype, sum_dtype
from engine.teachers.protocol import Teacher

# Shapes: B rows, T tokens, N labelled tokens, V student vocabulary, W teacher vocabulary, E teacher
# width, R rows of a part of the head

PART_ROWS = 8192
"""Number of head rows whose logits are computed at once."""
CHUNK = 1024
"""Number of tokens, with `PART_ROWS` head rows, processed at once: 32 MiB of logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedMass:
    """The probability that the teacher gives to the token ids that are cut, 0 to 1."""

    mean: float
    largest: float
    """Largest value of a single token."""
    tokens: int
    """Number of tokens it was measured on."""


# contract: vocabulary-alignment-v1
class TruncatingTeacher:
    """Wraps `inner` and keeps the first `vocab_size` token ids. Raises `BadInput` if `inner` has
    fewer.
    """

    def __init__(self, inner: Teacher, vocab_size: int) -> None:
        if vocab_size > inner.vocab_size:
            raise BadInput(
                f"vocabulary: student — expected at most the teacher's {inner.vocab_size} ids, "
                f"found {vocab_size}",
                hint="ids that the teacher does not have cannot be taught; cut the student's embedding",
            )
        self.inner = inner
        self._vocab_size = vocab_size

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def hidden(self, tokens_BT: Tensor, documents_BT: Tensor) -> Tensor:
        return self.inner.hidden(tokens_BT, documents_BT)

    def head(self) -> Head:
        return _CutHead(self.inner.head(), self._vocab_size)

    @torch.inference_mode()
    def dropped_mass(
        self, batches: Sequence[Batch], device: torch.device, *, temperature: float
    ) -> DroppedMass:
        """Return the probability dropped on the labelled tokens of `batches`, at the loss's
        temperature; NaN if there are none.

        Costs one forward pass of the teacher for each batch and some tens of MiB of memory, because the two sums
        are accumulated over parts of the head as log-sum-exps.
        """
        head = self.inner.head()
        parts = []
        for batch in batches:
            tokens_BT, documents_BT, labels_BT = batch.to_torch(device)
            hidden_NE = self.inner.hidden(tokens_BT, documents_BT)[labels_BT >= 0]
            parts += [
                _dropped(chunk_NE, head, self._vocab_size, temperature)
                for chunk_NE in torch.split(hidden_NE, CHUNK)
            ]
        dropped_N = torch.cat(parts) if parts else torch.empty(0)
        if not len(dropped_N):
            return DroppedMass(mean=math.nan, largest=math.nan, tokens=0)
        return DroppedMass(
            mean=float(dropped_N.double().mean()),
            largest=float(dropped_N.max()),
            tokens=len(dropped_N),
        )


class _CutHead:
    def __init__(self, inner: Head, vocab_size: int) -> None:
        self._inner, self._vocab_size = inner, vocab_size

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def width(self) -> int:
        return self._inner.width

    def slices(self, columns: int, dtype: torch.dtype, *, first: int = 0) -> Slices:
        return self._inner.slices(min(columns, self._vocab_size), dtype, first=first)


def _dropped(hidden_NE: Tensor, head: Head, vocab_size: int, temperature: float) -> Tensor:
    """Return the dropped probability of each token, (N,)."""
    dtype = operand_dtype(hidden_NE)
    hidden_NE = hidden_NE.to(dtype)
    kept_N, cut_N = hidden_NE.new_full(
        (2, len(hidden_NE)), -math.inf, dtype=sum_dtype(dtype)
    ).unbind()
    slices = head.slices(head.vocab_size, dtype)
    if not slices:  # hidden states are logits
        logits_NW = hidden_NE.to(kept_N.dtype) / temperature
        kept_N, cut_N = (
            part_NV.logsumexp(1) for part_NV in logits_NW.tensor_split((vocab_size,), dim=1)
        )
    for first, weight_SE in slices:
        for weight_RE in torch.split(weight_SE, PART_ROWS):
            logits_NR = kept_N.new_empty(len(hidden_NE), len(weight_RE))
            multiply(logits_NR, hidden_NE, weight_RE.t(), scale=1 / temperature)
            kept_rows = min(max(vocab_size - first, 0), len(weight_RE))
            kept_N = torch.logaddexp(kept_N, logits_NR[:, :kept_rows].logsumexp(1))
            cut_N = torch.logaddexp(cut_N, logits_NR[:, kept_rows:].logsumexp(1))
            first += len(weight_RE)
    # Not computed as 1 - kept: the result is far below the rounding error of 1.
    return (cut_N - torch.logaddexp(kept_N, cut_N)).exp()
