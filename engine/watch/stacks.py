"""The stacks of a trainer that has gone silent, taken from outside without ending it.

In the trainer, `register(folder)` before anything else: DUMP_SIGNAL then writes the Python stack of every
thread to `stacks/trainer.txt`, by a handler in C that works while the interpreter is stuck in a call
and while it holds its lock.

In the supervisor, `Capture` in two steps, one tick apart, so that the supervisor never waits:

    begin    the first look at /proc; the signal, if the trainer has said that it takes it: a process that
             does not would be ended by it; py-spy with native frames, where it is installed
    finish   the second look, what was written since, and one file with all of it

What could not be had is listed with the reason. A stopped process takes no signal before it goes on,
and one in an uninterruptible wait not before that ends: neither is sent one.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from engine.log.events import StackDump
from engine.machine.surroundings import find_command
from engine.watch.threads import (
    COMPUTING,
    STOPPED,
    UNINTERRUPTIBLE,
    Looks,
    Thread,
    compare,
    look_at,
)

FOLDER = "stacks"
TRAINER_FILE = "trainer.txt"
DUMP_SIGNAL = signal.SIGRTMIN + 3
"""None of the signals that a library takes for itself: LLVM, which a first Triton kernel loads, replaces the
handlers of SIGUSR1 and SIGUSR2 and calls nobody's."""
PY_SPY_LIMIT_S = 20.0
FRAMES_KEPT = 40
_MAIN = re.compile(r"^main thread (0x[0-9a-f]+)$", re.MULTILINE)
_HEAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)[^\n]*:$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')

_open_files: list[IO[str]] = []
"""The handler writes to a descriptor: its file must stay open for as long as the process lives."""


def dump_file(rank: int) -> str:
    """Where a rank's stacks go; the first is the trainer of a run of one process."""
    return TRAINER_FILE if rank == 0 else f"rank-{rank}.txt"


def register(run: Path, rank: int = 0) -> None:
    """In the trainer: write all stacks to RUN/stacks/trainer.txt, or the file of its rank, whenever
    DUMP_SIGNAL comes."""
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    file = (folder / dump_file(rank)).open("a")
    file.write(f"main thread 0x{threading.main_thread().ident or 0:016x}\n")
    file.flush()
    _open_files.append(file)
    faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True)


@dataclass(frozen=True, slots=True)
class PythonStacks:
    """A dump of `faulthandler`, read."""

    main: tuple[str, ...]
    """Frames of the main thread, innermost first, as `file:line in function`."""
    others: int
    """How many other threads run Python."""


def read_dump(text: str, main_id: str | None) -> PythonStacks | None:
    """The newest dump in the text of `stacks/trainer.txt`; None when there is none."""
    threads: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if head := _HEAD.match(line):
            # A thread that was named before begins the next dump.
            if any(name == head[1] for name, _ in threads):
                threads = []
            threads.append((head[1], []))
        elif threads and (frame := _FRAME.match(line)):
            threads[-1][1].append(f"{frame[1]}:{frame[2]} in {frame[3]}")
    if not threads:
        return None
    # faulthandler writes the main thread last; the id that it registered with is surer.
    main = next((frames for name, frames in threads if name == main_id), threads[-1][1])
    return PythonStacks(main=tuple(main[:FRAMES_KEPT]), others=len(threads) - 1)


def own_frame(stack: Sequence[str]) -> str:
    """The innermost frame of this project, which tells a reader more than one inside a library."""
    return next((f for f in stack if "/engine/" in f.partition(" in ")[0]), "")


