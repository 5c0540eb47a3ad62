"""The sandbox: right passes, wrong fails with the reason, harm stays inside, and no sandbox is no verdict."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.errors import NoAnswer
from engine.evaluate import sandbox as module
from engine.evaluate.guest_judge import judge
from engine.evaluate.guest_wire import NotPlain, pack, unpack
from engine.evaluate.hostile import HOSTILES, WANTED, Host, Hostile, not_contained
from engine.evaluate.sandbox import Exam, Sandbox, _verdict, open_sandbox
from engine.evaluate.seccomp import seccomp_filter

REPRESENTATIVE = (
    "fork bomb",
    "socket",
    "write a file outside",
    "huge allocation",
    "os._exit(0)",
    "assert replaced",
    "equal to everything",
    "a pass in place of an answer",
    "look for the nonce",
    "endless answer",
)


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    try:
        return open_sandbox(cpu_s=2, clock_s=20)
    except NoAnswer as error:
        pytest.skip(f"no sandbox here: {error.message}")


def exam(text: str, setup: str = "") -> Exam:
    return Exam(setup=setup, tests=text)


def test_a_right_program_passes_and_a_wrong_one_says_which_assertion(sandbox: Sandbox) -> None:
    text = "assert twice(2) == 4\nassert twice(x=-3) == -6"
    assert sandbox.try_program("def twice(x): return 2 * x", exam(text)).outcome == "pass"
    wrong = sandbox.try_program("def twice(x): return x * x", exam(text))
    assert wrong.outcome == "fail"
    assert wrong.reason == "an assertion does not hold: assert twice(x=-3) == -6"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("def f(", "SyntaxError"),
        ("", "NameError: name 'f' is not defined"),
        ("def f(): return {}['a']", "the program raises KeyError"),
        ("import sys\nsys.exit(0)", "ended while it was defined: exit status 0"),
        ("def f(): f()", "RecursionError"),
        ("def f(): return object()", "no plain data"),
        ("def f():\n    while True: pass", "of CPU time"),
    ],
)
def test_a_failure_says_its_cause(sandbox: Sandbox, program: str, reason: str) -> None:
    trial = replace(sandbox, cpu_s=1).try_program(program, exam("assert f() == 1"))
    assert trial.outcome == "fail"
    assert reason in trial.reason


def test_a_program_that_waits_is_ended_by_the_clock_and_leaves_nothing(sandbox: Sandbox) -> None:
    start_s = time.monotonic()
    trial = replace(sandbox, clock_s=1.0).try_program(
        "import time\ndef f(): time.sleep(1000)", exam("assert f() is None")
    )
    assert trial == ("fail", "not finished after 1 s")
    assert time.monotonic() - start_s < 15
    listed = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True, check=True)
    mine = [line for line in listed.stdout.splitlines() if line.split()[0] == str(os.getpid())]
    assert not [line for line in mine if "bwrap" in line]


@pytest.mark.parametrize(
    ("setup", "text", "reason"),
    [
        ("raise ValueError(3)", "assert f() == 1", "the problem's own code raises ValueError"),
        ("", "assert f(", "the problem's own code raises SyntaxError"),
        ("", "assert 1 == 1", "the tests call nothing"),
        ("", "assert f(lambda: 1) == 1", "no plain data"),
    ],
)
def test_what_the_problem_does_wrong_says_nothing_about_the_program(
    sandbox: Sandbox, setup: str, text: str, reason: str
) -> None:
    trial = sandbox.try_program("def f(*args): return 1", exam(text, setup))
    assert trial.outcome == "harness"
    assert reason in trial.reason


def test_tests_see_the_programs_exceptions(sandbox: Sandbox) -> None:
    text = "try:\n    f()\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'no'"
    assert sandbox.try_program("def f(): raise ValueError('no')", exam(text)).outcome == "pass"


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"", 0),
        (b"pass", 0),
        (json.dumps({"nonce": "guess", "outcome": "pass", "reason": ""}).encode(), 0),
        (json.dumps({"outcome": "pass", "reason": ""}).encode(), 0),
        (json.dumps({"nonce": "right", "outcome": "pass", "reason": ""}).encode(), 1),
        (json.dumps({"nonce": "right", "outcome": "pass", "reason": ""}).encode(), None),
        (json.dumps({"nonce": "right", "outcome": "great", "reason": ""}).encode(), 0),
    ],
)
def test_a_pass_needs_the_nonce_and_exit_status_0(said: bytes, status: int | None) -> None:
    assert _verdict(said, status, "right").outcome == "harness"
    good = json.dumps({"nonce": "right", "outcome": "pass", "reason": ""}).encode()
    assert _verdict(good, 0, "right").outcome == "pass"


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
    assert not_contained(sandbox, [network]) == ["socket pair: pass, 1 calls"]


def test_an_attack_that_fails_for_another_reason_does_not_count(sandbox: Sandbox) -> None:
    typo = Hostile(name="typo", program="def solve(): retrun", contained="PermissionError")
    assert len(not_contained(sandbox, [typo])) == 1
    assert WANTED.tests == "assert solve() == 42"


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


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.binary()
    | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


@example(-0.0)
@given(PLAIN)
def test_plain_data_crosses_as_it_is(value: object) -> None:
    crossed = unpack(json.loads(json.dumps(pack(value))))
    assert crossed == value
    assert repr(crossed) == repr(value)


def test_what_is_no_plain_data_does_not_cross_and_subclasses_lose_their_methods() -> None:
    class Same(int):
        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 0

    crossed = unpack(pack({"a": [Same(3)]}))
    assert crossed == {"a": [3]} and type(crossed["a"][0]) is int
    for value in (object(), len, range(3), (one for one in "ab")):
        with pytest.raises(NotPlain):
            pack(value)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_is_whole_instructions_and_refuses_clone_without_a_thread(machine: str) -> None:
    rules = seccomp_filter(machine)
    assert rules is not None and len(rules) % 8 == 0
    assert seccomp_filter("riscv64") is None


def test_a_program_does_not_begin_where_nobody_waits_for_it() -> None:
    def gone() -> None:
        raise BrokenPipeError

    calls = io.BytesIO()
    task = {"setup": "", "tests": "assert f() == 1", "entries": []}
    answers = io.BytesIO(b'{"hello": true}\n{"ready": true}\n{"value": 1}\n')
    assert judge(task, calls, answers, gone)[0] == "harness"
    assert calls.getvalue() == b""
    answers.seek(0)
    assert judge(task, calls, answers, lambda: None) == ("pass", "1 calls")


def test_a_killed_evaluation_leaves_no_program(sandbox: Sandbox, tmp_path: Path) -> None:
    script = (
        "from engine.evaluate.sandbox import *\n"
        "s = open_sandbox()\nprint('ready', flush=True)\n"
        "s.try_program('import time\\ntime.sleep(1000)', Exam(setup='', tests='assert f()'))\n"
    )
    running = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None and running.stdout.readline() == "ready\n"
    deadline_s = time.monotonic() + 20
    children: list[str] = []
    while len(children) < 2 and time.monotonic() < deadline_s:
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    running.send_signal(signal.SIGKILL)
    running.wait()
    running.stdout.close()
    assert len(children) == 2
    while any(Path(f"/proc/{one}").exists() for one in children):
        assert time.monotonic() < deadline_s, "a sandbox outlived what started it"
