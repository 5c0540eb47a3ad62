"""End a command on SIGTERM, SIGINT (Ctrl-C) and SIGHUP (a closed terminal) within two seconds, without leaving partial
output or child processes.

The handler raises `Stopped`, so that `finally` blocks remove partial files. If that takes more than `GRACE_S`, a
thread ends the process with 128 + n. A Python handler runs only between two bytecodes: native code that does not
return (a matmul, a tokenizer, one big read) delays it. The handler is used only once (SA_RESETHAND), so a second
signal ends the process even during native code.

    guard_command()              once, first thing in `main`; `leave_command(exit_code)` last
    with partial_output(path):   a file or folder that is renamed when complete, and removed otherwise
    descendants(pid), end(...)   the processes that a process started
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import ClassVar, NoReturn

GRACE_S = 0.9
"""Time that a command has to unwind after a signal, in seconds."""
AGAIN_S = 0.3
"""Seconds from a second signal to the next stronger measure."""
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal that ends the command. It is not an `Exception`, so that no error handler catches it."""

    def __init__(self, number: int) -> None:
        self.name = signal.Signals(number).name
        super().__init__(f"stopped by {self.name}")
        self.exit_code = 128 + number


class _Command:
    """State of this process as a command, once it is guarded."""

    guarded = stopped = False
    partial: ClassVar[set[Path]] = set()
    """Outputs that are not complete."""


def guard_command() -> None:
    """Make the signals in `ENDING` end this process as the module docstring describes. Call it once, in the main
    thread. A signal that is already ignored (`nohup`) stays ignored."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _unwind)
            only_once(number)
    os.register_at_fork(after_in_child=_leave_to_parent)
    _Command.guarded = True


def leave_command(exit_code: int) -> None:
    """End the command. If a signal stopped it, the process and its descendants end here, without waiting for threads
    and libraries."""
    if _Command.stopped:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        _exit(exit_code)


def _exit(exit_code: int) -> NoReturn:
    end(descendants(os.getpid()).values())
    for path in _Command.partial.copy():
        _remove(path)
    os._exit(exit_code)


def only_once(number: int) -> None:
    """Use the handler for the first signal and the kernel's default action for the second, which works even when
    no Python code can run."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "sysv_signal"):  # no glibc
        return
    get, put = ctypes.pythonapi.PyOS_getsig, libc.sysv_signal
    get.restype = put.restype = ctypes.c_void_p
    get.argtypes, put.argtypes = (ctypes.c_int,), (ctypes.c_int, ctypes.c_void_p)
    put(number, get(number))


@contextlib.contextmanager
def partial_output(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or folder; the caller renames it to `path` when it is complete. Whatever is
    left at the temporary path is removed at the end."""
    path = path.absolute()
    _Command.partial.add(path)
    try:
        yield path
    finally:
        _remove(path)
        _Command.partial.discard(path)


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Yield a new folder for temporary files, removed like a partial output."""
    with partial_output(Path(tempfile.mkdtemp(prefix=prefix))) as path:
        yield path


def descendants(pid: int) -> dict[int, int]:
    """Return the descendants of `pid` as a map from process id to pidfd. The caller ends them with `end`."""
    found: dict[int, int] = {}
    todo = [pid]
    while todo:
        for child in _children(todo.pop()):
            if child not in found and child != os.getpid():
                with contextlib.suppress(OSError):
                    found[child] = os.pidfd_open(child)
                    todo.append(child)
    return found


def end(processes: Iterable[int]) -> None:
    """Send SIGKILL to each of these pidfds, and close them."""
    for process in processes:
        _send(process, signal.SIGKILL)
        os.close(process)


def _send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(process, number)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.scandir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(task.path, "children").read_bytes().split())
    return found


def _unwind(number: int, frame: FrameType | None) -> None:
    # A further signal of any of these kinds ends the process at once.
    _restore_defaults()
    raise_stopped(number, frame, lambda: _exit(128 + number))


def _restore_defaults() -> None:
    for number in ENDING:
        if signal.getsignal(number) is _unwind:
            signal.signal(number, signal.SIG_DFL)


def raise_stopped(
    number: int, frame: FrameType | None, before_exit: Callable[[], None] = lambda: None
) -> None:
    """Unwind the main thread from its handler. During an import, which any line of a library may begin, the process
    instead calls `before_exit` and exits at once: an exception raised while native code is being loaded would end the
    process by SIGABRT."""
    if _Command.guarded:
        _Command.stopped = True
        exit_late = threading.Timer(GRACE_S, _exit, [128 + number])
        exit_late.daemon = True
        exit_late.start()
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            before_exit()
            os._exit(128 + number)
        frame = frame.f_back
    raise Stopped(number)


def _leave_to_parent() -> None:
    """Leave the command's signals and partial outputs to the parent, in a forked child."""
    _restore_defaults()
    _Command.guarded = False
    _Command.partial.clear()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()
