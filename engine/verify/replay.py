"""Replay a run: train the first steps of its first session again, in a new run folder and a fresh process.

The replay has the settings of the run. It leaves out what does not change a step: checks, audits, evaluations between
steps, checkpoints, and the student at the end. It differs in no setting that the training reads.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import write_error
from engine.log.events import DataReady, LogOpened, ModelReady, RunFinished, RunStarted, StepDone
from engine.log.folder import RunFolder, create_run
from engine.log.follow import Follower
from engine.log.observed import lines_of
from engine.signals import partial_output
from engine.spec import RunSpec, spec_from_dict, spec_to_toml
from engine.spec.sections import settings_sha256
from engine.terminal import StatusLine
from engine.units import format_seconds
from engine.version import VERSION
from engine.watch.start_and_stop import launch

POLL_S = 0.05
PLAIN_EVERY_S = 5.0


@dataclass(slots=True)
class Session:
    """What the trainer logged of one session."""

    started: RunStarted | None = None
    data: DataReady | None = None
    models: dict[str, ModelReady] = field(default_factory=dict)
    """By role, each as it was loaded."""
    steps: dict[int, StepDone] = field(default_factory=dict)
    finished: RunFinished | None = None

    @property
    def last_step(self) -> int:
        return max(self.steps, default=0)


def read_sessions(run: RunFolder) -> list[Session]:
    """Read the sessions of a run from its log, without those that ended before a step. Raises RunLogError."""
    found: list[Session] = []
    for line in lines_of(run.events):
        event = line.event
        if isinstance(event, LogOpened):
            found.append(Session())
        if not found:
            continue  # of a log that begins otherwise, nothing can be compared
        session = found[-1]
        match event:
            case RunStarted():
                session.started = event
            case DataReady():
                session.data = event
            case ModelReady():
                session.models.setdefault(event.role, event)
            case StepDone():
                # A second record of a step is no second step: the comparison keeps the first.
                session.steps.setdefault(event.step, event)
            case RunFinished():
                session.finished = event
    return [session for session in found if session.steps]


def settings_at(effective: dict[str, Any], sha256: str) -> dict[str, Any] | None:
    """Return the settings whose hash a session logged: those of effective.json, or those before its newest changes.
    None where neither has this hash."""
    settings: dict[str, Any] = copy.deepcopy(effective["spec"])
    changes = effective.get("changes")
    left = list(changes) if isinstance(changes, list) else []
    while settings_sha256(settings) != sha256:
        if not left:
            return None
        change = left.pop()
        try:
            section, name = change["key"].split(".")
            settings[section][name] = change["was"]
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
    return settings


def replayed_spec(settings: dict[str, Any], folder: Path, steps: int) -> RunSpec:
    """Return the settings of the replay in `folder`/run. Raises SpecError."""
    spec = spec_from_dict(settings)
    return dataclasses.replace(
        spec,
        run=dataclasses.replace(spec.run, name="run", out=str(folder)),
        train=dataclasses.replace(spec.train, stop_after=steps),
        eval=dataclasses.replace(spec.eval, every=0),
        checkpoint=dataclasses.replace(spec.checkpoint, every=0, at_end=False),
        checks=dataclasses.replace(spec.checks, enabled=False, every=-1),
    )


@contextlib.contextmanager
def replay_folder(run: RunFolder, scratch: Path | None, *, keep: bool) -> Iterator[Path]:
    """Yield a new folder beside the run, or in `scratch`, that is removed at the end unless it is to be kept."""
    parent = (scratch or run.path.parent).absolute()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        # A hidden folder around the replay: no list of runs shows it.
        path = Path(tempfile.mkdtemp(prefix=f".{run.name}.verify-", dir=parent))
    except OSError as error:
        raise write_error("replay", parent, "to create a folder in it", error) from error
    if not keep:
        with partial_output(path):
            yield path
        return
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.rmdir()  # where no replay was made


def train_again(spec: RunSpec, steps: int) -> RunFolder:
    """Train `steps` steps of `spec` in a process of its own, with progress on stderr, and return the run folder. A
    signal ends it at once."""
    path = Path(spec.run.out) / spec.run.name
    settings = {"engine": VERSION, "spec_file": "", "sets": [], "spec": spec.to_dict()}
    run = create_run(path, spec_to_toml(spec), settings | {"spec_sha256": spec.sha256})
    launched = launch(run)
    try:
        follower = Follower(run)
        line = StatusLine(plain_every_s=PLAIN_EVERY_S, plain_at_once=False)
        progress = _Progress(steps)
        while launched.process.poll() is None:
            follower.poll()
            phase = follower.view.phase.name if follower.view.phase is not None else "starting"
            line.show(progress.text(follower.view.last_step, phase))
            time.sleep(POLL_S)
        line.clear()
    finally:
        launched.end()
    return run


class _Progress:
    """The progress of a replay in words, with the time left at the pace since its first step."""

    def __init__(self, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.steps, self._clock = steps, clock
        self._first: tuple[int, float] | None = None

    def text(self, step: int, phase: str) -> str:
        if not step:
            return f"replay: {phase}"
        now_s = self._clock()
        if self._first is None:
            self._first = (step, now_s)
        first, since_s = self._first
        left = ""
        if step > first:
            pace_s = (now_s - since_s) / (step - first)
            left = f", {format_seconds(pace_s * (self.steps - step))} left"
        return f"replay: step {step}/{self.steps}{left}"
