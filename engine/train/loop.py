"""The training loop: the steps of one session of a run, and what is done between them.

    fetch, forward, loss, backward, update -> log -> check -> evaluate -> save -> stop, and again

A session is the part of a run that one process trains. It begins with a fresh student or a checkpoint, and ends
at the last step, at train.stop_after, or with a request to stop. Except after the first steps of a session,
when a stop was requested, or where an evaluation, a check, a memory measurement or a checkpoint follows a step, the
next step is launched before the numbers of this one are read, so that the device does not wait.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from torch import Tensor

from engine.checkpoint_folders import published
from engine.checks.artefact import Artefact
from engine.checks.context import Context, Memory
from engine.checks.result import Result
from engine.checks.runner import Checks
from engine.errors import TrainingFailed
from engine.log.events import (
    CHECKS,
    EVALUATING,
    LOGGING,
    SAVING,
    TRAINING,
    Evaluated,
    Note,
    Phase,
    RunFinished,
    StepDone,
    StopRequested,
    Wrote,
)
from engine.log.held import MemoryWriter
from engine.models.decoder import Decoder
from engine.models.head import Head
from engine.models.packed import head_of
from engine.plan.run_plan import Plan
from engine.runtime.ranks import Ranks
from engine.teachers.store.teacher import CachedTeacher
from engine.train import to_events
from engine.train.auditing import StepAudit
from engine.train.background import Background
from engine.train.checking import context_of
from engine.train.checkpoint.continuing import past_checks
from engine.train.checkpoint.keeper import Keeper
from engine.train.data import Data
from engine.train.heldout import greedy_continuation, heldout_loss, prompt_of
from engine.train.kernel_warm_up import Compiles
from engine.train.non_finite import non_finite, stop_for_weights, stop_unless_finite
from engine.train.ranks.sharding import whole_student
from engine.train.recorder import Recorder
from engine.train.rollout import Rollout
from engine.train.step import LaunchedStep, broken_invariants
from engine.train.stop_request import StopRequest
from engine.train.to_events import Log
from engine.train.trained_rows import TrainedRows
from engine.train.trainer import Trainer

MEMORY_SETTLED_AFTER = 3
"""Number of steps after which the allocator has served every phase of a step."""
READ_IN_BACKGROUND_BYTES = 1 << 30
"""Minimum size of a checkpoint that is read back in a background thread, in bytes; reading it takes about a second."""
PROGRESS_EVERY_S = 10.0
"""Interval between progress lines of an evaluation, in seconds."""
SUBJECTS = {
    "teacher": "the teacher",
    "untrained": "the student, not yet trained",
    "student": "the student",
}
"""Name of each subject of an evaluation in progress lines."""


class _FollowUp(NamedTuple):
    """Work that follows a step."""

    first: bool
    """Whether it is the first step of the session."""
    last: bool
    """Whether it is the last step of the run."""
    audit: bool
    measure_memory: bool
    evaluate: bool
    save: bool
    pause: bool
    """Whether train.stop_after ends the session here."""
    settling: bool
    """Whether the step is one of the session's first, whose numbers are read before the next step is launched."""


class _Session(NamedTuple):
    """The observers of every step of a session."""

    trainer: Trainer
    begun_at: int
    """The step before the session's first."""
    audit: StepAudit
    rows: TrainedRows
    recorder: Recorder
    memory_writer: MemoryWriter


