"""The one place that puts a run together: it reads like the recipe it is.

    settings -> device -> data -> teacher -> student -> (resume) -> steps, each logged -> held-out
    losses -> student, receipt

Everything below this module returns values; this module has them written into the log. What the log
says was read back from the built objects: the learning rate from the optimizer, the rows from the
batches, the hashes from the tensors.
"""

from __future__ import annotations

import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.checks.check import Result
from engine.checks.context import Context, Memory
from engine.checks.runner import Checks
from engine.data.batches import Batches
from engine.distill import record
from engine.distill.checking import context_of
from engine.distill.choose_ranks import choose_sharded
from engine.distill.compiles import Compiles
from engine.distill.drift import check_same_teacher, versions_changed
from engine.distill.heldout import heldout_loss
from engine.distill.inputs import Inputs, check_inputs
from engine.distill.keep import Keeper
from engine.distill.prepared import (
    cached_teacher,
    find_stored,
    holds_heldout,
    recall_heldout,
)
from engine.distill.receipt import Outcome, save_student, write_receipt
from engine.distill.roofline import Bound, flops_per_token, peak_flops
from engine.distill.setup import (
    choose_arithmetic,
    choose_running,
    kernel_for,
    loss_kernel,
    plan_memory,
    prepare_data,
    updating,
)
from engine.distill.sharding import least_available, whole_student
from engine.distill.state import capture, restore
from engine.distill.stopping import StopRequest
from engine.distill.student import put_into_graphs, put_to_run
from engine.distill.trainer import Trainer
from engine.errors import EXIT_FAIL, DiskFull, EngineError, TrainingFailed
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.head import DenseHead, Head
from engine.models.load import load_decoder, new_decoder
from engine.runlog.beats import BeatWriter, log_of
from engine.runlog.events import Evaluated, Note, RunFinished, StopRequested, name_of_non_finite
from engine.runlog.folder import RunFolder, open_run
from engine.runlog.follow import Follower
from engine.runlog.view import RunView
from engine.runlog.write import LogWriter
from engine.runtime.device import choose_precision
from engine.runtime.ranks import Ranks, join, leave, ranks_here, shard, use_own_gpu
from engine.spec import RunSpec, spec_from_dict
from engine.teachers.build import BuiltTeacher, build_teacher
from engine.teachers.cache_rows import HIDDEN
from engine.teachers.cached import CachedTeacher
from engine.teachers.choose import choose_teacher_precision
from engine.teachers.identity import check_not_identical
from engine.teachers.prefetching import PrefetchingTeacher
from engine.teachers.protocol import Teacher
from engine.teachers.sharded import ShardedLayers
from engine.teachers.truncating import TruncatingTeacher

MEMORY_SETTLED_AFTER = 3
"""Steps after which the allocator has seen every phase of a step."""


def run(path: Path, *, resume: bool, allow_fallback: bool, keep_alive_fd: int | None) -> int:
    """Train the run in `path` to its end; returns the exit code. However it ends, the log says
    so before this returns.
    """
    folder = open_run(path)
    spec = spec_from_dict(json.loads(folder.effective.read_text())["spec"])
    ranks = ranks_here()
    before = Follower(folder).read_all() if resume else None
    writer = "trainer" if ranks.first else f"rank {ranks.rank}"
    with LogWriter(log_of(folder, ranks.rank), writer=writer) as log:
        stop = StopRequest()
        stop.watch_signals()
        if keep_alive_fd is not None:
            stop.watch_supervisor(
                keep_alive_fd, lambda text: log.write(Note(level="error", text=text))
            )
        job = _Job(spec, folder, log, stop, before, ranks)
        try:
            if ranks.first:
                folder.keep_reserve()
            finished = job.carry_out(allow_fallback=allow_fallback)
        except EngineError as error:
            if isinstance(error, DiskFull) and ranks.first:
                folder.free_reserve()
            print(error, file=sys.stderr)
            finished = job.failed(str(error), error.exit_code)
        except (torch.OutOfMemoryError, MemoryError) as error:
            traceback.print_exc()
            where = "device" if isinstance(error, torch.OutOfMemoryError) else "host"
            finished = job.failed(f"the {where} allocator refused: {error}", EXIT_FAIL)
        except Exception as error:  # noqa: BLE001 - the last place that can say how the run ended
            traceback.print_exc()
            finished = job.failed(f"{type(error).__name__}: {error}", EngineError.exit_code)
        else:
            leave(ranks)
        stop.answered()
        if ranks.first:
            folder.free_reserve()
        log.write(finished)
        log.sync()
        return finished.exit_code


