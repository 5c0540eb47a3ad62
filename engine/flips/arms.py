"""One run of an arm: an ordinary run, started, and watched to its end or its limit.

The run is a process of its own that knows nothing of the experiment; all that is known about it is
what its logs say. One that takes too long is asked to stop, and killed when it does not answer: a
process that hangs in a system call or is stopped by a signal answers nothing. What it had done
stays in its folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import RunLogError
from engine.flips.outcome import Outcome, sum_up
from engine.flips.plan import Plan
from engine.log.folder import create_run
from engine.log.follow import Follower
from engine.log.text import has_ended
from engine.log.view import RunView
from engine.spec import RunSpec, spec_to_toml
from engine.version import VERSION
from engine.watch.launch import Launched, launch

POLL_S = 0.05
STOP_GRACE_S = 10.0

Watch = Callable[[RunView], None]


class Stopped(Exception):
    """Whoever runs the experiment asked it to stop."""


def run_arm(
    plan: Plan, *, b: bool, pair: int, folder: Path, watch: Watch, stop: Callable[[], bool]
) -> Outcome:
    """Run one arm to its end in the new run folder `folder`.

    `watch` is called with the view while it goes on. When `stop` answers yes the run is ended and
    Stopped raised.
    """
    spec = plan.arm(b, folder.parent, folder.name, pair)
    run = create_run(folder, spec_to_toml(spec), _effective(spec, plan))
    begun_s = time.monotonic()
    launched = launch(run)
    follower = Follower(run)
    over = False
    try:
        while launched.process.poll() is None:
            _poll(follower)
            watch(follower.view)
            if stop():
                raise Stopped
            if time.monotonic() - begun_s > plan.run_limit_s:
                over = True
                _end(launched, follower)
            time.sleep(POLL_S)
    except BaseException:
        # Whoever ends the experiment ends the arm with it.
        _end(launched, follower)
        raise
    finally:
        # Nobody is left to tell that we go.
        with contextlib.suppress(BrokenPipeError):
            assert launched.process.stdin is not None
            launched.process.stdin.close()
    # Before the view is looked at: this reads the last lines of the logs.
    state = _settled(follower)
    return sum_up(
        plan,
        "B" if b else "A",
        f"{folder.parent.name}/{folder.name}",
        follower.view,
        state,
        time.monotonic() - begun_s,
        over=over,
    )


def _effective(spec: RunSpec, plan: Plan) -> dict[str, Any]:
    return {
        "engine": VERSION,
        "spec_file": plan.source,
        "sets": [],
        "flip_sha256": plan.sha256,
        "spec": spec.to_dict(),
        "spec_sha256": spec.sha256,
    }


def _settled(follower: Follower) -> str:
    """The state once the supervisor is gone: a trainer that outlived it saves and says so first."""
    deadline_s = time.monotonic() + STOP_GRACE_S
    while True:
        with contextlib.suppress(RunLogError):
            follower.read_all()
        if has_ended(follower.state):
            return follower.state
        if time.monotonic() > deadline_s:
            return "vanished"
        time.sleep(POLL_S)


def _poll(follower: Follower) -> None:
    # What could be read is in the view; a killed writer may leave less than a line.
    with contextlib.suppress(RunLogError):
        follower.poll()


def _end(launched: Launched, follower: Follower) -> None:
    """Ask the run to stop; kill its trainer, then its supervisor, when that is not enough."""
    process = launched.process
    if process.poll() is None:
        launched.send(signal.SIGTERM)
        _wait(launched, follower)
    pid = follower.view.trainer_pid
    # The supervisor has not taken the exit status yet, so the pid is still the trainer's.
    if process.poll() is None and pid is not None and follower.view.exit is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _wait(launched, follower)
    if process.poll() is None:
        process.kill()
    process.wait()


def _wait(launched: Launched, follower: Follower) -> None:
    deadline_s = time.monotonic() + STOP_GRACE_S
    while launched.process.poll() is None and time.monotonic() < deadline_s:
        _poll(follower)
        time.sleep(POLL_S)
