"""Compose a run from top to bottom: the composition root.

    settings -> device -> data -> plan -> teacher -> student -> (resume) -> steps, each logged ->
    held-out losses -> student, saved, read back and evaluated -> receipt

The modules that this one calls return values, and receive a function with which they log
(`engine.train.to_events.Log`). The training loop, `engine.train.loop`, is part of the composition root. Logged
values are read back from the built objects: the learning rate from the optimizer, the rows from the batches, the
hashes from the tensors.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from engine.checks.artefact import Artefact, Sample, samples_of
from engine.checks.runner import Checks
from engine.crash import as_engine_error, is_memory_error, trace_of
from engine.errors import EXIT_FAIL, EXIT_INTERRUPTED, DiskFull, EngineError
from engine.log.beats import BeatWriter, log_of
from engine.log.events import Evaluated, Note, Phase, RunFinished, RunStarted
from engine.log.fold import Follower
from engine.log.folder import RunFolder, open_run
from engine.log.view import RunView
from engine.log.write import LogWriter
from engine.models.adapter import is_adapted
from engine.models.decoder import Decoder
from engine.models.load import load_decoder
from engine.models.packed import head_of
from engine.models.transformers_config import library_warnings, reset_warnings
from engine.plan.cost import flops_per_token, peak_flops, step_costs
from engine.plan.device import ComputeDevice, set_up_device
from engine.plan.inputs import Inputs, check_inputs
from engine.plan.memory import evaluates_late
from engine.plan.run_plan import Plan, plan_run
from engine.receipts.receipt import digest_files
from engine.runtime.device import torch_dtype
from engine.runtime.ranks import Ranks, join, leave, ranks_here, use_own_gpu
from engine.signals import Stopped
from engine.spec import RunSpec, spec_from_dict
from engine.teachers.store.teacher import CachedTeacher
from engine.terminal import say
from engine.train import to_events
from engine.train.background import Background, ModelHash
from engine.train.build import Builder, holds_heldout, recall_heldout
from engine.train.capture_student import configure_student
from engine.train.checkpoint.continuing import versions_changed
from engine.train.checkpoint.keeper import Keeper
from engine.train.data import Data, prepare_data
from engine.train.finish import Outcome, save_student, write_receipt
from engine.train.kernel_warm_up import Compiles
from engine.train.loop import TrainingLoop
from engine.train.ranks.sharding import (
    check_same_weights,
    least_available,
    shard_trainer,
    whole_student,
)
from engine.train.stop_request import StopRequest
from engine.train.trainer import Trainer

_DEVICE_ERROR = re.compile(r"CUDA error: |CUDNN_STATUS_|CUBLAS_STATUS_|CUSOLVER_STATUS_|NCCL error")
LAST_LINE_S = 0.2
"""Largest time that a process about to exit waits for the log's last line, in seconds."""


def run(
    path: Path,
    *,
    resume: bool,
    allow_fallback: bool,
    keep_alive_fd: int | None,
    allow_restart: bool = False,
) -> int:
    """Train the run in `path` to its end and return the exit code.

    However the run ends, its end is logged before this returns. `Keeper.restore` describes `allow_fallback`
    and `allow_restart`.
    """
    folder = open_run(path)
    settings = folder.read_effective()
    spec = spec_from_dict(settings["spec"])
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
        reset_warnings()
        job = _Job(spec, folder, log, stop, before, ranks)
        stop.before_exit = job.log_stopped
        try:
            if ranks.first:
                folder.keep_reserve()
            finished = job.carry_out(allow_fallback=allow_fallback, allow_restart=allow_restart)
        except Stopped:
            finished = job.stopped()
        except BaseException as error:  # noqa: BLE001 - the last place that can log how the run ended
            reason, code = why_failed(error)
            engine_error = as_engine_error(error)
            if isinstance(engine_error, DiskFull) and ranks.first:
                folder.free_reserve()
            say(error if error is engine_error else trace_of(error))
            finished = job.failed(reason, code)
        else:
            leave(ranks)
        stop.answered()
        for model_hash in job.hashes:
            model_hash.cancel()
        if ranks.first:
            folder.free_reserve()
        for text in library_warnings():
            log.write(Note(level="warning", text=text))
        log.write(finished)
        try:
            log.sync()
        except EngineError as error:
            # The log should agree with the exit code, if a line can still be written.
            with contextlib.suppress(EngineError):
                log.write(job.failed(str(error), error.exit_code))
            raise
        return finished.exit_code


