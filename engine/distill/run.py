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
from pathlib import Path

import torch
from torch import Tensor

from engine.checks.check import Result
from engine.checks.context import Memory
from engine.checks.runner import Checks
from engine.data.batches import Batches
from engine.distill import record
from engine.distill.checking import context_of
from engine.distill.compiles import Compiles
from engine.distill.heldout import heldout_loss
from engine.distill.inputs import Inputs, check_inputs
from engine.distill.keep import Keeper
from engine.distill.receipt import Outcome, save_student, write_receipt
from engine.distill.setup import choose_arithmetic, kernel_for, plan_memory, prepare_data
from engine.distill.stopping import StopRequest
from engine.distill.trainer import Trainer
from engine.errors import EXIT_FAIL, DiskFull, EngineError, TrainingFailed
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.head import DenseHead, Head
from engine.models.load import load_decoder, new_decoder
from engine.runlog.events import Evaluated, Note, RunFinished, StopRequested, name_of_non_finite
from engine.runlog.folder import RunFolder, open_run
from engine.runlog.follow import Follower
from engine.runlog.view import RunView
from engine.runlog.write import LogWriter
from engine.runtime.device import choose_precision
from engine.spec import RunSpec, spec_from_dict
from engine.teachers.build import build_teacher
from engine.teachers.choose import choose_teacher_precision
from engine.teachers.identity import check_not_identical
from engine.teachers.protocol import Teacher
from engine.teachers.truncating import TruncatingTeacher

MEMORY_SETTLED_AFTER = 3
"""Steps after which the allocator has seen every phase of a step."""


