"""End a command on SIGTERM, SIGINT (Ctrl-C) and SIGHUP (a closed terminal) within two seconds, whatever it is doing,
without leaving partial output or child processes.

    command ---(wake-up pipe: the signal's number)---> guard
        |  raises `Stopped`, unwinds                      |  GRACE_S later, or once the command is gone:
        v                                                 v  ends the command's descendants, removes its partial files
    exit 128 + n                                       exits

A Python handler runs only between two bytecodes. While the main thread is inside native code (a matmul, a
tokenizer, one big read) no handler runs, and if that code holds the GIL no other thread runs either. So a
separate process, the guard, enforces the exit; it is forked before anything is imported. The kernel-level
handler writes the signal's number into the pipe even then. The guard gives the command `GRACE_S` to unwind,
during which `finally` blocks remove partial files; then a thread of the command exits with 128 + n. If native
code holds the GIL, the guard sends the same signal again: the handler is installed for one signal only
(SA_RESETHAND), so the second one has the kernel's default action and ends the process (143 in a shell too).

    guard_command()              once, first thing in `main`; `leave_command(exit_code)` last
    hand_over()                  from here on the command handles signals itself: it has steps to finish and save
    with partial_output(path):   a file or folder that is renamed when complete, and removed otherwise
    descendants(pid), end(...)   the processes that a process started
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType

GRACE_S = 0.9
"""Seconds that a command has to unwind."""
AGAIN_S = 0.3
"""Seconds from the exit request, or from the second signal, to the next stronger measure."""
HEARD_S = 0.25
"""Seconds that a command waits for the guard to list its descendants."""
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_REGISTER, _FORGET, _LEAVING = b"+", b"-", b"."
"""Messages from a command to its guard; the first two are followed by a path."""
_HEARD, _EXIT = b"!", b"x"
"""Messages from a guard to its command; the second is followed by the exit code."""
_CLOSED = b""
_MESSAGE_BYTES = 1 << 16


class Stopped(KeyboardInterrupt):
    """A signal asked the command to end. It is not an `Exception`, so that no error handler catches it."""

    def __init__(self, number: int) -> None:
        self.name = signal.Signals(number).name
        super().__init__(f"stopped by {self.name}")
        self.exit_code = 128 + number


class _Guarded:
    """This process's end of the connection to its guard; `messages` is None without a guard."""

    messages: socket.socket | None = None
    guard = 0
    wake = -1
    stopped = False
    heard = threading.Event()


def guard_command() -> None:
    """Make the signals in `ENDING` end this process as described above. Call it once, in the main thread, before
    other threads exist. A signal that is already ignored (`nohup`) stays ignored."""
    handled = [n for n in ENDING if signal.getsignal(n) is not signal.SIG_IGN]
    if _Guarded.messages is not None or not handled:
        return
    wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    command_end, guard_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        command_fd = os.pidfd_open(os.getpid())
        guard = os.fork()
    except OSError:
        # The process limit is reached: only Python's handlers remain.
        guard = -1
    if guard == 0:
        try:
            _stand_guard(os.getppid(), command_fd, wake_read, guard_end)
        finally:
            os._exit(0)
    for number in handled:
        signal.signal(number, _unwind)
        only_once(number)
    os.close(wake_read)
    guard_end.close()
    if guard < 0:
        os.close(wake_write)
        command_end.close()
        return
    os.close(command_fd)
    _Guarded.messages, _Guarded.guard, _Guarded.wake = command_end, guard, wake_write
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=(command_end,), name="guard", daemon=True).start()
    os.register_at_fork(after_in_child=_leave_to_parent)


def leave_command(exit_code: int) -> None:
    """End the command. If it ended by itself, its guard is dismissed. If a signal stopped it, the process exits
    here and the guard does the rest. Threads and libraries are not waited for."""
    if _Guarded.stopped:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(exit_code)
    dismiss_guard()


def dismiss_guard() -> None:
    """Do without the guard from here on: signals, and processes that outlive this one, are the caller's."""
    if _Guarded.messages is None:
        return
    hand_over()
    _tell(_LEAVING)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(_Guarded.guard, 0)
    _Guarded.messages = None
    os.close(_Guarded.wake)


def hand_over() -> None:
    """Leave all signals to the caller's own handlers from here on, without a time limit."""
    if _Guarded.messages is not None:
        signal.set_wakeup_fd(-1)


