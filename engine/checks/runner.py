"""Run each check at its time, and guarantee that the run is not changed by it.

    checks = Checks(spec)
    for result in checks.before_training(context): ...     before the first step of a session
    for result in checks.after_step(step): ...             after each step: checks that wait for one
    for result in checks.at_checkpoint(path, step): ...    after each save; the first one is checked
    for result in checks.at_end(saved, step, student): ... once the student is saved
    checks.ends_run(result)                                whether to stop

A check that was skipped, or that raised, is UNKNOWN with the reason: an exception in a check must not end
the run, and must not count as passed.

Invariant: weights, gradients, the optimizer, the modes of the models and the random number generators are
the same before and after; data is read at positions and never advanced. `undisturbed` restores what a
check uses, and tests compare runs with and without checks bit by bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from engine.checks.artefact import Artefact, artefact
from engine.checks.catalogue import ABOUT, CATALOGUE, skipped_ids
from engine.checks.check import About, Answer, Result, When, unknown
from engine.checks.checkpoint import CheckpointReloads
from engine.checks.context import Context
from engine.checks.data import (
    SplitDisjoint,
    batch_not_degenerate,
    end_is_learnt,
    padding_not_trained,
)
from engine.checks.forward import forward_is_the_model
from engine.checks.objective import nan_not_masked
from engine.checks.resources import MemoryAsPlanned, NoLateCompile
from engine.checks.settings import effective_settings, resume_continues
from engine.checks.teacher import (
    StudentShift,
    eval_baseline,
    shift_proof,
    stored_outputs,
    teacher_fp8_within_noise_floor,
    teacher_knows_text,
    teacher_not_student,
)
from engine.checks.vocabulary import vocabulary_by_bytes
from engine.checks.weights import weights_alive
from engine.log.events import StepDone
from engine.models.decoder import Decoder
from engine.spec import RunSpec
from engine.teachers.protocol import NoHiddenStates


class Watch(Protocol):
    """A check that runs after each step until it returns an answer; None means not yet."""

    def after(self, context: Context, step: StepDone) -> Answer | None: ...


class Reread(Protocol):
    """A check of a checkpoint."""

    def at_checkpoint(self, context: Context, path: Path) -> Answer: ...


AT_ONCE: dict[str, Callable[[Context], Answer]] = {
    "vocabulary_by_bytes": vocabulary_by_bytes,
    "batch_not_degenerate": batch_not_degenerate,
    "padding_not_trained": padding_not_trained,
    "end_is_learnt": end_is_learnt,
    "effective_settings": effective_settings,
    "resume_continues": resume_continues,
    "weights_alive": weights_alive,
    "forward_is_the_model": forward_is_the_model,
    "teacher_knows_text": teacher_knows_text,
    "eval_baseline": eval_baseline,
    "shift_proof": shift_proof,
    "teacher_fp8_within_noise_floor": teacher_fp8_within_noise_floor,
    "stored_outputs": stored_outputs,
    "teacher_not_student": teacher_not_student,
    "nan_not_masked": nan_not_masked,
}
WATCHES: dict[str, Callable[[Context], Watch]] = {
    "split_disjoint": SplitDisjoint,
    "memory_as_planned": MemoryAsPlanned,
    "no_late_compile": NoLateCompile,
}
REREADS: dict[str, Callable[[Context], Reread]] = {
    "checkpoint_reloads": CheckpointReloads,
    "student_shift": StudentShift,
}
AT_END: dict[str, Callable[[Artefact, Context], Answer]] = {"artefact": artefact}


class Checks:
    """The checks of one session. Raises SpecError for a `checks.skip` that names no check."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec.checks
        self._skipped = skipped_ids(spec.checks.skip)
        self._context: Context | None = None
        self._watches: dict[str, Watch] = {}
        self._rereads: dict[str, Reread] = {}

    def before_training(self, context: Context) -> Iterator[Result]:
        """Run every check that needs no step, in the order of the catalogue; prepare the others."""
        self._context = context
        for about in CATALOGUE:
            if not self.spec.enabled or about.id in self._skipped:
                why = "checks.skip" if self.spec.enabled else "checks.enabled=false"
                yield _result(about, unknown(f"skipped by {why}"), 0.0, context.step)
            elif about.id in AT_ONCE:
                yield from self._ask(about, context.step, AT_ONCE[about.id])
            elif about.when not in (When.AT_STEP, When.AT_END):
                yield from self._prepare(about, context)

    def look_at(self, context: Context) -> None:
        """Continue with other objects of the same run, whose student was sharded over several GPUs.

        The checks after each step take their baseline again.
        """
        self._context = context
        with undisturbed(context):
            self._watches = {name: WATCHES[name](context) for name in self._watches}

    def after_step(self, step: StepDone) -> Iterator[Result]:
        """Run the checks that are due now that `step` is done; free when none is."""
        for name in list(self._watches):
            watch, about = self._watches[name], ABOUT[name]
            for result in self._ask(about, step.step, partial(_after, watch, step)):
                if about.when is not When.ALWAYS:
                    self._watches.pop(name, None)
                yield result

    def at_checkpoint(
        self, path: Path, step: int, student: Decoder | None = None
    ) -> Iterator[Result]:
        """Check the first checkpoint of a session, once it is safe in `path`.

        `student` is the full student, gathered if it is sharded.
        """
        assert self._context is not None, "before_training comes first"
        context = dataclasses.replace(
            self._context, step=step, student=student or self._context.student
        )
        for name in list(self._rereads):
            reread = self._rereads.pop(name)
            yield from self._ask(ABOUT[name], step, partial(_at_checkpoint, reread, path), context)

    def at_end(self, saved: Artefact, step: int, student: Decoder) -> Iterator[Result]:
        """Check the saved student; `student` is the trained one, whole."""
        assert self._context is not None, "before_training comes first"
        context = dataclasses.replace(self._context, step=step, student=student)
        for name, question in AT_END.items():
            if self.spec.enabled and name not in self._skipped:
                yield from self._ask(ABOUT[name], step, partial(question, saved), context)

    def ends_run(self, result: Result) -> bool:
        """Return whether this failure makes the run worthless and the spec says to stop."""
        return result.failed and result.about.stops and self.spec.on_fail == "stop"

    def _prepare(self, about: About, context: Context) -> Iterator[Result]:
        """Let a later check record the initial state of the run."""

        def prepare(context: Context) -> None:
            if about.id in WATCHES:
                self._watches[about.id] = WATCHES[about.id](context)
            else:
                self._rereads[about.id] = REREADS[about.id](context)

        return self._ask(about, context.step, prepare)

    def _ask(
        self,
        about: About,
        step: int,
        question: Callable[[Context], Answer | None],
        context: Context | None = None,
    ) -> Iterator[Result]:
        context = context or self._context
        assert context is not None, "before_training comes first"
        begun = time.perf_counter()
        try:
            # A check that runs after every step looks at no model.
            always = about.when is When.ALWAYS
            with contextlib.nullcontext() if always else undisturbed(context):
                answer = question(context)
        except NoHiddenStates as error:
            answer = unknown(str(error))
            self._watches.pop(about.id, None)
        except Exception as error:  # noqa: BLE001 - a check that breaks must not end the run
            answer = unknown(f"the check broke: {type(error).__name__}: {error}")
            self._watches.pop(about.id, None)
        if answer is not None:
            yield _result(about, answer, time.perf_counter() - begun, step)


def _after(watch: Watch, step: StepDone, context: Context) -> Answer | None:
    return watch.after(context, step)


def _at_checkpoint(reread: Reread, path: Path, context: Context) -> Answer:
    return reread.at_checkpoint(context, path)


def _result(about: About, answer: Answer, cost_s: float, step: int) -> Result:
    return Result(
        about=about, verdict=answer.verdict, numbers=answer.numbers, cost_s=cost_s, step=step
    )


@contextlib.contextmanager
def undisturbed(context: Context) -> Iterator[None]:
    """Restore random number generators, gradients, and the modes of the models."""
    models = [model for model in (context.student, context.teacher_decoder) if model is not None]
    modes = {module: module.training for model in models for module in model.modules()}
    parameters = list(context.student.parameters())
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    devices = [context.device] if context.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for module, training in modes.items():
            module.training = training
