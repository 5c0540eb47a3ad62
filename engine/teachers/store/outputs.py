"""Compute the stored form of a teacher's distribution from its hidden states and head.

The distribution is over the first V ids (the student's vocabulary), renormalised as in the loss, at
the temperature of the loss:

    log p_v = t_v / T - log sum_{u < V} e^{t_u / T}

    top_k      the K largest log p, with their ids, largest first; fp32. The tail's probability is
               1 - sum of the stored p. Rounding these to 16 bits would change the tail by up to 1e-3,
               and could make it negative
    sampled    id = the first v with sum_{u <= v} p_u > r, for each of m numbers r in [0, 1): the inverse
               of the distribution function, summed in float64, whose rounding is far below any p that
               could be drawn. So P(id = v) = p_v, and the mean of a function over the m draws is
               unbiased for its mean under p (random-sampling distillation)

Logits are computed for a chunk of tokens at a time, and freed.
"""

# Shapes: N tokens, C tokens of a chunk, V student vocabulary, E teacher width, K ids of a token

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.loss.chunks import SparseTargets
from engine.models.head import Head, operand_dtype, project, sum_dtype
from engine.teachers.store.keys import SAMPLED, TOP_K, Identity, uniforms

CHUNK_BYTES = 256 * 2**20
"""Size in bytes of the fp32 logits of one chunk; sampling needs three times as much in addition."""

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I32": torch.int32}


def rows_at_once(vocabulary: int) -> int:
    """Return the number of tokens in a chunk."""
    return max(16, CHUNK_BYTES // (4 * vocabulary))


# contract: topk-cache-fidelity-v1
@torch.inference_mode()
def sparse_parts(
    identity: Identity, hidden_NE: Tensor, head: Head, keys: list[bytes]
) -> tuple[Tensor, ...]:
    """Return one tensor of N tokens for each field of a sparse form. `keys` are the keys of the rows that
    the N tokens make up; the random numbers of sampled ids depend on them.
    """
    vocabulary, temperature = identity.vocabulary, identity.temperature
    assert vocabulary is not None and temperature is not None, "a sparse form has both"
    dtype = operand_dtype(hidden_NE)
    slices = head.slices(vocabulary, dtype)
    uniforms_NK = _uniforms(identity, keys) if identity.form == SAMPLED else None
    chunk = rows_at_once(vocabulary)
    chunks: list[tuple[Tensor, ...]] = []
    for first in range(0, len(hidden_NE), chunk):
        chunk_CE = hidden_NE[first : first + chunk].to(dtype)
        logits_CV = chunk_CE.new_empty(len(chunk_CE), vocabulary, dtype=sum_dtype(dtype))
        project(logits_CV, chunk_CE, slices, scale=1 / temperature)
        if uniforms_NK is None:
            chunks.append(_top_k(logits_CV, identity.count))
        else:
            chunks.append((_sample(logits_CV, uniforms_NK[first : first + chunk]),))
    return tuple(torch.cat(parts) for parts in zip(*chunks, strict=True))


def as_targets(identity: Identity, parts: tuple[Tensor, ...]) -> SparseTargets:
    """Return the fields of a sparse form as targets of the loss."""
    return SparseTargets(ids_NK=parts[0], log_probs_NK=parts[1] if identity.form == TOP_K else None)


def _top_k(logits_CV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    sums_C1 = logits_CV.logsumexp(1, keepdim=True)
    values_CK, ids_CK = logits_CV.topk(count, dim=1)
    return ids_CK.int(), (values_CK - sums_C1).float()


def _sample(logits_CV: Tensor, uniforms_CK: NDArray[np.float64]) -> Tensor:
    weights_CV = (logits_CV - logits_CV.amax(1, keepdim=True)).double().exp_()
    sums_CV = weights_CV.cumsum_(1)
    # r < 1, so r * total is below the total unless it rounds up to it; then the clamp below applies.
    target_CK = torch.from_numpy(uniforms_CK).to(sums_CV.device) * sums_CV[:, -1:]
    ids_CK = torch.searchsorted(sums_CV, target_CK, right=True)
    return ids_CK.clamp_(max=logits_CV.shape[1] - 1).int()


def _uniforms(identity: Identity, keys: list[bytes]) -> NDArray[np.float64]:
    assert identity.seed is not None
    shape = (identity.seq_len, identity.count)
    return np.concatenate([uniforms(identity.seed, key, shape) for key in keys])
