"""The teacher, the student and the trainer of a run, built as the plan says.

    teacher -> student -> what loss and update launch -> trainer

Models are logged by the hashes of what is in memory. The teacher comes first: a student that is the same
model is refused by comparing the two. Its kernels and layers are compiled here, so that no step waits for
one (`engine.train.compiles`); the layers of the student later, when a resume has put its weights there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.data.batches import Batches
from engine.log.beats import BeatWriter
from engine.log.events import Note
from engine.log.view import RunView
from engine.log.write import LogWriter
from engine.models.decoder import Decoder
from engine.models.load import load_decoder, new_decoder
from engine.plan.choose_running import updating
from engine.plan.device import Arithmetic
from engine.plan.inputs import Inputs
from engine.plan.run_plan import Plan
from engine.runtime.ranks import Ranks
from engine.spec import RunSpec
from engine.teachers.build import BuiltTeacher, build_teacher
from engine.teachers.identity import check_not_identical
from engine.teachers.prefetching import PrefetchingTeacher
from engine.teachers.protocol import Teacher
from engine.teachers.sharded import ShardedLayers
from engine.teachers.truncating import TruncatingTeacher
from engine.train import record
from engine.train.compiles import Compiles
from engine.train.data import Data
from engine.train.drift import check_same_teacher
from engine.train.prepared import cached_teacher
from engine.train.stopping import StopRequest
from engine.train.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTeacher:
    teacher: Teacher | None = None
    """None for a run without one."""
    decoder: Decoder | None = None
    """What computes inside it; None where its outputs are stored too."""
    sha256: str | None = None
    """Of its tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """What there is before the first weight."""

    log: LogWriter
    spec: RunSpec
    inputs: Inputs
    arithmetic: Arithmetic
    data: Data
    plan: Plan
    compiles: Compiles
    stop: StopRequest
    ranks: Ranks
    beat: BeatWriter | None
    """Of this rank, where there are several."""

    def teacher(self, before: RunView | None) -> LoadedTeacher:
        """The teacher, ready to be asked. Raises CheckpointError where an earlier session, of which the log
        is `before`, had other weights out of the same file.
        """
        spec, log, plan = self.spec.teacher, self.log, self.plan
        backend, precision = plan.fitted.backend, plan.precision
        if backend == "none":
            return LoadedTeacher()
        if plan.stored is not None:
            cached = cached_teacher(
                log,
                self.spec,
                plan.stored,
                self.data.heldout,
                student_vocab=self.inputs.student.vocab_size,
                device=self.arithmetic.device,
                load=self._build,
            )
            return LoadedTeacher(teacher=cached, sha256=plan.stored.identity.teacher_sha256)
        record.phase(log, "loading the teacher", spec.path)
        teacher, decoder = self._build(backend, precision)
        self._warm_up_teacher(decoder)
        sha256 = record.model(log, "teacher", spec.path, decoder, precision)
        check_same_teacher(before, sha256, spec.path, backend, precision)
        if isinstance(teacher, TruncatingTeacher):
            record.phase(log, "measuring what the cut of the vocabulary drops")
            dropped = teacher.dropped_mass(
                self.data.heldout[:1],
                self.arithmetic.device,
                temperature=self.spec.loss.temperature,
            )
            record.vocabulary_cut(log, teacher.inner.vocab_size, teacher.vocab_size, dropped)
        if plan.running.teacher_compiled:
            record.phase(log, "compiling the teacher's layers")
            self.compiles.compile_teacher(
                teacher, decoder, self.data.heldout[0], self.spec.train.rows, precision
            )
        if plan.running.prefetches:
            teacher = PrefetchingTeacher(teacher, self.arithmetic.device)
        return LoadedTeacher(teacher=teacher, decoder=decoder, sha256=sha256)

    def student(self, teacher_decoder: Decoder | None) -> tuple[Decoder, str]:
        """The student as it begins, and the sha256 of its tensors. Raises WeightsError for one that is the
        teacher, unless teacher.allow_identical.
        """
        spec, seed, device = self.spec.student, self.spec.train.seed, self.arithmetic.device
        if spec.path:
            record.phase(self.log, "loading the student", spec.path)
            student = load_decoder(Path(spec.path), dtype=torch.float32, device=device)
        else:
            record.phase(self.log, "making the student", f"fresh weights, seed {seed}")
            student = new_decoder(self.inputs.student, seed=seed).to(device)
        source = spec.path or f"fresh weights of {spec.config}"
        sha256 = record.model(self.log, "student", source, student, self.arithmetic.precision)
        if teacher_decoder is not None:
            allowed = self.spec.teacher.allow_identical
            note = check_not_identical(teacher_decoder, student, source, allowed=allowed)
            if note is not None:
                self.log.write(Note(level="warning", text=note))
        return student, sha256

    def warm_up(self) -> str:
        """Compiles what the loss and the update launch; returns what makes an update of gradients."""
        spec = self.spec
        if spec.kernels.prewarm and self.plan.loss_kernel == "fused":
            self.compiles.warm_up_loss(
                self.inputs.student.vocab_size,
                spec.loss,
                self.arithmetic.precision,
                teaching=spec.has_teacher and spec.loss.alpha < 1,
                sparse=self.plan.sparse,
            )
        update = updating(self.log, spec, self.arithmetic)
        if spec.kernels.prewarm and update == "fused":
            self.compiles.warm_up_update()
        return update

    def trainer(
        self, student: Decoder, teacher: Teacher | None, *, update: str, ranks: Ranks
    ) -> Trainer:
        """A trainer at step 0. `ranks` are those that share `student`: of one that is whole, this alone."""
        spec, plan = self.spec, self.plan
        return Trainer(
            student=student,
            teacher=teacher,
            batches=Batches(
                self.data.stream,
                seq_len=spec.data.seq_len,
                rows_per_batch=spec.train.rows,
                seed=spec.train.seed,
            ),
            train=replace(spec.train, update=update),
            loss=replace(spec.loss, kernel=plan.loss_kernel, chunk_rows=plan.fitted.chunk_rows),
            device=self.arithmetic.device,
            precision=self.arithmetic.precision,
            slow_by=spec.compute.slow_by,
            ranks=ranks,
            stop_asked=lambda: self.stop.reason is not None,
            arrived=self.beat.write if self.beat else lambda step: None,
        )

    def entering(self) -> None:
        """This rank enters a collective."""
        if self.beat is not None:
            self.beat.entering()

    def _build(self, backend: str, precision: str) -> BuiltTeacher:
        shards = None
        if self.plan.fitted.teacher_shard:
            shards = ShardedLayers(self.ranks, self.arithmetic.device, self.entering)
        built = build_teacher(
            self.spec.teacher.path,
            backend=backend,
            precision=precision,
            kernel=self.spec.teacher.kernel,
            device=self.arithmetic.device,
            student_vocab=self.inputs.student.vocab_size,
            probe=self.data.heldout[0],
            shards=shards,
            joined=self.plan.running.teacher_compiled,
        )
        built.decoder.packed = self.plan.running.teacher_packed
        return built

    def _warm_up_teacher(self, decoder: Decoder) -> None:
        """Every kernel that batches of training and of held-out rows launch in `decoder`."""
        if self.spec.kernels.prewarm:
            rows = {self.spec.train.rows} | {len(b.tokens_BT) for b in self.data.heldout}
            tokens = {count * self.spec.data.seq_len for count in rows}
            self.compiles.warm_up(decoder, tokens, self.arithmetic.device)
