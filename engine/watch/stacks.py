"""Collect the stacks of a silent trainer from outside, without ending it.

In the trainer, `register(folder)` runs before anything else. DUMP_SIGNAL then writes the Python stack of
every thread to `stacks/trainer.txt`, by a C handler that works even while the interpreter is stuck in a call
that holds the GIL.

In the supervisor, `Capture` works in two steps, at least one tick apart, so that the supervisor never waits:

    begin    take the first sample of /proc; send the signal, if the trainer has a handler for it (without one the
             signal would end it); start py-spy with native frames, if it is installed; request the ranks' flight
             recorders
    finish   take the second sample, read what was written since, and write all of it to one file

What the threads are doing is inferred from two samples of /proc, some time apart:

    /proc/PID/task/TID/stat      name, state, CPU time
    /proc/PID/task/TID/wchan     the kernel's function that it waits in

The state letter alone does not tell a deadlock, a slow disk and an idle poll apart: all are "S". The kernel function
does:

    T, t                        stopped by a signal, or held by a debugger
    D                           in the kernel, where not even SIGKILL ends it: a disk, a network, a driver
    R, or at least half a core   computing
    S in futex_...              waiting for a lock or for another thread
    S in ..._poll, poll_...     waiting for input
    S in pipe_read, wait_woken  waiting to read: a pipe, a socket
    S in hrtimer_nanosleep      sleeping

Not covered: which lock it is and which thread holds it; the C function that made the call, which needs a debugger.

For a process that this engine did not start (`is_attached`) only /proc and py-spy are used: it gets no signal,
whatever handlers it has. py-spy stops the process briefly, except in the captures that are made at regular intervals.

What could not be read is listed with the reason. No signal is sent to a stopped process, which takes none
before it continues, nor to one in an uninterruptible wait.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from engine.files import open_plain
from engine.log.events import StackDump
from engine.machine.reading import Reading, absent, measured
from engine.machine.surroundings import LET_ATTACH, find_command
from engine.watch import flight_recorder

FOLDER = "stacks"
TRAINER_FILE = "trainer.txt"
DUMP_SIGNAL = signal.SIGRTMIN + 3
"""A signal that no library uses: LLVM, which the first Triton kernel loads, replaces the handlers of SIGUSR1 and
SIGUSR2 without calling the previous ones."""
PY_SPY_LIMIT_S = 20.0
"""Seconds after which py-spy is ended."""
FRAMES_KEPT = 40
THREADS_NAMED = 8
_PY_SPY_HEAD = re.compile(r'^Thread \S+ \([^)]*\)(?:: "(.*)")?$')
_PY_SPY_FRAME = re.compile(r"^    (\S.*) \((.*\.py|<.*>):(\d+)\)$")
_MAIN = re.compile(r"^main thread (0x[0-9a-f]+)$", re.MULTILINE)
_HEAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)[^\n]*:$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
BUSY_PCT = 50.0
"""CPU use from which a thread counts as computing, in percent of one core."""
TICKS_FOR_A_SHARE = 5
"""Smallest interval over which a thread's CPU share is computed, in clock ticks (mostly 10 ms): over a shorter
interval one extra tick would make an idle thread look busy."""
COMPUTING, STOPPED, UNINTERRUPTIBLE = (
    "computing",
    "stopped by a signal",
    "in the kernel, not interruptible",
)
LOCK, INPUT, READING, SLEEPING = (
    "waiting for a lock",
    "waiting for input",
    "waiting to read",
    "sleeping",
)
CHILD, ENDED, WAITING = "waiting for a child process", "ended", "waiting"
_WAITS = {
    "futex": LOCK,
    "poll": INPUT,
    "pipe_read": READING,
    "unix_stream": READING,
    "sk_wait_data": READING,
    "wait_woken": READING,
    "pipe_write": "waiting to write",
    "nanosleep": SLEEPING,
    "do_wait": CHILD,
    "wait_for_partner": "waiting to open a file",
}
"""State of a thread, by a substring of the name of the kernel function that it waits in, for Linux 5 and 6."""

_open_files: list[IO[str]] = []
"""Open stack files: the signal handler writes to their descriptors, so they stay open for the life of the process."""


def dump_file(rank: int) -> str:
    """Return the name of a rank's stack file; rank 0 is the trainer of a single-process run."""
    return TRAINER_FILE if rank == 0 else f"rank-{rank}.txt"


def register(run: Path, rank: int = 0) -> None:
    """Make this process write all its stacks to RUN/stacks/trainer.txt, or its rank's file, on each DUMP_SIGNAL."""
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    file = (folder / dump_file(rank)).open("a")
    file.write(f"main thread 0x{threading.main_thread().ident or 0:016x}\n")
    file.flush()
    _open_files.append(file)
    faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True)


