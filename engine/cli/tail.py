"""Print what a run says about itself: state, losses, alerts, decisions, device, log.

engine tail RUN            what there is now
engine tail -f RUN         and what comes, until the run ends
engine tail --json RUN     the same as one JSON value
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from engine import limits
from engine.cli.numbers import whole
from engine.terminal import put, put_json

HELP = "print a run: state, losses, decisions, device, log"
POLL_S = 0.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on printing the log until the run ends"
    )
    parser.add_argument(
        "-n",
        "--lines",
        type=whole(limits.LINES.most),
        default=20,
        metavar="N",
        help="log lines to print first (20)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON value")


def run(arguments: argparse.Namespace) -> int:
    from engine.runlog.folder import open_run
    from engine.runlog.follow import Follower
    from engine.runlog.read import BrokenLog
    from engine.runlog.text import (
        alert_lines,
        decision_lines,
        device_lines,
        has_ended,
        line_text,
        result_lines,
        speed_lines,
        status_text,
    )

    follower = Follower(open_run(arguments.run))
    broken: BrokenLog | None = None
    try:
        follower.read_all()
    except BrokenLog as error:
        broken = error  # what can be read is printed first
    view = follower.view
    if arguments.json and broken is None:
        put_json(as_json(follower))
        return 0
    put(f"{follower.run.name}: {status_text(view, follower.alive)}")
    for line in [*result_lines(view), *speed_lines(view)]:
        put(line)
    for heading, lines in (
        *(
            [("alerts", [line for a in view.alerts.values() for line in alert_lines(a)])]
            if view.alerts
            else []
        ),
        ("decisions", [line for d in view.decisions for line in decision_lines(d)]),
        ("device", device_lines(view)),
        (
            "log",
            [line_text(line) for line in view.lines[-arguments.lines :]]
            if arguments.lines > 0
            else [],
        ),
    ):
        put(f"\n{heading}")
        for line in lines:
            put(f"  {line}")
    sys.stdout.flush()
    if broken is not None:
        raise broken
    follower.new_lines()
    while arguments.follow and not has_ended(follower.state):
        time.sleep(POLL_S)
        follower.poll()
        for entry in follower.new_lines():
            put(f"  {line_text(entry)}", flush=True)
    if arguments.follow:
        put(f"{follower.run.name}: {status_text(follower.view, follower.alive)}")
    return 0


def as_json(follower: Any) -> dict[str, Any]:
    """A run as one JSON value; non-finite numbers are written by name."""
    import math

    import msgspec

    from engine.runlog.events import name_of_non_finite
    from engine.runlog.text import share_of_peak

    def clean(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return name_of_non_finite(value)
        if isinstance(value, dict):
            return {k: clean(v) for k, v in value.items()}
        return [clean(v) for v in value] if isinstance(value, list | tuple) else value

    def plain(event: Any) -> Any:
        return None if event is None else clean(msgspec.structs.asdict(event))

    view = follower.view
    last = len(view.steps) - 1
    return {
        "run": str(follower.run.path),
        "state": follower.state,
        "step": view.last_step,
        "total_steps": view.total_steps,
        "last": {n: clean(view.steps.value(n, last)) for n in view.steps.columns}
        if last >= 0
        else None,
        "tokens_per_second": view.tokens_per_second(),
        "share_of_peak": share_of_peak(view),
        "phases_s": clean(dict(view.phases)),
        "eta_s": view.eta_s(),
        "started": plain(view.started),
        "phase": plain(view.phase),
        "data": plain(view.data),
        "models": {role: plain(model) for role, model in view.models.items()},
        "decisions": [plain(d) for d in view.decisions],
        "evals": [plain(e) for e in view.evals],
        "checkpoints": [plain(c) for c in view.checkpoints],
        "non_finite": [plain(e) for e in view.non_finite],
        "notes": [plain(n) for n in view.notes],
        "alerts": [plain(a) for a in view.alerts.values()],
        "alert_count": view.alert_count,
        "stack_dump": plain(view.stack_dump),
        "student": plain(view.student),
        "finished": plain(view.finished),
        "exit": plain(view.exit),
        "host": plain(view.host),
        "gpus": [plain(view.gpus[i]) for i in sorted(view.gpus)],
        "absent": view.absent,
        "facts": clean(view.facts),
    }
