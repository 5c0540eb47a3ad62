"""The sandbox for generated programs: bubblewrap, a filter of system calls, limits, and a clock outside.

    /usr, /bin, /lib, this Python     read-only, as on the host
    /guest                            the files that run inside, read-only
    /tmp                              empty, read-only
    network, processes, users, IPC    separate namespaces with nothing in them

Nothing else of the host is visible: no home, no /proc, no environment. No place is writable, because a file
in memory is memory that no limit of a process counts, and so is every directory entry.

A trial consists of two sandboxes and two pipes between them:

    judge     runs the problem's tests           knows the nonce, never runs the program
      | calls with plain data   ^ replies
    program   runs the generated program         knows nothing worth taking

Each has no network, sees no other process, has no capability, and is one process with one thread
(`engine.evaluate.seccomp`), with limits on memory, CPU time and open files. All memory that it can obtain
lies in its address space, where the limit of 1 GiB counts it, except the kernel's own: page tables, and at
most 1 MiB for each of 64 open files. Both sandboxes are killed with everything in them when the judge has
given its verdict, when the clock runs out, and when this process dies. A program begins only after the judge
has found this process alive, because the kernel does not notify a child whose parent died before the child
asked for the notification.

The verdict is made here: `pass` requires the judge's exit status 0, the nonce that only the judge was given,
and each assertion to hold as often as with the reference solution, which is run first. A trial that ends
before the program begins is `harness`: it is not a result of the program. From then on, anything that keeps
the judge from a verdict counts against the program; otherwise a program that ends its judge would never be
wrong. A trial without a verdict is first repeated, in case something else ended it. A limit of CPU time ends
a program that computes for ever, so that a busy machine changes no verdict; the clock ends a program that
waits.

`open_sandbox` first tests the sandbox and raises `NoAnswer` with the reason when it does not work: generated
code never runs outside. Covered: Linux on x86-64 and AArch64. Not covered: cgroups, which need root.
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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from engine.errors import NoAnswer
from engine.evaluate.seccomp import seccomp_filter

Outcome = Literal["pass", "fail", "harness"]

CPU_S = 10
CLOCK_S = 60.0
RULES = 3
"""Incremented when programs may be judged differently than before; results under other rules are not
continued."""
TRIES = 3
"""Number of tries of a trial without a verdict."""
MEMORY_BYTES = 1 << 30
_MOST_RESULT_BYTES = 1 << 20
_GUESTS = ("guest_wire.py", "guest_program.py", "guest_judge.py", "guest_assertions.py")
_HOST_FOLDERS = ("/bin", "/lib", "/lib64", "/lib32", "/sbin")
_INSTALL = "install bubblewrap (apt install bubblewrap, dnf install bubblewrap)"
_APPARMOR = (
    "user namespaces may be switched off (Ubuntu 24.04: an AppArmor profile for /usr/bin/bwrap with "
    "`userns,` in it, or sysctl kernel.apparmor_restrict_unprivileged_userns=0)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exam:
    """The tests of a program and their inputs."""

    setup: str
    """The problem's own code, run in the judge before the tests; it may use what the program defines."""
    tests: str
    reference: str | None = None
    """A correct program. Each assertion must hold as often as with it."""
    entries: tuple[str, ...] = ()
    """Functions of the program whose names `setup` or Python defines as well. Names that nothing defines
    belong to the program anyway."""
    classes: tuple[str, ...] = ()
    """Classes of the program: the tests hold references to their objects, never the objects themselves."""


class Trial(NamedTuple):
    outcome: Outcome
    reason: str