def run(path: Path, *, resume: bool, allow_fallback: bool, keep_alive_fd: int | None) -> int:
    """Train the run in `path` to its end; returns the exit code. However it ends, the log says
    so before this returns.
    """
    folder = open_run(path)
    spec = spec_from_dict(json.loads(folder.effective.read_text())["spec"])
    before = Follower(folder).read_all() if resume else None
    folder.keep_reserve()
    with LogWriter(folder.events, writer="trainer") as log:
        stop = StopRequest()
        stop.watch_signals()
        if keep_alive_fd is not None:
            stop.watch_supervisor(
                keep_alive_fd, lambda text: log.write(Note(level="error", text=text))
            )
        job = _Job(spec, folder, log, stop, before)
        try:
            finished = job.carry_out(allow_fallback=allow_fallback)
        except EngineError as error:
            if isinstance(error, DiskFull):
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
        stop.answered()
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
    ) -> None:
        self.spec, self.folder, self.log, self.stop = spec, folder, log, stop
        self.before = before
        """What the log of a resumed run says of its earlier sessions."""
        self.begun_s = time.monotonic()
        self.step = 0
        self.keeper = Keeper(log, folder, spec)
        self.heldout_losses: dict[str, float] = {}
        self.sha256: dict[str, str] = {}
        self.teacher_decoder: Decoder | None = None
        self.compiles = Compiles(log)
        self.checks = Checks(spec)

    def failed(self, reason: str, exit_code: int) -> RunFinished:
        return RunFinished(state="failed", reason=reason, exit_code=exit_code, step=self.step)

    def carry_out(self, *, allow_fallback: bool) -> RunFinished:
        spec = self.spec
        inputs = check_inputs(spec, self.folder.path)
        for note in inputs.notes:
            self.log.write(Note(level="warning", text=note))
        self.arithmetic = arithmetic = choose_arithmetic(self.log, spec)
        self.device = arithmetic.device
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.data = prepare_data(self.log, spec, inputs, self.before.data if self.before else None)
        with arithmetic.memory.use():
            teacher = self._load_teacher(inputs)
            student = self._make_student(inputs.student)
            trainer = Trainer(
                student=student,
                teacher=teacher,
                batches=Batches(
                    self.data.stream,
                    seq_len=spec.data.seq_len,
                    rows_per_batch=spec.train.rows,
                    seed=spec.train.seed,
                ),
                train=spec.train,
                loss=spec.loss,
                device=self.device,
                precision=arithmetic.precision,
                slow_by=spec.compute.slow_by,
            )
        resumed_from = None
        if self.before is not None:
            self.heldout_losses |= self.keeper.restore(trainer, self.before, allow_fallback)
            resumed_from = trainer.step
        record.start(self.log, self.folder.name, spec, trainer, resumed_from)
        if trainer.step == 0:
            if teacher is not None:
                self._evaluate("teacher", teacher.hidden, teacher.head(), trainer)
            self._evaluate("untrained", student.hidden, DenseHead(student.head_weight), trainer)
        self._check(trainer, inputs)
        with arithmetic.memory.use():  # AdamW makes its moments in the first step
            ended_early = self._train(trainer)
        self.compiles.write_counts(self.step)
        if ended_early is not None:
            return ended_early
        if spec.checkpoint.at_end:
            self._leave_results(trainer, inputs)
        return RunFinished(
            state="completed", reason="every step done", exit_code=0, step=trainer.step
        )

    def _load_teacher(self, inputs: Inputs) -> Teacher | None:
        spec, log = self.spec.teacher, self.log
        precision = "fp32"
        if self.spec.has_teacher:
            choice = choose_teacher_precision(
                spec.precision, device=self.device.type, capability=self.arithmetic.capability
            ) or choose_precision("teacher.precision", spec.precision, self.device.type)
            precision = record.decide(log, choice)
        backend, self.budget = plan_memory(log, self.spec, inputs, self.arithmetic, precision)
        if backend == "none":
            return None
        if backend == "quantized" and inputs.teacher is not None:
            tokens = self.spec.train.rows * self.spec.data.seq_len
            record.decide(
                log, kernel_for(spec.kernel, inputs.teacher, tokens, self.arithmetic.capability)
            )
        record.phase(log, "loading the teacher", spec.path)
        teacher, self.teacher_decoder = build_teacher(
            spec.path,
            backend=backend,
            precision=precision,
            kernel=spec.kernel,
            device=self.device,
            student_vocab=inputs.student.vocab_size,
        )
        self._warm_up(self.teacher_decoder)
        self.sha256["teacher"] = record.model(
            log, "teacher", spec.path, self.teacher_decoder, precision
        )
        if isinstance(teacher, TruncatingTeacher):
            record.phase(log, "measuring what the cut of the vocabulary drops")
            dropped = teacher.dropped_mass(
                self.data.heldout[:1], self.device, temperature=self.spec.loss.temperature
            )
            record.vocabulary_cut(log, teacher.inner.vocab_size, teacher.vocab_size, dropped)
        return teacher

    def _warm_up(self, decoder: Decoder) -> None:
        if self.spec.kernels.prewarm:
            rows = {self.spec.train.rows} | {len(b.tokens_BT) for b in self.data.heldout}
            tokens = {count * self.spec.data.seq_len for count in rows}
            self.compiles.warm_up(decoder, tokens, self.device)

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

    def _check(self, trainer: Trainer, inputs: Inputs) -> None:
        """First-minute checks; whatever fails, all are asked before the run is stopped."""
        record.phase(self.log, "checking")
        context = context_of(
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
        self._answer(self.checks.before_training(context))

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
        for step in trainer.steps():
            self.step = step.step
            record.step(self.log, step)
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
                student = trainer.student
                self._evaluate("student", student.hidden, DenseHead(student.head_weight), trainer)
            if save:
                record.phase(self.log, "saving a checkpoint")
                saved = self.keeper.save(trainer, self.heldout_losses.get("student"))
                self._answer(self.checks.at_checkpoint(saved, step.step))
            if pause and not last:
                record.phase(self.log, "training")
            if self.stop.reason is not None and not last:
                return self._stop_as_asked(trainer)
        return None

    def _stop_as_asked(self, trainer: Trainer) -> RunFinished:
        self.stop.answered()
        reason = str(self.stop.reason)
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
        self.sha256["student"] = save_student(
            self.log, self.folder, trainer.student, inputs, self.spec.student.save_as
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
