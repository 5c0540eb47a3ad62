"""A run whose teacher ran before: its store is opened, held against the run, and put in the teacher's
place.

What a run otherwise learns from the loaded teacher comes from the store's manifest: the hash of its
weights, vouched for by the files they came from; the mass that the cut of the vocabulary drops; and,
where no hidden states are stored, its held-out loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.data.batches import Batch, Batches
from engine.data.tokens import TokenStream
from engine.decision import Decision
from engine.formats.safetensors import tensors_sha256
from engine.log.events import Evaluated, ModelReady, Note
from engine.log.write import LogWriter
from engine.models.config import ModelConfig, count_parameters
from engine.models.decoder import Decoder
from engine.models.head import Head
from engine.plan.inputs import Inputs
from engine.spec import RunSpec
from engine.teachers.build import DTYPES, BuiltTeacher
from engine.teachers.protocol import Teacher
from engine.teachers.store.folder import Store, open_store
from engine.teachers.store.manifest import (
    CacheError,
    Identity,
    check_teacher_files,
    contents_sha256,
    fitting_manifest,
    uses_cache,
)
from engine.teachers.store.teacher import CachedTeacher, load_head
from engine.teachers.truncating import DroppedMass, TruncatingTeacher
from engine.train import record
from engine.train.prepare_plan import rows_of_run

LOOKED_AT = 1024
"""Rows of the run that are looked for before it begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The store that a run reads."""

    store: Store
    config: ModelConfig
    """Of the teacher."""
    teacher_known: str
    """How it is known that the store is this teacher's, in words."""
    rows: int
    """Looked for."""
    found: int

    @property
    def identity(self) -> Identity:
        return self.store.identity

    @property
    def precision(self) -> Decision:
        return Decision(
            knob="teacher.precision",
            choice=self.identity.precision,
            reason="the outputs in teacher.cache were made in it",
        )

    @property
    def words(self) -> str:
        """The reason for reading it, with its arithmetic."""
        identity, each = self.identity, self.identity.token_bytes
        where = f"{self.found:,} of {self.rows:,} rows looked for are there"
        return f"{len(self.store):,} rows are stored: {identity.words}, {each:,.0f} bytes per token; {where}"


def find_stored(spec: RunSpec, inputs: Inputs, stream: TokenStream) -> Stored | None:
    """The store that `spec` names, opened; None where it names none. Raises CacheError for one that is
    not this run's.
    """
    if not uses_cache(spec):
        return None
    assert inputs.teacher is not None
    fitting_manifest(spec, inputs.teacher, inputs.student)
    store = open_store(spec.teacher.cache)
    known = check_teacher_files(spec.teacher.path, store.manifest, store.path)
    batches = Batches(
        stream,
        seq_len=spec.data.seq_len,
        rows_per_batch=spec.train.rows,
        seed=spec.train.seed,
    )
    # Evenly over what the run takes, at most an epoch: one row each.
    rows = min(rows_of_run(spec), batches.rows_per_epoch)
    positions = np.unique(np.linspace(0, rows - 1, min(rows, LOOKED_AT)).astype(np.int64))
    found = sum(
        key in store for at in positions for key in store.identity.keys(batches.take(int(at), 1))
    )
    return Stored(
        store=store,
        config=inputs.teacher,
        teacher_known=known,
        rows=len(positions),
        found=found,
    )