class TrainingLoop:
    """Takes the steps of a session, and does what comes between them.

    It logs every step, evaluation, check and checkpoint as it happens. It holds the log itself, because the
    result of a step decides what follows.
    """

    def __init__(
        self,
        log: Log,
        plan: Plan,
        data: Data,
        *,
        teacher_decoder: Decoder | None,
        keeper: Keeper,
        checks: Checks,
        compiles: Compiles,
        stop: StopRequest,
    ) -> None:
        self.log, self.data, self.teacher_decoder = log, data, teacher_decoder
        self.spec, self.inputs, self.budget = plan.spec, plan.inputs, plan.budget
        self.keeper, self.checks, self.compiles, self.stop = keeper, checks, compiles, stop
        self.step = 0
        """The last logged step, or the step that a resumed run continues from; 0 before the first."""
        self.heldout_losses: dict[str, float] = {}
        """Nats per token: `teacher`, `untrained`, `student`."""
        self._evaluated: tuple[int, float | None] = -1, None
        """The step of the newest evaluation of the student, and its loss."""
        self._continued: list[int] = []
        """Continuation of the prompt in the last evaluation: the guess for the next one."""
        self._reading: Background[list[Result]] | None = None
        """Thread that reads the newest checkpoint back from disk and checks it; None if its results were logged."""
        self.after_first_step: Callable[[], None] | None = None
        """Work of the start of the session that is deferred until after its first step."""

    def check(self, trainer: Trainer) -> None:
        """Run the checks that are due before training. Raises TrainingFailed if one of them ends the run."""
        self.log(Phase(name="checking"))
        # Until its student is sharded, the trainer has a single rank, so the ranks are passed separately.
        self._act_on(self.checks.before_training(self._context(trainer)), self.keeper.ranks)

    def replace_checked_trainer(self, trainer: Trainer) -> None:
        """Make the checks after each step use `trainer`, which replaces the first trainer once the student is
        sharded."""
        self.checks.use(self._context(trainer))

    def evaluate(
        self,
        subject: str,
        hidden: Callable[[Tensor, Tensor], Tensor],
        head: Head,
        trainer: Trainer,
        *,
        saved: bool = False,
    ) -> None:
        """Evaluate `subject` and log its held-out loss; `saved` is whether the model was read back from its files.
        Raises TrainingFailed when the loss is not finite."""
        begun_s = time.perf_counter()
        report = self._progress("the saved student" if saved else SUBJECTS[subject])
        heldout, device, autocast = self.data.heldout, trainer.device, trainer.autocast
        loss, labelled = heldout_loss(hidden, head, heldout, device, autocast, begun=report)
        self.heldout_losses[subject] = loss
        # The teacher and the untrained student are evaluated as of step 0.
        step = trainer.step if subject == "student" else 0
        if subject == "student":
            self._evaluated = step, loss
        prompt, sample = self._sample(hidden, head, trainer)
        evaluated = Evaluated(
            step=step,
            subject=subject,
            loss=loss,
            labelled=labelled,
            eval_s=time.perf_counter() - begun_s,
            saved=saved,
            prompt=prompt,
            sample=sample,
        )
        self.log(evaluated)
        if not math.isfinite(loss):
            stop_for_weights(self.log, self.step, "heldout_loss", loss)

    def _progress(self, subject: str) -> Callable[[int], None]:
        """Log that `subject` is evaluated; return a function that is called with each batch number and logs progress
        at intervals."""
        self.log(Phase(name="evaluating", detail=subject))
        reported_s = time.perf_counter()

        def report(number: int) -> None:
            nonlocal reported_s
            if time.perf_counter() - reported_s > PROGRESS_EVERY_S:
                reported_s = time.perf_counter()
                done = f"{subject}, {number} of {len(self.data.heldout)} batches"
                self.log(Phase(name="evaluating", detail=done))

        return report

    def _sample(
        self, hidden: Callable[[Tensor, Tensor], Tensor], head: Head, trainer: Trainer
    ) -> tuple[str, str]:
        """Return a prompt of the held-out text and the model's continuation; empty strings if no sample is
        wanted, or none can be generated."""
        count, prompt = self.spec.eval.sample_tokens, prompt_of(self.data.heldout)
        tokenizer = next((t for t in self.inputs.tokenizers.values() if t is not None), None)
        stored = isinstance(getattr(hidden, "__self__", None), CachedTeacher)
        if not count or tokenizer is None or not prompt or stored:
            return "", ""
        guess = self._continued or [prompt[-1]] * count
        self._continued = greedy_continuation(
            hidden, head, prompt, guess, trainer.device, trainer.autocast
        )
        return tokenizer.decode(prompt), tokenizer.decode(self._continued)

    def check_saved(self, saved: Artefact, student: Decoder) -> None:
        """Compare the saved student with `student`, the trained one. Raises TrainingFailed if a check of it
        ends the run."""
        self._act_on(self.checks.at_end(saved, self.step, student))

    def train(self, trainer: Trainer) -> RunFinished | None:
        """Train all remaining steps. Return None if all steps are done, otherwise how the session ended
        earlier."""
        session, host = self._begin(trainer), trainer.host
        launched: LaunchedStep | None = None
        rank_stops = False
        """Whether the numbers of an earlier step report a request to stop on any rank."""
        host.take()
        while launched is not None or trainer.step < self.spec.train.steps:
            # Fetch, forward, loss, backward, update.
            launched = launched or trainer.launch()
            follow_up = self._follow_up(launched.step, session)
            waits = any(follow_up) or rank_stops or self.stop.reason is not None or trainer.slow_by
            ahead = None if waits else trainer.launch(launched)
            step = session.rows.record(trainer.finish(launched))

            # Log, check.
            self.step = step.step
            with host.measure(LOGGING):
                self._log_step(step, self._written_event(launched, trainer.rollout), session)
            with host.measure(CHECKS):
                self._check_step(step, session)
            if follow_up.first:
                self._end_of_start(trainer)
            if follow_up.measure_memory:
                self.log(to_events.memory_peak(step.step, self.budget, trainer))

            # Evaluate, save.
            if follow_up.evaluate:
                with host.measure(EVALUATING):
                    student = whole_student(trainer.student)
                    self.evaluate("student", student.hidden, head_of(student), trainer)
            if follow_up.save:
                with host.measure(SAVING):
                    self._save(trainer)
            if follow_up.evaluate and not follow_up.last:
                self.log(Phase(name=TRAINING))

            # Stop. Some ranks may have launched the next step already, but no rank launches the step after that
            # before it has read this step's numbers. So all ranks stop after the next step.
            asked = rank_stops if trainer.ranks.many else ahead is None and self.stop.reason
            if asked and not follow_up.last:
                return self._stop_as_asked(trainer)
            if follow_up.pause:
                return self._pause(trainer)
            rank_stops = rank_stops or launched.numbers.asked_to_stop > 0
            launched = ahead
        if not self.spec.checkpoint.at_end:
            self.end_reading(trainer)
        return None

    def _begin(self, trainer: Trainer) -> _Session:
        """Begin the steps of a session: log its phase, and make the observers of its steps."""
        self.stop.steps_begin()
        self.step = self.keeper.saved_step = trainer.step
        begun = f"from step {trainer.step} to {self.spec.train.steps}"
        self.log(Phase(name=TRAINING, detail=begun))
        trainer.student.train()
        if trainer.rollout is not None:
            trainer.rollout.prepare()
        audit = StepAudit(trainer, self.spec, self.teacher_decoder)
        folder = self.keeper.folder
        rows = TrainedRows(folder, trainer)
        self.keeper.sync_rows = rows.sync
        memory_writer = MemoryWriter(folder, partial(to_events.trainer_memory, trainer.device))
        recorder = Recorder(trainer, self.spec)
        return _Session(trainer, trainer.step, audit, rows, recorder, memory_writer)

    def _follow_up(self, step: int, session: _Session) -> _FollowUp:
        """Return the work that follows `step`."""
        spec, begun_at = self.spec, session.begun_at
        last, first = step == spec.train.steps, step == begun_at + 1
        settled_at = begun_at + MEMORY_SETTLED_AFTER
        save = (last and spec.checkpoint.at_end) or _every(step, spec.checkpoint.every)
        on_gpu = session.trainer.device.type == "cuda"
        return _FollowUp(
            first=first,
            last=last,
            audit=session.audit.due(step),
            measure_memory=last or (on_gpu and step == settled_at),
            evaluate=last or save or _every(step, spec.eval.every),
            save=save,
            pause=spec.train.stop_after > 0
            and step == begun_at + spec.train.stop_after
            and not last,
            settling=step <= settled_at,
        )

    def _log_step(self, step: StepDone, wrote: Wrote | None, session: _Session) -> None:
        log_step(self.log, step, self.spec.loss.temperature)
        if wrote is not None:
            self.log(wrote)
        for recorded in session.recorder.take(step.step):
            self.log(recorded)
        if session.trainer.ranks.first:
            session.memory_writer.record(step.step)
        self.compiles.log_new(self.log)

    def _written_event(self, launched: LaunchedStep, rollout: Rollout | None) -> Wrote | None:
        """Return the event about the rows generated for a finished step; None if there are none."""
        if rollout is None or not launched.written:
            return None
        return to_events.wrote(launched, self.spec, rollout.turns, self.inputs.tokenizer.decode)

    def _check_step(self, step: StepDone, session: _Session) -> None:
        """Log the results of the checks that are due after a step. Raises TrainingFailed if a check or a number of the
        step ends the run."""
        if self._reading is not None and self._reading.done:
            self.end_reading(session.trainer)
        self._act_on(session.audit.after(step))
        self._act_on(self.checks.after_step(step))
        if self.spec.train.on_non_finite == "stop":
            stop_unless_finite(step)

    def _end_of_start(self, trainer: Trainer) -> None:
        # After a request to stop, the session that resumes does this work.
        if self.after_first_step is not None and self.stop.reason is None:
            with trainer.host.measure(EVALUATING):
                self.after_first_step()
            self.log(Phase(name=TRAINING))
        self.compiles.end_warm_up(self.log)

    def _context(self, trainer: Trainer) -> Context:
        return context_of(
            trainer,
            # The keeper's spec, whose hash identifies the checkpoints of this run.
            self.keeper.spec,
            teacher_decoder=self.teacher_decoder,
            train_stream=self.data.stream,
            heldout_stream=self.data.heldout_stream,
            heldout=self.data.heldout,
            tokenizers=self.inputs.tokenizers,
            memory=lambda: self._memory(trainer),
            late_compiles=lambda: self.compiles.late,
        )

    def _memory(self, trainer: Trainer) -> Memory:
        measured, source = to_events.allocator_peak(trainer)
        return Memory(
            predicted_bytes=self.budget.total_bytes,
            measured_bytes=measured,
            source=source,
            does_all_work=self.keeper.ranks.first,
        )

    def _act_on(self, results: Iterator[Result], ranks: Ranks | None = None) -> None:
        """Log the results of checks, and then raise TrainingFailed if one of them ends the run.

        With `ranks` this is a collective: a failure on any rank is logged by the first rank and ends all ranks.
        """
        failures = []
        for result in results:
            self.log(result)
            if self.checks.ends_run(result):
                failures.append(result)
        if ranks is not None and ranks.many:
            for rank, rank_failures in enumerate(ranks.collect(failures)):
                if rank != ranks.rank:
                    named = [failure.prefixed(f"rank {rank}") for failure in rank_failures]
                    failures += named
                    for failure in named if ranks.first else ():
                        self.log(failure)
        if failures:
            raise TrainingFailed(
                "\n".join(f"check {result}" for result in failures),
                hint=f"{failures[0].about.remedy} {self._how_to_continue(failures[0])}",
            )

    def _how_to_continue(self, failed: Result) -> str:
        """Return a hint that says how to continue past a failed check, and at what risk. The user decides."""
        if not any(published(self.keeper.folder.checkpoints)):
            return "With checks.on_fail=report the run continues past it."
        return (
            f"If the check is wrong: `{past_checks(self.keeper.folder)}` continues the run and only reports "
            f"failed checks. The risk: {failed.about.means} All existing checkpoints are kept."
        )

    def _save(self, trainer: Trainer) -> None:
        """Save a checkpoint of this step, unless it exists, and begin to read it back."""
        if self.keeper.saved_step == self.step:
            return
        self.end_reading(trainer)
        self.log(Phase(name="saving a checkpoint"))
        step, loss = self._evaluated
        path = self.keeper.save(trainer, loss if step == self.step else None)
        resumable = partial(self.keeper.check_resumable, trainer=trainer)
        results = self.checks.at_checkpoint(path, self.step, resumable)
        ranks = trainer.ranks
        self._reading = Background(partial(list, results if ranks.first else ()), "read back")
        if (
            ranks.many
            or sum(file.stat().st_size for file in path.iterdir()) < READ_IN_BACKGROUND_BYTES
        ):
            self.end_reading(trainer)

    def end_reading(self, trainer: Trainer) -> None:
        """Wait until the newest checkpoint is read back, and then delete those that are no longer kept. Raises
        TrainingFailed if a check of the newest one ends the run."""
        if self._reading is None:
            return
        reading, self._reading = self._reading, None
        with trainer.host.measure(CHECKS):
            self._act_on(iter(reading.result()), trainer.ranks)
        self.keeper.prune()

    def _pause(self, trainer: Trainer) -> RunFinished:
        self.log(to_events.memory_peak(self.step, self.budget, trainer))
        reason = f"train.stop_after = {self.spec.train.stop_after}: the step was finished"
        if not self.spec.checkpoint.at_end:
            return RunFinished(state="stopped", reason=reason, exit_code=0, step=self.step)
        self._save(trainer)
        self.end_reading(trainer)
        return RunFinished(
            state="stopped", reason=f"{reason} and saved", exit_code=0, step=self.step
        )

    def _stop_as_asked(self, trainer: Trainer) -> RunFinished:
        self.stop.answered()
        reason = self.stop.reason or "another rank was asked to stop"
        self.log(StopRequested(reason=reason, step=self.step))
        self._save(trainer)
        self.end_reading(trainer)
        return RunFinished(
            state="stopped",
            reason=f"{reason}: the step was finished and saved",
            exit_code=self.stop.exit_code,
            step=self.step,
        )


def log_step(log: Log, step: StepDone, temperature: float) -> None:
    """Log a step's non-finite numbers and broken invariants, one line each, and then the step."""
    for event in non_finite(step):
        log(event)
    for text in broken_invariants(step, temperature):
        log(Note(level="error", text=text))
    log(step)


def _every(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
