"""Check stored teacher outputs against the teacher: recompute some rows and compare.

    cosine(stored, computed)              per token; the smallest must reach a threshold
    |stored - computed| / |computed|      per token; the largest must stay below a limit. It finds a wrong scale,
                                          which a cosine does not

Hidden states are compared if they are stored, otherwise probability vectors over the vocabulary, with one more
component for the tail that was not stored. The probabilities are computed here from the logits, not by the code that
fills a store. Sampled targets are drawn again with the same random numbers, so they are equal up to rounding.
"""

# Shapes: N tokens of a row, E width, K stored tokens of a position, V vocabulary

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.data.batches import Batch, Batches
from engine.loss.chunks import SparseTargets
from engine.models.config import ModelConfig, count_parameters
from engine.models.head import Head, logits_of
from engine.teachers.protocol import Teacher
from engine.teachers.store.folder import Store
from engine.teachers.store.keys import Identity, uniforms
from engine.teachers.store.teacher import CachedTeacher

BATCH_ROWS = 4
MIN_COMPARED, MAX_COMPARED = 4, 64
COMPARED_FLOPS = {"cpu": 1e11, "cuda": 1e15}
"""FLOPs of the teacher that may be spent on the comparison, by device: a few seconds."""
DRAW_ROUNDING = 2e-3
"""Largest distance, in probability, of a random number from the cumulative interval of the id that it drew. It is
above 0 because two forward passes round differently."""
SEARCHED_ROWS = 1024
"""Number of rows of a run, evenly spread, that are looked up in the store to find stored ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    least_cosine: float
    """NaN where a stored output is not finite."""
    mean_cosine: float
    largest_distance: float
    rows: int
    tokens: int

    def within(self, cosine: float) -> bool:
        """Return whether every token reaches this cosine, and none exceeds 1.1 times the relative distance of two
        vectors of equal length with this cosine."""
        distance = math.sqrt(2 * (1 - cosine))
        # `>=` and `<=`, so that NaN fails.
        return self.least_cosine >= cosine and self.largest_distance <= 1.1 * distance

    def text(self, cosine: float) -> str:
        return (
            f"least cosine {self.least_cosine:.6f}, mean {self.mean_cosine:.6f}, at least {cosine:g}; largest distance "
            f"{self.largest_distance:.2g} ({self.rows} rows, {self.tokens:,} tokens)"
        )


def affordable_rows(teacher: ModelConfig, seq_len: int, device: torch.device) -> int:
    """Return the number of stored rows that the teacher can recompute within COMPARED_FLOPS."""
    row_flops = 2 * count_parameters(teacher) * seq_len
    return min(MAX_COMPARED, max(MIN_COMPARED, int(COMPARED_FLOPS[device.type] / row_flops)))


def stored_rows(batches: Batches, store: Store, count: int, taken: int) -> list[Batch]:
    """Return up to `count` stored rows of the first `taken` rows of a run, evenly spread. They come in batches of
    BATCH_ROWS, so that outputs swapped between the rows of a batch are found too."""
    rows = min(batches.rows_per_epoch, taken)
    positions = np.unique(np.linspace(0, rows - 1, min(rows, SEARCHED_ROWS)).astype(np.int64))
    candidates = [batches.take(int(position), 1) for position in positions]
    stored = np.array(
        [int(row.row_ids[0]) for row in candidates if store.identity.keys(row)[0] in store],
        dtype=np.int64,
    )
    ids = stored[np.linspace(0, len(stored) - 1, min(len(stored), count)).astype(np.int64)]
    return [
        batches.rows(ids[first : first + BATCH_ROWS]) for first in range(0, len(ids), BATCH_ROWS)
    ]


@torch.inference_mode()
def compare(
    stored: CachedTeacher, teacher: Teacher, batches: Sequence[Batch], device: torch.device
) -> Fidelity:
    """Compare stored rows with the outputs of `teacher`. Its vocabulary is the student's, unless hidden states are
    stored."""
    cosines, distances = [], []
    for batch in batches:
        kept, computed = _stored_and_computed(stored, teacher, batch, device)
        cosines.append(F.cosine_similarity(kept, computed, dim=-1).cpu())
        distances.append(((kept - computed).norm(dim=-1) / computed.norm(dim=-1)).cpu())
    cosine_N, distance_N = torch.cat(cosines), torch.cat(distances)
    return Fidelity(
        least_cosine=float(cosine_N.min()),
        mean_cosine=float(cosine_N.mean()),
        largest_distance=float(distance_N.max()),
        rows=sum(len(batch.row_ids) for batch in batches),
        tokens=len(cosine_N),
    )


def _stored_and_computed(
    stored: CachedTeacher, teacher: Teacher, batch: Batch, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the stored and the computed output of each token, in float64."""
    tokens_BT, documents_BT, _ = batch.to_torch(device)
    hidden_NE = teacher.hidden(tokens_BT, documents_BT).flatten(0, 1)
    if stored.gives_hidden:
        return stored.hidden(tokens_BT, documents_BT).flatten(0, 1).double(), hidden_NE.double()
    identity = stored.store.identity
    kept = stored.targets(tokens_BT, documents_BT)
    assert kept is not None
    computed = _compute(identity, hidden_NE, teacher.head(), identity.keys(batch), kept.ids_NK)
    return _spread(kept, stored.vocab_size), _spread(computed, stored.vocab_size)


