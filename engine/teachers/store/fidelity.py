"""Whether stored teacher outputs are those that the teacher computes: rows of the store, asked of the teacher again.

    cosine(stored, computed)              for each token; the smallest one counts
    |stored - computed| / |computed|      the same: of outputs that are scaled, the cosine is 1

Of hidden states if those are stored, otherwise of the probabilities: one component for each token that either side
kept, and one for the rest. Sampled targets are drawn again with their own random numbers, so they are equal or nearly
so.
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
from engine.teachers.protocol import Teacher
from engine.teachers.store.folder import Store
from engine.teachers.store.outputs import as_targets, sparse_parts
from engine.teachers.store.teacher import CachedTeacher

AT_ONCE = 4
LOOKED_UP = 1024
"""Rows of a run, evenly spread, that are looked for in the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    least_cosine: float
    """NaN where a stored output is not finite."""
    mean_cosine: float
    largest_distance: float
    rows: int
    tokens: int

    def within(self, cosine: float) -> bool:
        """Whether no token is further than outputs of one length are that have this cosine."""
        distance = math.sqrt(2 * (1 - cosine))
        # Written so that NaN fails.
        return self.least_cosine >= cosine and self.largest_distance <= 1.1 * distance

    def text(self, cosine: float) -> str:
        return (
            f"least cosine {self.least_cosine:.6f}, mean {self.mean_cosine:.6f}, at least {cosine:g}; largest distance "
            f"{self.largest_distance:.2g} ({self.rows} rows, {self.tokens:,} tokens)"
        )


def stored_rows(batches: Batches, store: Store, count: int) -> list[Batch]:
    """Return at most `count` rows of a run that are stored, spread evenly, in batches of AT_ONCE: what takes the output
    of another row of its batch shows too."""
    rows = batches.rows_per_epoch
    places = np.unique(np.linspace(0, rows - 1, min(rows, LOOKED_UP)).astype(np.int64))
    taken = (batches.take(int(at), 1) for at in places)
    found = [batch for batch in taken if all(key in store for key in store.identity.keys(batch))]
    if not found:
        return []
    chosen = np.unique(np.linspace(0, len(found) - 1, min(len(found), count)).astype(np.int64))
    ids = np.concatenate([found[index].row_ids for index in chosen])
    return [batches.rows(ids[first : first + AT_ONCE]) for first in range(0, len(ids), AT_ONCE)]


@torch.inference_mode()
def compare(
    stored: CachedTeacher, teacher: Teacher, batches: Sequence[Batch], device: torch.device
) -> Fidelity:
    """Ask `teacher`, cut to the student's vocabulary where logits are stored, for rows that are stored."""
    cosines, distances = [], []
    for batch in batches:
        kept, computed = _both(stored, teacher, batch, device)
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


def _both(
    stored: CachedTeacher, teacher: Teacher, batch: Batch, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return what is stored of each token, and what is computed, in float64."""
    tokens_BT, documents_BT, _ = batch.to_torch(device)
    hidden_NE = teacher.hidden(tokens_BT, documents_BT).flatten(0, 1)
    if stored.gives_hidden:
        return stored.hidden(tokens_BT, documents_BT).flatten(0, 1).double(), hidden_NE.double()
    identity = stored.store.identity
    kept = stored.targets(tokens_BT, documents_BT)
    assert kept is not None
    parts = sparse_parts(identity, hidden_NE, teacher.head(), identity.keys(batch))
    computed = as_targets(identity, parts)
    return _spread(kept, stored.vocab_size), _spread(computed, stored.vocab_size)


def _spread(outputs: SparseTargets, vocabulary: int) -> Tensor:
    """Probabilities over the vocabulary, with one more column for the rest (N, V + 1)."""
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
