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
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn

from engine.data.batches import Batch, Batches, heldout_rows
from engine.data.corpus import open_corpus
from engine.data.tokens import TokenStream, tokenize
from engine.device.threads import choose_thread_wait
from engine.distill import checkpoint, record, state
from engine.distill.heldout import heldout_loss
from engine.distill.inputs import Inputs, check_inputs
from engine.distill.receipt import Outcome, save_student, write_receipt
from engine.distill.stopping import StopRequest
from engine.distill.trainer import Trainer
from engine.errors import (
    EXIT_FAIL,
    BadInput,
    CheckpointError,
    CorpusError,
    DiskFull,
    EngineError,
    TrainingFailed,
)
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.load import load_decoder, new_decoder
from engine.runlog.events import (
    CheckpointSaved,
    DataReady,
    Evaluated,
    NonFinite,
    Note,
    RunFinished,
    StopRequested,
    name_of_non_finite,
)
from engine.runlog.folder import RunFolder, open_run
from engine.runlog.follow import Follower
from engine.runlog.view import RunView
from engine.runlog.write import LogWriter
from engine.runtime.device import choose_device, choose_precision, choose_threads, torch_dtype
from engine.spec import RunSpec, spec_from_dict
from engine.teachers.choose import choose_backend
from engine.teachers.dequantized import DequantizedTeacher

