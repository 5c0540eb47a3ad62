"""Follow a run in the foreground: progress, signals, and the result at the end.

On a terminal one line is redrawn; in a pipe or a log file each noteworthy event is a line of its own. Both go
to stderr.
"""

from __future__ import annotations

import os
import signal
import time

from engine.cli.answers import put_json
from engine.errors import EXIT_FAIL
from engine.log.events import AnyEvent, Judged, Phase, kind_of
from engine.log.fold import Follower
from engine.log.text import (
    alert_lines,
    event_text,
    has_ended,
    host_words,
    result_lines,
    share_of_peak,
    speed_lines,
    start_parts,
    status_text,
)
from engine.log.view import LogLine, RunView
from engine.signals import ENDING
from engine.terminal import StatusLine, put, say
from engine.train.checkpoint.continuing import past_checks, resume_command, was_stopped_by_checks
from engine.watch.start_and_stop import Launched
from engine.watch.verdict_line import SUSPECT, WRONG, run_verdict_lines, verdict_of

POLL_S = 0.2
PLAIN_EVERY_S = 5.0
SETTLE_S = 10.0
"""Seconds to wait for a trainer that outlived its supervisor."""
RECURRING = ("training", "evaluating", "saving a checkpoint")
"""Phases that occur again and again."""
QUIET = ("step", "log_opened", "host", "gpu", "device_facts")
"""Kinds of events that are too frequent to print."""


class _Progress:
    """Prints what changed since the last poll."""

    def __init__(self, since_unix_s: float) -> None:
        self.line = StatusLine(plain_every_s=PLAIN_EVERY_S)
        self.since_unix_s = since_unix_s

    def show(self, follower: Follower) -> None:
        view = follower.view
        for line in follower.new_lines():
            if line.unix_s > self.since_unix_s and not _is_quiet(line.event):
                self.line.say(*_event_lines(line))
        if self.line.redrawn or len(view.steps):
            bar = _bar(view) if self.line.redrawn else ""
            verdict = verdict_of(view, follower.state)
            wrong = f" | {verdict.line}" if verdict.level in (WRONG, SUSPECT) else ""
            self.line.show(f"{bar}{status_text(view, follower.alive)}{wrong}")


def _event_lines(line: LogLine) -> list[str]:
    """Render an alert in full, anything else on one line."""
    if isinstance(line.event, Judged) and line.event.raises_alert:
        return alert_lines(line.event)
    return [f"{host_words(line)}{event_text(line.event)}"]


def _is_quiet(event: AnyEvent) -> bool:
    """Return whether an event is too frequent to print here; it is in the log, and would bury the rare events."""
    if isinstance(event, Phase):
        return event.name in RECURRING and not event.detail
    return kind_of(event) in QUIET


def _bar(view: RunView) -> str:
    total = view.total_steps
    if not total:
        return ""
    filled = round(20 * view.last_step / total)
    return f"[{'#' * filled}{'.' * (20 - filled)}] "


def attend(launched: Launched, *, as_json: bool, results: bool = True) -> int:
    """Follow the run to its end; returns its exit code. Ctrl-C and SIGTERM are forwarded; after a hang-up the
    run continues. Without `results` the results are not written to stdout; with `as_json` they are one JSON value
    there."""
    follower = Follower(launched.run)
    progress = _Progress(launched.begun_unix_s)
    # Of several hosts the first one shows the run.
    show = progress.show if not launched.run.host else lambda _: None
    say(f"run folder: {launched.run.path}")

    def pass_on(number: int, _frame: object) -> None:
        if launched.process.poll() is None:
            launched.send(number)

    def hang_up(_number: int, _frame: object) -> None:
        launched.leave(b"h")
        os._exit(128 + signal.SIGHUP)

    signal.signal(signal.SIGINT, pass_on)
    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGHUP, hang_up)
    while launched.process.poll() is None:
        follower.poll()
        show(follower)
        time.sleep(POLL_S)
    _settle(follower)
    show(follower)
    progress.line.clear()
    return _report(launched, follower, as_json=as_json, results=results)


def _settle(follower: Follower) -> None:
    """After the supervisor is gone, wait for a trainer that outlived it to save and log its end."""
    deadline = time.monotonic() + SETTLE_S
    follower.read_all()
    while not has_ended(follower.state) and time.monotonic() < deadline:
        time.sleep(POLL_S)
        follower.read_all()


def _report(launched: Launched, follower: Follower, *, as_json: bool, results: bool) -> int:
    view, state = follower.view, follower.state
    code = exit_code(view, launched.process.returncode)
    for line in [*result_lines(view), *speed_lines(view)] if results and not as_json else []:
        put(line)
    if as_json:
        receipt = launched.run.read_receipt() or {}
        pace = {
            "tokens_per_second": view.tokens_per_second(),
            "share_of_peak": share_of_peak(view),
            "phases_s": view.phases,
            "host_s": view.host_s,
            "start": start_parts(view),
        }
        ending = {"state": state, "exit_code": code, "run": launched.run.path}
        put_json("distill", {**receipt, **pace, **ending})
    for line in run_verdict_lines(view, state, launched.run.path):
        say(line)
    say(status_text(view, follower.alive))
    if state not in ("completed",):
        say(f"log: engine tail {launched.run.path}    errors: {launched.run.stderr}")
        if view.checkpoints and was_stopped_by_checks(view):
            say(f"continue past the failed check: {past_checks(launched.run)}")
        elif view.checkpoints:
            say(f"continue: {resume_command(launched.run)}")
    say(f"run folder: {launched.run.path}")
    return code


def exit_code(view: RunView, supervisor_code: int) -> int:
    """Return the exit code that the run recorded, else the one its parent saw, else the supervisor's. A signal n
    is 128 + n; 0 without a recorded end is 1."""
    code = supervisor_code
    if view.finished is not None:
        code = view.finished.exit_code
    elif view.exit is not None and supervisor_code - 128 not in ENDING:
        # A supervisor that was asked to end a run before its first step reports that, however the trainer
        # ended.
        code = supervisor_code if view.exit.returncode is None else view.exit.returncode
    if code < 0:
        return 128 - code
    return code if code or view.finished is not None else EXIT_FAIL
