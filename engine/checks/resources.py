"""Checks of resources: memory against its plan, and compilations after warm-up."""

from __future__ import annotations

from engine.checks.context import Context
from engine.log.events import StepDone
from engine.units import format_bytes
from engine.verdict import Answer, Numbers, failed, passed, unknown

SETTLED = 3
"""Number of steps after which memory has peaked and every kernel of a step has run."""
MAX_MEASURED, MIN_MEASURED = 1.10, 0.5
"""Allowed range of the measured memory relative to the plan. Above it the plan accepts runs that do not fit; below it
the plan refuses runs that do. Caching and fragmentation are a few percent.
"""
SLACK_BYTES = 256 << 20
"""Bytes that libraries allocate for themselves, which matters only for small runs."""


def memory_as_planned(context: Context, step: StepDone) -> Answer | None:
    if step.step < context.step + SETTLED:
        return None
    memory = context.memory()
    if memory is None:
        return unknown("no memory was planned")
    measured, predicted = memory.measured_bytes, memory.predicted_bytes
    numbers = Numbers(predicted_bytes=predicted)
    if measured is None:
        return numbers.unknown(f"the peak was not measured: {memory.source}")
    numbers["measured_bytes"] = measured
    text = f"{format_bytes(measured)} measured ({memory.source}), {format_bytes(predicted)} planned"
    if measured > MAX_MEASURED * predicted + SLACK_BYTES:
        return numbers.failed(f"{text}: the plan accepts runs that do not fit")
    if memory.does_all_work and predicted > measured / MIN_MEASURED + SLACK_BYTES:
        return numbers.failed(f"{text}: the plan refuses runs that fit")
    return numbers.passed(text)


def no_late_compile(context: Context, step: StepDone) -> Answer | None:
    if step.step < context.step + SETTLED:
        return None
    late = context.late_compiles()
    if late:
        return failed(
            f"{len(late)} kernels were compiled while a step waited, last {late[-1]}",
            compiles=len(late),
        )
    return passed("no kernel was compiled while a step waited", compiles=0)
