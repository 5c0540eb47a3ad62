"""Choose how the CPU threads of a trainer wait for each other. OpenMP reads this once at its start, so it is
decided before torch loads.

A step on the CPU is thousands of short parallel regions, and each ends when its slowest thread does. A
waiting thread may spin (`active`), which saves microseconds while every thread has a CPU of its own. When
another process takes a CPU, the spinning threads compete with the thread they wait for, and a step of 0.3 s
can take 10. A sleeping thread (`passive`) costs little and does no such harm.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.decision import Decision

VARIABLE = "OMP_WAIT_POLICY"


def choose_thread_wait(wanted: str, environ: Mapping[str, str]) -> Decision:
    """Choose `passive` unless the spec or the environment says otherwise."""
    knob = "compute.thread_wait"
    if wanted != "auto":
        return Decision(knob=knob, choice=wanted, reason="", overridden=True)
    value = environ.get(VARIABLE, "").lower()
    # `passive` there is the default, or what the supervisor set for this process.
    if value and value != "passive":
        return Decision(knob=knob, choice=value, reason=f"{VARIABLE} is set", overridden=True)
    return Decision(
        knob=knob,
        choice="passive",
        reason="threads that spin take the CPU from the one they wait for when another process runs",
        rejected=(
            ("active", "a little faster on an idle machine, many times slower on a busy one"),
        ),
    )
