"""Checks of resources: memory against its plan, and compilations after warm-up."""

from __future__ import annotations

from engine.checks.check import Answer, Numbers, failed, passed, unknown
from engine.checks.context import Context
from engine.log.events import StepDone
from engine.units import format_bytes

SETTLED = 3
"""Steps after which the peak of a step has been reached and every kernel of a step has run."""
MOST_MEASURED, LEAST_MEASURED = 1.10, 0.5
"""Measured memory relative to the plan. Above the first, the plan accepts runs that do not fit; below the
second, it refuses runs that do. Caching and fragmentation are some percent.
"""
SLACK_BYTES = 256 << 20
"""Memory that libraries allocate for themselves, which matters only for small runs."""


class MemoryAsPlanned:
    def __init__(self, context: Context) -> None:
        self.begun = context.step

    def after(self, context: Context, step: StepDone) -> Answer | None:
        if step.step < self.begun + SETTLED:
            return None
        memory = context.memory()
        if memory is None:
            return unknown("no memory was planned")
        if memory.measured_bytes is None:
            return unknown(
                f"the peak was not measured: {memory.source}",
                predicted_bytes=memory.predicted_bytes,
            )
        measured, predicted = memory.measured_bytes, memory.predicted_bytes
        numbers = Numbers(measured_bytes=measured, predicted_bytes=predicted)
        text = f"{format_bytes(measured)} measured ({memory.source}), {format_bytes(predicted)} planned"
        if measured > MOST_MEASURED * predicted + SLACK_BYTES:
            return numbers.failed(f"{text}: the plan lets runs through that do not fit")
        if predicted > measured / LEAST_MEASURED + SLACK_BYTES:
            return numbers.failed(f"{text}: the plan refuses runs that fit")
        return numbers.passed(text)


class NoLateCompile:
    def __init__(self, context: Context) -> None:
        self.begun = context.step
        self.said = -1
        """Number of late compilations at the last result."""

    def after(self, context: Context, step: StepDone) -> Answer | None:
        if step.step < self.begun + SETTLED:
            return None
        late = context.late_compiles()
        if len(late) == self.said:
            return None
        self.said = len(late)
        if late:
            return failed(
                f"{len(late)} kernels were compiled while a step waited, last {late[-1]}",
                compiles=len(late),
            )
        return passed(
            f"no kernel was compiled in the first {step.step - self.begun} steps", compiles=0
        )