class _Judged(NamedTuple):
    trial: Trial
    held: list[int]
    """Number of times that each assertion of the tests held."""
    is_verdict: bool = True
    """Whether the verdict came from the judge or from its limits; False when the judge died of something
    else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """A tested sandbox. `open_sandbox` makes it."""

    bwrap: str
    version: str
    cpu_s: int = CPU_S
    clock_s: float = CLOCK_S

    _held: dict[Exam, list[int]] = field(default_factory=dict, compare=False, repr=False)
    """Number of times that each assertion holds with the reference solution, for each exam so far."""

    def try_program(self, program: str, tests: Exam) -> Trial:
        """Run `program` against `tests`."""
        if tests.reference is None:
            return self._judge(program, tests, None).trial
        if tests not in self._held:
            trial, held, _ = self._judge(tests.reference, tests, None)
            if trial.outcome != "pass":
                if program == tests.reference:
                    return trial
                # If the reference solution does not pass, there is nothing to compare with.
                reason = f"the reference solution does not pass: {trial.outcome}, {trial.reason}"
                return Trial("harness", reason)
            self._held[tests] = held
            if program == tests.reference:
                return trial
        return self._judge(program, tests, self._held[tests]).trial

    def _judge(self, program: str, tests: Exam, held: list[int] | None) -> _Judged:
        """Run a trial until there is a verdict; after TRIES without one, return the last result."""
        judged = _Judged(Trial("harness", "not tried"), [])
        for _ in range(TRIES):
            try:
                judged = self._try_once(program, tests, held)
            except OSError as error:  # of this process: no pipe, file or process available
                judged = _Judged(Trial("harness", f"no sandbox: {error}"), [], is_verdict=False)
            if judged.is_verdict and judged.trial.outcome != "harness":
                break
        return judged

    def _try_once(self, program: str, tests: Exam, held: list[int] | None) -> _Judged:
        limits = _limits_of(self.cpu_s)
        nonce = secrets.token_hex(16)
        deadline_s = time.monotonic() + self.clock_s
        with ExitStack() as stack:
            ends: set[int] = set()
            stack.callback(_close, ends)
            calls_out, calls_in = _pipe(ends)
            answers_out, answers_in = _pipe(ends)
            result_out, result_in = os.pipe()
            stack.callback(os.close, result_out)
            ends.add(result_in)
            judge_task = {
                "nonce": nonce,
                "limits": limits,
                "setup": tests.setup,
                "tests": tests.tests,
                "entries": tests.entries,
                "classes": tests.classes,
                "held": held,
            }
            task = _file(stack, json.dumps(judge_task).encode())
            judge = self._start(stack, "judge", answers_out, calls_in, (task, result_in))
            task = _file(stack, json.dumps({"limits": limits, "program": program}).encode())
            running = self._start(stack, "program", calls_out, answers_in, (task,))
            # Descriptors that stay open here would keep the pipes open after their ends are gone.
            _close(ends)
            result, is_over = _read_all(result_out, deadline_s)
            if not is_over:
                reason = f"not finished after {self.clock_s:g} s"
                if _has_begun(result):
                    return _Judged(Trial("fail", reason), [])
                return _Judged(Trial("harness", f"{reason}, nor begun"), [], is_verdict=False)
            status = _status(judge, deadline_s)
            judged = _verdict(result, status, nonce)
            if not judged.is_verdict and _signal(status) == signal.SIGXCPU and _has_begun(result):
                reason = f"more than {self.cpu_s} s of CPU time to judge its answers"
                return _Judged(Trial("fail", reason), [])
            trial = judged.trial
            ended = _status(running, time.monotonic() + 2.0)
        if trial.reason.startswith("the program ended") and ended is not None:
            return _Judged(Trial("fail", f"{trial.reason}: {self._describe_end(ended)}"), [])
        return judged

    def _describe_end(self, status: int) -> str:
        """Describe how the program ended, from bubblewrap's exit status."""
        number = _signal(status)
        if number == signal.SIGXCPU:
            return f"more than {self.cpu_s} s of CPU time"
        if number == signal.SIGKILL:
            return f"killed, as at the limit of {self.cpu_s} s of CPU time"
        if number > 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(number).name}"
        return f"exit status {status}"

    def _start(
        self, stack: ExitStack, guest: str, read: int, write: int, files: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        rules = seccomp_filter()
        assert rules is not None  # open_sandbox refuses a machine without a filter
        number = _file(stack, rules)
        start = (
            f"import sys; sys.path.insert(0, '/guest'); "
            f"from engine.evaluate.guest_{guest} import main; main()"
        )
        command = [
            self.bwrap,
            *_bwrap_arguments(),
            "--seccomp",
            str(number),
            _inner_python(),
            *("-I", "-S", "-B", "-c", start),
            *(str(descriptor) for descriptor in files),
        ]
        process = subprocess.Popen(
            command,
            stdin=read,
            stdout=write,
            stderr=subprocess.DEVNULL,
            pass_fds=(number, *files),
            env={},
            start_new_session=True,
        )
        stack.callback(_kill, process)
        return process


def _bwrap_arguments() -> list[str]:
    """bubblewrap's arguments, except the filter and the command."""
    folder = Path(__file__).parent
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
    for name in _GUESTS:
        arguments += ["--ro-bind", str(folder / name), f"/guest/engine/evaluate/{name}"]
    for device in ("null", "zero", "urandom"):
        arguments += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    return [*arguments, "--dir", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]


def _inner_python() -> str:
    """The base interpreter, because the sandbox does not contain a virtual environment."""
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
    """Open the sandbox of this machine, tested with one program. Raises `NoAnswer` when there is none."""
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
        found = f"nothing said for {clock_s:g} s"
        raise _no_sandbox("a sandbox that starts", found, None) from None
    if plain.stdout.strip() != "42":
        found = plain.stderr.strip()[:500] or f"exit status {plain.returncode}"
        raise _no_sandbox("a sandbox that starts", found, _APPARMOR)
    sandbox = Sandbox(bwrap=bwrap, version=version.stdout.strip(), cpu_s=cpu_s, clock_s=clock_s)
    trial = sandbox.try_program("def f():\n    return 42", Exam(setup="", tests="assert f() == 42"))
    if trial.outcome != "pass":
        raise _no_sandbox("a right program to pass", f"{trial.outcome}: {trial.reason}", None)
    return sandbox


def _no_sandbox(expected: str, found: str, hint: str | None) -> NoAnswer:
    return NoAnswer(
        f"sandbox: generated programs run in no other place — expected {expected}, found {found}",
        hint=hint,
    )


# contract: eval-no-fake-pass-v1
def _verdict(result: bytes, status: int | None, nonce: str) -> _Judged:
    try:
        record = json.loads(result)
        outcome, reason = record["outcome"], str(record["reason"])
        held = [int(count) for count in record["held"]]
        known = record["nonce"] == nonce and outcome in ("pass", "fail", "harness")
    except (ValueError, KeyError, TypeError):
        known = False
    if not known or status != 0:
        without = f"the judge ended without a verdict, exit status {status}"
        if _has_begun(result):
            return _Judged(
                Trial("fail", f"{without}, of the program's answers"), [], is_verdict=False
            )
        return _Judged(Trial("harness", without), [], is_verdict=False)
    return _Judged(Trial(outcome, reason), held)


def _has_begun(result: bytes) -> bool:
    """Whether the judge let the program begin."""
    return result.startswith(b"\n")


def _signal(status: int | None) -> int:
    """The signal that ended a process in bubblewrap; 0 or less for none."""
    if status is None:
        return 0
    return -status if status < 0 else status - 128


def _pipe(ends: set[int]) -> tuple[int, int]:
    pair = os.pipe()
    ends.update(pair)
    return pair


def _close(ends: set[int]) -> None:
    while ends:
        os.close(ends.pop())


def _file(stack: ExitStack, content: bytes) -> int:
    """An open unnamed file that holds `content`."""
    file = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
    file.write(content)
    file.seek(0)
    return file.fileno()


def _read_all(number: int, deadline_s: float) -> tuple[bytes, bool]:
    """Read until the other end closes or writes too much (True), or until the deadline (False)."""
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
    """Kill a sandbox: bubblewrap's first process ends with it, and its namespace with that, so nothing is
    left."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
