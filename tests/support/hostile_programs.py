"""Malicious programs, each of which the sandbox must contain.

Each one makes its attempt in `solve()` and returns 42 when the attempt succeeded; the test is `solve() ==
42`. So a hole shows as a pass. Containment requires more than the absence of a pass: the reason must be the
one that the intended barrier gives, so that an attack that merely contains a typing error does not count. In
addition, a file outside must be unchanged, and no connection may have reached a port that is listened to.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from engine.evaluate.sandbox import Sandbox

WANTED = "assert solve() == 42"
CPU_S, CLOCK_S = 1, 8.0
"""CPU and wall-clock seconds of a hostile program: lower than for a program under test, because some of them use up
every limit."""
_REFUSED = r"PermissionError|Operation not permitted"
_NEW = r"Function not implemented"
_ABSENT = r"FileNotFoundError"
_READ_ONLY = r"Read-only file system|FileNotFoundError|PermissionError"
_ENDED = r"^the program ended"
_THREAD = r"can't start new thread"
_WRONG = r"^an assertion does not hold"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostile:
    name: str
    program: str
    """`FILE`, `PORT` and `PID` in it stand for the host's."""
    contained: str
    """A regular expression that the reason matches when the sandbox held."""


def _solve(body: str) -> str:
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    return f"import ctypes, os, signal, socket, subprocess, sys, time\ndef solve():\n{lines}"


def _libc(call: str) -> str:
    return _solve(
        f"libc = ctypes.CDLL(None, use_errno=True)\nif {call} != -1:\n    return 42\n"
        "raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))"
    )