def _compute(
    identity: Identity, hidden_NE: Tensor, head: Head, keys: Sequence[bytes], stored_NK: Tensor
) -> SparseTargets:
    """Return the targets that a store should hold for the rows of `keys`. A stored id whose cumulative interval is
    within DRAW_ROUNDING of its random number is correct, and is returned unchanged."""
    assert identity.vocabulary is not None and identity.temperature is not None
    kept: list[tuple[Tensor, Tensor | None]] = []
    rows = zip(hidden_NE.chunk(len(keys)), stored_NK.chunk(len(keys)), keys, strict=True)
    for row_TE, stored_TK, key in rows:
        logits_TV = logits_of(row_TE, head, identity.vocabulary).double()
        p_TV = (logits_TV / identity.temperature).softmax(1)
        if identity.seed is None:
            p_TK, ids_TK = p_TV.topk(identity.count, dim=1)
            kept.append((ids_TK, p_TK.log()))
        else:
            shape = (identity.seq_len, identity.count)
            numbers_TK = torch.from_numpy(uniforms(identity.seed, key, shape)).to(p_TV.device)
            sums_TV = F.pad(p_TV.cumsum(1), (1, 0))
            ids_TK = torch.searchsorted(sums_TV, numbers_TK, right=True) - 1
            stored_ids_TK = stored_TK.long()
            below_TK = sums_TV.gather(1, stored_ids_TK) - numbers_TK
            above_TK = numbers_TK - sums_TV.gather(1, stored_ids_TK + 1)
            drawn_TK = torch.maximum(below_TK, above_TK) <= DRAW_ROUNDING
            ids_TK = torch.where(drawn_TK, stored_ids_TK, ids_TK.clamp(max=identity.vocabulary - 1))
            kept.append((ids_TK, None))
    ids, log_probs = zip(*kept, strict=True)
    return SparseTargets(
        ids_NK=torch.cat(ids),
        log_probs_NK=None if log_probs[0] is None else torch.cat(log_probs),
    )


def _spread(outputs: SparseTargets, vocabulary: int) -> Tensor:
    """Return probabilities over the vocabulary, with one more column for the remaining probability, (N, V + 1)."""
    ids_NK = outputs.ids_NK.long()
    if outputs.log_probs_NK is None:
        p_NK = torch.full(
            ids_NK.shape, 1 / ids_NK.shape[1], dtype=torch.float64, device=ids_NK.device
        )
    else:
        p_NK = outputs.log_probs_NK.double().exp()
    out_NV = p_NK.new_zeros(len(ids_NK), vocabulary + 1)
    out_NV.scatter_add_(1, ids_NK, p_NK)
    out_NV[:, -1] = 1 - p_NK.sum(1)
    return out_NV
