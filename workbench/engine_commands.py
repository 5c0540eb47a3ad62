"""Start, stop and resume runs with the commands that a shell would run, each in its own process.

Nothing here waits for training. `--detach` returns as soon as the run continues without its parent and prints
the path of its folder as the only line on stdout. An exit code of the engine becomes the error of that code
with the message that it printed. The child has its own session, so that closing the terminal of a screen
cannot reach it.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from engine import child
from engine.errors import BadInput, EngineError, InternalError, UsageError
from engine.log.folder import RunFolder, open_run

ENGINE = tuple(child.command("engine"))
"""The engine of the interpreter that runs the workbench, to be started in `child.environment()`."""
T = TypeVar("T")


def distill_arguments(spec: Path, sets: Sequence[str], out: Path | None) -> list[str]:
    """Return the arguments of `engine distill` for a new run."""
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


def check_run(
    spec: Path, sets: Sequence[str], out: Path | None = None, *, engine: Sequence[str] = ENGINE
) -> str:
    """Return the report of `engine distill --check-inputs` on a valid spec and its inputs. Raises BadInput with
    everything that is wrong otherwise. Nothing is started and nothing is written."""
    return _run([*distill_arguments(spec, sets, out), "--check-inputs"], engine).stderr.strip()


def resume_arguments(
    run: RunFolder, *, allow_fallback: bool = False, allow_change: Sequence[str] = ()
) -> list[str]:
    """Return the arguments of `engine distill` that continue a run."""
    arguments = ["distill", "--resume", str(run.path)]
    arguments += ["--allow-fallback"] if allow_fallback else []
    for key in allow_change:
        arguments += ["--allow-change", key]
    return arguments


def resume_run(
    run: RunFolder,
    *,
    allow_fallback: bool = False,
    allow_change: Sequence[str] = (),
    engine: Sequence[str] = ENGINE,
) -> RunFolder:
    """Continue a run that has ended, from its newest checkpoint.

    With `allow_fallback`, an older checkpoint is used when the newest is damaged. Raises BadInput when no
    steps are left, or when the environment changes a setting that is not in `allow_change`.
    """
    arguments = resume_arguments(run, allow_fallback=allow_fallback, allow_change=allow_change)
    return _detached([*arguments, "--detach"], engine)


def command_text(arguments: Sequence[str]) -> str:
    """Return the command as it is typed in a shell."""
    return shlex.join(["engine", *arguments])


def stop_run(run: RunFolder, *, engine: Sequence[str] = ENGINE) -> str:
    """Ask a run to stop; returns the engine's message."""
    return _run(["stop", str(run.path)], engine).stderr.strip()


class StartedFlip:
    """A flip in its own process, which continues when this program ends."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, words: Path) -> None:
        self._process, self.folder, self._words = process, folder, words

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def said(self) -> str:
        """Return why it ended without a verdict: the error that it printed, and the hint below it."""
        lines = self._words.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if not lines:
            return f"engine flip ended with code {self._process.returncode}"
        causes = [line for line in lines if line.startswith("engine flip: ")]
        return "\n".join(dict.fromkeys([*causes[-1:], lines[-1]]))

    def stop(self) -> None:
        """Like Ctrl-C: the measurements are kept, and a verdict so far is written."""
        if self.is_alive:
            self._process.send_signal(signal.SIGINT)


def check_flip(arguments: Sequence[str], *, engine: Sequence[str] = ENGINE) -> list[str]:
    """Return the report of `engine flip --dry-run` on a flip that can be started: its plan and its cost. The
    inputs of both arms are checked and nothing is started. Raises BadInput for one that is refused."""
    return _run([*arguments, "--dry-run"], engine).stderr.strip().splitlines()


def start_flip(arguments: Sequence[str], folder: Path) -> StartedFlip:
    """Start `engine flip` into `folder`. Its output goes to `<folder>.txt` beside it. Raises BadInput
    when that cannot be written."""
    words = folder.with_name(f"{folder.name}.txt")
    try:
        words.parent.mkdir(parents=True, exist_ok=True)
        with words.open("wb") as output:
            process = spawn(arguments, output)
    except OSError as problem:
        raise BadInput.expected(
            "flip", words, "to write it", problem.strerror or str(problem)
        ) from problem
    return StartedFlip(process, folder, words)


def spawn(
    arguments: Sequence[str], output: BinaryIO, engine: Sequence[str] = ENGINE
) -> subprocess.Popen[bytes]:
    """Start an engine command that outlives this program, with all its output going to `output`."""
    return subprocess.Popen(
        [*engine, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=child.environment(),
        start_new_session=True,
    )


def ask_json(
    arguments: Sequence[str], refusal: str, type_: type[T], engine: Sequence[str] = ENGINE
) -> T:
    """Return the JSON value that an engine command prints. Raises InternalError when there is none, with the
    text `refusal` formatted with the exit `code` and with the output as `said`."""
    done = subprocess.run(
        [*engine, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=child.environment(),
        check=False,
    )
    try:
        return msgspec.json.decode(done.stdout, type=type_)
    except msgspec.DecodeError as problem:
        said = done.stderr.decode("utf-8", "replace").strip() or str(problem)
        raise InternalError(refusal.format(code=done.returncode, said=said)) from None


def _detached(arguments: Sequence[str], engine: Sequence[str]) -> RunFolder:
    lines = _run(arguments, engine).stdout.splitlines()
    if len(lines) != 1:
        raise InternalError(
            f"engine {arguments[0]} --detach — expected the path of a run folder on stdout, "
            f"found {lines}"
        )
    return open_run(Path(lines[0]))


def _run(arguments: Sequence[str], engine: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run an engine command that has to succeed; a failure is raised as the engine error with its exit code."""
    done = subprocess.run(
        [*engine, *arguments],
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