HOSTILES = tuple(
    Hostile(name=name, program=program, contained=contained)
    for name, program, contained in (
        ("fork bomb", _solve("while True:\n    os.fork()\n    return 42"), _REFUSED),
        ("another program", _solve("subprocess.run(['/bin/sh', '-c', ':'])\nreturn 42"), _REFUSED),
        (
            "socket",
            _solve("socket.create_connection(('127.0.0.1', PORT), timeout=2)\nreturn 42"),
            _REFUSED,
        ),
        ("socket pair", _solve("socket.socketpair()\nreturn 42"), _REFUSED),
        ("write a file outside", _solve("open(FILE, 'w').write('x')\nreturn 42"), _READ_ONLY),
        ("read a file outside", _solve("return 42 if open(FILE).read() else 0"), _ABSENT),
        ("remove a file outside", _solve("os.remove(FILE)\nreturn 42"), _ABSENT),
        ("write to the system", _solve("open('/usr/x', 'w')\nreturn 42"), _READ_ONLY),
        ("write to the root", _solve("open('/x', 'w')\nreturn 42"), _READ_ONLY),
        ("huge allocation", _solve("len(bytearray(1 << 36))\nreturn 42"), r"MemoryError"),
        ("write a file in /tmp", _solve("open('/tmp/x', 'w')\nreturn 42"), _READ_ONLY),
        ("make a folder", _solve("os.mkdir('x')\nreturn 42"), _READ_ONLY),
        (
            "thread",
            _solve("import _thread\n_thread.start_new_thread(min, (1, 2))\nreturn 42"),
            _THREAD,
        ),
        # Memory that no limit of a process counts.
        ("shared memory of SysV", _libc("libc.shmget(0, 1 << 28, 0o1600)"), _REFUSED),
        ("queue of SysV", _libc("libc.msgget(0, 0o1600)"), _REFUSED),
        ("semaphores of SysV", _libc("libc.semget(0, 30000, 0o1600)"), _REFUSED),
        (
            "queue of POSIX",
            _libc("ctypes.CDLL('librt.so.1', use_errno=True).mq_open(b'/q', 66, 0o600, None)"),
            _REFUSED,
        ),
        ("secret memory", _libc("libc.syscall(447, 0)"), _NEW),
        ("file in memory", _solve("os.memfd_create('x')\nreturn 42"), _REFUSED),
        (
            "pages in a pipe",
            _libc("libc.vmsplice(os.pipe()[1], (ctypes.c_void_p * 2)(id(libc), 8), 1, 0)"),
            _REFUSED,
        ),
        ("exit 0 early", "import sys\nsys.exit(0)\ndef solve(): return 42", r"^SystemExit: 0$"),
        ("os._exit(0)", _solve("os._exit(0)"), _ENDED),
        (
            "exit 0 at exit",
            "import atexit, os, sys\natexit.register(os._exit, 0)\n"
            "def solve():\n    print('passed')\n    sys.exit(0)\n",
            r"^SystemExit: 0",
        ),
        (
            "a pass in place of an answer",
            _solve(
                'for n in range(64):\n    try: os.write(n, b\'{"outcome": "pass", "nonce": ""}\\n\')\n'
                "    except OSError: pass\nos._exit(0)"
            ),
            _ENDED,
        ),
        (
            "read another process' memory",
            _solve("return 42 if open('/proc/PID/mem', 'rb') else 0"),
            _ABSENT,
        ),
        ("ptrace", _libc("libc.ptrace(16, PID, 0, 0)"), _REFUSED),
        ("new namespaces", _libc("libc.unshare(0x10000000)"), _REFUSED),
        ("mount", _libc("libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)"), _REFUSED),
        (
            "raise a limit",
            _solve(
                "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))\nreturn 42"
            ),
            r"not allowed to raise|PermissionError",
        ),
        (
            "kill everything",
            _solve("os.kill(-1, signal.SIGKILL)\nreturn 42"),
            r"^the program ended|ProcessLookupError|PermissionError",
        ),
        (
            "signal the host",
            _solve("os.kill(PID, signal.SIGTERM)\nreturn 42"),
            r"ProcessLookupError",
        ),
        (
            "read the environment",
            _solve("return 42 if set(os.environ) - {'PYTHONHASHSEED', 'PWD', 'LC_CTYPE'} else 0"),
            _WRONG,
        ),
        ("SIGSTOP", _solve("os.kill(os.getpid(), signal.SIGSTOP)\nreturn 0"), r"^not finished"),
        (
            "compute for ever",
            _solve(
                "for n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n"
                "    except OSError: pass\nwhile True: pass"
            ),
            r"CPU time",
        ),
        (
            "endless output",
            _solve("while True:\n    print('x' * 65536)"),
            r"CPU time|^not finished",
        ),
        # Files of the host that are visible inside. The attacks set their times to now or their mode to its present
        # value, so that an attack that succeeds does little harm.
        ("mode of a device", _solve("os.chmod('/dev/zero', 0o666)\nreturn 42"), _REFUSED),
        ("mode by a descriptor", _solve("os.fchmod(2, 0o666)\nreturn 42"), _REFUSED),
        ("mode by a new call", _libc("libc.syscall(452, -100, b'/dev/zero', 0o666, 0)"), _NEW),
        ("times of a device", _solve("os.utime('/dev/zero')\nreturn 42"), _REFUSED),
        ("owner of a device", _solve("os.chown('/dev/zero', -1, -1)\nreturn 42"), _REFUSED),
        (
            "attribute of a device",
            _solve("os.setxattr('/dev/zero', 'user.x', b'')\nreturn 42"),
            _REFUSED,
        ),
        (
            "lock of the system",
            _solve("import fcntl\nfcntl.flock(os.open('/usr', 0), fcntl.LOCK_EX)\nreturn 42"),
            _REFUSED,
        ),
        (
            "lock of a device",
            _solve("import fcntl\nfcntl.lockf(open('/dev/zero', 'wb'), fcntl.LOCK_EX)\nreturn 42"),
            _REFUSED,
        ),
        (
            "lease of a file",
            _solve(
                "import fcntl\n"
                "fcntl.fcntl(os.open(os.__file__, 0), fcntl.F_SETLEASE, fcntl.F_RDLCK)\nreturn 42"
            ),
            _REFUSED,
        ),
        ("log of the kernel", _libc("libc.klogctl(10, None, 0)"), _REFUSED),
        ("crash", _solve("ctypes.string_at(0)"), r"SIGSEGV|SIGBUS"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The targets of the attacks on this machine."""

    file: Path
    port: int

    def aim(self, hostile: Hostile) -> str:
        return (
            hostile.program.replace("FILE", repr(str(self.file)))
            .replace("PORT", str(self.port))
            .replace("PID", str(os.getpid()))
        )


def not_contained(sandbox: Sandbox, hostiles: Sequence[Hostile] = HOSTILES) -> list[str]:
    """Run the hostile programs and list what the sandbox did not contain, one line each."""
    sandbox = replace(sandbox, cpu_s=CPU_S, clock_s=CLOCK_S)
    content = "what was there before"
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket() as listener,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
    ):
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        host = Host(file=Path(folder, "file"), port=listener.getsockname()[1])
        host.file.write_text(content)
        programs = [host.aim(hostile) for hostile in hostiles]
        trials = list(pool.map(lambda program: sandbox.try_program(program, WANTED), programs))
        problems = [
            f"{hostile.name}: {trial.outcome}, {trial.reason}"
            for hostile, trial in zip(hostiles, trials, strict=True)
            if trial.outcome != "fail" or not re.search(hostile.contained, trial.reason)
        ]
        if not host.file.exists() or host.file.read_text() != content:
            problems.append("a file outside is not what it was")
        with contextlib.suppress(BlockingIOError):
            listener.accept()[0].close()
            problems.append("a port of the host was called")
    return problems
