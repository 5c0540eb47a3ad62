"""The sandbox: right passes, wrong fails with the reason, harm stays inside, and no sandbox is no verdict."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import NoAnswer
from engine.evaluate import sandbox as module
from engine.evaluate.sandbox import Sandbox, _verdict, open_sandbox
from engine.evaluate.seccomp import seccomp_filter
from tests.support.hostile_programs import HOSTILES, WANTED, Host, Hostile, not_contained
from tests.support.lacks import open_sandbox_here
from tests.support.perf import within

REPRESENTATIVE = (
    "fork bomb",
    "socket",
    "write a file outside",
    "huge allocation",
    "os._exit(0)",
    "a pass in place of an answer",
)


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return open_sandbox_here(cpu_s=2, clock_s=20)


def test_a_right_program_passes_and_a_wrong_one_says_which_assertion(sandbox: Sandbox) -> None:
    text = "assert twice(2) == 4\nassert twice(x=-3) == -6"
    assert sandbox.try_program("def twice(x): return 2 * x", text).outcome == "pass"
    wrong = sandbox.try_program("def twice(x): return x * x", text)
    assert wrong.outcome == "fail"
    assert wrong.reason == "an assertion does not hold: assert twice(x=-3) == -6"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("def f(", "SyntaxError"),
        ("", "NameError: name 'f' is not defined"),
        ("def f(): return {}['a']", "KeyError: 'a', in assert f() == 1"),
        ("import sys\nsys.exit(0)", "SystemExit: 0"),
        ("import os\nos._exit(0)", "the program ended before its tests did: exit status 0"),
        ("def f(): f()", "RecursionError"),
        ("def f():\n    while True: pass", "limit of CPU time"),
    ],
)
def test_a_failure_says_its_cause(sandbox: Sandbox, program: str, reason: str) -> None:
    trial = replace(sandbox, cpu_s=1).try_program(program, "assert f() == 1")
    assert trial.outcome == "fail"
    assert reason in trial.reason


@pytest.mark.perf
def test_a_program_that_waits_is_ended_by_the_clock_and_leaves_nothing(sandbox: Sandbox) -> None:
    start_s = time.monotonic()
    trial = replace(sandbox, clock_s=1.0).try_program(
        "import time\ndef f(): time.sleep(1000)", "assert f() is None"
    )
    assert trial == ("fail", "not finished after 1 s")
    within(time.monotonic() - start_s, 15)
    listed = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True, check=True)
    mine = [line for line in listed.stdout.splitlines() if line.split()[0] == str(os.getpid())]
    assert not [line for line in mine if "bwrap" in line]


def test_tests_that_are_no_python_say_nothing_about_the_program(sandbox: Sandbox) -> None:
    trial = sandbox.try_program("def f(): return 1", "assert f(")
    assert trial.outcome == "harness"
    assert "the tests do not compile: SyntaxError" in trial.reason


def test_tests_run_in_the_programs_module(sandbox: Sandbox) -> None:
    program = "import math\nclass Node:\n    size = 2\ndef f(node): return node.size\n"
    tests = "assert f(Node()) == math.sqrt(4)\nassert isinstance(Node(), Node)"
    assert sandbox.try_program(program, tests).outcome == "pass"


PASS = {"outcome": "pass", "reason": ""}


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"", 0),
        (b"pass", 0),
        (json.dumps(PASS | {"nonce": "guess"}).encode(), 0),
        (json.dumps(PASS).encode(), 0),
        (json.dumps(PASS | {"nonce": "right"}).encode(), 1),
        (json.dumps(PASS | {"nonce": "right"}).encode(), None),
        (json.dumps(PASS | {"nonce": "right", "outcome": "great"}).encode(), 0),
    ],
)
def test_a_pass_needs_the_nonce_and_exit_status_0(said: bytes, status: int | None) -> None:
    assert _verdict(said, status, "right").outcome == "harness"
    # Once the program runs, keeping the tests from their end is no way to be spared a verdict.
    assert _verdict(b"\n" + said, status, "right").outcome == "fail"
    good = json.dumps(PASS | {"nonce": "right"}).encode()
    assert _verdict(b"\n" + good, 0, "right").outcome == "pass"


def test_hostile_programs_are_contained(sandbox: Sandbox) -> None:
    some = [one for one in HOSTILES if one.name in REPRESENTATIVE]
    assert len(some) == len(REPRESENTATIVE)
    assert not_contained(sandbox, some) == []


@pytest.mark.soak
def test_every_hostile_program_is_contained(sandbox: Sandbox) -> None:
    assert len(HOSTILES) >= 20
    assert not_contained(sandbox) == []


ATTEMPTS = (
    "another program",
    "socket",
    "write a file outside",
    "read a file outside",
    "remove a file outside",
    "socket pair",
    "read another process' memory",
    "read the environment",
)


@pytest.mark.parametrize("name", ATTEMPTS)
def test_the_attacks_work_where_there_is_no_sandbox(name: str, tmp_path: Path) -> None:
    """The control of the control: what is said to be contained would otherwise have happened."""
    import socket

    (hostile,) = (one for one in HOSTILES if one.name == name)
    target = tmp_path / "file"
    target.write_text("content")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        host = Host(file=target, port=listener.getsockname()[1])
        program = host.aim(hostile).replace(str(os.getpid()), "self")
        ran = subprocess.run(
            [sys.executable, "-c", f"{program}\nsys.exit(solve())"],
            capture_output=True,
            text=True,
            check=False,
        )
    assert ran.returncode == 42, ran.stderr


def test_a_wall_that_is_missing_is_found(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    (network,) = (one for one in HOSTILES if one.name == "socket pair")
    empty = b"\x06\x00\x00\x00\x00\x00\xff\x7f"  # one instruction: allow
    monkeypatch.setattr(module, "seccomp_filter", lambda: empty)
    assert not_contained(sandbox, [network]) == ["socket pair: pass, "]


def test_an_attack_that_fails_for_another_reason_does_not_count(sandbox: Sandbox) -> None:
    typo = Hostile(name="typo", program="def solve(): retrun", contained="PermissionError")
    assert len(not_contained(sandbox, [typo])) == 1
    assert WANTED == "assert solve() == 42"


def test_without_bubblewrap_nothing_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoAnswer, match="no bwrap on the path") as caught:
        open_sandbox()
    assert caught.value.exit_code == 2
    assert "bubblewrap" in (caught.value.hint or "")


def test_a_bubblewrap_that_does_not_work_is_refused_with_its_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoAnswer, match="No permissions to create new namespace") as caught:
        open_sandbox()
    assert "AppArmor" in (caught.value.hint or "")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_is_whole_instructions(machine: str) -> None:
    rules = seccomp_filter(machine)
    assert rules is not None and len(rules) % 8 == 0
    assert seccomp_filter("riscv64") is None


def test_a_killed_evaluation_leaves_no_program(sandbox: Sandbox, tmp_path: Path) -> None:
    script = (
        "from engine.evaluate.sandbox import *\n"
        "s = open_sandbox()\nprint('ready', flush=True)\n"
        "s.try_program('import time\\ntime.sleep(1000)', 'assert f()')\n"
    )
    running = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None and running.stdout.readline() == "ready\n"
    deadline_s = time.monotonic() + 240
    children: list[str] = []
    while not children and time.monotonic() < deadline_s:
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    running.send_signal(signal.SIGKILL)
    running.wait()
    running.stdout.close()
    assert len(children) == 1
    while any(Path(f"/proc/{one}").exists() for one in children):
        assert time.monotonic() < deadline_s, "a sandbox outlived what started it"


HOLDS = """
import ctypes, fcntl, os
def held():
    libc = ctypes.CDLL(None, use_errno=True)
    total = 0
    for _ in range(64):
        try:
            out = os.pipe()[1]
        except OSError:
            break
        try:
            fcntl.fcntl(out, 1031, 1 << 20)
        except OSError:
            pass
        os.set_blocking(out, False)
        try:
            while True:
                total += os.write(out, bytes(1 << 16))
        except BlockingIOError:
            pass
    for make in (
        lambda: libc.shmget(0, 1 << 24, 0o1600),
        lambda: libc.msgget(0, 0o1600),
        lambda: libc.semget(0, 1000, 0o1600),
        lambda: libc.memfd_create(b'x', 0),
        lambda: libc.syscall(447, 0),
        lambda: libc.inotify_init1(0),
        lambda: libc.mmap(0, 1 << 30, 3, 0x21, -1, 0),
    ):
        if make() != -1:
            total += 1 << 24
    return total
def writable():
    found = []
    for folder, folders, _ in os.walk('/'):
        if folder.count('/') > 2:
            folders.clear()
        try:
            os.close(os.open(folder + '/x', os.O_CREAT | os.O_WRONLY))
            found.append(folder)
        except OSError:
            pass
        try:
            os.mkdir(folder + '/y')
            found.append(folder)
        except OSError:
            pass
    return found
"""


def test_a_program_holds_no_memory_but_what_its_limit_counts_and_can_write_nowhere(
    sandbox: Sandbox,
) -> None:
    """Pipes are the kernel's own memory: at most a mebibyte for each open file."""
    trial = sandbox.try_program(HOLDS, "assert held() <= 64 << 20\nassert writable() == []")
    assert trial.outcome == "pass", trial.reason


def test_a_program_gets_no_more_than_its_memory(sandbox: Sandbox) -> None:
    program = (
        "import mmap\ndef grown():\n    kept = []\n    try:\n        while len(kept) < 64:\n"
        "            kept.append(mmap.mmap(-1, 1 << 26))\n    except OSError:\n        pass\n"
        "    return len(kept)\n"
    )
    trial = sandbox.try_program(program, "assert 8 <= grown() < 16")
    assert trial.outcome == "pass", trial.reason
