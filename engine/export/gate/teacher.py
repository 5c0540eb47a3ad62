"""Gates on the teacher's outputs: against its reference model, and against its stored outputs.

Teacher parity compares a teacher whose matmuls are not exact with its reference.

    KL(reference || teacher)  <=  the published noise of 4-bit weights, or gate.teacher_kl

It is a mean over labelled tokens of held-out rows, at temperature 1, over the student's vocabulary. The
reference is the model in gate.teacher_reference, from which the blocks were quantised. Without that setting
it is the dequantised blocks in fp32; then the gate judges the arithmetic and not the quantization. For a
dense teacher in a float type there is nothing to compare.

Cache fidelity compares the outputs of rows in teacher.cache with what the teacher computes now
(`engine.teachers.store.fidelity`). The rows are spread evenly over those of the run. The teacher runs
with the backend and precision that the store was made with; one with other weights fails by its hash before
it runs.
"""

from __future__ import annotations

from pathlib import Path

import torch

from engine.evaluate.perplexity import log_probabilities
from engine.export.gate.gate import Subject, does_not_apply
from engine.export.outcome import Outcome, answered, unknown
from engine.formats.safetensors import tensors_sha256
from engine.models.frozen import freeze
from engine.models.head import Head
from engine.models.load import load_decoder
from engine.models.packed import head_of
from engine.quant.blocks import NOISE_FLOORS
from engine.teachers.store.fidelity import compare, stored_rows
from engine.teachers.store.folder import open_store
from engine.teachers.store.keys import HIDDEN
from engine.teachers.store.manifest import MANIFEST, uses_cache
from engine.teachers.store.teacher import CachedTeacher
from engine.verdict import Level

# Shapes: B rows, T tokens, N labelled tokens (of the cache: all of a row), K stored tokens of a position,
# V vocabulary, E width

TEACHER, CACHE = "teacher", "cache"
ROWS = 8
_CHUNK = 256


@torch.inference_mode()
def teacher_parity(subject: Subject) -> Outcome:
    spec = subject.spec
    if not spec.has_teacher:
        return does_not_apply(TEACHER, "the run has no teacher")
    reference_path = spec.gate.teacher_reference
    inexact = subject.teacher_backend == "quantized" or subject.teacher_precision == "fp8"
    if not inexact and not reference_path:
        return does_not_apply(
            TEACHER,
            f"the teacher is dense, in {subject.teacher_precision}: no part of it is quantised "
            "(gate.teacher_reference compares it with another model)",
        )
    batches = list(subject.rows.heldout.split(ROWS))[:1]
    path = reference_path or spec.teacher.path
    teacher = subject.teacher.teacher
    columns = subject.inputs.student.vocab_size
    subject.say(f"loading the reference: {path} (fp32)")
    reference = freeze(load_decoder(path, torch.float32, subject.device))
    if reference.config.vocab_size < columns:
        text = f"{path} has {reference.config.vocab_size:,} ids, expected {columns:,} or more"
        return unknown(TEACHER, text)
    kl = agreed = 0.0
    count = 0
    for batch in batches:
        tokens_BT, documents_BT, labels_BT = batch.to_torch(subject.device)
        labelled = (labels_BT.flatten() >= 0).nonzero().squeeze(1)
        ours_NE = teacher.hidden(tokens_BT, documents_BT).flatten(0, 1)[labelled]
        theirs_NE = reference.hidden(tokens_BT, documents_BT).flatten(0, 1)[labelled]
        for start in range(0, len(labelled), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            q_NV = log_probabilities(ours_NE[chunk], teacher.head(), columns).double()
            p_NV = log_probabilities(theirs_NE[chunk], head_of(reference), columns).double()
            kl += float((p_NV.exp() * (p_NV - q_NV)).sum())
            agreed += float((p_NV.argmax(-1) == q_NV.argmax(-1)).sum())
        count += len(labelled)
    if not count:
        return unknown(TEACHER, "the held-out rows have no label")
    limit = spec.gate.teacher_kl or NOISE_FLOORS["q4_k_m"].kl
    mean = kl / count
    reference_name = reference_path or "the values in its blocks, in fp32"
    text = (
        f"{subject.teacher_backend}, {subject.teacher_precision}: KL {mean:.2g} from {reference_name}, at most "
        f"{limit:.2g}; {agreed / count:.1%} rank the same id first ({count:,} tokens)"
    )
    # Written so that NaN fails.
    level = Level.PASS if mean <= limit else Level.FAIL
    return answered(
        TEACHER, level, text, kl=mean, limit=limit, agreement=agreed / count, tokens=count
    )


@torch.inference_mode()
def cache_fidelity(subject: Subject) -> Outcome:
    spec = subject.spec
    if not uses_cache(spec):
        return does_not_apply(CACHE, "the run reads no stored teacher outputs (teacher.cache)")
    folder = Path(spec.teacher.cache)
    if not (folder / MANIFEST).is_file():
        return unknown(CACHE, f"{folder} is empty: fill it with `engine prepare`")
    store = open_store(folder)
    identity = store.identity
    rows_taken = spec.train.steps * spec.rows_per_step
    chosen = stored_rows(subject.rows.batches, store, spec.gate.cache_rows, rows_taken)
    if not chosen:
        text = f"no row of the run is in {folder}: fill it with `engine prepare`"
        return unknown(CACHE, text)
    built = subject.teacher_of(identity.backend, identity.precision)
    decoder = built.decoder
    sha256 = tensors_sha256(dict(decoder.named_parameters()) | dict(decoder.named_buffers()))
    if sha256 != identity.teacher_sha256:
        text = f"made with a teacher {identity.teacher_sha256[:16]}, found {sha256[:16]} in {spec.teacher.path}"
        return answered(CACHE, Level.FAIL, text)
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
    try:
        fidelity = compare(stored, built.teacher, chosen, subject.device)
    finally:
        stored.close()
    limit = spec.gate.cache_cosine
    return answered(
        CACHE,
        Level.PASS if fidelity.within(limit) else Level.FAIL,
        f"{identity.words}: {fidelity.text(limit)}",
        least=fidelity.least_cosine,
        mean=fidelity.mean_cosine,
        distance=fidelity.largest_distance,
        limit=limit,
        rows=fidelity.rows,
    )
