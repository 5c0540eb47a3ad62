"""The short run of a drill: the demo's models on some text of the standard library, started with the public
command."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from engine import child, demo
from engine.errors import InternalError, RunLogError
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.log.text import has_ended
from engine.log.view import RunView
from engine.machine.host import Cgroup, Host
from engine.watch.supervisor import TRAINER

DEMO = Path(demo.__file__).parent
COPY = "teacher"
"""Folder of a drill's inputs with a copy of the demo's teacher."""
MODELS = {
    "TEACHER": DEMO / "teacher" / "config.json",
    "QUANTIZED": DEMO / "teacher.gguf",
}
"""Values of a setting that stand for a file of the demo."""
COMMON: Mapping[str, Any] = {
    "teacher.path": str(DEMO / "teacher"),
    "student.config": str(DEMO / "student.json"),
    "data.corpus": "python-stdlib",
    "data.tokenizer": str(DEMO / "teacher" / "tokenizer.json"),
    "data.max_bytes": 200_000,
    "data.seq_len": 48,
    "loss.alpha": 0.5,
    "loss.temperature": 2.0,
    "train.steps": 6,
    "train.rows": 4,
    "train.warmup_steps": 2,
    "eval.every": 0,
    "eval.rows": 8,
    "checkpoint.every": 4,
    "checkpoint.at_end": False,
    "compute.threads": 1,
}
POLL_S = 0.02
END_DEADLINE_S = 30.0
STOP_DEADLINE_S = 90.0


def copy_inputs(folder: Path) -> dict[str, Any]:
    """Copy the demo's teacher into `folder`, and return the settings that name it."""
    shutil.copytree(DEMO / "teacher", folder / COPY)
    teacher = folder / COPY
    return {"teacher.path": str(teacher), "data.tokenizer": str(teacher / "tokenizer.json")}


def write_spec(path: Path, sets: Mapping[str, Any], inputs: Path = Path()) -> Path:
    """Write a spec of the common settings, overridden by `sets`, in which INPUTS is replaced by the folder `inputs`."""
    sections: dict[str, list[str]] = {}
    for key, value in {**COMMON, **sets}.items():
        section, name = key.split(".")
        if isinstance(value, str):
            value = str(MODELS.get(value, value)).replace("INPUTS", str(inputs))
        sections.setdefault(section, []).append(f"{name} = {json.dumps(value)}")
    path.write_text(
        "\n".join(f"[{section}]\n" + "\n".join(lines) for section, lines in sections.items()) + "\n"
    )
    return path


def store_outputs(spec: Path) -> None:
    """Run `engine prepare` for the steps of `spec`, without an incident. Raises InternalError when it fails."""
    command = child.command("engine", "prepare", str(spec))
    _run(command, child.environment(), f"{spec} — expected teacher outputs that can be stored")


def _run(command: list[str], environment: Mapping[str, str], expected: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise InternalError(f"drill: {expected}, found {done.stderr.strip()[-800:]}")


def start(
    arguments: list[str], run: RunFolder, *, plant: str = "", group: Path | None = None
) -> None:
    """Run `engine distill ARGUMENTS --detach`, with the fault of the drill `plant` planted, inside the control group
    `group`. Raises InternalError when the command refuses."""
    environment = {name: value for name, value in child.environment().items() if name != TRAINER}
    if plant:
        environment[TRAINER] = f"engine.drills.planting {plant} --"
    no_messages = [] if "--resume" in arguments else ["--set", "notify.to=none"]
    command = child.command("engine", "distill", *arguments, *no_messages, "--detach")
    if group is not None:
        # The shell moves itself, so that whatever it starts is created inside the group.
        enter = 'echo $$ > "$0" && exec "$@"'
        command = ["sh", "-c", enter, str(group / "cgroup.procs"), *command]
    _run(command, environment, f"{run.path} — expected a run that begins")


class Attended:
    """A run whose log is followed."""

    def __init__(self, run: RunFolder) -> None:
        self.run, self.follower = run, Follower(run)
        self.died_unix_s: float | None = None
        """Time at which its trainer was first found to have ended."""
        self.ended_unix_s = math.inf
        """Time at which the drill killed the rest of the run; names given later concern the kill and not the
        incident."""

    @property
    def view(self) -> RunView:
        return self.follower.view

    def wait(self, condition: Callable[[RunView], bool], limit_s: float) -> bool:
        """Wait until the view fulfils `condition` (True), or until the run or the time has ended (False)."""
        deadline_s = time.monotonic() + limit_s
        while True:
            # Check for the end before reading, so that the read includes everything written before it.
            over = self.has_ended()
            with contextlib.suppress(RunLogError):
                self.follower.poll()
            if condition(self.view):
                return True
            if over or time.monotonic() > deadline_s:
                return False
            self._note_death()
            time.sleep(POLL_S)

    def has_ended(self) -> bool:
        alive = self.run.liveness()
        return (
            bool(self.view.clocks)
            and has_ended(self.follower.state)
            and not (alive.trainer or alive.supervisor)
        )

    def _note_death(self) -> None:
        pid = self.view.trainer_pid
        if pid is None or self.died_unix_s is not None or self.view.exit is not None:
            return
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
        except OSError:
            state = "X"
        if state in "ZX":
            self.died_unix_s = time.time()

    def kill(self) -> float:
        """Send SIGKILL to the trainer and return the wall-clock time of the signal."""
        pid = self.view.trainer_pid
        assert pid is not None, "a trainer was seen"
        at_unix_s = time.time()
        os.kill(pid, signal.SIGKILL)
        return at_unix_s

    def stop(self) -> None:
        """Ask the trainer to stop, and wait until all processes of the run have ended."""
        from engine.watch.start_and_stop import stop

        stop(self.run)
        self.wait(lambda view: view.exit is not None, STOP_DEADLINE_S)
        self.wait(lambda _: False, END_DEADLINE_S)

    def end(self) -> None:
        """Kill the remaining processes of the run and read its last lines."""
        self.wait(lambda _: False, 0.0)
        pid = self.view.trainer_pid
        if pid is not None and self.view.exit is None and self.run.liveness().supervisor:
            # The supervisor has not reaped the trainer, so the pid still belongs to the trainer.
            self.ended_unix_s = time.time()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait(lambda _: False, END_DEADLINE_S)


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path | None]:
    """Create a control group with a memory limit below this process's own; yield None when the limit is 0.
    Raises OSError when none can be created."""
    if not limit_bytes:
        yield None
        return
    above = Host().find_cgroup("memory")
    if not isinstance(above, Cgroup):
        raise OSError(str(above.absent))
    group = above.directory / f"apr-drill-{os.getpid()}"
    group.mkdir()
    name = "memory.max" if above.version == 2 else "memory.limit_in_bytes"
    try:
        (group / name).write_text(str(limit_bytes))
        yield group
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    """Remove a group, which is possible once the kernel has removed the last process from it."""
    deadline_s = time.monotonic() + END_DEADLINE_S
    while True:
        try:
            group.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(POLL_S)


def why_no_memory_group() -> str:
    """Return the reason why no control group with a memory limit can be created here; empty if one can."""
    try:
        with memory_group(1 << 30):
            return ""
    except OSError as error:
        return f"no control group with a limit of memory can be made: {error}"