EVAL_ROWS_AT_ONCE = 16


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
        self.saved_step = -1
        self.best_loss: float | None = None
        self.best_step: int | None = None
        self.heldout_losses: dict[str, float] = {}
        self.sha256: dict[str, str] = {}

    def failed(self, reason: str, exit_code: int) -> RunFinished:
        return RunFinished(state="failed", reason=reason, exit_code=exit_code, step=self.step)

    def carry_out(self, *, allow_fallback: bool) -> RunFinished:
        spec = self.spec
        inputs = check_inputs(spec, self.folder.path)
        self._choose_arithmetic()
        stream, self.heldout, self.data = self._prepare_data(inputs)
        teacher = self._load_teacher(inputs.teacher)
        student = self._make_student(inputs.student)
        trainer = Trainer(
            student=student,
            teacher=teacher,
            batches=Batches(
                stream,
                seq_len=spec.data.seq_len,
                rows_per_batch=spec.train.rows,
                seed=spec.train.seed,
            ),
            train=spec.train,
            loss=spec.loss,
            device=self.device,
            precision=self.precision,
        )
        resumed_from = self._restore(trainer, allow_fallback) if self.before else None
        record.start(self.log, self.folder.name, spec, trainer, resumed_from)
        if trainer.step == 0:
            if teacher is not None:
                self._evaluate("teacher", teacher.hidden, teacher.head_weight(), trainer)
            self._evaluate("untrained", student.hidden, student.head_weight, trainer)
        if (ended_early := self._train(trainer)) is not None:
            return ended_early
        self._leave_results(trainer, inputs)
        return RunFinished(
            state="completed", reason="every step done", exit_code=0, step=trainer.step
        )

    def _choose_arithmetic(self) -> None:
        spec = self.spec
        self.device = torch.device(record.decide(self.log, choose_device(spec.compute.device)))
        self.precision = record.decide(
            self.log,
            choose_precision("student.precision", spec.student.precision, self.device.type),
        )
        threads = record.decide(self.log, choose_threads(spec.compute.threads))
        torch.set_num_threads(int(threads))
        # Set by the supervisor: OpenMP has read its environment before this line can run.
        record.decide(self.log, choose_thread_wait(spec.compute.thread_wait, os.environ))
        torch.use_deterministic_algorithms(spec.compute.deterministic)
        torch.manual_seed(spec.train.seed)

    def _prepare_data(self, inputs: Inputs) -> tuple[TokenStream, list[Batch], DataReady]:
        data = self.spec.data
        record.phase(self.log, "reading the corpus", data.corpus)
        corpus = open_corpus(
            data.corpus,
            heldout_fraction=data.heldout_fraction,
            include_tests=data.include_tests,
            max_bytes=data.max_bytes or None,
        )
        count = corpus.train.document_count + corpus.heldout.document_count
        record.phase(self.log, "tokenizing", f"{count} documents")
        train = tokenize(corpus.train.documents, inputs.tokenizer)
        held = tokenize(corpus.heldout.documents, inputs.tokenizer)
        rows = heldout_rows(held, data.seq_len, self.spec.eval.rows)
        ready = record.data(self.log, corpus, train, held, data.seq_len)
        seen = self.before.data if self.before else None
        if seen is not None and seen.train_sha256 != ready.train_sha256:
            raise CorpusError(
                f"corpus: {data.corpus} — expected the tokens this run began with "
                f"(sha256 {seen.train_sha256[:12]}), found others ({ready.train_sha256[:12]})",
                hint="restore the files as they were, or start a new run",
            )
        return train, list(rows.split(EVAL_ROWS_AT_ONCE)), ready

    def _load_teacher(self, config: ModelConfig | None) -> DequantizedTeacher | None:
        spec = self.spec.teacher
        used = config if self.spec.has_teacher else None
        precision = "fp32"
        if used is not None:
            choice = choose_precision("teacher.precision", spec.precision, self.device.type)
            precision = record.decide(self.log, choice)
        dtype = torch_dtype(precision)
        record.decide(
            self.log, choose_backend(spec.backend, config=used, bytes_per_weight=dtype.itemsize)
        )
        if used is None:
            return None
        record.phase(self.log, "loading the teacher", spec.path)
        decoder = load_decoder(Path(spec.path), dtype=dtype, device=self.device)
        self.sha256["teacher"] = record.model(self.log, "teacher", spec.path, decoder, precision)
        return DequantizedTeacher(decoder)

    def _make_student(self, config: ModelConfig) -> Decoder:
        spec, seed = self.spec.student, self.spec.train.seed
        if spec.path:
            record.phase(self.log, "loading the student", spec.path)
            student = load_decoder(Path(spec.path), dtype=torch.float32, device=self.device)
        else:
            record.phase(self.log, "making the student", f"fresh weights, seed {seed}")
            student = new_decoder(config, seed=seed).to(self.device)
        source = spec.path or f"fresh weights of {spec.config}"
        sha256 = record.model(self.log, "student", source, student, self.precision)
        self.sha256["student_start"] = sha256
        if sha256 == self.sha256.get("teacher"):
            raise BadInput(
                f"student.path: {spec.path} — expected other weights than the teacher's, "
                f"found the same tensors (sha256 {sha256[:12]})",
                hint="a student equal to its teacher has nothing to learn from it",
            )
        return student

    def _train(self, trainer: Trainer) -> RunFinished | None:
        """Every step that is left. None when all are done, else how the run ended before that."""
        spec = self.spec
        self.step = self.saved_step = trainer.step
        record.phase(self.log, "training", f"from step {trainer.step} to {spec.train.steps}")
        for step in trainer.steps():
            self.step = step.step
            record.step(self.log, step)
            if not step.updated and spec.train.on_non_finite == "stop":
                names = ", ".join(f"{n} is {name_of_non_finite(v)}" for n, v in step.non_finite())
                raise TrainingFailed(
                    f"{names} at step {step.step}; the weights were not changed by it",
                    hint="look at the steps before it; train.on_non_finite=skip would go on past it",
                )
            last = step.step == spec.train.steps
            save = last or _due(step.step, spec.checkpoint.every)
            if save or _due(step.step, spec.eval.every):
                student = trainer.student
                self._evaluate("student", student.hidden, student.head_weight, trainer)
            if save:
                self._save_checkpoint(trainer)
            if self.stop.reason is not None and not last:
                return self._stop_as_asked(trainer)
        return None

    def _stop_as_asked(self, trainer: Trainer) -> RunFinished:
        self.stop.answered()
        reason = str(self.stop.reason)
        self.log.write(StopRequested(reason=reason, step=self.step))
        if self.saved_step != self.step:
            self._save_checkpoint(trainer)
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
        head_VD: Tensor,
        trainer: Trainer,
    ) -> None:
        begun_s = time.perf_counter()
        loss, labelled = heldout_loss(hidden, head_VD, self.heldout, self.device, trainer.autocast)
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
            self._fail_at("heldout_loss", loss)

    def _fail_at(self, name: str, value: float) -> NoReturn:
        """End a run whose weights give NaN or infinity, before a checkpoint could hold them."""
        found = name_of_non_finite(value)
        self.log.write(NonFinite(step=self.step, field=name, value=found))
        raise TrainingFailed(
            f"{name} is {found} at step {self.step}: the weights are no longer usable, and no checkpoint holds them",
            hint="resume from the last checkpoint with a lower learning rate in a new run",
        )

    def _save_checkpoint(self, trainer: Trainer) -> None:
        """Publish a checkpoint, say so once it is safe, then delete what is no longer kept."""
        # One pass over the weights, far cheaper than writing them.
        with torch.no_grad():
            norm = float(nn.utils.get_total_norm(trainer.parameters))
        if not math.isfinite(norm):
            self._fail_at("weight_norm", norm)
        loss = self.heldout_losses.get("student")
        best = loss is not None and (self.best_loss is None or loss < self.best_loss)
        if best:
            self.best_loss, self.best_step = loss, trainer.step
        captured = state.capture(
            trainer.student,
            trainer.optimizer,
            step=trainer.step,
            seed=self.spec.train.seed,
            spec_sha256=self.spec.sha256,
            position={"rows": trainer.position},
            best_held_out_loss=self.best_loss,
        )
        saved = checkpoint.save(self.folder.checkpoints, trainer.step, state.pack(captured))
        self.saved_step = trainer.step
        self.log.write(
            CheckpointSaved(
                step=trainer.step,
                path=str(saved.path),
                size_bytes=saved.bytes,
                save_s=saved.seconds,
                manifest_sha256=saved.manifest_sha256,
                best=best,
            )
        )
        self.log.sync()
        kept = {self.best_step} if self.best_step is not None else set()
        checkpoint.prune(self.folder.checkpoints, self.spec.checkpoint.keep_last, kept)

    def _restore(self, trainer: Trainer, allow_fallback: bool) -> int:
        """Continue from the newest checkpoint; returns its step, 0 when the run died before its
        first.
        """
        newest = (
            checkpoint.newest(self.folder.checkpoints, allow_fallback)
            if self.folder.checkpoints.is_dir()
            else None
        )
        if newest is None:
            text = "there is no checkpoint yet: starting again from step 0"
            self.log.write(Note(level="warning", text=text))
            return 0
        for path, reason in newest.refused:
            aside = checkpoint.set_aside(path)
            text = f"{path.name} does not verify ({reason}): set aside as {aside.name}"
            self.log.write(Note(level="error", text=text))
        found = state.unpack(newest)
        if found.spec_sha256 != self.spec.sha256:
            raise CheckpointError(
                f"checkpoint: {newest.path} — expected spec {self.spec.sha256[:12]}, "
                f"found {found.spec_sha256[:12]}",
                hint="a run continues with the settings it began with",
            )
        state.restore(found, trainer.student, trainer.optimizer)
        trainer.step, trainer.position = found.step, found.position["rows"]
        self.best_loss = found.best_held_out_loss
        if self.before is not None:
            done = [c for c in self.before.checkpoints if c.best and c.step <= found.step]
            self.best_step = done[-1].step if done else None
            self.heldout_losses = {
                e.subject: e.loss
                for e in self.before.evals
                if e.loss is not None and e.step <= found.step
            }
        return found.step

    def _leave_results(self, trainer: Trainer, inputs: Inputs) -> None:
        record.phase(self.log, "saving the student", str(self.folder.student))
        self.sha256["student"] = save_student(
            self.log, self.folder, trainer.student, inputs, self.spec.student.save_as
        )
        outcome = Outcome(
            spec=self.spec,
            data=self.data,
            model_sha256=self.sha256,
            heldout_losses=self.heldout_losses,
            best_step=self.best_step,
            steps=trainer.step,
            rows=trainer.position,
            device=str(self.device),
            session_s=time.monotonic() - self.begun_s,
        )
        write_receipt(self.folder, outcome)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
