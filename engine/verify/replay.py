"""Replay a stretch of a run: train its steps again in a new run folder and a new process.

The replay starts at the first step or at a checkpoint. It has the run's values of all settings that change a step, and
omits work that does not change one: checks, evaluations between steps, checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.catalogue import CHECKS, STAGES
from engine.errors import CheckpointError, write_error
from engine.files import read_json_object
from engine.limits import RUN_FILE
from engine.log.fold import Follower
from engine.log.folder import RunFolder, create_run
from engine.signals import partial_output
from engine.spec import RunSpec, spec_from_dict, spec_to_toml
from engine.terminal import StatusLine
from engine.units import format_seconds
from engine.verify.sessions import Stretch
from engine.version import VERSION
from engine.watch.start_and_stop import launch

POLL_S = 0.05
"""Interval at which the replay's log is read, in seconds."""


def replayed_spec(
    stretch: Stretch, folder: Path, *, saves: bool = False, audited: int = 0
) -> RunSpec:
    """Return the settings of a replay in `folder`. With `saves` the replay saves a checkpoint at its end, and the
    student after the run's last step. Step `audited` is audited, unless it is 0. Raises SpecError."""
    spec = spec_from_dict(stretch.settings)
    stages = {about.id for about in STAGES}
    others = ",".join(about.id for about in CHECKS if about.id not in stages)
    return dataclasses.replace(
        spec.without_receivers,
        run=dataclasses.replace(spec.run, name=folder.name, out=str(folder.parent)),
        train=dataclasses.replace(spec.train, stop_after=stretch.end - stretch.begin),
        eval=dataclasses.replace(spec.eval, every=0),
        checkpoint=dataclasses.replace(spec.checkpoint, every=0, at_end=saves),
        checks=dataclasses.replace(
            spec.checks,
            enabled=audited > 0,
            every=audited or -1,
            skip=others,
            on_fail="report",
            record="all",
        ),
    )


@contextlib.contextmanager
def replay_folder(run: RunFolder, scratch: Path | None, *, keep: bool) -> Iterator[Path]:
    """Yield a new folder next to the run or in `scratch`; it is removed at the end unless `keep` is set."""
    parent = (scratch or run.path.parent).absolute()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        # A hidden folder, so that lists of runs do not show the replay.
        path = Path(tempfile.mkdtemp(prefix=f".{run.name}.verify-", dir=parent))
    except OSError as error:
        raise write_error("replay", parent, "a folder that can be written to", error) from error
    if not keep:
        with partial_output(path):
            yield path
        return
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.rmdir()  # fails unless it is empty, because no replay was run


def train_again(spec: RunSpec, stretch: Stretch, checkpoint: Path | None) -> RunFolder:
    """Train a stretch with the settings of `spec` in a new process, from `checkpoint` or from the first step, and
    return the run folder. Progress is shown on stderr. If this process is interrupted, the new one is ended."""
    path = Path(spec.run.out) / spec.run.name
    settings: dict[str, Any] = {
        "engine": VERSION,
        "spec_file": "",
        "sets": [],
        "spec": spec.to_dict(),
    }
    if checkpoint is not None:
        settings["changes"] = _changes(stretch.settings, spec, _settings_sha256_of(checkpoint))
    run = create_run(path, spec_to_toml(spec), settings | {"spec_sha256": spec.sha256})
    if checkpoint is not None:
        _link_checkpoint(checkpoint, run)
    launched = launch(run, resume=checkpoint is not None)
    try:
        follower = Follower(run)
        line = StatusLine(plain_every_s=5.0, plain_at_once=False)
        first_seen: tuple[int, float] | None = None
        while launched.process.poll() is None:
            follower.poll()
            view, now_s = follower.view, time.monotonic()
            text = view.phase.name if view.phase is not None else "starting"
            if (done := view.last_step) > stretch.begin:
                first_seen = first_seen or (done, now_s)
                pace_s = (now_s - first_seen[1]) / max(done - first_seen[0], 1)
                remaining = (
                    f", {format_seconds(pace_s * (stretch.end - done))} left" if pace_s else ""
                )
                text = f"step {done} of {stretch.end}{remaining}"
            line.show(f"replay: {text}")
            time.sleep(POLL_S)
        line.clear()
    finally:
        launched.end()
    return run


def _settings_sha256_of(checkpoint: Path) -> str:
    """Return the hash of the settings that a checkpoint was saved with. Raises CheckpointError."""
    state = read_json_object(
        checkpoint / "state.json", "checkpoint", RUN_FILE, error=CheckpointError
    )
    return str(state.get("spec_sha256", ""))


def _changes(recorded: dict[str, Any], spec: RunSpec, sha256: str) -> list[dict[str, Any]]:
    """Return the settings that the replay changes, in the form that a resume expects them in effective.json."""
    changes = [
        {"key": f"{section}.{name}", "was": recorded.get(section, {}).get(name), "is": value}
        for section, fields in spec.to_dict().items()
        for name, value in fields.items()
        if recorded.get(section, {}).get(name, value) != value
    ]
    return [change | {"spec_sha256": sha256} for change in changes]


def _link_checkpoint(checkpoint: Path, run: RunFolder) -> None:
    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:  # a hard link cannot cross file systems
            shutil.copyfile(source, target)

    target = run.checkpoints / checkpoint.name
    try:
        shutil.copytree(checkpoint, target, copy_function=link)
    except (OSError, shutil.Error) as error:
        raise write_error(
            "replay", target, "a folder that can be written to", OSError(str(error))
        ) from error
