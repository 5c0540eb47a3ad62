"""A generated program changes no mode, owner, time, attribute or lock of what it can see of the host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.evaluate import sandbox as module
from engine.evaluate.sandbox import Sandbox
from tests.support.hostile_programs import HOSTILES, not_contained
from tests.support.lacks import open_sandbox_here, skip_for

OUTSIDE = (
    "mode of a device",
    "mode by a descriptor",
    "mode by a new call",
    "times of a device",
    "owner of a device",
    "attribute of a device",
    "lock of the system",
    "lock of a device",
    "lease of a file",
    "log of the kernel",
)
"""They would change what the host has, or learn what it says."""


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return open_sandbox_here(cpu_s=2, clock_s=20)


def test_attacks_on_what_is_outside_are_refused(sandbox: Sandbox) -> None:
    some = [one for one in HOSTILES if one.name in OUTSIDE]
    assert len(some) == len(OUTSIDE)
    assert not_contained(sandbox, some) == []


METADATA = """
import ctypes, fcntl, os, platform
from pathlib import Path

PLACES = ["/dev/zero", "/dev/urandom", "/dev/null", "/usr", os.__file__]
CALLS = {
    "x86_64": "90 91 268 452 92 93 94 260 132 235 261 280 188 189 190 197 198 199 463 466 469 73",
    "aarch64": "52 53 452 55 54 88 5 6 7 14 15 16 463 466 469 32",
}

def done():
    succeeded = []
    def attempt(name, call, *arguments, **more):
        try:
            call(*arguments, **more)
        except OSError:
            return
        succeeded.append(name)
    for place in PLACES:
        mode = os.stat(place).st_mode & 0o7777
        opened = os.open(place, os.O_RDONLY)
        for target in (place, opened):
            attempt(f"chmod {target}", os.chmod, target, mode)
            attempt(f"chown {target}", os.chown, target, -1, -1)
            attempt(f"utime {target}", os.utime, target)
            attempt(f"set {target}", os.setxattr, target, "user.x", b"")
            attempt(f"remove {target}", os.removexattr, target, "user.x")
        attempt(f"lchown {place}", os.lchown, place, -1, -1)
        attempt(f"utime of link {place}", os.utime, place, follow_symlinks=False)
        attempt(f"flock {place}", fcntl.flock, opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        attempt(f"read lock {place}", fcntl.lockf, opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        attempt(f"lease {place}", fcntl.fcntl, opened, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        attempt(f"no lease {place}", fcntl.fcntl, opened, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        attempt(f"notify {place}", fcntl.fcntl, opened, fcntl.F_NOTIFY, 0)
        attempt(f"open lock {place}", fcntl.fcntl, opened, 37, bytes(32))
        os.close(opened)
    libc = ctypes.CDLL(None, use_errno=True)
    for number in map(int, CALLS[platform.machine()].split()):
        # Bad pointers and descriptors: a call that gets as far as to look at them says so.
        libc.syscall(number, -1, None, None, None, None)
        if ctypes.get_errno() not in (1, 38):
            succeeded.append(f"call {number}: {os.strerror(ctypes.get_errno())}")
    assert fcntl.fcntl(2, fcntl.F_GETFD) == 0 and fcntl.fcntl(2, fcntl.F_GETFL) >= 0
    os.close(fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, 9))
    os.close(os.dup(2))
    os.set_blocking(2, True)
    return succeeded
"""
"""Tries every call that changes what a file outside is called by others, and lists those that were not refused."""


def test_no_metadata_of_what_is_outside_changes(sandbox: Sandbox) -> None:
    places = [Path("/dev", name) for name in ("zero", "urandom", "null")] + [Path("/usr")]

    def seen() -> list[tuple[int, ...]]:
        found = [one.stat() for one in places]
        return [(s.st_mode, s.st_uid, s.st_gid, s.st_mtime_ns, s.st_ctime_ns) for s in found]

    before = seen()
    trial = sandbox.try_program(METADATA, "assert done() == []")
    assert trial.outcome == "pass", trial.reason
    assert seen() == before


AS_NOBODY = """
import sys
from engine.errors import NoAnswer
from engine.evaluate.sandbox import open_sandbox
from tests.support.hostile_programs import HOSTILES, not_contained
try:
    sandbox = open_sandbox()
except NoAnswer as error:
    sys.exit(f"no sandbox: {error.message}")
trial = sandbox.try_program(sys.stdin.read(), "assert done() == []")
print(trial.outcome, trial.reason)
some = [one for one in HOSTILES if one.name in sys.argv[1:]]
print(*not_contained(sandbox, some), sep="\\n")
"""


def test_an_ordinary_user_changes_no_metadata_outside(sandbox: Sandbox) -> None:
    """The owner of /dev/zero is root, but its times are set by whoever may write to it."""
    if os.geteuid() != 0:
        skip_for("root", "the tests run as an ordinary user already")
    root = Path(module.__file__).parents[2]
    why = ""
    # The Python of the tests may lie where only root can go.
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            ran = subprocess.run(
                [python, "-c", AS_NOBODY, *OUTSIDE],
                input=METADATA,
                capture_output=True,
                text=True,
                check=False,
                cwd="/",
                user=65534,
                group=65534,
                extra_groups=[],
                env={"PATH": os.environ["PATH"], "PYTHONPATH": str(root)},
            )
        except OSError as error:
            why = str(error)
            continue
        if ran.returncode == 0:
            assert ran.stdout == "pass \n\n"
            return
        why = ran.stderr.strip().splitlines()[-1]
    skip_for("bubblewrap", f"for nobody: {why}")