def takes_signal(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether a process has a handler for the signal: without one it would be ended by it."""
    try:
        status = (proc / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (DUMP_SIGNAL - 1) & 1)


@dataclass(slots=True)
class Capture:
    """One capture of the stacks of `pid`, into RUN/stacks/`name`.txt."""

    run: Path
    pid: int
    name: str
    why: str
    rank: int = 0
    proc: Path = Path("/proc")
    begun_s: float = field(default_factory=time.monotonic)
    _before: Looks | None = None
    _offset: int = 0
    _py_spy: subprocess.Popen[bytes] | None = None
    _py_spy_file: Path | None = None
    _missing: list[str] = field(default_factory=list)

    def begin(self) -> None:
        folder = self.run / FOLDER
        folder.mkdir(exist_ok=True)
        self._before = look_at(self.pid, self.proc)
        self._offset = self._dump_size()
        main = self._before.threads.get(self.pid)
        letter = main.letter if main else "X"
        if letter in "TtD":
            self._missing.append(
                f"Python stacks: the process is in state {letter} and takes no signal"
            )
        elif not takes_signal(self.pid, self.proc):
            self._missing.append("Python stacks: the trainer has no handler for the signal yet")
        else:
            os.kill(self.pid, DUMP_SIGNAL)
        self._start_py_spy(folder)

    def _dump_size(self) -> int:
        try:
            return (self.run / FOLDER / dump_file(self.rank)).stat().st_size
        except OSError:
            return 0

    def _start_py_spy(self, folder: Path) -> None:
        program = find_command("py-spy")
        if program.value is None:
            self._missing.append("native frames: py-spy is not installed")
            return
        self._py_spy_file = folder / f"{self.name}-py-spy.txt"
        with self._py_spy_file.open("wb") as output:
            self._py_spy = subprocess.Popen(
                [str(program.value), "dump", "--native", "--pid", str(self.pid)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def is_ready(self, now_s: float) -> bool:
        """Whether there is nothing left to wait for."""
        if self._py_spy is None or self._py_spy.poll() is not None:
            return True
        if now_s - self.begun_s < PY_SPY_LIMIT_S:
            return False
        self._py_spy.kill()
        self._py_spy.wait()
        self._missing.append(f"native frames: py-spy did not end within {PY_SPY_LIMIT_S:.0f} s")
        return True

    def finish(self) -> StackDump:
        """Put together what was found; also when the process has ended meanwhile."""
        before = self._before or look_at(self.pid, self.proc)
        threads = compare(before, look_at(self.pid, self.proc))
        dump, stacks = self._python()
        native, native_text = self._native()
        main = threads[0] if threads else None
        frame = stacks.main[0] if stacks and stacks.main else ""
        call = str(main.call.value) if main is not None and main.call.value is not None else ""
        state = main.state if main is not None else "ended"
        summary = self._summary(main, threads, stacks)
        path = Path(FOLDER) / f"{self.name}.txt"
        (self.run / path).write_text(
            "\n".join(
                [
                    f"{self.why}",
                    f"process {self.pid}: {summary}",
                    *(f"not had: {text}" for text in self._missing),
                    "",
                    "threads",
                    *(f"  {thread.line()}" for thread in threads),
                    "",
                    "Python stacks, innermost line first",
                    dump or "  none",
                    "",
                    "py-spy",
                    native_text or "  none",
                    "",
                ]
            )
        )
        return StackDump(
            path=str(path),
            state=state,
            summary=summary,
            python_frame=frame,
            native_frame=native or call,
            python_stack=list(stacks.main) if stacks else [],
            busy_threads=sum(t.state == COMPUTING for t in threads),
            missing=self._missing,
        )

    def _python(self) -> tuple[str, PythonStacks | None]:
        try:
            text = (self.run / FOLDER / dump_file(self.rank)).read_text(errors="replace")
        except OSError:
            return "", None
        main = _MAIN.findall(text)
        new = text.encode()[self._offset :].decode("utf-8", "replace")
        stacks = read_dump(new, main[-1] if main else None)
        if stacks is None and not self._missing_python():
            self._missing.append("Python stacks: the trainer did not answer the signal")
        return new, stacks

    def _missing_python(self) -> bool:
        return any(text.startswith("Python stacks") for text in self._missing)

    def _native(self) -> tuple[str, str]:
        if self._py_spy_file is None or self._py_spy is None:
            return "", ""
        text = self._py_spy_file.read_text(errors="replace")
        self._py_spy_file.unlink()
        if self._py_spy.returncode != 0:
            said = text.strip().splitlines()
            self._missing.append(f"native frames: py-spy: {said[-1] if said else 'failed'}")
            return "", text
        return native_frame(text), text

    def _summary(
        self, main: Thread | None, threads: Sequence[Thread], stacks: PythonStacks | None
    ) -> str:
        if main is None:
            return "the process has ended"
        words = f"the main thread is {main.state}"
        if main.cpu_pct is not None and main.state == COMPUTING:
            words += f" ({main.cpu_pct:.0f} % CPU)"
        elif main.state == STOPPED:
            words += f": `kill -CONT {self.pid}` lets it go on"
        elif main.state == UNINTERRUPTIBLE:
            words += f" ({main.kernel}): a disk, a network file system or a driver does not answer"
        elif main.call.value is not None:
            words += f" ({main.call})"
        busy = [t for t in threads if t is not main and t.state == COMPUTING]
        if busy:
            spent = sum(t.cpu_pct or 0.0 for t in busy)
            words += f"; {len(busy)} other threads compute ({spent:.0f} % CPU)"
        if stacks is not None and stacks.main:
            words += f"; innermost line {stacks.main[0]}"
            ours = own_frame(stacks.main)
            if ours and ours != stacks.main[0]:
                words += f", from {ours}"
        return words


def native_frame(text: str) -> str:
    """The innermost frame of the main thread in a dump of py-spy with native frames: one with a name
    where there is one, since a library without symbols has only addresses."""
    lines = text.splitlines()
    begin = next(
        (n for n, line in enumerate(lines) if line.startswith("Thread") and "MainThread" in line),
        len(lines),
    )
    rest = lines[begin + 1 :]
    frames = [line.strip() for line in itertools.takewhile(lambda x: x.startswith("    "), rest)]
    return next((f for f in frames if not f.startswith("0x")), frames[0] if frames else "")
