"""Engine commands that a key starts and a screen follows, each in its own process.

The output of a command goes to a file that is read again at each poll, so a screen that was closed and opened
again shows the same text. The process has its own session: closing the workbench or its terminal does not end
it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from engine import child
from engine.errors import BadInput, write_error
from engine.units import format_seconds
from workbench.engine_commands import ENGINE

TAIL_BYTES = 16 << 10
"""Bytes at the end of the output that are read."""


class Job:
    """One command, from its start on."""

    def __init__(self, arguments: Sequence[str], output: IO[bytes]) -> None:
        """Start `engine ARGUMENTS`, with all that it prints going to a file."""
        self.arguments, self.words = tuple(arguments), Path(output.name)
        self._begun_s = time.monotonic()
        self._ended_s: float | None = None
        self._process = subprocess.Popen(
            [*ENGINE, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=child.environment(),
            start_new_session=True,
        )

    @property
    def is_alive(self) -> bool:
        alive = self.code is None
        if not alive and self._ended_s is None:
            self._ended_s = time.monotonic()
        return alive

    @property
    def code(self) -> int | None:
        """Return the exit code; None while the command runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Interrupt the command and everything it started in its session, as Ctrl-C would."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGINT)

    @property
    def newest_line(self) -> str:
        """Return the last line of its output; empty before the first."""
        return next((line.strip() for line in reversed(self._tail())), "")

    @property
    def refusal(self) -> str:
        """Return why it ended without a result: the error that it printed, and the hint below it."""
        command = f"engine {self.arguments[0]}"
        causes = [line[2:] for line in self._tail() if line.startswith(f"  {command}: ")]
        lines = dict.fromkeys([*causes[-1:], self.newest_line])
        return "\n".join(filter(None, lines)) or f"{command} ended with code {self.code}"

    def lines(self) -> tuple[str, ...]:
        """Return the command, its state, and the end of its output."""
        alive = self.is_alive
        duration = format_seconds((self._ended_s or time.monotonic()) - self._begun_s)
        state = f"running, {duration}" if alive else f"{_ending(self.code)} after {duration}"
        return (f"engine {shlex.join(self.arguments)}: {state}", *self._tail())

    def _tail(self) -> list[str]:
        try:
            with self.words.open("rb") as file:
                file.seek(max(0, self.words.stat().st_size - TAIL_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError as problem:
            return [f"  {self.words}: {problem.strerror}"]
        return [f"  {line}" for line in text.splitlines() if line.strip()]


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"


class Jobs:
    """The commands that this workbench started: at most one per name at a time."""

    def __init__(self) -> None:
        self._newest: dict[str, Job] = {}

    def of(self, name: str) -> Job | None:
        """Return the newest command of a name."""
        return self._newest.get(name)

    def start(self, name: str, arguments: Sequence[str]) -> Job:
        """Start `engine ARGUMENTS`, or return the running command of that name. Raises RunLogError or DiskFull when
        the file of its output cannot be written."""
        before = self.of(name)
        if before is not None and before.is_alive:
            return before
        prefix = f"apr-{name}-"
        try:
            output = tempfile.NamedTemporaryFile(prefix=prefix, suffix=".txt", delete=False)  # noqa: SIM115
        except OSError as problem:
            raise write_error("command", tempfile.gettempdir(), "to write there", problem) from None
        with output:
            job = self._newest[name] = Job(arguments, output)
        return job


def start_flip(arguments: Sequence[str], folder: Path) -> Job:
    """Start `engine flip` into `folder`. Its output goes to `<folder>.txt` in the same parent folder. Raises BadInput
    when that cannot be written."""
    words = folder.with_name(f"{folder.name}.txt")
    try:
        words.parent.mkdir(parents=True, exist_ok=True)
        with words.open("wb") as output:
            return Job(arguments, output)
    except OSError as problem:
        raise BadInput.expected(
            "flip", words, "to write it", problem.strerror or str(problem)
        ) from problem
