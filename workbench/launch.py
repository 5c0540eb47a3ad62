"""Starting, stopping and resuming runs: exactly what a shell would run, in a process of its own.

Nothing here waits for training. `--detach` returns as soon as the run stands on its own feet, with
the path of its folder as the only line on stdout; an exit code of the engine's comes back as the
error of that code, in the words that it printed. The child is in a session of its own, so that
closing the terminal of a screen cannot reach it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.errors import BadInput, EngineError, InternalError, UsageError
from engine.runlog.folder import RunFolder, open_run

ENGINE = (sys.executable, "-m", "engine")
"""The engine of the interpreter that runs the workbench."""


def distill_arguments(spec: Path, sets: Sequence[str], out: Path | None) -> list[str]:
    """The arguments of `engine distill` for a new run."""
    arguments = ["distill", str(spec)]
    for assignment in sets:
        arguments += ["--set", assignment]
    if out is not None:
        arguments += ["--out", str(out)]
    return arguments


def start_run(
    spec: Path, sets: Sequence[str], out: Path | None, *, engine: Sequence[str] = ENGINE
) -> RunFolder:
    """Start a run in the background. Raises BadInput when the engine refuses the spec or a
    setting."""
    return _detached([*distill_arguments(spec, sets, out), "--detach"], engine)


def resume_run(run: RunFolder, *, engine: Sequence[str] = ENGINE) -> RunFolder:
    """Continue a run that has ended, from its newest checkpoint."""
    return _detached(["distill", "--resume", str(run.path), "--detach"], engine)


def stop_run(run: RunFolder, *, engine: Sequence[str] = ENGINE) -> str:
    """Ask a run to stop; returns what the engine said."""
    return _run(["stop", str(run.path)], engine).stderr.strip()


def _detached(arguments: Sequence[str], engine: Sequence[str]) -> RunFolder:
    lines = _run(arguments, engine).stdout.splitlines()
    if len(lines) != 1:
        raise InternalError(
            f"engine {arguments[0]} --detach — expected the path of a run folder on stdout, "
            f"found {lines}"
        )
    return open_run(Path(lines[0]))


def _run(arguments: Sequence[str], engine: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """An engine command that succeeded; a failure is raised as the engine error that has its exit
    code."""
    done = subprocess.run(
        [*engine, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
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
