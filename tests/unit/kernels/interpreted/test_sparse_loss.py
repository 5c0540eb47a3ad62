"""The fused form of the loss against some ids of each token answers as the eager form does, which is held
against float64 autograd in `tests/unit/loss/test_sparse.py`. In fp32: the interpreter's bf16 is wrong.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from engine.loss import fused
from engine.loss.chunks import Chunks, Job, SparseTargets, Totals
from engine.loss.eager import EagerChunks

# Columns beyond V and the ids taken out are -infinity; a row may have no others.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
]

# Shapes: C rows, V vocabulary, D width, K ids


def answers(form: Any, job: Job, h_CD: Tensor, w_VD: Tensor) -> tuple[Tensor, Totals]:
    """dz of two chunks, and the totals."""
    chunks: Chunks = form(job, (3, len(w_VD)), w_VD)
    parts = []
    for part in (slice(0, 3), slice(3, len(h_CD))):
        chunks.differentiate(h_CD[part], w_VD, part)
        if chunks.held == 1:
            parts.append(chunks.gradient(part).clone())
    return torch.cat(parts) if parts else chunks.gradient(
        slice(0, len(h_CD))
    ).clone(), chunks.totals()


def targets_of(kind: str, teacher_CV: Tensor, count: int, temperature: float) -> SparseTargets:
    log_p_CV = torch.log_softmax(teacher_CV / temperature, 1)
    if kind == "top_k":
        values_CK, ids_CK = log_p_CV.topk(count, 1)
        return SparseTargets(ids_NK=ids_CK, log_probs_NK=values_CK)
    drawn = torch.Generator().manual_seed(2)
    ids_CK = torch.multinomial(log_p_CV.exp(), count, replacement=True, generator=drawn)
    return SparseTargets(ids_NK=ids_CK.int(), log_probs_NK=None)


@pytest.mark.parametrize("kind", ["top_k", "sampled"])
@pytest.mark.parametrize(
    ("vocabulary", "alpha", "temperature"), [(37, 0.3, 2.0), (37, 0.0, 1.0), (9000, 0.5, 0.7)]
)
def test_rows_are_those_of_the_eager_form(
    kind: str, vocabulary: int, alpha: float, temperature: float
) -> None:
    random = torch.Generator().manual_seed(0)
    h_CD, w_VD = torch.randn(5, 8, generator=random), torch.randn(vocabulary, 8, generator=random)
    teacher_CV = 4 * torch.randn(5, vocabulary, generator=random)
    for count in (1, 37):
        targets = targets_of(kind, teacher_CV, count, temperature)
        labels_C = torch.randint(0, vocabulary, (5,), generator=random)
        labels_C[0] = targets.ids_NK[0, 0]  # one that the teacher named
        job = Job(
            labels_M=labels_C, teacher=targets, alpha=alpha, temperature=temperature,
            divergence="forward_kl", beta=0.5, kernel="fused", chunk_rows=3,
            wants_hidden=True, wants_head=True,
        )  # fmt: skip
        found, mine = answers(fused.FusedSparseChunks, job, h_CD, w_VD)
        wanted, theirs = answers(EagerChunks, replace(job, kernel="eager"), h_CD, w_VD)
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-6)
        assert float(mine.ce) == pytest.approx(float(theirs.ce), rel=1e-5)
        assert mine.divergence is not None and theirs.divergence is not None
        assert float(mine.divergence) == pytest.approx(float(theirs.divergence), rel=1e-4, abs=1e-5)
        assert float(mine.largest_sum) < 2e-6 * max(1.0, temperature) * 5
        assert (mine.lowest is None) == (theirs.lowest is None) == (kind == "sampled")
        if mine.agreeing is not None and theirs.agreeing is not None:
            assert float(mine.agreeing) == float(theirs.agreeing)