@dataclass(frozen=True, slots=True)
class PythonStacks:
    """The Python stacks of a process, parsed from a dump of `faulthandler` or py-spy."""

    main: tuple[str, ...]
    """Frames of the main thread, innermost first, as `file:line in function`."""
    others: int
    """Number of other threads that run Python."""


def read_dump(text: str, main_id: str | None) -> PythonStacks | None:
    """Parse the newest dump in the text of `stacks/trainer.txt`; None when there is none."""
    threads: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if head := _HEAD.match(line):
            # A thread that is already listed begins the next dump.
            if any(name == head[1] for name, _ in threads):
                threads = []
            threads.append((head[1], []))
        elif threads and (frame := _FRAME.match(line)):
            threads[-1][1].append(f"{frame[1]}:{frame[2]} in {frame[3]}")
    if not threads:
        return None
    # faulthandler writes the main thread last; the id recorded at registration is more reliable.
    main = next((frames for name, frames in threads if name == main_id), threads[-1][1])
    return PythonStacks(main=tuple(main[:FRAMES_KEPT]), others=len(threads) - 1)


def own_frame(stack: Sequence[str]) -> str:
    """Return the innermost frame in the engine's code, or else in a script's, as a frame inside a library is less
    useful; empty if all frames are inside libraries."""
    files = {frame: frame.partition(" in ")[0] for frame in stack}
    engine_frames = (frame for frame, file in files.items() if "/engine/" in file)
    scripts = (
        f
        for f, file in files.items()
        if not any(part in file for part in flight_recorder.LIBRARIES)
    )
    return next(engine_frames, next(scripts, ""))


