"""Cache fidelity: what teacher.cache holds of a row, against what the teacher says of it now.

    cosine(stored, online)  >=  0.999        for each token; the least one counts

of hidden states where those are stored, else of the probabilities: of each id that either side kept, and of
the tail as one. Draws are drawn again with their own random numbers, so they are equal or nearly so. The
rows are spread evenly over those of the run; the teacher is the one the store was made with, in its
arithmetic, and one with other weights fails by its hash before it is asked.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.data.batches import Batch
from engine.export.gate.gate import Gate, answered, does_not_apply
from engine.export.gate.subject import Subject
from engine.formats.safetensors import tensors_sha256
from engine.loss.types import SparseTargets
from engine.models.head import Head
from engine.models.packed import head_of
from engine.teachers.build import BuiltTeacher
from engine.teachers.store.folder import Store, open_store
from engine.teachers.store.manifest import HIDDEN, MANIFEST, uses_cache
from engine.teachers.store.outputs import as_targets, sparse_parts
from engine.teachers.store.teacher import CachedTeacher
from engine.verdict import Level

# Shapes: N tokens of a row, K ids of a token, V vocabulary, E width

ID = "cache"


@torch.inference_mode()
def cache_fidelity(subject: Subject) -> Gate:
    spec = subject.spec
    if not uses_cache(spec):
        return does_not_apply(ID, "the run reads no stored teacher outputs (teacher.cache)")
    folder = Path(spec.teacher.cache)
    if not (folder / MANIFEST).is_file():
        return answered(ID, Level.UNKNOWN, f"{folder} is empty: fill it with `engine prepare`")
    store = open_store(folder)
    identity = store.identity
    batches = subject.rows.batches
    rows = batches.rows_per_epoch
    places = np.unique(np.linspace(0, rows - 1, min(rows, 1024)).astype(np.int64))
    found = [batch for at in places if _held(batch := batches.take(int(at), 1), store)]
    if not found:
        text = (
            f"none of {len(places):,} rows of the run is in {folder}: fill it with `engine prepare`"
        )
        return answered(ID, Level.UNKNOWN, text)
    chosen = np.unique(
        np.linspace(0, len(found) - 1, min(len(found), spec.gate.cache_rows)).astype(np.int64)
    )
    built = subject.teacher_of(identity.backend, identity.precision)
    decoder = built.decoder
    sha256 = tensors_sha256(dict(decoder.named_parameters()) | dict(decoder.named_buffers()))
    if sha256 != identity.teacher_sha256:
        text = f"made with a teacher {identity.teacher_sha256[:16]}, found {sha256[:16]} in {spec.teacher.path}"
        return answered(ID, Level.FAIL, text)
    head: Head | None = head_of(decoder) if identity.form == HIDDEN else None
    stored = CachedTeacher(
        store,
        device=subject.device,
        vocab_size=head.vocab_size if head is not None else subject.inputs.student.vocab_size,
        head=head,
        online=None,
        say=subject.say,
    )
    subject.say(f"{len(chosen)} stored rows, asked of the teacher again")
    least, total, tokens = 1.0, 0.0, 0
    try:
        for index in chosen:
            cosine_N = _cosines(stored, built, found[index], subject.device)
            least = min(least, float(cosine_N.min()))
            total += float(cosine_N.double().sum())
            tokens += len(cosine_N)
            if not bool(cosine_N.isfinite().all()):
                return answered(ID, Level.FAIL, "stored outputs that are not finite")
    finally:
        stored.close()
    limit = spec.gate.cache_cosine
    text = (
        f"{identity.words}: least cosine {least:.6f}, mean {total / tokens:.6f}, at least {limit:g} "
        f"({len(chosen)} rows, {tokens:,} tokens)"
    )
    level = Level.PASS if least >= limit else Level.FAIL
    return answered(
        ID, level, text, least=least, mean=total / tokens, limit=limit, rows=len(chosen)
    )


def _held(batch: Batch, store: Store) -> bool:
    return all(key in store for key in store.identity.keys(batch))


def _cosines(
    stored: CachedTeacher, built: BuiltTeacher, batch: Batch, device: torch.device
) -> Tensor:
    """Of each token (N,)."""
    tokens_BT, documents_BT, _ = batch.to_torch(device)
    hidden_NE = built.teacher.hidden(tokens_BT, documents_BT).flatten(0, 1)
    if stored.gives_hidden:
        kept_NE = stored.hidden(tokens_BT, documents_BT).flatten(0, 1)
        return F.cosine_similarity(kept_NE.double(), hidden_NE.double(), dim=-1)
    identity = stored.store.identity
    kept = stored.targets(tokens_BT, documents_BT)
    assert kept is not None
    parts = sparse_parts(identity, hidden_NE, built.teacher.head(), identity.keys(batch))
    online = as_targets(identity, parts)
    spread = [_spread(one, stored.vocab_size) for one in (kept, online)]
    return F.cosine_similarity(spread[0], spread[1], dim=-1)


def _spread(outputs: SparseTargets, vocabulary: int) -> Tensor:
    """Probabilities over all ids, with what is left of them in one more column (N, V + 1)."""
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
