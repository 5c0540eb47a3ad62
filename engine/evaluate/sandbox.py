"""Run generated programs in a sandbox: bubblewrap, a filter of system calls, resource limits, and a timeout outside.

    /usr, /bin, /lib, this Python     read-only, as on the host
    /guest                            the files that run inside, read-only
    /tmp                              empty, read-only
    network, processes, users, IPC    separate namespaces with nothing in them

Nothing else of the host is visible: no home, no /proc, no environment. No path is writable, because files and
directory entries of a tmpfs use memory that no limit of a process counts.

A trial is one process with one thread (`engine.evaluate.seccomp`): it runs the program and then its tests
(`engine.evaluate.guest`), without network, other processes or capabilities, with limits on memory, CPU time and open
files. The limit of 1 GiB on its address space covers all memory that it can allocate, except memory of the kernel:
page tables, and at most 1 MiB for each of 64 open files. The whole sandbox is killed when the wall-clock timeout
expires, and when this process dies.

A trial passes if the process exits with status 0 and writes, after the last test, the nonce that it was given:
neither printing nor exiting early makes a program pass. If a trial ends before the program begins, or the tests do not
compile, its outcome is `harness`: nothing is known about the program. Once the program has begun, its outcome is `fail`
if the tests do not reach their end, whatever the cause. The limit of CPU time ends a program that computes for ever,
so a busy machine does not change a verdict; the wall-clock timeout ends a program that waits. A program written to
search for the nonce can find it: this sandbox is meant for programs that a model wrote, not for an attacker's.

`open_sandbox` first tests the sandbox and raises `NoAnswer` with the reason if it does not work: generated
code never runs outside a sandbox. It works on Linux on x86-64 and AArch64. It uses no cgroups, which need root.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from engine.errors import NoAnswer
from engine.evaluate.seccomp import seccomp_filter

Outcome = Literal["pass", "fail", "harness"]

CPU_S = 10
CLOCK_S = 60.0
RULES = 4
"""Version of the sandbox's rules, incremented if a change could alter a verdict. An evaluation continues a file of
results only if it has the same version."""
TRIES = 3
"""Maximum number of attempts to start a trial."""
MEMORY_BYTES = 1 << 30
_MOST_RESULT_BYTES = 1 << 20
_HOST_FOLDERS = ("/bin", "/lib", "/lib64", "/lib32", "/sbin")
_INSTALL = "install bubblewrap (apt install bubblewrap, dnf install bubblewrap)"
_APPARMOR = (
    "user namespaces may be switched off (Ubuntu 24.04: an AppArmor profile for /usr/bin/bwrap with "
    "`userns,` in it, or sysctl kernel.apparmor_restrict_unprivileged_userns=0)"
)


class Trial(NamedTuple):
    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """A tested sandbox, made by `open_sandbox`."""

    bwrap: str
    version: str
    cpu_s: int = CPU_S
    clock_s: float = CLOCK_S

    def try_program(self, program: str, tests: str) -> Trial:
        """Run `program`, and then `tests` in the same module. A trial with outcome `harness` is repeated, up to
        TRIES in all."""
        trial = Trial("harness", "not tried")
        for _ in range(TRIES):
            try:
                trial = self._try_once(program, tests)
            except OSError as error:  # of this process: no pipe, file or process available
                trial = Trial("harness", f"no sandbox: {error}")
            if trial.outcome != "harness":
                break
        return trial

    def _try_once(self, program: str, tests: str) -> Trial:
        nonce = secrets.token_hex(16)
        deadline_s = time.monotonic() + self.clock_s
        task = {
            "limits": _limits_of(self.cpu_s),
            "nonce": nonce,
            "program": program,
            "tests": tests,
        }
        with ExitStack() as stack:
            result_out, result_in = os.pipe()
            stack.callback(os.close, result_out)
            try:
                files = _file(stack, json.dumps(task).encode()), result_in
                process = self._start(stack, files)
            finally:
                # Only the sandbox may hold the writing end, so that reading ends when the sandbox does.
                os.close(result_in)
            result, is_over = _read_all(result_out, deadline_s)
            status = _status(process, deadline_s) if is_over else None
        if is_over:
            return _verdict(result, status, nonce)
        outcome: Outcome = "fail" if _has_begun(result) else "harness"
        return Trial(outcome, f"not finished after {self.clock_s:g} s")

    def _start(self, stack: ExitStack, files: tuple[int, ...]) -> subprocess.Popen[bytes]:
        rules = seccomp_filter()
        assert rules is not None  # open_sandbox refuses a machine without a filter
        number = _file(stack, rules)
        command = [
            self.bwrap,
            *_bwrap_arguments(),
            "--seccomp",
            str(number),
            _inner_python(),
            *("-I", "-S", "-B", "-c", _START),
            *(str(descriptor) for descriptor in files),
        ]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(number, *files),
            env={},
            start_new_session=True,
        )
        stack.callback(_kill, process)
        return process


_START = "import sys; sys.path.insert(0, '/guest'); from guest import main; main()"


def _bwrap_arguments() -> list[str]:
    """Return bubblewrap's arguments, except the filter and the command."""
    arguments = [
        *("--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"),
        *("--uid", "65534", "--gid", "65534", "--hostname", "sandbox"),
        *("--cap-drop", "ALL", "--clearenv", "--setenv", "PYTHONHASHSEED", "0"),
        *("--ro-bind", "/usr", "/usr"),
    ]
    for host_folder in _HOST_FOLDERS:
        if os.path.islink(host_folder):
            arguments += ["--symlink", os.readlink(host_folder), host_folder]
        elif os.path.isdir(host_folder):
            arguments += ["--ro-bind", host_folder, host_folder]
    prefix = str(Path(sys.base_prefix).resolve())
    if not prefix.startswith("/usr/") and prefix != "/usr":
        arguments += ["--ro-bind", prefix, prefix]
    arguments += ["--ro-bind", str(Path(__file__).parent / "guest.py"), "/guest/guest.py"]
    for device in ("null", "zero", "urandom"):
        arguments += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    return [*arguments, "--dir", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]


