"""Run each check when it is due, and guarantee that it does not change the run.

    checks = Checks(spec)
    for result in checks.before_training(context): ...     before the first step of a session
    for result in checks.after_step(step): ...             after each step: checks that wait for one
    for result in checks.at_checkpoint(path, ...): ...     after each save
    for result in checks.at_end(saved, step, student): ... once the student is saved
    checks.ends_run(result)                                whether to stop the run

A check that was skipped or that raised is UNKNOWN with the reason: an exception in a check must not end
the run and must not count as passed.

Invariant: weights, gradients, the optimizer, the modes of the models and the random number generators are
the same before and after a check; data is read at positions and never advanced. `undisturbed` restores what a
check uses, and tests compare runs with and without checks bit by bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from engine.catalogue import CHECKS, About, When, skipped_ids
from engine.checks.artefact import Artefact, artefact
from engine.checks.checkpoint import checkpoint_reloads
from engine.checks.context import Context
from engine.checks.data import (
    batch_not_degenerate,
    end_is_learnt,
    padding_not_trained,
    split_disjoint,
)
from engine.checks.forward import no_token_leaks
from engine.checks.resources import memory_as_planned, no_late_compile
from engine.checks.result import Result
from engine.checks.teacher import (
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
from engine.verdict import Answer, Verdict, unknown

_CHECK_FUNCTIONS: tuple[Callable[..., Answer | None], ...] = (
    vocabulary_by_bytes,
    batch_not_degenerate,
    padding_not_trained,
    end_is_learnt,
    weights_alive,
    no_token_leaks,
    teacher_knows_text,
    teacher_fp8_within_noise_floor,
    stored_outputs,
    teacher_not_student,
    split_disjoint,
    memory_as_planned,
    no_late_compile,
    checkpoint_reloads,
    artefact,
)
"""Functions of all checks. Each takes the context; a check after a step also takes the step, one of a checkpoint its
folder and step, one at the end the saved student. A function that returns None is called again later.
"""
FUNCTIONS = {check.__name__: check for check in _CHECK_FUNCTIONS}
AT_ONCE = (When.BEFORE, When.AT_START)


class Checks:
    """The checks of one session. Raises SpecError for a `checks.skip` that names no check."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec.checks
        self._skipped = skipped_ids(spec.checks.skip)
        self._context: Context | None = None
        self._pending: dict[About, Verdict | None] = {}
        """Checks that wait for a step or a checkpoint, with the last verdict of a check that runs after every step."""

    def before_training(self, context: Context) -> Iterator[Result]:
        """Run every check that needs no step, in the order of the catalogue."""
        self._context = context
        for about in CHECKS:
            if not self.spec.enabled or about.id in self._skipped:
                why = "checks.skip" if self.spec.enabled else "checks.enabled=false"
                yield _result(about, unknown(f"skipped by {why}"), 0.0, context.step)
            elif about.when in AT_ONCE:
                yield from self._run(about, context.step)
            elif about.id in FUNCTIONS:
                self._pending[about] = None

    def use(self, context: Context) -> None:
        """Continue with other objects of the same run, after its student was sharded over several GPUs."""
        self._context = context

    def after_step(self, step: StepDone) -> Iterator[Result]:
        """Run the checks that are due after `step`; costs nothing when none is due."""
        for about in [
            check for check in self._pending if check.when in (When.FIRST_STEPS, When.ALWAYS)
        ]:
            for result in self._run(about, step.step, step):
                if about.when is When.FIRST_STEPS:
                    del self._pending[about]
                elif self._pending[about] == result.verdict:
                    continue
                else:
                    self._pending[about] = result.verdict
                yield result

    def at_checkpoint(
        self, path: Path, step: int, check_resumable: Callable[[Path], None]
    ) -> Iterator[Result]:
        """Check the newest checkpoint once it is published in `path`."""
        for about in [check for check in self._pending if check.when is When.AT_CHECKPOINT]:
            yield from self._run(about, step, path, step, check_resumable)

    def at_end(self, saved: Artefact, step: int, student: Decoder) -> Iterator[Result]:
        """Compare the saved files with the trained student, `student`, whose tensors are not sharded."""
        for about in [check for check in self._pending if check.when is When.AT_END]:
            yield from self._run(about, step, saved, student=student)

    def ends_run(self, result: Result) -> bool:
        """Return whether this failure stops the run: it makes the run worthless, and the spec says to stop."""
        return result.failed and result.about.stops and self.spec.on_fail == "stop"

    def _run(
        self,
        about: About,
        step: int,
        *arguments: object,
        student: Decoder | None = None,
    ) -> Iterator[Result]:
        assert self._context is not None, "before_training comes first"
        context = self._context
        if student is not None:
            context = dataclasses.replace(context, student=student)
        begun = time.perf_counter()
        answer: Answer | None
        try:
            # These checks read no model, so nothing has to be restored; a step may even be running.
            no_model = about.when in (When.ALWAYS, When.AT_CHECKPOINT)
            with contextlib.nullcontext() if no_model else undisturbed(context):
                answer = FUNCTIONS[about.id](context, *arguments)
        except NoHiddenStates as error:
            answer = unknown(str(error))
        except Exception as error:  # noqa: BLE001 - an exception in a check must not end the run
            answer = unknown(f"the check raised {type(error).__name__}: {error}")
        if answer is not None:
            yield _result(about, answer, time.perf_counter() - begun, step)


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