def takes_signal(pid: int, proc: Path = Path("/proc")) -> bool:
    """Return whether a process has a handler for DUMP_SIGNAL, which would otherwise end it."""
    try:
        status = (proc / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (DUMP_SIGNAL - 1) & 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadSample:
    """One thread at one moment."""

    tid: int
    name: str
    letter: str
    """State letter in /proc: R, S, D, T, t, Z, ..."""
    cpu_s: float
    kernel: Reading
    """The innermost kernel function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    tid: int
    name: str
    state: str
    """A state in the table of the module docstring or in `_WAITS`; `ended`; `waiting` for any other wait."""
    cpu_pct: float | None
    """CPU use between two samples, in percent; 100 is one core. None if the samples are too close together."""
    kernel: Reading

    def line(self) -> str:
        cpu = "not measured" if self.cpu_pct is None else f"{self.cpu_pct:.0f} %"
        return f"{self.tid} {self.name}: {self.state}, CPU {cpu}, kernel {self.kernel}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    """All threads at one moment."""

    pid: int
    at_s: float
    threads: dict[int, ThreadSample]


def sample_threads(
    pid: int, proc: Path = Path("/proc"), clock: Callable[[], float] = time.monotonic
) -> ProcessSample:
    """Sample every thread of a process; empty if the process does not exist."""
    threads: dict[int, ThreadSample] = {}
    try:
        names = sorted(os.listdir(proc / str(pid) / "task"), key=int)
    except OSError:
        names = []
    for name in names:
        sample = _sample_thread(proc / str(pid) / "task" / name, int(name))
        if sample is not None:
            threads[sample.tid] = sample
    return ProcessSample(pid=pid, at_s=clock(), threads=threads)


def _sample_thread(folder: Path, tid: int) -> ThreadSample | None:
    try:
        text = (folder / "stat").read_text(errors="replace")
    except OSError:
        return None  # the thread ended between the listing and the read
    match = re.fullmatch(r"(?s)\d+ \((.*)\) (\S)(?: \S+){10} (\d+) (\d+) .*", text)
    if match is None:
        return None
    ticks = int(match[3]) + int(match[4])
    return ThreadSample(
        tid=tid,
        name=match[1],
        letter=match[2],
        cpu_s=ticks / os.sysconf("SC_CLK_TCK"),
        kernel=_kernel_function(folder / "wchan"),
    )


def _kernel_function(path: Path) -> Reading:
    try:
        word = path.read_text().strip()
    except OSError as error:
        return absent(f"not readable: {error.strerror}", str(path))
    # The kernel shows "0" for a running thread, and for any thread where symbols are hidden.
    if word in ("", "0"):
        return absent("the kernel does not show it", str(path))
    return measured(word, str(path))


def compare(before: ProcessSample, after: ProcessSample) -> list[Thread]:
    """Return every thread of the second sample: the main thread, then the others by CPU use between the samples."""
    passed_s = after.at_s - before.at_s
    long_enough = passed_s >= TICKS_FOR_A_SHARE / os.sysconf("SC_CLK_TCK")
    threads = []
    for tid, sample in after.threads.items():
        earlier = before.threads.get(tid)
        pct = None
        if earlier is not None and long_enough:
            pct = 100 * (sample.cpu_s - earlier.cpu_s) / passed_s
        threads.append(
            Thread(
                tid=tid,
                name=sample.name,
                state=_state(sample, pct),
                cpu_pct=pct,
                kernel=sample.kernel,
            )
        )
    threads.sort(key=lambda t: (t.tid != after.pid, -(t.cpu_pct or 0.0)))
    return threads


def _state(sample: ThreadSample, cpu_pct: float | None) -> str:
    if sample.letter in "Tt":
        return STOPPED
    if sample.letter == "D":
        return UNINTERRUPTIBLE
    if sample.letter in "ZX":
        return ENDED
    if sample.letter == "R" or (cpu_pct is not None and cpu_pct >= BUSY_PCT):
        return COMPUTING
    function = str(sample.kernel.value)
    return next((state for part, state in _WAITS.items() if part in function), WAITING)


@dataclass(slots=True)
class Capture:
    """One capture of the stacks of `pid`, written to RUN/stacks/`name`.txt. The process's signal handler writes its
    Python stacks to RUN/stacks/`dump_file`; a process that `is_attached` gets no signal. With `native`, py-spy stops
    the process briefly to read native frames; without, it reads the running process."""

    run: Path
    pid: int
    name: str
    why: str
    dump_file: str = TRAINER_FILE
    is_attached: bool = False
    native: bool = True
    proc: Path = Path("/proc")
    begun_s: float = field(default_factory=time.monotonic)
    _before: ProcessSample | None = None
    _offset: int = 0
    _py_spy: subprocess.Popen[bytes] | None = None
    _py_spy_file: Path | None = None
    _asked_unix_s: float | None = None
    """Time at which the ranks' flight recorders were requested."""
    _missing: list[str] = field(default_factory=list)

    def begin(self) -> None:
        folder = self.run / FOLDER
        folder.mkdir(exist_ok=True)
        self._before = sample_threads(self.pid, self.proc)
        self._offset = self._dump_size()
        main = self._before.threads.get(self.pid)
        letter = main.letter if main else "X"
        if self.is_attached:
            pass
        elif letter in "TtD":
            self._missing.append(
                f"Python stacks: the process is in state {letter} and takes no signal"
            )
        elif not takes_signal(self.pid, self.proc):
            self._missing.append("Python stacks: the process has no handler for the signal yet")
        else:
            os.kill(self.pid, DUMP_SIGNAL)
        self._start_py_spy(folder)
        self._asked_unix_s = flight_recorder.ask(self.run)

    def _dump_size(self) -> int:
        try:
            return (self.run / FOLDER / self.dump_file).stat().st_size
        except OSError:
            return 0

    def _start_py_spy(self, folder: Path) -> None:
        program = find_command("py-spy")
        if program.value is None:
            self._missing.append(f"{self._from_py_spy}: py-spy is not installed")
            return
        self._py_spy_file = folder / f"{self.name}-py-spy.txt"
        with self._py_spy_file.open("wb") as output:
            self._py_spy = subprocess.Popen(
                [
                    str(program.value),
                    *("dump", "--native" if self.native else "--nonblocking"),
                    *("--full-filenames", "--pid", str(self.pid)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A Ctrl-C in the terminal must not end py-spy while it has the process stopped.
                start_new_session=True,
            )

    @property
    def _from_py_spy(self) -> str:
        return "Python stacks" if self.is_attached else "native frames"

    def is_ready(self, now_s: float) -> bool:
        """Return whether the capture can be finished; end py-spy if it takes too long."""
        asked_unix_s = self._asked_unix_s
        if (
            asked_unix_s is not None
            and now_s - self.begun_s < flight_recorder.ANSWER_S
            and not flight_recorder.has_answered(self.run, asked_unix_s)
        ):
            return False
        if self._py_spy is None or self._py_spy.poll() is not None:
            return True
        if now_s - self.begun_s < PY_SPY_LIMIT_S:
            return False
        self._py_spy.kill()
        self._py_spy.wait()
        self._missing.append(
            f"{self._from_py_spy}: py-spy did not end within {PY_SPY_LIMIT_S:.0f} s"
        )
        return True

    def finish(self) -> StackDump:
        """Write the file of the capture and return its summary; works also if the process has ended meanwhile."""
        before = self._before or sample_threads(self.pid, self.proc)
        threads = compare(before, sample_threads(self.pid, self.proc))
        dump, stacks = ("", None) if self.is_attached else self._python_stacks()
        native, native_text = self._py_spy_stacks()
        of_threads = read_py_spy(native_text)
        others: list[str] = []
        if self.is_attached and of_threads:
            # py-spy lists the oldest thread first.
            first = next(
                (thread for thread in of_threads if thread[0] == "MainThread"), of_threads[0]
            )
            rest = [thread for thread in of_threads if thread is not first]
            stacks = PythonStacks(main=tuple(first[1][:FRAMES_KEPT]), others=len(rest))
            others = [f"{name}: {own_frame(stack) or stack[0]}" for name, stack in rest if stack]
        main = threads[0] if threads else None
        frame = stacks.main[0] if stacks and stacks.main else ""
        kernel = main.kernel.value if main is not None else None
        state = main.state if main is not None else "ended"
        summary = self._summary(main, threads, stacks)
        if others:
            more = f" and {len(others) - THREADS_NAMED} more" if others[THREADS_NAMED:] else ""
            summary += f"; other threads: {', '.join(others[:THREADS_NAMED])}{more}"
        collective = self._collective()
        path = Path(FOLDER) / f"{self.name}.txt"
        (self.run / path).write_text(
            "\n".join(
                [
                    f"{self.why}",
                    f"process {self.pid}: {summary}",
                    *([f"collectives: {collective}"] if collective else []),
                    *(f"missing: {text}" for text in self._missing),
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
            native_frame=(native if self.native else "") or str(kernel or ""),
            python_stack=list(stacks.main) if stacks else [],
            others=others,
            collective=collective,
            missing=self._missing,
        )

    def _collective(self) -> str:
        if self._asked_unix_s is None:
            return ""
        traces, refused = flight_recorder.read(self.run, self._asked_unix_s)
        self._missing += refused
        if not traces and not refused:
            self._missing.append(
                "collectives: no rank has recorded any; TORCH_FR_BUFFER_SIZE=2000 (before torch 2.9 "
                "TORCH_NCCL_TRACE_BUFFER_SIZE) turns the flight recorder on"
            )
        return flight_recorder.sentence(traces)

    def _python_stacks(self) -> tuple[str, PythonStacks | None]:
        try:
            with open_plain(self.run / FOLDER / self.dump_file) as file:
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return "", None
        main = _MAIN.findall(text)
        new = text.encode()[self._offset :].decode("utf-8", "replace")
        stacks = read_dump(new, main[-1] if main else None)
        if stacks is None and not self._missing_python():
            self._missing.append("Python stacks: the process did not answer the signal")
        return new, stacks

    def _missing_python(self) -> bool:
        return any(text.startswith("Python stacks") for text in self._missing)

    def _py_spy_stacks(self) -> tuple[str, str]:
        if self._py_spy_file is None or self._py_spy is None:
            return "", ""
        text = self._py_spy_file.read_text(errors="replace")
        self._py_spy_file.unlink()
        if self._py_spy.returncode != 0:
            lines = text.strip().splitlines()
            refused = re.search(r"denied|not permitted", text, re.IGNORECASE)
            advice = f"; {LET_ATTACH}" if refused else ""
            self._missing.append(
                f"{self._from_py_spy}: py-spy: {lines[-1] if lines else 'failed'}{advice}"
            )
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
        elif main.kernel.value is not None:
            words += f" ({main.kernel})"
        busy = [t for t in threads if t is not main and t.state == COMPUTING]
        if busy:
            spent = sum(t.cpu_pct or 0.0 for t in busy)
            words += f"; {len(busy)} other threads compute ({spent:.0f} % CPU)"
        if stacks is not None and stacks.main:
            words += f"; innermost line {stacks.main[0]}"
            own = own_frame(stacks.main)
            if own and own != stacks.main[0]:
                words += f", from {own}"
        return words


def read_py_spy(text: str) -> list[tuple[str, list[str]]]:
    """Return each thread of a py-spy dump: its name and its Python frames, innermost first, in the dump's order."""
    threads: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if head := _PY_SPY_HEAD.match(line):
            threads.append((head[1] or "unnamed", []))
        elif threads and (frame := _PY_SPY_FRAME.match(line)):
            threads[-1][1].append(f"{frame[2]}:{frame[3]} in {frame[1]}")
    return threads


def native_frame(text: str) -> str:
    """Return the innermost frame of the main thread in a py-spy dump with native frames. A named frame is
    preferred, since a library without symbols shows only addresses."""
    lines = text.splitlines()
    begin = next(
        (n for n, line in enumerate(lines) if line.startswith("Thread") and "MainThread" in line),
        len(lines),
    )
    rest = lines[begin + 1 :]
    frames = [line.strip() for line in itertools.takewhile(lambda x: x.startswith("    "), rest)]
    return next((f for f in frames if not f.startswith("0x")), frames[0] if frames else "")