def only_once(number: int) -> None:
    """Use the handler for the first signal and the kernel's default action for the second, which works even when
    no Python code can run."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "sysv_signal"):  # no glibc: only the guard's SIGKILL remains
        return
    get, put = ctypes.pythonapi.PyOS_getsig, libc.sysv_signal
    get.restype = put.restype = ctypes.c_void_p
    get.argtypes, put.argtypes = (ctypes.c_int,), (ctypes.c_int, ctypes.c_void_p)
    put(number, get(number))


@contextlib.contextmanager
def partial_output(path: Path) -> Iterator[Path]:
    """Yield a path for a file or folder that is renamed to `path` when complete. Whatever is left at the end is
    removed, by the guard if the process cannot do it."""
    path = path.absolute()
    _tell(_REGISTER + os.fsencode(path))
    try:
        yield path
    finally:
        _remove(path)
        _tell(_FORGET + os.fsencode(path))


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
    # A further signal of any of these kinds ends the process at once; the guard then does the rest.
    for other in ENDING:
        if signal.getsignal(other) is _unwind:
            signal.signal(other, signal.SIG_DFL)
    _Guarded.stopped = True
    if _Guarded.messages is not None and signal.set_wakeup_fd(-1) >= 0:
        # The guard lists the descendants before any of them is ended: once their parent is dead they can no
        # longer be recognised as ours.
        _Guarded.heard.wait(HEARD_S)
    raise_stopped(number, frame)


def raise_stopped(
    number: int, frame: FrameType | None, before_exit: Callable[[], None] = lambda: None
) -> None:
    """Unwind the main thread from its handler. During an import, which any line of a library may begin, the
    process calls `before_exit` and exits at once instead: an exception out of native code that is being loaded
    would end it by SIGABRT."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            before_exit()
            os._exit(128 + number)
        frame = frame.f_back
    raise Stopped(number)


def _listen(messages: socket.socket) -> None:
    """Thread that receives the guard's messages."""
    while True:
        try:
            message = messages.recv(16)
        except OSError:
            return
        if message[:1] == _EXIT:
            os._exit(message[1])
        if message != _HEARD:
            return
        _Guarded.heard.set()


def _leave_to_parent() -> None:
    """In a forked child: leave the command's signals to the parent."""
    if _Guarded.messages is None:
        return
    signal.set_wakeup_fd(-1)
    for number in ENDING:
        if signal.getsignal(number) is _unwind:
            signal.signal(number, signal.SIG_DFL)
    _Guarded.messages.close()
    _Guarded.messages = None


def _tell(message: bytes) -> None:
    if _Guarded.messages is not None:
        with contextlib.suppress(OSError):
            _Guarded.messages.send(message)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()


def _stand_guard(main: int, main_fd: int, wake: int, messages: socket.socket) -> None:
    """Main function of the guard; it returns when nothing is left to do."""
    # In its own session neither Ctrl-C nor a closed terminal reaches the guard, and no process waits for its
    # stdout.
    os.setsid()
    for ending in ENDING:
        signal.signal(ending, signal.SIG_IGN)
    kept = sorted({main_fd, wake, messages.fileno()})
    for low, high in zip([-1, *kept], [*kept, os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, min(high, 1 << 16))
    # There is nowhere to print a traceback.
    sys.stderr = sys.stdout = None
    partial: dict[bytes, None] = {}
    number = _wait_for_signal(main_fd, wake, messages, partial)
    if number is None:
        return
    tree: dict[int, int] = {}
    if number:
        tree = descendants(main)
        with contextlib.suppress(OSError):
            messages.send(_HEARD)
        if not _has_ended(main_fd, GRACE_S):
            tree = descendants(main) | tree
            with contextlib.suppress(OSError):
                messages.send(_EXIT + bytes([128 + number]))
            if not _has_ended(main_fd, AGAIN_S):
                _send(main_fd, number)
            if not _has_ended(main_fd, AGAIN_S):
                _send(main_fd, signal.SIGKILL)
                _has_ended(main_fd, AGAIN_S)
    end(tree.values())
    _read_messages(messages, partial)
    for path in partial:
        _remove(Path(os.fsdecode(path)))


def _wait_for_signal(
    main_fd: int, wake: int, messages: socket.socket, partial: dict[bytes, None]
) -> int | None:
    """Return the signal that the command got: 0 when it died of another cause, None when it exited normally."""
    poll = select.poll()
    for fd in (main_fd, wake, messages.fileno()):
        poll.register(fd, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if messages.fileno() in ready:
            last = _read_messages(messages, partial)
            if last == _LEAVING:
                return None
            if last == _CLOSED:
                # EOF: the command is exiting, and its pidfd will report it.
                poll.unregister(messages.fileno())
        if wake in ready:
            for byte in os.read(wake, 64):
                if byte in ENDING:
                    return byte
            if main_fd not in ready:
                continue
        if main_fd in ready:
            return 0


def _read_messages(messages: socket.socket, partial: dict[bytes, None]) -> bytes | None:
    """Handle all pending messages of the command; returns the last one if it is not about a path."""
    while True:
        try:
            message = messages.recv(_MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return _CLOSED
        if message in (_LEAVING, _CLOSED):
            return message
        if message[:1] == _REGISTER:
            partial[message[1:]] = None
        else:
            partial.pop(message[1:], None)


def _has_ended(process: int, within_s: float) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(within_s * 1000))
