"""Build the teacher, the student and the trainer of a run as planned.

    teacher -> student -> kernels of the loss and the update -> trainer

The log identifies models by the hashes of their tensors in memory. The teacher is built first, because the
student is compared with it: a student that is the same model is refused. The teacher's kernels are compiled here,
so that no step waits for a compilation (`engine.train.kernel_warm_up`).

A teacher may be read from stored outputs. Facts that otherwise come from the loaded teacher then come
from the store's manifest: the hash of its weights, which is valid because the files with the weights were compared
with the manifest; the probability mass that truncating the vocabulary drops; and its held-out loss when no hidden
states are stored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from engine.catalogue import skipped_ids
from engine.data.batches import Batch
from engine.errors import BadInput
from engine.formats.adapter import AdapterFolder
from engine.formats.open import open_weights
from engine.formats.safetensors import tensors_sha256
from engine.log.beats import BeatWriter
from engine.log.events import Evaluated, ModelReady, Note, Phase
from engine.log.view import RunView
from engine.models.adapter import adapt
from engine.models.config import ModelConfig, count_parameters
from engine.models.decoder import Decoder, Tensors
from engine.models.fused import use_kernels
from engine.models.head import Head
from engine.models.load import base_of, load_decoder, load_packed_decoder, new_decoder
from engine.models.load_fp8 import load_fp8_base
from engine.models.transformers_decoder import TransformersDecoder
from engine.plan.memory import written_rows
from engine.plan.run_plan import Plan, Stored, batches_of
from engine.runtime.device import torch_dtype
from engine.runtime.ranks import Ranks
from engine.spec import RunSpec
from engine.teachers.build import DTYPES, BuiltTeacher, build_teacher
from engine.teachers.protocol import Teacher
from engine.teachers.same_model import check_not_identical
from engine.teachers.sharded import ShardedLayers
from engine.teachers.store.fidelity import Fidelity, affordable_rows, compare, stored_rows
from engine.teachers.store.keys import CacheError, contents_sha256
from engine.teachers.store.teacher import CachedTeacher, load_head
from engine.teachers.truncating import DroppedMass, TruncatingTeacher
from engine.train import to_events
from engine.train.background import Background, ModelHash
from engine.train.checkpoint.continuing import check_same_teacher
from engine.train.data import Data
from engine.train.kernel_warm_up import Compiles, build_cudnn_attention
from engine.train.rollout import Rollout, turns_of
from engine.train.step import BeatObserver
from engine.train.stop_request import StopRequest
from engine.train.to_events import Log
from engine.train.trainer import Trainer
from engine.units import format_bytes

FREE_SHARE = 1.2
"""Free memory needed to load the teacher for a comparison with its store, relative to the size of its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTeacher:
    teacher: Teacher | None = None
    """None for a run without a teacher."""
    decoder: Decoder | None = None
    """The decoder inside the teacher; None when the teacher is read from stored outputs."""
    sha256: Callable[[], str] | None = None
    """Function that waits for the sha256 of the teacher's tensors, and returns it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """Builds the models and the trainer of a planned run."""

    plan: Plan
    data: Data
    compiles: Compiles
    stop: StopRequest
    ranks: Ranks
    beat: BeatWriter | None
    """The beats of this rank; None for a single process."""
    log: Log
    hashes: list[ModelHash] = field(default_factory=list)
    """Hashes of the models, computed in background threads."""

    @property
    def spec(self) -> RunSpec:
        return self.plan.spec

    @property
    def device(self) -> torch.device:
        return self.plan.compute.device

    def teacher(self, before: RunView | None) -> LoadedTeacher:
        """Return the teacher, ready to run.

        Its `sha256` raises CheckpointError when an earlier session, whose log is `before`, read different weights
        from the same file.
        """
        spec, log = self.spec.teacher, self.log
        backend, precision = spec.backend, spec.precision
        if backend == "none":
            return LoadedTeacher()
        if (store := self.plan.store) is not None:
            cached = self._stored_teacher(store)
            cached.proof = self._proof(cached, store.config)
            return LoadedTeacher(teacher=cached, sha256=lambda: store.identity.teacher_sha256)
        log(Phase(name="loading the teacher", detail=spec.path))
        teacher, decoder = self._build(backend, precision)
        self._warm_up_teacher(decoder)
        ready = partial(to_events.model, "teacher", spec.path, decoder.config, precision)
        sha256 = self._hashed(decoder, ready, in_background=spec.shard == "off")
        if isinstance(teacher, TruncatingTeacher):
            log(Phase(name="measuring the probability mass of the truncated tokens"))
            dropped = teacher.dropped_mass(
                self.data.heldout[:1],
                self.device,
                temperature=self.spec.loss.temperature,
            )
            log(to_events.vocabulary_cut(teacher.inner.vocab_size, teacher.vocab_size, dropped))

        def checked_sha256() -> str:
            check_same_teacher(before, digest := sha256(), spec.path, backend, precision)
            return digest

        return LoadedTeacher(teacher=teacher, decoder=decoder, sha256=checked_sha256)

    def fresh_student(self) -> Background[tuple[Decoder, Background[str]]] | None:
        """Start a thread that draws the weights of a fresh student on the CPU and hashes them. None for a student from
        files or one that transformers runs."""
        config, seed = self.plan.inputs.student, self.spec.train.seed
        if self.spec.student.path or not config.native:
            return None

        def draw() -> tuple[Decoder, Background[str]]:
            decoder = new_decoder(config, seed=seed)
            # These tensors stay on the CPU when the decoder moves to its device.
            tensors = {name: tensor.detach() for name, tensor in Tensors(decoder).items()}
            return decoder, Background(partial(tensors_sha256, tensors), "hash of fresh weights")

        return Background(draw, "fresh weights")

    def student(
        self,
        fresh: Background[tuple[Decoder, Background[str]]] | None,
        teacher_decoder: Decoder | None,
    ) -> tuple[Decoder, Callable[[], str]]:
        """Return the initial student, and a function that waits for the sha256 of its tensors.

        Raises WeightsError when it is the same model as the teacher, unless teacher.allow_identical is
        set.
        """
        spec = self.spec.student
        if spec.path:
            self.log(Phase(name="loading the student", detail=spec.path))
        else:
            detail = f"fresh weights, seed {self.spec.train.seed}"
            self.log(Phase(name="making the student", detail=detail))
        drawn, sha256 = (None, None) if fresh is None else fresh.result()
        student = self.untrained(teacher_decoder) if drawn is None else drawn.to(self.device)
        if self.spec.kernels.layers == "fused":
            use_kernels(student, frozen=False)
            if self.spec.kernels.prewarm:
                self.compiles.warm_up_student(student, torch_dtype(spec.precision), self.log)
        examine(student, "student", self.spec.data.seq_len, self.log)
        source, precision = (
            spec.path or f"fresh weights of {spec.config}",
            spec.precision,
        )
        ready = partial(to_events.model, "student", source, student.config, precision)
        self.hashes.append(ModelHash(sha256 or Tensors(student), ready, self.log))
        student_sha256 = self.hashes[-1].result
        if teacher_decoder is not None:
            section = self.spec.teacher
            note = check_not_identical(
                teacher_decoder,
                student,
                source,
                allowed=section.allow_identical or bool(section.context),
            )
            if note is not None and not section.context:
                self.log(Note(level="warning", text=note))
        return student, student_sha256

    def untrained(self, teacher: Decoder | None = None) -> Decoder:
        """Return the untrained student on its device, with the same weights at each call. The frozen base of its
        adapters may share the weights of `teacher`."""
        spec, device = self.spec, self.device
        if spec.student.adapter != "none":
            dtype = torch_dtype(spec.student.precision)
            with open_weights(spec.student.path) as weights:
                start = weights if isinstance(weights, AdapterFolder) else None
                source = weights if start is None else start.base
                if teacher is not None and teacher.config.native and self.plan.shares_weights:
                    base = base_of(teacher)
                elif spec.student.adapter_base == "fp8":
                    base = load_fp8_base(source, dtype, device)
                elif self.plan.inputs.student_blocks is not None:
                    base = base_of(load_packed_decoder(source, dtype, device))
                else:
                    base = load_decoder(source, dtype, device, spec.model)
            if not base.config.native:
                raise BadInput.expected(
                    "student.adapter",
                    spec.student.path,
                    "a model that the native decoder runs",
                    "one that transformers runs",
                )
            return adapt(base, spec.student, spec.train.seed, start)
        if spec.student.path:
            return load_decoder(Path(spec.student.path), torch.float32, device, spec.model)
        return new_decoder(self.plan.inputs.student, seed=spec.train.seed).to(device)

    def _hashed(
        self, decoder: Decoder, ready: Callable[[str], ModelReady], *, in_background: bool
    ) -> Callable[[], str]:
        """Return a function that waits for the sha256 of a model's tensors, computed in a thread if `in_background`."""
        if in_background:
            self.hashes.append(ModelHash(Tensors(decoder), ready, self.log))
            return self.hashes[-1].result
        sha256 = tensors_sha256(Tensors(decoder))
        self.log(ready(sha256))
        return lambda: sha256

    def warm_up(self) -> None:
        """Compile the kernels of the loss and the update."""
        spec = self.spec
        if spec.kernels.prewarm and spec.loss.kernel == "fused":
            self.compiles.warm_up_loss(self.plan, self.log)
        if spec.kernels.prewarm and spec.train.update == "fused":
            self.compiles.warm_up_update(self.log)

    def _rollout(self, student: Decoder, teacher: Decoder | None, ranks: Ranks) -> Rollout | None:
        """Return the generator of the run's rollout rows; None without rollouts. Raises BadInput."""
        spec = self.spec
        if not spec.rollout.share:
            return None
        writer = student if spec.rollout.by == "student" else teacher
        assert writer is not None, "the spec refuses rows generated by a teacher if there is none"
        if ranks.many and writer is teacher and spec.teacher.shard == "on":
            raise BadInput.expected(
                "rollout.by",
                "teacher",
                "a teacher that is whole on each rank",
                "a sharded one",
            )
        return Rollout(
            writer,
            self.plan.inputs.tokenizer,
            spec.rollout,
            seed=spec.train.seed,
            seq_len=spec.data.seq_len,
            slots=written_rows(spec),
            dtype=torch_dtype(spec.student.precision) if writer is student else writer.dtype,
            turns=turns_of(self.data.heldout),
            rank=ranks.rank,
        )

    def trainer(
        self,
        student: Decoder,
        teacher: Teacher | None,
        ranks: Ranks,
        teacher_decoder: Decoder | None = None,
    ) -> Trainer:
        """Return a trainer at step 0. `ranks` are those that shard `student`; for a full one, this rank alone."""
        spec = self.spec
        return Trainer(
            student=student,
            teacher=teacher,
            batches=batches_of(spec, self.data.stream),
            train=spec.train,
            loss=spec.loss,
            device=self.device,
            precision=spec.student.precision,
            slow_by=spec.compute.slow_by,
            rollout=self._rollout(student, teacher_decoder, ranks),
            ranks=ranks,
            stop_asked=lambda: self.stop.reason is not None,
            observers=(BeatObserver(self.beat),) if self.beat else (),
        )

    def entering(self) -> None:
        """Record that this rank enters a collective."""
        if self.beat is not None:
            self.beat.entering()

    def _stored_teacher(self, stored: Stored) -> CachedTeacher:
        """Return the teacher read from its store, truncated to the student's vocabulary.

        It is logged like a loaded teacher. If teacher.cache_miss is online, the teacher itself is built at the
        first row that is not stored. Raises WeightsError and, for a row that is not stored, CacheError.
        """
        spec, device, log = self.spec.teacher, self.device, self.log
        ids = self.plan.inputs.student.vocab_size
        store, identity, config = stored.store, stored.identity, stored.config
        for text in store.refusals:
            log(Note(level="warning", text=f"{text}; its rows are not used"))
        log(Note(level="info", text=f"teacher: read from {store.path}; {stored.teacher_evidence}"))
        log(
            to_events.model(
                "teacher", spec.path, config, identity.precision, identity.teacher_sha256
            )
        )

        def online() -> Teacher:
            detail = f"{spec.path}: for rows that are not stored"
            self.log(Phase(name="loading the teacher", detail=detail))
            built = self._build(identity.backend, identity.precision)
            sha256 = _hash_of(built.decoder)
            if sha256 != identity.teacher_sha256:
                raise CacheError.expected(
                    "teacher.cache",
                    store.path,
                    f"the teacher that the store was made with, sha256 {identity.teacher_sha256}",
                    f"{spec.path} with sha256 {sha256}",
                )
            detail = "with the teacher itself for rows that are not stored"
            self.log(Phase(name="training", detail=detail))
            return built.teacher

        def teacher(head: Head | None, width: int) -> CachedTeacher:
            return CachedTeacher(
                store,
                device=device,
                vocab_size=width,
                head=head,
                online=online if spec.cache_miss == "online" else None,
                say=lambda text: self.log(Note(level="warning", text=text)),
            )

        if identity.form != "hidden":
            _log_stored_cut(stored, ids, log)
            return teacher(None, ids)
        log(Phase(name="loading the teacher's head", detail=spec.path))
        head = load_head(
            spec.path,
            packed=identity.backend == "quantized",
            how=self.spec.model,
            dtype=DTYPES[identity.precision],
            device=device,
        )
        untruncated = teacher(head, config.vocab_size)
        if config.vocab_size == ids:
            return untruncated
        truncated = TruncatingTeacher(untruncated, ids)
        with contextlib.closing(untruncated):
            if all(untruncated.holds(batch) for batch in self.data.heldout[:1]):
                log(Phase(name="measuring the probability mass of the truncated tokens"))
                dropped = truncated.dropped_mass(
                    self.data.heldout[:1], device, temperature=self.spec.loss.temperature
                )
                log(to_events.vocabulary_cut(config.vocab_size, ids, dropped))
            else:
                _log_stored_cut(stored, ids, log)
        return teacher(truncated.head(), ids)

    def _proof(self, stored: CachedTeacher, config: ModelConfig) -> Fidelity | str:
        """Load the teacher and compare some stored rows of the run with it, or return why that is not possible."""
        spec, identity, device = self.spec, stored.store.identity, self.device
        if not spec.checks.enabled or "stored_outputs" in skipped_ids(spec.checks.skip):
            return "the comparison is disabled"
        with open_weights(spec.teacher.path) as weights:
            # The size of the weights in the file, in quantised blocks; a dequantised size replaces it below.
            size = sum(info.bytes for info in weights.tensors.values())
        if identity.backend != "quantized":
            size = count_parameters(config) * DTYPES[identity.precision].itemsize
        free = self.plan.compute.available.number
        if free is not None and free < FREE_SHARE * size:
            return f"not compared: the teacher needs {format_bytes(size)}, and {format_bytes(int(free))} are free"
        count = affordable_rows(config, spec.data.seq_len, device)
        trained_rows = spec.train.steps * spec.rows_per_step
        rows = stored_rows(batches_of(spec, self.data.stream), stored.store, count, trained_rows)
        if not rows:
            return "none of the run's rows is stored"
        self.log(Phase(name="comparing stored outputs with the teacher", detail=spec.teacher.path))
        built = self._build(identity.backend, identity.precision)
        fidelity = compare(stored, built.teacher, rows, device)
        del built
        if device.type == "cuda":
            # The memory plan assumes that no teacher is loaded, so its peak is measured from here on.
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        return fidelity

    def _build(self, backend: str, precision: str) -> BuiltTeacher:
        shards = None
        if self.spec.teacher.shard == "on":
            shards = ShardedLayers(self.ranks, self.device, self.entering)
        built = build_teacher(
            self.spec.teacher.path,
            backend=backend,
            precision=precision,
            device=self.device,
            student_vocab=self.plan.inputs.student.vocab_size,
            probe=self.data.heldout[0],
            shards=shards,
            kernels=self.spec.kernels.layers,
            how=self.spec.model,
            context=self.plan.inputs.context,
        )
        built.decoder.packed = self.spec.teacher.attention == "packed"
        built.decoder.cudnn = build_cudnn_attention(
            built.decoder, "teacher", self.spec, self.device, self.log, trained=False
        )
        examine(built.decoder, "teacher", self.spec.data.seq_len, self.log)
        return built

    def _warm_up_teacher(self, decoder: Decoder) -> None:
        """Compile every Triton kernel of the engine that `decoder` launches."""
        if self.spec.kernels.prewarm:
            self.compiles.warm_up(decoder, self.device, self.log)