class _Job:
    """One session of one run."""

    def __init__(
        self,
        spec: RunSpec,
        folder: RunFolder,
        log: LogWriter,
        stop: StopRequest,
        before: RunView | None,
        ranks: Ranks,
    ) -> None:
        self.spec, self.folder, self.log, self.stop = spec, folder, log, stop
        self.ranks = ranks
        self.before = before
        """What the log of a resumed run says of its earlier sessions."""
        self.begun_s = time.monotonic()
        self.step = 0
        self.keeper = Keeper(log, folder, spec, ranks)
        self.beat = BeatWriter(folder, ranks.rank) if ranks.many else None
        self.heldout_losses: dict[str, float] = {}
        self.sha256: dict[str, str] = {}
        self.teacher_decoder: Decoder | None = None
        self.compiles = Compiles(log)
        self.checks = Checks(spec)

    def _entering(self) -> None:
        """This rank enters a collective."""
        if self.beat is not None:
            self.beat.entering()

    def failed(self, reason: str, exit_code: int) -> RunFinished:
        return RunFinished(state="failed", reason=reason, exit_code=exit_code, step=self.step)

    def carry_out(self, *, allow_fallback: bool) -> RunFinished:
        spec = self.spec
        inputs = check_inputs(spec, self.folder.path)
        for note in inputs.notes:
            self.log.write(Note(level="warning", text=note))
        use_own_gpu(self.ranks)
        self.arithmetic = arithmetic = choose_arithmetic(self.log, spec)
        self.device = arithmetic.device
        if self.ranks.many:
            record.phase(self.log, "meeting the other ranks", f"{self.ranks.world} of them")
            join(self.ranks, self.device, timeout_s=spec.compute.collective_timeout_s)
            # Ranks that chose for themselves would not do the same collectives.
            available = least_available(self.ranks, arithmetic.available, self.device)
            self.arithmetic = arithmetic = replace(arithmetic, available=available)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.data = prepare_data(self.log, spec, inputs, self.before.data if self.before else None)
        with arithmetic.memory.use():
            teacher = self._load_teacher(inputs)
            student = self._make_student(inputs.student)
            self._warm_up_loss(inputs.student)
            self.update = updating(self.log, spec, arithmetic)
            if spec.kernels.prewarm and self.update == "fused":
                self.compiles.warm_up_update()
            trainer = self._make_trainer(student, teacher, Ranks())
        resumed_from = None
        if self.before is not None:
            # One rank at a time decides what is damaged and sets it aside: the first.
            if not self.ranks.first:
                self.ranks.wait_for_all()
            self.heldout_losses |= self.keeper.restore(trainer, self.before, allow_fallback)
            if self.ranks.first:
                self.ranks.wait_for_all()
            resumed_from = trainer.step
        # Sharded layers are others to a compiler, and are compiled when they are sharded.
        self._put_to_run(trainer, compiled=self.running.compiled and not self.ranks.many)
        begun = record.start(
            self.log, self.folder.name, spec, trainer, resumed_from, self._bound(trainer, inputs)
        )
        if changed := versions_changed(self.before, begun):
            self.log.write(Note(level="warning", text=changed))
        if trainer.step == 0:
            if isinstance(teacher, CachedTeacher) and not holds_heldout(teacher, self.data.heldout):
                loss = recall_heldout(self.log, teacher, self.data.heldout)
                self.heldout_losses |= {} if loss is None else {"teacher": loss}
            elif teacher is not None:
                self._evaluate("teacher", teacher.hidden, teacher.head(), trainer)
            self._evaluate("untrained", student.hidden, DenseHead(student.head_weight), trainer)
        self._check(trainer, inputs)
        if self.ranks.many:
            trainer = self._shard(trainer)
            self.checks.look_at(self._context(trainer, inputs))
            # Once nothing holds what every rank had alone.
            self._put_to_run(trainer, compiled=self.running.compiled)
        with arithmetic.memory.use():  # AdamW makes its moments in the first step
            ended_early = self._train(trainer)
        self.compiles.write_counts(self.step)
        if isinstance(teacher, CachedTeacher):
            self.log.write(Note(level="info", text=teacher.summary))
        if ended_early is not None:
            return ended_early
        if spec.checkpoint.at_end:
            self._leave_results(trainer, inputs)
        return RunFinished(
            state="completed", reason="every step done", exit_code=0, step=trainer.step
        )

    def _make_trainer(self, student: Decoder, teacher: Teacher | None, ranks: Ranks) -> Trainer:
        spec = self.spec
        return Trainer(
            student=student,
            teacher=teacher,
            batches=Batches(
                self.data.stream,
                seq_len=spec.data.seq_len,
                rows_per_batch=spec.train.rows,
                seed=spec.train.seed,
            ),
            train=replace(spec.train, update=self.update),
            loss=replace(spec.loss, kernel=self.loss_kernel, chunk_rows=self.chunk_rows),
            device=self.device,
            precision=self.arithmetic.precision,
            slow_by=spec.compute.slow_by,
            ranks=ranks,
            stop_asked=lambda: self.stop.reason is not None,
            arrived=self.beat.write if self.beat else lambda step: None,
        )

    def _shard(self, alone: Trainer) -> Trainer:
        """The same trainer with its student shared out over the ranks; until here every rank has
        done the same on its own.
        """
        record.phase(self.log, "sharding the student", f"over {self.ranks.world} ranks")
        captured = capture(
            alone.student,
            alone.optimizer,
            step=alone.step,
            seed=self.spec.train.seed,
            spec_sha256=self.spec.sha256,
            position={"rows": alone.position},
            best_held_out_loss=None,
        )
        student = alone.student
        shard(
            student,
            student.layers,
            self.ranks,
            self.device,
            reshard=self.reshard,
            entering=self._entering,
        )
        trainer = self._make_trainer(alone.student, alone.teacher, self.ranks)
        restore(captured, trainer.student, trainer.optimizer)
        trainer.step, trainer.position = alone.step, alone.position
        # Weights and two moments, in fp32.
        size = 12 * sum(p.numel() for p in trainer.parameters)
        choice = choose_sharded(self.spec.checkpoint.sharded, whole_bytes=size)
        self.keeper.sharded = record.decide(self.log, choice) == "on"
        return trainer

    def _load_teacher(self, inputs: Inputs) -> Teacher | None:
        spec, log = self.spec.teacher, self.log
        precision = "fp32"
        stored = find_stored(self.spec, inputs, self.data.stream)
        if stored is not None:
            precision = record.decide(log, stored.precision)
        elif self.spec.has_teacher:
            choice = choose_teacher_precision(
                spec.precision, device=self.device.type, capability=self.arithmetic.capability
            ) or choose_precision("teacher.precision", spec.precision, self.device.type)
            precision = record.decide(log, choice)
        self.loss_kernel = loss_kernel(log, self.spec, self.arithmetic)
        self.sparse = stored is not None and stored.identity.form != HIDDEN
        self.running = choose_running(
            log,
            self.spec,
            inputs,
            self.arithmetic,
            precision,
            asks_teacher=stored is None,
        )
        fitted = plan_memory(
            log,
            self.spec,
            inputs,
            self.arithmetic,
            precision,
            self.running,
            stored,
            fused_loss=self.loss_kernel == "fused",
        )
        backend, self.checkpointing = fitted.backend, fitted.checkpointing
        self.budget = fitted.budget
        self.chunk_rows, self.reshard = fitted.chunk_rows, fitted.reshard
        self.shares_teacher = fitted.teacher_shard
        self.graphed = fitted.graphs
        if backend == "none":
            return None
        if stored is not None:
            self.sha256["teacher"] = stored.identity.teacher_sha256
            return cached_teacher(
                log,
                self.spec,
                stored,
                self.data.heldout,
                student_vocab=inputs.student.vocab_size,
                device=self.device,
                load=partial(self._build_teacher, inputs),
            )
        if backend == "quantized" and inputs.teacher is not None:
            tokens = self.spec.train.rows * self.spec.data.seq_len
            record.decide(
                log, kernel_for(spec.kernel, inputs.teacher, tokens, self.arithmetic.capability)
            )
        record.phase(log, "loading the teacher", spec.path)
        teacher, self.teacher_decoder = self._build_teacher(inputs, backend, precision)
        self._warm_up(self.teacher_decoder)
        self.sha256["teacher"] = record.model(
            log, "teacher", spec.path, self.teacher_decoder, precision
        )
        check_same_teacher(self.before, self.sha256["teacher"], spec.path, backend, precision)
        if isinstance(teacher, TruncatingTeacher):
            record.phase(log, "measuring what the cut of the vocabulary drops")
            dropped = teacher.dropped_mass(
                self.data.heldout[:1], self.device, temperature=self.spec.loss.temperature
            )
            record.vocabulary_cut(log, teacher.inner.vocab_size, teacher.vocab_size, dropped)
        if self.running.teacher_compiled:
            record.phase(log, "compiling the teacher's layers")
            self.compiles.compile_teacher(
                teacher, self.teacher_decoder, self.data.heldout[0], self.spec.train.rows, precision
            )
        return PrefetchingTeacher(teacher, self.device) if self.running.prefetches else teacher

    def _build_teacher(self, inputs: Inputs, backend: str, precision: str) -> BuiltTeacher:
        shards = None
        if self.shares_teacher:
            shards = ShardedLayers(self.ranks, self.device, self._entering)
        built = build_teacher(
            self.spec.teacher.path,
            backend=backend,
            precision=precision,
            kernel=self.spec.teacher.kernel,
            device=self.device,
            student_vocab=inputs.student.vocab_size,
            probe=self.data.heldout[0],
            shards=shards,
            joined=self.running.teacher_compiled,
        )
        built.decoder.packed = self.running.teacher_packed
        return built

    def _warm_up(self, decoder: Decoder) -> None:
        if self.spec.kernels.prewarm:
            rows = {self.spec.train.rows} | {len(b.tokens_BT) for b in self.data.heldout}
            tokens = {count * self.spec.data.seq_len for count in rows}
            self.compiles.warm_up(decoder, tokens, self.device)

    def _warm_up_loss(self, student: ModelConfig) -> None:
        if self.spec.kernels.prewarm and self.loss_kernel == "fused":
            loss = self.spec.loss
            teaching = self.spec.has_teacher and loss.alpha < 1
            self.compiles.warm_up_loss(
                student.vocab_size,
                loss,
                self.arithmetic.precision,
                teaching=teaching,
                sparse=self.sparse,
            )

    def _make_student(self, config: ModelConfig) -> Decoder:
        spec, seed = self.spec.student, self.spec.train.seed
        if spec.path:
            record.phase(self.log, "loading the student", spec.path)
            student = load_decoder(Path(spec.path), dtype=torch.float32, device=self.device)
        else:
            record.phase(self.log, "making the student", f"fresh weights, seed {seed}")
            student = new_decoder(config, seed=seed).to(self.device)
        source = spec.path or f"fresh weights of {spec.config}"
        self.sha256["student_start"] = record.model(
            self.log, "student", source, student, self.arithmetic.precision
        )
        if self.teacher_decoder is not None:
            allowed = self.spec.teacher.allow_identical
            note = check_not_identical(self.teacher_decoder, student, source, allowed=allowed)
            if note is not None:
                self.log.write(Note(level="warning", text=note))
        return student

    def _bound(self, trainer: Trainer, inputs: Inputs) -> Bound:
        on_gpu = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device) if on_gpu else "a CPU"
        return Bound(
            flops_per_token=flops_per_token(
                inputs.student,
                inputs.teacher if trainer.teaching else None,
                self.spec.data.seq_len,
            ),
            peak=peak_flops(name, self.ranks.world),
        )

    def _put_to_run(self, trainer: Trainer, *, compiled: bool) -> None:
        """The student's layers as was chosen, compiled before anything waits for them."""
        if compiled:
            record.phase(self.log, "compiling the student's layers")
        agreement = put_to_run(
            trainer,
            length=self.spec.data.seq_len,
            compiled=compiled,
            packed=self.running.packed,
            checkpointing=self.checkpointing,
        )
        self.compiles.write()
        if agreement is not None:
            text = f"compiled layers are as far from the layers as written as rounding takes them: {agreement}"
            self.log.write(Note(level="info", text=text))
        if self.graphed:
            record.phase(self.log, "capturing the student's layers")
            captured = put_into_graphs(trainer, length=self.spec.data.seq_len)
            text = f"captured layers are as far from layers launched one by one as rounding takes them: {captured}"
            self.log.write(Note(level="info", text=text))

    def _check(self, trainer: Trainer, inputs: Inputs) -> None:
        """First-minute checks; whatever fails, all are asked before the run is stopped."""
        record.phase(self.log, "checking")
        self._answer(self.checks.before_training(self._context(trainer, inputs)))

    def _context(self, trainer: Trainer, inputs: Inputs) -> Context:
        return context_of(
            trainer,
            self.spec,
            teacher_decoder=self.teacher_decoder,
            train_stream=self.data.stream,
            heldout_stream=self.data.heldout_stream,
            heldout=self.data.heldout,
            tokenizers=inputs.tokenizers,
            memory=self._memory,
            late_compiles=lambda: self.compiles.late,
        )

    def _memory(self) -> Memory:
        measured, source = record.peak_of(self.device)
        return Memory(
            predicted_bytes=self.budget.total_bytes, measured_bytes=measured, source=source
        )

    def _answer(self, results: Iterator[Result]) -> None:
        """Logs what checks say; TrainingFailed, once all are logged, when one ends the run."""
        worthless = []
        for result in results:
            record.checked(self.log, result)
            if self.checks.ends_run(result):
                worthless.append(result)
        if worthless:
            raise TrainingFailed(
                "\n".join(f"check {result}" for result in worthless),
                hint=f"{worthless[0].about.remedy} checks.on_fail=report would go on past it",
            )

    def _train(self, trainer: Trainer) -> RunFinished | None:
        """Every step that is left. None when all are done, else how the run ended before that."""
        spec = self.spec
        self.step = self.keeper.saved_step = begun_at = trainer.step
        record.phase(self.log, "training", f"from step {trainer.step} to {spec.train.steps}")
        for step in trainer.steps(lambda step: self._may_run_ahead(step, begun_at)):
            self.step = step.step
            record.step(self.log, step, spec.loss.temperature)
            self.compiles.write()
            self._answer(self.checks.after_step(step))
            if step.step == begun_at + 1:
                # Whatever torch compiles for itself it has compiled by now.
                self.compiles.seal()
            if not step.updated and spec.train.on_non_finite == "stop":
                names = ", ".join(f"{n} is {name_of_non_finite(v)}" for n, v in step.non_finite())
                raise TrainingFailed(
                    f"{names} at step {step.step}; the weights were not changed by it",
                    hint="look at the steps before it; train.on_non_finite=skip would go on past it",
                )
            last = step.step == spec.train.steps
            settled = self.device.type == "cuda" and step.step == begun_at + MEMORY_SETTLED_AFTER
            if last or settled:
                record.memory_peak(self.log, step.step, self.budget, self.device)
            save = (last and spec.checkpoint.at_end) or _due(step.step, spec.checkpoint.every)
            pause = last or save or _due(step.step, spec.eval.every)
            if pause:
                record.phase(self.log, "evaluating")
                student = whole_student(trainer.student)
                self._evaluate("student", student.hidden, DenseHead(student.head_weight), trainer)
            if save:
                record.phase(self.log, "saving a checkpoint")
                saved = self.keeper.save(trainer, self.heldout_losses.get("student"))
                self._answer(self.checks.at_checkpoint(saved, step.step, student))
            if pause and not last:
                record.phase(self.log, "training")
            if step.stop_asked and not last:
                return self._stop_as_asked(trainer)
            if step.step == self._paused_at(begun_at) and not last:
                return self._pause(trainer)
        return None

    def _may_run_ahead(self, step: int, begun_at: int) -> bool:
        """Whether nothing will look at the run as `step` leaves it."""
        spec = self.spec
        looks = (
            step <= begun_at + MEMORY_SETTLED_AFTER
            or step in (spec.train.steps, self._paused_at(begun_at))
            or _due(step, spec.checkpoint.every)
            or _due(step, spec.eval.every)
        )
        return not looks and not self.checks.looks_at_weights and self.stop.reason is None

    def _paused_at(self, begun_at: int) -> int:
        """The step after which train.stop_after ends the session; the last step without it."""
        after = self.spec.train.stop_after
        return begun_at + after if after else self.spec.train.steps

    def _pause(self, trainer: Trainer) -> RunFinished:
        record.memory_peak(self.log, self.step, self.budget, self.device)
        reason = f"train.stop_after = {self.spec.train.stop_after}: the step was finished"
        if not self.spec.checkpoint.at_end:
            return RunFinished(state="stopped", reason=reason, exit_code=0, step=self.step)
        if self.keeper.saved_step != self.step:
            record.phase(self.log, "saving a checkpoint")
            saved = self.keeper.save(trainer, self.heldout_losses.get("student"))
            whole = whole_student(trainer.student)
            self._answer(self.checks.at_checkpoint(saved, self.step, whole))
        return RunFinished(
            state="stopped", reason=f"{reason} and saved", exit_code=0, step=self.step
        )

    def _stop_as_asked(self, trainer: Trainer) -> RunFinished:
        self.stop.answered()
        reason = self.stop.reason or "asked of another rank"
        self.log.write(StopRequested(reason=reason, step=self.step))
        if self.keeper.saved_step != self.step:
            self.keeper.save(trainer, self.heldout_losses.get("student"))
        return RunFinished(
            state="stopped",
            reason=f"{reason}: the step was finished and saved",
            exit_code=self.stop.exit_code,
            step=self.step,
        )

    def _evaluate(
        self,
        subject: str,
        hidden: Callable[[Tensor, Tensor], Tensor],
        head: Head,
        trainer: Trainer,
    ) -> None:
        begun_s = time.perf_counter()
        loss, labelled = heldout_loss(
            hidden, head, self.data.heldout, self.device, trainer.autocast
        )
        self.heldout_losses[subject] = loss
        self.log.write(
            Evaluated(
                step=trainer.step,
                subject=subject,
                loss=loss,
                labelled=labelled,
                eval_s=time.perf_counter() - begun_s,
            )
        )
        if not math.isfinite(loss):
            record.fail_at(self.log, self.step, "heldout_loss", loss)

    def _leave_results(self, trainer: Trainer, inputs: Inputs) -> None:
        record.phase(self.log, "saving the student", str(self.folder.student))
        student = whole_student(trainer.student)
        if not self.ranks.first:
            return
        self.sha256["student"] = save_student(
            self.log, self.folder, student, inputs, self.spec.student.save_as
        )
        outcome = Outcome(
            spec=self.spec,
            data=self.data.ready,
            model_sha256=self.sha256,
            heldout_losses=self.heldout_losses,
            best_step=self.keeper.best_step,
            steps=trainer.step,
            rows=trainer.position,
            device=str(self.device),
            session_s=time.monotonic() - self.begun_s,
        )
        write_receipt(self.folder, outcome)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