def cached_teacher(
    log: LogWriter,
    spec: RunSpec,
    stored: Stored,
    heldout: Sequence[Batch],
    *,
    student_vocab: int,
    device: torch.device,
    load: Callable[[str, str], BuiltTeacher],
) -> CachedTeacher:
    """The teacher of a run out of its store, logged as a loaded one is; cut to `student_vocab` ids.

    `load` builds the teacher itself, of a backend and a precision, for the first miss. Raises
    WeightsError and, at a miss, CacheError.
    """
    store, identity, config = stored.store, stored.identity, stored.config
    for text in store.refusals:
        log.write(Note(level="warning", text=f"{text}; its rows are not used"))
    log.write(Note(level="info", text=f"teacher: out of {store.path}; {stored.teacher_known}"))
    log.write(
        ModelReady(
            role="teacher",
            source=spec.teacher.path,
            parameters=count_parameters(config),
            layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            precision=identity.precision,
            sha256=identity.teacher_sha256,
        )
    )

    def online() -> Teacher:
        record.phase(log, "loading the teacher", f"{spec.teacher.path}: for what is not stored")
        built = load(identity.backend, identity.precision)
        found = _hash_of(built.decoder)
        if found != identity.teacher_sha256:
            raise CacheError.expected(
                "teacher.cache",
                store.path,
                f"the teacher it was made with, {identity.teacher_sha256}",
                f"{spec.teacher.path} with {found}",
            )
        record.phase(log, "training", "with the teacher itself where nothing is stored")
        return built.teacher

    def teacher(head: Head | None, ids: int) -> CachedTeacher:
        return CachedTeacher(
            store,
            device=device,
            vocab_size=ids,
            head=head,
            online=online if spec.teacher.cache_miss == "online" else None,
            say=lambda text: log.write(Note(level="warning", text=text)),
        )

    if identity.form != "hidden":
        _log_cut(log, stored, student_vocab)
        return teacher(None, student_vocab)
    record.phase(log, "loading the teacher's head", spec.teacher.path)
    head = load_head(
        spec.teacher.path,
        packed=identity.backend == "quantized",
        dtype=DTYPES[identity.precision],
        device=device,
    )
    whole = teacher(head, config.vocab_size)
    if config.vocab_size == student_vocab:
        return whole
    cut = TruncatingTeacher(whole, student_vocab)
    with contextlib.closing(whole):
        if all(whole.holds(batch) for batch in heldout[:1]):
            record.phase(log, "measuring what the cut of the vocabulary drops")
            dropped = cut.dropped_mass(heldout[:1], device, temperature=spec.loss.temperature)
            record.vocabulary_cut(log, config.vocab_size, student_vocab, dropped)
        else:
            _log_cut(log, stored, student_vocab)
    return teacher(cut.head(), student_vocab)


def holds_heldout(teacher: CachedTeacher, heldout: Sequence[Batch]) -> bool:
    """Whether the teacher can be evaluated on held-out rows out of its store."""
    return teacher.gives_hidden and all(teacher.holds(batch) for batch in heldout)


def recall_heldout(
    log: LogWriter, teacher: CachedTeacher, heldout: Sequence[Batch]
) -> float | None:
    """Logs the teacher's held-out loss as it was when the store was made; where that was of other rows,
    that it is not known: a teacher is not loaded for this alone.
    """
    measured = teacher.store.manifest.measured
    if measured.heldout_sha256 != contents_sha256(heldout):
        text = "the teacher's held-out loss is not known: its outputs on these rows are not stored"
        log.write(Note(level="warning", text=f"{teacher.store.path}: {text}"))
        return None
    log.write(
        Evaluated(
            step=0,
            subject="teacher",
            loss=measured.loss,
            labelled=measured.labelled,
            eval_s=None,
        )
    )
    return measured.loss


def _hash_of(decoder: Decoder) -> str:
    return tensors_sha256(dict(decoder.named_parameters()) | dict(decoder.named_buffers()))


def _log_cut(log: LogWriter, stored: Stored, student_vocab: int) -> None:
    """What the cut of the vocabulary drops, as it was measured when the store was made."""
    measured, ids = stored.store.manifest.measured, stored.config.vocab_size
    if measured.dropped_mean is None or measured.dropped_max is None:
        return
    dropped = DroppedMass(
        mean=measured.dropped_mean, largest=measured.dropped_max, tokens=measured.dropped_tokens
    )
    record.vocabulary_cut(log, ids, student_vocab, dropped)