def examine(decoder: Decoder, whose: str, length: int, log: Log) -> None:
    """Log how a model that transformers runs computes logits and separates documents."""
    if isinstance(decoder, TransformersDecoder):
        log(Phase(name=f"examining the {whose}", detail="logits and documents"))
        for decision in decoder.probe(whose, length):
            log(decision)


def holds_heldout(teacher: CachedTeacher, heldout: Sequence[Batch]) -> bool:
    """Return whether the teacher can be evaluated on the held-out rows from its store."""
    return teacher.gives_hidden and all(teacher.holds(batch) for batch in heldout)


def recall_heldout(teacher: CachedTeacher, heldout: Sequence[Batch]) -> Evaluated | Note:
    """Return the teacher's held-out loss as measured when the store was made.

    If it was measured on other rows, return a note that the loss is unknown: the teacher is not loaded just
    for this.
    """
    measured = teacher.store.manifest.measured
    if measured.heldout_sha256 != contents_sha256(heldout):
        text = "the teacher's held-out loss is not known: its outputs on these rows are not stored"
        return Note(level="warning", text=f"{teacher.store.path}: {text}")
    return Evaluated(
        step=0,
        subject="teacher",
        loss=measured.loss,
        labelled=measured.labelled,
        eval_s=None,
    )


def _hash_of(decoder: Decoder) -> str:
    return tensors_sha256(dict(decoder.named_parameters()) | dict(decoder.named_buffers()))


def _log_stored_cut(stored: Stored, student_vocab: int, log: Log) -> None:
    """Log the mass that truncating the vocabulary drops, as measured when the store was made."""
    measured, ids = stored.store.manifest.measured, stored.config.vocab_size
    if measured.dropped_mean is None or measured.dropped_max is None:
        return
    dropped = DroppedMass(
        mean=measured.dropped_mean, largest=measured.dropped_max, tokens=measured.dropped_tokens
    )
    log(to_events.vocabulary_cut(ids, student_vocab, dropped))