def _inner_python() -> str:
    """Return the path of the base interpreter: a virtual environment is not visible in the sandbox."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def _limits_of(cpu_s: int) -> Mapping[str, int]:
    return {
        "AS": MEMORY_BYTES,
        "CPU": cpu_s,
        "FSIZE": 0,
        "NOFILE": 64,
        "CORE": 0,
        "MSGQUEUE": 0,
        "SIGPENDING": 64,
    }


def open_sandbox(*, cpu_s: int = CPU_S, clock_s: float = CLOCK_S) -> Sandbox:
    """Open a sandbox and test it with one program. Raises `NoAnswer` if this machine cannot run one."""
    if sys.platform != "linux" or seccomp_filter() is None:
        found = f"{sys.platform} on {platform.machine()}"
        raise _no_sandbox("Linux on x86-64 or AArch64", found, None)
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise _no_sandbox("bubblewrap", "no bwrap on the path", _INSTALL)
    version = subprocess.run([bwrap, "--version"], capture_output=True, text=True, check=False)
    try:
        plain = subprocess.run(
            [bwrap, *_bwrap_arguments(), _inner_python(), "-I", "-S", "-c", "print(6 * 7)"],
            capture_output=True,
            text=True,
            check=False,
            timeout=clock_s,
        )
    except subprocess.TimeoutExpired:
        found = f"no output within {clock_s:g} s"
        raise _no_sandbox("a sandbox that starts", found, None) from None
    if plain.stdout.strip() != "42":
        found = plain.stderr.strip()[:500] or f"exit status {plain.returncode}"
        raise _no_sandbox("a sandbox that starts", found, _APPARMOR)
    sandbox = Sandbox(bwrap=bwrap, version=version.stdout.strip(), cpu_s=cpu_s, clock_s=clock_s)
    trial = sandbox.try_program("def f():\n    return 42", "assert f() == 42")
    if trial.outcome != "pass":
        raise _no_sandbox("a right program to pass", f"{trial.outcome}: {trial.reason}", None)
    return sandbox


def _no_sandbox(expected: str, found: str, hint: str | None) -> NoAnswer:
    return NoAnswer(
        f"sandbox: generated programs run only in a sandbox — expected {expected}, found {found}",
        hint=hint,
    )


# contract: eval-no-fake-pass-v1
def _verdict(result: bytes, status: int | None, nonce: str) -> Trial:
    try:
        record = json.loads(result)
        outcome, reason = record["outcome"], str(record["reason"])
        known = record["nonce"] == nonce and outcome in ("pass", "fail", "harness")
    except (ValueError, KeyError, TypeError):
        known = False
    if known and status == 0:
        return Trial(outcome, reason)
    if _has_begun(result):
        return Trial("fail", f"the program ended before its tests did: {_describe_end(status)}")
    return Trial("harness", f"the program did not begin: {_describe_end(status)}")


def _describe_end(status: int | None) -> str:
    """Describe how the program ended, from bubblewrap's exit status."""
    number = 0 if status is None else -status if status < 0 else status - 128
    if number == signal.SIGXCPU:
        return "at its limit of CPU time"
    if number == signal.SIGKILL:
        return "killed, as a program is that ignores SIGXCPU at its limit of CPU time"
    if number > 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(number).name}"
    return f"exit status {status}"


def _has_begun(result: bytes) -> bool:
    """Return whether the program began: the guest writes an empty line first."""
    return result.startswith(b"\n")


def _file(stack: ExitStack, content: bytes) -> int:
    """Return the descriptor of an open unnamed file that holds `content`."""
    file = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
    file.write(content)
    file.seek(0)
    return file.fileno()


def _read_all(number: int, deadline_s: float) -> tuple[bytes, bool]:
    """Read a pipe. Return its content, and whether it ended before the deadline: the other end was closed, or more
    than 1 MiB was read."""
    result = b""
    while (left_s := deadline_s - time.monotonic()) > 0:
        if not select.select([number], [], [], left_s)[0]:
            break
        piece = os.read(number, _MOST_RESULT_BYTES)
        if not piece or len(result) > _MOST_RESULT_BYTES:
            return result, True
        result += piece
    return result, False


def _status(process: subprocess.Popen[bytes], deadline_s: float) -> int | None:
    try:
        return process.wait(max(0.0, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill bubblewrap; the init process of its PID namespace dies with it (`--die-with-parent`), and so every
    process in the sandbox."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
