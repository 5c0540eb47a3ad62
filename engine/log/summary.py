"""What was checked and what was compiled, in lines: the longer summaries of a view that the terminal, the
notebook and the report all show. Pure; single sentences are `engine.log.text`'s.
"""

from __future__ import annotations

from engine.log.phrases import one_line
from engine.log.view import RunView
from engine.units import format_seconds

CHECK_SIGNS = {"fail": "x FAIL", "unknown": "? unknown", "pass": "+ pass"}


def check_lines(view: RunView) -> list[str]:
    """The first-minute checks: what failed, then what could not be told, then what holds."""
    checks = view.checks
    if not checks:
        return ["no check was asked yet"]
    order = list(CHECK_SIGNS)
    levels = {
        check.id: check.level if check.level in order else "unknown" for check in checks.values()
    }
    found = sorted(checks.values(), key=lambda check: order.index(levels[check.id]))
    counts = ", ".join(
        f"{sum(level == one for one in levels.values())} {level}" for level in reversed(order)
    )
    cost = sum(check.cost_s or 0.0 for check in found)
    times, seconds = view.checked_again
    again = f"; {times} answers again later took {format_seconds(seconds)}" if times else ""
    return [
        f"{counts}; they took {format_seconds(cost)}{again}",
        *(
            one_line(f"{CHECK_SIGNS[levels[check.id]]} {check.id}: {check.reason}")
            for check in found
        ),
    ]


def kernel_lines(view: RunView) -> list[str]:
    """The kernel caches: hits, misses, and each compile, newest first, with what made it a new one."""
    counts = view.kernel_counts
    lines = []
    if counts is not None:
        lines.append(
            f"by step {counts.step}: {counts.hits} hits, {counts.misses} misses, "
            f"{counts.disk_hits} of them from the cache on disk"
        )
    late = sum(compiled.after_warm_up for compiled in view.compiles)
    took = sum(compiled.compile_s or 0.0 for compiled in view.compiles)
    if view.compiles:
        lines.append(
            f"{len(view.compiles)} compiled in {format_seconds(took)}, {late} after warm-up"
        )
    for compiled in reversed(view.compiles):
        seconds = "" if compiled.compile_s is None else f" {format_seconds(compiled.compile_s)}"
        where = " from disk" if compiled.disk_hit else ""
        sign = "x LATE" if compiled.after_warm_up else "+"
        lines.append(
            one_line(
                f"{sign} {compiled.compiler} {compiled.kernel}{seconds}{where}: {compiled.key}"
            )
        )
        if compiled.differs:
            lines.append("    " + one_line(f"differs in {', '.join(compiled.differs)}"))
    return lines or ["nothing was compiled: this run has no kernels of its own, or none yet"]
