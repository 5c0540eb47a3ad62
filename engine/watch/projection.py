"""Project the duration of a whole run from its first steps.

    whole run = start + steps x median step + evaluations + checkpoints + saving the student

Each term is measured in the log, without the warm-up steps. Compiling is a separate number: it happens once, and the
next run may load the kernels from a cache. A term that was not observed is listed as missing, and the sum is then
"at least".
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from engine.log.view import RunView
from engine.spec import RunSpec
from engine.units import NOT_MEASURED, format_bytes, format_count, format_seconds

WARM_UP_STEPS = 3
"""Number of first steps of a session that are not used: they allocate optimizer state, fill caches and raise
clocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Times in seconds; None where not observed."""

    steps: int
    """Steps of the whole run."""
    measured_steps: int
    step_s: float | None
    """Median of the steps after the warm-up."""
    tokens_per_s: float | None
    start_s: float | None
    """Seconds from the first log line to the first step, without compiling."""
    compile_s: float
    evaluations: int
    evaluation_s: float | None
    checkpoints: int
    checkpoint_s: float | None
    predicted_bytes: float | None
    measured_bytes: float | None
    passed: int
    unknown: tuple[str, ...]
    """Ids of first-minute checks without a result."""
    failed: tuple[str, ...]

    @property
    def total_s(self) -> float | None:
        """Seconds of the whole run without compiling; missing terms count as 0."""
        if self.step_s is None:
            return None
        return (
            (self.start_s or 0.0)
            + self.steps * self.step_s
            + self.evaluations * (self.evaluation_s or 0.0)
            + self.checkpoints * (self.checkpoint_s or 0.0)
        )

    @property
    def missing(self) -> list[str]:
        """Names of the terms that were not observed."""
        parts = {
            "the start": self.start_s is None,
            "evaluations": self.evaluations > 0 and self.evaluation_s is None,
            "checkpoints": self.checkpoints > 0 and self.checkpoint_s is None,
        }
        return [name for name, lacks in parts.items() if lacks]


def project(view: RunView, spec: RunSpec) -> Projection:
    """Project the whole run that `spec` describes from the steps in `view`."""
    times = [s for s in view.steps.values("step_s", view.session_row) if s is not None]
    pace = times[WARM_UP_STEPS:]
    tokens = view.steps.last("tokens")
    step_s = statistics.median(pace) if pace else None
    compile_s = sum(c.compile_s or 0.0 for c in view.compiles)
    every_eval, every_save = spec.eval.every, spec.checkpoint.every
    evaluated = [e.eval_s for e in view.evals if e.subject != "teacher" and e.eval_s is not None]
    saved = [c.save_s for c in view.checkpoints if c.save_s is not None]
    checks = view.checks.values()
    start_s = None
    if view.first_step_unix_s is not None and view.first_unix_s is not None and times:
        start_s = max(0.0, view.first_step_unix_s - view.first_unix_s - times[0] - compile_s)
    plan, peak = view.memory_plan, view.memory_peak
    return Projection(
        steps=spec.train.steps,
        measured_steps=len(pace),
        step_s=step_s,
        tokens_per_s=tokens / step_s if tokens is not None and step_s else None,
        start_s=start_s,
        compile_s=compile_s,
        # The last step always evaluates, and the saved student is evaluated after it; the teacher's and the
        # untrained student's evaluations are part of the start.
        evaluations=_points(spec.train.steps, every_eval, every_save) + spec.checkpoint.at_end,
        evaluation_s=statistics.median(evaluated) if evaluated else None,
        checkpoints=_points(spec.train.steps, every_save) if spec.checkpoint.at_end else 0,
        checkpoint_s=statistics.median(saved) if saved else None,
        predicted_bytes=plan.predicted_bytes if plan is not None else None,
        measured_bytes=peak.measured_bytes if peak is not None else None,
        passed=sum(check.level == "pass" for check in checks),
        unknown=tuple(check.id for check in checks if check.level == "unknown"),
        failed=tuple(check.id for check in checks if check.level == "fail"),
    )


def _points(steps: int, *every: int) -> int:
    """Count the steps, up to `steps`, that are a multiple of one of `every` or the last step."""
    return len({n for e in every if e > 0 for n in range(e, steps + 1, e)} | {steps})


def projection_lines(projection: Projection) -> list[str]:
    """Describe the projection for a user who decides whether to start the whole run."""
    p = projection
    if p.step_s is None or p.total_s is None:
        return [
            f"no pace: expected more than {WARM_UP_STEPS} steps, which warm up; give --smoke a larger number"
        ]
    least = f"at least, without {' and '.join(p.missing)}: " if p.missing else ""
    tokens = f", {format_count(p.tokens_per_s)} tokens/s" if p.tokens_per_s is not None else ""
    checks = f"{p.passed} pass"
    checks += f", {len(p.unknown)} unknown ({', '.join(p.unknown)})" if p.unknown else ""
    checks += f", {len(p.failed)} FAIL ({', '.join(p.failed)})" if p.failed else ""
    return [
        f"the whole run: {least}{format_seconds(p.total_s)}, and {format_seconds(p.compile_s)} of compiling once",
        f"  {p.steps} steps of {_time(p.step_s)} (median of {p.measured_steps}){tokens}",
        f"  start {_time(p.start_s)}, {p.evaluations} evaluations of {_time(p.evaluation_s)}, "
        f"{p.checkpoints} checkpoints of {_time(p.checkpoint_s)}",
        f"memory: {format_bytes(p.measured_bytes)} at the peak, {format_bytes(p.predicted_bytes)} predicted",
        f"checks: {checks}",
    ]


def _time(seconds: float | None) -> str:
    return NOT_MEASURED if seconds is None else format_seconds(seconds)
