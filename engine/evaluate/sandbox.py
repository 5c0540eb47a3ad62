"""Where generated programs run: bubblewrap, a filter of system calls, limits, and a clock outside.

A trial is two sandboxes and two pipes between them:

    judge     runs the problem's tests           knows the nonce, never runs the program
      | calls with plain data   ^ answers
    program   runs what was generated            knows nothing worth taking

Each has namespaces of its own (no network, no other process to be seen), a root that is read-only and
holds /usr and this Python, 16 MiB of /tmp, no /proc, no capability, no environment, one process
(`engine.evaluate.seccomp`), and limits of memory, CPU time, file size and open files. Both are killed with
all that is in them when the judge has spoken, when the clock runs out, and when this process dies; a
program begins only after the judge has found this process alive, because a kernel does not tell a child of
a parent that died before it asked to be told.

The verdict is made here: `pass` needs the judge's exit status 0 and the nonce that only it was given. A
judge that dies without a word, or a sandbox that does not start, is `harness`: nothing is said about the
program. CPU time ends a program that computes for ever, so that a busy machine changes no verdict; the
clock is for one that waits.

`open_sandbox` tries it first, and raises `NoAnswer` with the reason where it cannot: nothing generated is
ever run outside. Covered: Linux on x86-64 and AArch64. Not covered: cgroups, which root is needed for.
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
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, NamedTuple

from engine.errors import NoAnswer
from engine.evaluate.seccomp import seccomp_filter
from engine.evaluate.walls import inner_python, limits_of, walls

Outcome = Literal["pass", "fail", "harness"]

CPU_S = 10
CLOCK_S = 60.0
_MOST_RESULT_BYTES = 1 << 16
_INSTALL = "install bubblewrap (apt install bubblewrap, dnf install bubblewrap)"
_APPARMOR = (
    "user namespaces may be switched off (Ubuntu 24.04: an AppArmor profile for /usr/bin/bwrap with "
    "`userns,` in it, or sysctl kernel.apparmor_restrict_unprivileged_userns=0)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exam:
    """What a program is tried with."""

    setup: str
    """The problem's own code, run before the tests in the judge; it may use what the program defines."""
    tests: str
    entries: tuple[str, ...] = ()
    """Functions of the program that `setup` or Python defines as well; names that nothing defines are
    the program's by themselves."""
    classes: tuple[str, ...] = ()
    """Classes of the program: the tests hold references to what they make, and never the objects."""


class Trial(NamedTuple):
    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """A sandbox that was tried. Made by `open_sandbox`."""

    bwrap: str
    version: str
    cpu_s: int = CPU_S
    clock_s: float = CLOCK_S

    def try_program(self, program: str, tests: Exam) -> Trial:
        """Runs `program` against `tests`."""
        limits = limits_of(self.cpu_s)
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
            wanted = {
                "nonce": nonce,
                "limits": limits,
                "setup": tests.setup,
                "tests": tests.tests,
                "entries": tests.entries,
                "classes": tests.classes,
            }
            task = _file(stack, json.dumps(wanted).encode())
            judge = self._start(stack, "judge", answers_out, calls_in, (task, result_in))
            task = _file(stack, json.dumps({"limits": limits, "program": program}).encode())
            running = self._start(stack, "program", calls_out, answers_in, (task,))
            # What is held here would keep the pipes open after their ends are gone.
            _close(ends)
            said = _read_all(result_out, deadline_s)
            if said is None:
                return Trial("fail", f"not finished after {self.clock_s:g} s")
            status = _status(judge, deadline_s)
            trial = _verdict(said, status, nonce)
            ended = _status(running, time.monotonic() + 2.0)
        if trial.outcome == "fail" and "ended" in trial.reason and ended is not None:
            return Trial("fail", f"{trial.reason}: {self._how(ended)}")
        return trial

    def _how(self, status: int) -> str:
        """What an exit status of bubblewrap says about the program."""
        number = -status if status < 0 else status - 128
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
        assert rules is not None  # open_sandbox refuses a machine without
        number = _file(stack, rules)
        start = (
            f"import sys; sys.path.insert(0, '/guest'); "
            f"from engine.evaluate.guest_{guest} import main; main()"
        )
        command = [
            self.bwrap,
            *walls(),
            "--seccomp",
            str(number),
            inner_python(),
            *("-I", "-S", "-B", "-c", start),
            *(str(one) for one in files),
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


def open_sandbox(*, cpu_s: int = CPU_S, clock_s: float = CLOCK_S) -> Sandbox:
    """The sandbox of this machine, tried with one program. Raises `NoAnswer` where there is none."""
    if sys.platform != "linux" or seccomp_filter() is None:
        found = f"{sys.platform} on {platform.machine()}"
        raise _refused("Linux on x86-64 or AArch64", found, None)
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise _refused("bubblewrap", "no bwrap on the path", _INSTALL)
    said = subprocess.run([bwrap, "--version"], capture_output=True, text=True, check=False)
    try:
        plain = subprocess.run(
            [bwrap, *walls(), inner_python(), "-I", "-S", "-c", "print(6 * 7)"],
            capture_output=True,
            text=True,
            check=False,
            timeout=clock_s,
        )
    except subprocess.TimeoutExpired:
        found = f"nothing said for {clock_s:g} s"
        raise _refused("a sandbox that starts", found, None) from None
    if plain.stdout.strip() != "42":
        found = plain.stderr.strip()[:500] or f"exit status {plain.returncode}"
        raise _refused("a sandbox that starts", found, _APPARMOR)
    sandbox = Sandbox(bwrap=bwrap, version=said.stdout.strip(), cpu_s=cpu_s, clock_s=clock_s)
    trial = sandbox.try_program("def f():\n    return 42", Exam(setup="", tests="assert f() == 42"))
    if trial.outcome != "pass":
        raise _refused("a right program to pass", f"{trial.outcome}: {trial.reason}", None)
    return sandbox


def _refused(expected: str, found: str, hint: str | None) -> NoAnswer:
    return NoAnswer(
        f"sandbox: generated programs run in no other place — expected {expected}, found {found}",
        hint=hint,
    )


# contract: eval-no-fake-pass-v1
def _verdict(said: bytes, status: int | None, nonce: str) -> Trial:
    try:
        record = json.loads(said)
        outcome, reason = record["outcome"], str(record["reason"])
        known = record["nonce"] == nonce and outcome in ("pass", "fail", "harness")
    except (ValueError, KeyError, TypeError):
        known = False
    if not known or status != 0:
        return Trial("harness", f"the judge ended without a verdict, exit status {status}")
    return Trial(outcome, reason)


def _pipe(ends: set[int]) -> tuple[int, int]:
    pair = os.pipe()
    ends.update(pair)
    return pair


def _close(ends: set[int]) -> None:
    while ends:
        os.close(ends.pop())


def _file(stack: ExitStack, content: bytes) -> int:
    """An open file with no name that holds `content`."""
    file = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
    file.write(content)
    file.seek(0)
    return file.fileno()


def _read_all(number: int, deadline_s: float) -> bytes | None:
    """What is written until the other end closes; None when the time is over first."""
    read = b""
    while (left_s := deadline_s - time.monotonic()) > 0:
        if not select.select([number], [], [], left_s)[0]:
            return None
        piece = os.read(number, _MOST_RESULT_BYTES)
        if not piece or len(read) > _MOST_RESULT_BYTES:
            return read
        read += piece
    return None


def _status(process: subprocess.Popen[bytes], deadline_s: float) -> int | None:
    try:
        return process.wait(max(0.0, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """bubblewrap's first process ends with it, and its namespace with that: nothing is left."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
