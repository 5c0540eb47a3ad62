"""Start, stop and resume runs with the commands that a shell would run, each in its own process.

Nothing here waits for training. `--detach` returns as soon as the run continues without its parent and prints the path
of its folder as the only line on stdout. The exit codes 64 and 65 of the engine become UsageError and BadInput, any
other failure InternalError, each with the message that the engine printed. The child has its own session, so that
closing the terminal of a screen cannot reach it.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from engine import child
from engine.errors import BadInput, EngineError, InternalError, UsageError
from engine.log.folder import RunFolder, open_run

ENGINE = tuple(child.command("engine"))
"""The engine of the interpreter that runs the workbench, to be started in `child.environment()`."""


def distill_arguments(spec: Path, sets: Sequence[str], out: Path | None) -> list[str]:
    """Return the arguments of `engine distill` for a new run."""
    arguments = ["distill", str(spec)]
    for assignment in sets:
        arguments += ["--set", assignment]
    if out is not None:
        arguments += ["--out", str(out)]
    return arguments


def start_run(spec: Path, sets: Sequence[str], out: Path | None) -> RunFolder:
    """Start a run in the background. Raises BadInput or UsageError when the engine refuses the spec or a setting."""
    return _detached([*distill_arguments(spec, sets, out), "--detach"])


def resume_arguments(run: RunFolder) -> list[str]:
    """Return the arguments of `engine distill` that continue a run."""
    return ["distill", "--resume", str(run.path)]


def resume_run(run: RunFolder) -> RunFolder:
    """Continue a run that has ended, from its newest checkpoint. Raises BadInput when no steps are left, when that
    checkpoint is damaged, or when the environment changes a setting."""
    return _detached([*resume_arguments(run), "--detach"])


def command_text(arguments: Sequence[str]) -> str:
    """Return the command as it is typed in a shell."""
    return shlex.join(["engine", *arguments])


def stop_run(run: RunFolder) -> str:
    """Ask a run to stop; returns the engine's message."""
    return _run(["stop", str(run.path)]).stderr.strip()


def check_flip(arguments: Sequence[str]) -> list[str]:
    """Return the report of `engine flip --dry-run` on a flip that can be started: its plan and its cost. The
    inputs of both arms are checked and nothing is started. Raises BadInput or UsageError for a flip that is
    refused."""
    return _run([*arguments, "--dry-run"]).stderr.strip().splitlines()


def _detached(arguments: Sequence[str]) -> RunFolder:
    lines = _run(arguments).stdout.splitlines()
    if len(lines) != 1:
        raise InternalError(
            f"engine {arguments[0]} --detach — expected the path of a run folder on stdout, "
            f"found {lines}"
        )
    return open_run(Path(lines[0]))


def _run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run an engine command that has to succeed; exit code 64 is raised as UsageError, 65 as BadInput, and any other
    failure as InternalError."""
    done = subprocess.run(
        [*ENGINE, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env=child.environment(),
        start_new_session=True,
        check=False,
    )
    if done.returncode == 0:
        return done
    message, _, hint = done.stderr.strip().partition("\nhint: ")
    classes: dict[int, type[EngineError]] = {64: UsageError, 65: BadInput}
    kind = classes.get(done.returncode, InternalError)
    if not message:
        message = f"engine {arguments[0]} — expected a message on stderr, found none"
    if kind is InternalError:
        message = f"engine {arguments[0]} ended with code {done.returncode}: {message}"
    raise kind(message, hint=hint or None)