def why_failed(error: BaseException) -> tuple[str, int]:
    """Return the reason to log for a run that `error` ended, and its exit code."""
    if is_memory_error(error):
        where = "device" if isinstance(error, torch.OutOfMemoryError) else "host"
        return f"the {where} allocator refused: {error}", EXIT_FAIL
    # The failure of a kernel, library or collective is raised by an unrelated later call.
    if isinstance(error, (torch.AcceleratorError, torch.distributed.DistBackendError)) or (
        isinstance(error, RuntimeError) and _DEVICE_ERROR.search(str(error))
    ):
        return f"the device failed: {error}", EXIT_FAIL
    if (engine_error := as_engine_error(error)) is not None:
        return str(engine_error), engine_error.exit_code
    text = ": ".join(filter(None, (type(error).__name__, str(error))))
    if isinstance(error, KeyboardInterrupt):
        return f"{text}: raised by code, not by a signal", EXIT_INTERRUPTED
    if isinstance(error, SystemExit):
        text += ": raised by code outside the engine, which never exits the trainer this way"
    return text, EngineError.exit_code


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
        self.folder, self.stop = folder, stop
        self.requested = self.spec = spec
        """`requested` are the settings that identify the run; `spec` has all decisions too, and the run uses it."""
        self._write = partial(to_events.write, log)
        self.ranks = ranks
        self.before = before
        """The log of a resumed run's earlier sessions."""
        self.begun_s = time.monotonic()
        self.keeper = Keeper(folder, spec, ranks, log=self.log, sync_log=log.sync)
        self.beat = BeatWriter(folder, ranks.rank) if ranks.many else None
        self.compiles = Compiles()
        self.checks = Checks(spec)
        self.hashes: list[ModelHash] = []
        """Hashes of the models, computed in threads."""
        self.loop: TrainingLoop | None = None
        """The training loop; None until the models are built."""

    def log(self, value: to_events.Loggable) -> None:
        """Write one line to the log, followed by any new warnings of transformers."""
        self._write(value)
        for text in library_warnings():
            self._write(Note(level="warning", text=text))

    def failed(self, reason: str, exit_code: int) -> RunFinished:
        # A resume that fails before it has restored anything leaves the run at its last step.
        before = 0 if self.before is None else self.before.last_step
        step = before if self.loop is None else self.loop.step
        return RunFinished(state="failed", reason=reason, exit_code=exit_code, step=step)

    def stopped(self) -> RunFinished:
        """Return the last event of a session that stopped before its first step; the run stays at its last step."""
        step = self.before.last_step if self.before is not None else 0
        return RunFinished(
            state="stopped",
            reason=f"{self.stop.reason} before the first step",
            exit_code=self.stop.exit_code,
            step=step,
        )

    def log_stopped(self) -> None:
        """Log the end of a session whose process exits in a signal handler. The handler may have interrupted a write
        and must not wait for its lock, so a thread writes the line, and is waited for at most LAST_LINE_S."""

        def write() -> None:
            with contextlib.suppress(EngineError):
                self.log(self.stopped())

        thread = threading.Thread(target=write, name="last line", daemon=True)
        thread.start()
        thread.join(LAST_LINE_S)

    def carry_out(self, *, allow_fallback: bool, allow_restart: bool) -> RunFinished:
        log, ranks = self.log, self.ranks
        inputs = check_inputs(self.requested, self.folder.path)
        for text in inputs.models:
            log(Note(level="info", text=text))
        for note in inputs.notes:
            log(Note(level="warning", text=note))
        compute = self._join_ranks()
        first_data = self.before.data if self.before else None
        data = prepare_data(self.requested, inputs, first_data, self.log)
        with compute.memory.use():
            log(Phase(name="planning"))
            plan = plan_run(self.spec, inputs, compute, data.stream, self.log)
            spec = self.spec = plan.spec
            if ranks.first:
                self.folder.write_resolved(spec.to_dict())
            builder = Builder(
                plan=plan,
                data=data,
                compiles=self.compiles,
                stop=self.stop,
                ranks=ranks,
                beat=self.beat,
                log=self.log,
            )
            self.hashes = builder.hashes
            fresh = builder.fresh_student()
            teacher = builder.teacher(self.before)
            student, student_sha256 = builder.student(fresh, teacher.decoder)
            untrained = samples_of(student)  # before a resume replaces the weights
            log(Phase(name="setting up the trainer"))
            builder.warm_up()
            trainer = builder.trainer(student, teacher.teacher, Ranks(), teacher.decoder)
        self.loop = loop = TrainingLoop(
            log,
            plan,
            data,
            teacher_decoder=teacher.decoder,
            keeper=self.keeper,
            checks=self.checks,
            compiles=self.compiles,
            stop=self.stop,
        )
        if self.before is not None:
            student_sha256()  # before a resume replaces the weights
        resumed_from = self._resume(trainer, loop, allow_fallback, allow_restart)
        if (
            self.before is not None
            and "teacher" in self.before.models
            and teacher.sha256 is not None
        ):
            teacher.sha256()  # refuses another teacher than the run's
        configure_student(trainer, plan, log)
        started = self._start_event(trainer, plan, resumed_from)
        log(started)
        if changed := versions_changed(self.before, started):
            log(Note(level="warning", text=changed))
        self._evaluate_untrained(trainer, loop, data, builder)
        student_sha256()  # before the first step changes the weights
        loop.check(trainer)
        if ranks.many:
            trainer = self._shard(trainer, builder, teacher.decoder)
            loop.replace_checked_trainer(trainer)
            # From here on nothing references the unsharded student and optimizer, whose memory is freed.
            configure_student(trainer, plan, log)
        with compute.memory.use():  # AdamW allocates its moments in the first step
            ended_early = loop.train(trainer)
        if teacher.sha256 is not None and self.stop.reason is None:
            teacher.sha256()
        self.compiles.counts(loop.step, self.log)
        if isinstance(teacher.teacher, CachedTeacher):
            log(Note(level="info", text=teacher.teacher.summary))
        if ended_early is not None:
            return ended_early
        if spec.checkpoint.at_end:
            hashes = {"student_start": student_sha256()}
            if teacher.sha256 is not None:
                hashes = {"teacher": teacher.sha256(), **hashes}
            self._save_results(trainer, loop, inputs, data, hashes, untrained)
        return RunFinished(
            state="completed", reason="every step done", exit_code=0, step=trainer.step
        )

    def _join_ranks(self) -> ComputeDevice:
        """Return this rank's device, once all ranks have joined and agreed on the memory to plan with."""
        use_own_gpu(self.ranks, self.spec.compute.device)
        self.spec, compute = set_up_device(self.requested, self.log)
        device = compute.device
        if self.ranks.many:
            world = f"{self.ranks.world} ranks in all"
            self.log(Phase(name="waiting for the other ranks", detail=world))
            join(self.ranks, device, timeout_s=self.spec.compute.collective_timeout_s)
            # Ranks that planned with different memory could launch different collectives.
            available = least_available(self.ranks, compute.available, device)
            compute = replace(compute, available=available)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        return compute

    def _resume(
        self, trainer: Trainer, loop: TrainingLoop, allow_fallback: bool, allow_restart: bool
    ) -> int | None:
        """Resume from the newest checkpoint and return its step; None for a run that is not resumed."""
        if self.before is None:
            return None
        self.log(Phase(name="restoring the checkpoint"))
        # The first rank decides what is damaged and sets it aside before the others read anything.
        if not self.ranks.first:
            self.ranks.wait_for_all()
        # If restoring fails, the log still reports the step that the run is at.
        loop.step = self.before.last_step
        loop.heldout_losses |= self.keeper.restore(
            trainer, self.before, allow_fallback, allow_restart
        )
        loop.step = trainer.step
        if self.ranks.first:
            self.ranks.wait_for_all()
        return trainer.step

    def _start_event(self, trainer: Trainer, plan: Plan, resumed_from: int | None) -> RunStarted:
        on_gpu = trainer.device.type == "cuda"
        name = torch.cuda.get_device_name(trainer.device) if on_gpu else "a CPU"
        inputs, spec, seq_len = plan.inputs, plan.spec, plan.spec.data.seq_len
        teacher = inputs.teacher if trainer.has_teacher else None
        costs = step_costs(
            inputs.student,
            teacher,
            trainer.train.rows * trainer.train.accumulation * seq_len,
            seq_len,
            trainer.train.accumulation,
            stored=isinstance(trainer.teacher, CachedTeacher),
            recomputes=spec.student.checkpointing == "on",
            chunk_rows=trainer.loss.chunk_rows,
        )
        comparable = {"teacher"} if teacher is not None and teacher.native else set()
        if inputs.student.native and not self.ranks.many:
            comparable |= costs.keys() - {"teacher"}
        # A sharded model also waits for other ranks, so its time cannot be compared with its cost.
        comparable -= {"teacher"} if spec.teacher.shard == "on" else set()
        return to_events.start(
            self.folder.name,
            self.requested,
            trainer,
            resumed_from,
            flops_per_token(inputs.student, teacher, seq_len),
            peak_flops(name, self.ranks.world),
            {part: cost for part, cost in costs.items() if part in comparable},
        )

    def _evaluate_untrained(
        self, trainer: Trainer, loop: TrainingLoop, data: Data, builder: Builder
    ) -> None:
        """Evaluate the teacher, whose loss the student should approach, and the untrained student.

        On a GPU this is done before the first step, when the optimizer has no moments yet and most memory is free. On
        a CPU an evaluation takes as long as several steps, so it follows the first step.
        """

        def evaluate(untrained: Callable[[], Decoder]) -> None:
            self._evaluate_teacher(trainer, loop, data)
            student = untrained()
            loop.evaluate("untrained", student.hidden, head_of(student), trainer)

        if not evaluates_late(self.spec):
            if trainer.step == 0:
                evaluate(lambda: trainer.student)
        # An earlier session may have been stopped before its evaluation.
        elif trainer.step == 0 or self.before is None or self.before.eval_of("untrained") is None:

            def evaluate_late() -> None:
                # The untrained student takes the memory of gradients that the next step would clear.
                trainer.optimizer.zero_grad(set_to_none=True)
                evaluate(builder.untrained)

            loop.after_first_step = evaluate_late

    def _evaluate_teacher(self, trainer: Trainer, loop: TrainingLoop, data: Data) -> None:
        teacher = trainer.teacher
        if isinstance(teacher, CachedTeacher) and not holds_heldout(teacher, data.heldout):
            recalled = recall_heldout(teacher, data.heldout)
            self.log(recalled)
            if isinstance(recalled, Evaluated) and recalled.loss is not None:
                loop.heldout_losses["teacher"] = recalled.loss
        elif teacher is not None:
            loop.evaluate("teacher", teacher.hidden, teacher.head(), trainer)

    def _evaluate_saved(self, trainer: Trainer, loop: TrainingLoop) -> None:
        """Evaluate the student in the run's folder with the trainer's dtypes and kernels; the run reports this loss.

        Training has ended, so the memory of the gradients and of the optimizer's moments is freed for it.
        """
        trainer.optimizer.zero_grad(set_to_none=True)
        trainer.optimizer.state.clear()
        if is_adapted(trainer.student):
            # The saved adapters equal the trained ones bit by bit, so the base need not be loaded again.
            loop.evaluate(
                "student", trainer.student.hidden, head_of(trainer.student), trainer, saved=True
            )
            return
        saved = load_decoder(
            self.folder.student, torch.float32, trainer.device, self.requested.model
        )
        saved.run_like(trainer.student)
        loop.evaluate("student", saved.hidden, head_of(saved), trainer, saved=True)

    def _shard(self, alone: Trainer, builder: Builder, teacher_decoder: Decoder | None) -> Trainer:
        """Return an equivalent trainer with its student sharded over the ranks."""
        check_same_weights(alone.student, "student", self.ranks)
        detail = f"over {self.ranks.world} ranks"
        self.log(Phase(name="sharding the student", detail=detail))
        trainer = shard_trainer(
            alone,
            self.spec,
            self.ranks,
            build=lambda student: builder.trainer(
                student, alone.teacher, self.ranks, teacher_decoder
            ),
            reshard=self.spec.student.reshard == "on",
            entering=builder.entering,
        )
        self.keeper.sharded = self.spec.checkpoint.sharded == "on"
        return trainer

    def _save_results(
        self,
        trainer: Trainer,
        loop: TrainingLoop,
        inputs: Inputs,
        data: Data,
        hashes: dict[str, str],
        untrained: Mapping[str, Sample],
    ) -> None:
        """Save the student, check and evaluate the saved files, and write the receipt.

        `hashes` are those of the models at the start of the run; `untrained` are samples of the untrained student.
        """
        self.log(Phase(name="saving the student", detail=str(self.folder.student)))
        student = whole_student(trainer.student)
        if not self.ranks.first:
            return
        saved = save_student(self.folder, student, inputs, self.spec.student)
        files = Background(
            partial(digest_files, self.folder.student), "hash of the student's files"
        )
        self.log(Phase(name="reading the saved student back", detail=str(self.folder.student)))
        artefact = Artefact(
            folder=self.folder.student,
            dtype=torch_dtype(self.spec.student.save_as),
            how=self.requested.model,
            start=untrained,
        )
        loop.check_saved(artefact, student)
        self.log(saved)
        del student  # the full copy of a sharded one
        self._evaluate_saved(trainer, loop)
        loop.end_reading(trainer)
        self.log(Phase(name="writing the receipt"))
        outcome = Outcome(
            spec=self.requested,
            data=data.ready,
            student_files=files.result(),
            model_sha256=hashes | {"student": saved.sha256},
            heldout_losses=loop.heldout_losses,
            best_step=self.keeper.best_step,
            steps=trainer.step,
            rows=trainer.position,
            device=str(trainer.device),
            session_s=time.monotonic() - self.begun_s,
        )
        self.log(write_receipt(self.folder, outcome))
