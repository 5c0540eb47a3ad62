"""Print what a run says about itself: state, losses, alerts, decisions, device, log.

engine tail RUN            what there is now
engine tail -f RUN         and what comes, until the run ends
engine tail --json RUN     the same as one JSON value
engine tail -f --json RUN  one JSON value a line: the run, each line of its logs as it comes, the run at its end

A log that cannot be read to its end is printed as far as it can be, as JSON too, where `fault` says what is
wrong; then the exit code is 65.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from engine import limits
from engine.cli.numbers import whole
from engine.terminal import clipped, put, put_json

HELP = "print a run: state, losses, decisions, device, log"
POLL_S = 0.25
SECTION_LINES = 500
"""So many lines of a section are printed; a log may have any number of them."""


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
    parser.add_argument(
        "--json", action="store_true", help="print JSON: one value, with -f one a line"
    )


def run(arguments: argparse.Namespace) -> int:
    from engine.errors import RunLogError
    from engine.log.folder import open_run
    from engine.log.follow import Follower
    from engine.log.text import has_ended, line_text, status_text

    follower = Follower(open_run(arguments.run))
    fault: RunLogError | None = None
    try:
        follower.read_all()
    except RunLogError as error:
        fault = error  # what can be read is printed first
    if arguments.json:
        put_json(as_json(follower, fault), flush=True)
    else:
        _print_all(follower, arguments.lines)
    follower.new_lines()
    while arguments.follow and fault is None and not has_ended(follower.state):
        time.sleep(POLL_S)
        try:
            follower.poll()
        except RunLogError as error:
            fault = error
        for entry in follower.new_lines():
            if arguments.json:
                put_json(line_as_json(entry), flush=True)
            else:
                put(f"  {line_text(entry)}", flush=True)
    if arguments.follow and arguments.json:
        put_json(as_json(follower, fault))
    elif arguments.follow and fault is None:
        put(f"{follower.run.name}: {status_text(follower.view, follower.alive)}")
    if fault is not None:
        sys.stdout.flush()
        raise fault
    return 0


def _print_all(follower: Any, log_lines: int) -> None:
    """What there is now, in words."""
    from engine.log.text import (
        alert_lines,
        decision_lines,
        device_lines,
        line_text,
        result_lines,
        speed_lines,
        status_text,
    )

    view = follower.view
    put(f"{follower.run.name}: {status_text(view, follower.alive)}")
    for line in [*result_lines(view), *speed_lines(view)]:
        put(line)
    alerts = [line for a in view.alerts.values() for line in alert_lines(a)]
    log = view.lines[-log_lines:] if log_lines > 0 else []
    sections = {
        **({"alerts": alerts} if alerts else {}),
        "decisions": [line for d in view.decisions for line in decision_lines(d)],
        "device": device_lines(view),
    }
    for heading, lines in sections.items():
        put(f"\n{heading}")
        for line in lines[:SECTION_LINES]:
            put(f"  {line}")
        if len(lines) > SECTION_LINES:
            put(f"  and {len(lines) - SECTION_LINES:,} lines more")
    put("\nlog")
    for entry in log:
        put(f"  {line_text(entry)}")
    sys.stdout.flush()


def _plain(value: Any) -> Any:
    """A value of a log as JSON has it: numbers that are not finite by name, long texts cut."""
    import math

    from engine.limits import LOG_TEXT
    from engine.log.events import name_of_non_finite

    if isinstance(value, float) and not math.isfinite(value):
        return name_of_non_finite(value)
    if isinstance(value, str):
        return clipped(value, LOG_TEXT.most)
    if isinstance(value, dict):
        return {_plain(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def line_as_json(line: Any) -> dict[str, Any]:
    """A line of one of the logs as one JSON value."""
    import msgspec

    from engine.log.events import kind_of

    fields = _plain(msgspec.structs.asdict(line.event))
    return {
        "log": line.source,
        "unix_s": line.unix_s,
        **fields,
        "kind": _plain(kind_of(line.event)),
    }


def as_json(follower: Any, fault: Any = None) -> dict[str, Any]:
    """A run as one JSON value; `fault` is what kept its logs from being read to their ends."""
    import msgspec

    from engine.log.text import share_of_peak

    def plain(event: Any) -> Any:
        return None if event is None else _plain(msgspec.structs.asdict(event))

    view = follower.view
    last = len(view.steps) - 1
    return {
        "run": str(follower.run.path),
        "fault": None if fault is None else fault.message,
        "state": follower.state,
        "step": view.last_step,
        "total_steps": view.total_steps,
        "last": {n: _plain(view.steps.value(n, last)) for n in view.steps.columns}
        if last >= 0
        else None,
        "tokens_per_second": _plain(view.tokens_per_second()),
        "share_of_peak": _plain(share_of_peak(view)),
        "phases_s": _plain(dict(view.phases)),
        "eta_s": _plain(view.eta_s()),
        "started": plain(view.started),
        "phase": plain(view.phase),
        "data": plain(view.data),
        "models": {_plain(role): plain(model) for role, model in view.models.items()},
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
        "absent": _plain(view.absent),
        "facts": _plain(view.facts),
    }
