"""What is known of a watched command at its end, on one screen: verdict, why, evidence, next step."""

from __future__ import annotations

from engine.errors import RunLogError
from engine.log.folder import RunFolder
from engine.log.follow import Follower
from engine.log.text import alert_lines, status_text
from engine.units import format_count, format_seconds, format_value

OUTSIDE = (
    "seen from outside only: no probe reported a step. The command stepped no torch optimizer, or ran Python with "
    "-I or -E, in a container, on another machine, or with an environment of its own"
)


def summary_lines(run: RunFolder) -> list[str]:
    follower = Follower(run)
    try:
        follower.read_all()
    except RunLogError as broken:
        return [f"watched: {broken}"]
    view = follower.view
    lines = [f"watched: {run.name}: {status_text(view, follower.alive)}"]
    if view.watched is None:
        lines.append(f"  {OUTSIDE}")
    elif len(view.steps):
        losses = view.steps.values("loss")
        first, last = format_value(losses[0]), format_value(losses[-1])
        times = sorted(s for s in view.steps.values("step_s") if s is not None)
        middle = f", {format_seconds(times[len(times) // 2])} a step (median)" if times else ""
        lines.append(f"  {format_count(len(view.steps))} steps{middle}; loss {first} -> {last}")
    for alert in view.alerts.values():
        lines += [f"  {line}" for line in alert_lines(alert)]
    return [*lines, f"  look at it: apr-workbench {run.path}"]
