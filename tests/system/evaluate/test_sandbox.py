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
from engine.evaluate.guest_judge import Judged, judge
from engine.evaluate.guest_wire import NotPlain, pack, unpack
from engine.evaluate.hostile import HOSTILES, WANTED, Host, Hostile, not_contained
from engine.evaluate.sandbox import Exam, Sandbox, _verdict, open_sandbox
from engine.evaluate.seccomp import seccomp_filter
from tests.support.lacks import open_sandbox_here
from tests.support.perf import within

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
    return open_sandbox_here(cpu_s=2, clock_s=20)


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


@pytest.mark.perf
def test_a_program_that_waits_is_ended_by_the_clock_and_leaves_nothing(sandbox: Sandbox) -> None:
    start_s = time.monotonic()
    trial = replace(sandbox, clock_s=1.0).try_program(
        "import time\ndef f(): time.sleep(1000)", exam("assert f() is None")
    )
    assert trial == ("fail", "not finished after 1 s")
    within(time.monotonic() - start_s, 15)
    listed = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True, check=True)
    mine = [line for line in listed.stdout.splitlines() if line.split()[0] == str(os.getpid())]
    assert not [line for line in mine if "bwrap" in line]


@pytest.mark.parametrize(
    ("setup", "text", "reason"),
    [
        ("raise ValueError(3)", "assert f() == 1", "the problem's own code raises ValueError"),
        ("a = Tree(1", "assert f() == 1", "the problem's own code raises SyntaxError"),
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


NODE = """
class Node:
    def __init__(self, data):
        self.data, self.left, self.right = data, None, None
    def grow(self, data):
        self.left = Node(data)
        return self.left
def height(root):
    return 0 if root is None else 1 + max(height(root.left), height(root.right))
def leftmost(root):
    return root if root.left is None else leftmost(root.left)
"""
TREE = Exam(
    setup="root = Node(1)\nroot.left = Node(2)\nroot.left.right = Node(3)\n",
    tests="assert height(root) == 3\nassert height(root.left) == 2\nassert root.left.data == 2\n"
    "assert leftmost(root) is root.left\nassert root.right is None\nassert [root] == [root]\n"
    "assert root.left.grow(9).data == 9\nassert leftmost(root) is root.left.left\n",
    classes=("Node",),
)


@pytest.mark.parametrize("program", [NODE, NODE.replace("class Node", "class Node(dict)")])
def test_tests_use_objects_of_the_programs_classes(program: str, sandbox: Sandbox) -> None:
    assert sandbox.try_program(program, TREE).outcome == "pass"


def test_a_class_of_the_tests_may_be_what_python_has(sandbox: Sandbox) -> None:
    pairs = Exam(
        setup="", tests="assert last([Pair(1, 2), Pair(3, 4)]) == (3, 4)", classes=("Pair",)
    )
    program = "def Pair(a, b): return (a, b)\ndef last(pairs): return pairs[-1]"
    assert sandbox.try_program(program, pairs).outcome == "pass"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (NODE.replace("1 + max", "max"), "an assertion does not hold: assert height(root) == 3"),
        (NODE.replace("class Node", "class Knot"), "NameError: name 'Node' is not defined"),
        (
            NODE.replace("self, data):\n        self.d", "self):\n        data = self.d"),
            "TypeError",
        ),
        ("def Node(data): return [data]\n", "AttributeError"),
        ("", "NameError: name 'Node' is not defined"),
        # What a program says of itself decides nothing.
        (
            "class Node:\n    def __eq__(self, other): return True\n    def __init__(self, data): pass\n"
            "def height(root): return Node(0)\n",
            "an assertion does not hold: assert height(root) == 3",
        ),
        (
            NODE.replace("root if root.left is None else leftmost(root.left)", "root"),
            "an assertion does not hold: assert leftmost(root) is root.left",
        ),
        (NODE.replace("return self.left", "return len"), "no plain data"),
    ],
)
def test_a_program_that_has_a_class_and_does_not_solve_the_problem_fails(
    program: str, reason: str, sandbox: Sandbox
) -> None:
    trial = sandbox.try_program(program, TREE)
    assert trial.outcome == "fail"
    assert reason in trial.reason


def test_an_object_where_the_tests_name_no_class_and_a_method_as_data_are_the_programs_doing() -> (
    None
):
    def judged(tests: str, classes: list[str], *answers: object) -> Judged:
        said = [{"hello": True}, {"ready": True}, *answers]
        task = {"setup": "", "tests": tests, "entries": [], "classes": classes, "held": None}
        lines = io.BytesIO("".join(json.dumps(one) + "\n" for one in said).encode())
        return judge(task, io.BytesIO(), lines, lambda: None)

    made = {"value": {"object": 0}}
    assert judged("assert f()", [], made) == ("fail", "the program answers nonsense", [0])
    assert judged("assert f()", ["C"], {"value": {"object": []}})[0] == "fail"
    assert judged("assert f() == 1", ["C"], made)[0] == "fail"
    outcome, reason, _ = judged("assert f(C().x) == 1", ["C"], made, {"method": True}, {"value": 1})
    assert outcome == "fail" and "a method x where the tests want data" in reason


def test_an_answer_that_is_no_plain_data_is_true_or_false_and_nothing_else(
    sandbox: Sandbox,
) -> None:
    program = (
        "import re\ndef f(text): return re.search('a', text)\nclass Same:\n"
        "    def __eq__(self, other): return True\n    def __bool__(self): return False\n"
        "    def __hash__(self): return 1\ndef g(): return Same()\n"
    )
    right = "assert f('a')\nassert not f('b')\nassert f('a') is not None\nassert not g()"
    assert sandbox.try_program(program, exam(right)).outcome == "pass"
    wrong = sandbox.try_program(program, exam("assert g()"))
    assert wrong == ("fail", "an assertion does not hold: assert g()")
    for text in ("g() == 1", "g() in [1]", "{g(): 1}", "g() != 1", "g().x", "f(g())"):
        trial = sandbox.try_program(program, exam(f"assert {text}"))
        assert trial == ("fail", "g gives a Same, which is no plain data"), text
    for text in ("assert str(g()) == '1'", "raise ValueError(g())"):
        assert sandbox.try_program(program, exam(text)).outcome == "fail"


def test_a_type_is_given_as_it_is(sandbox: Sandbox) -> None:
    text = "assert keep((1, 'a', True), int) == [1, True]\nassert keep((1, 'a'), str) == ['a']"
    program = "def keep(values, kind): return [one for one in values if isinstance(one, kind)]"
    assert sandbox.try_program(program, exam(text)).outcome == "pass"
    trial = sandbox.try_program(program.replace("isinstance", "not isinstance"), exam(text))
    assert trial.outcome == "fail"


def test_tests_see_the_programs_exceptions(sandbox: Sandbox) -> None:
    text = "try:\n    f()\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'no'"
    assert sandbox.try_program("def f(): raise ValueError('no')", exam(text)).outcome == "pass"


PASS = {"outcome": "pass", "reason": "", "held": [1]}


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
    assert _verdict(said, status, "right").trial.outcome == "harness"
    # Once the program runs, a judge that is kept from its verdict is no way to be spared one.
    assert _verdict(b"\n" + said, status, "right").trial.outcome == "fail"
    good = json.dumps(PASS | {"nonce": "right"}).encode()
    assert _verdict(b"\n" + good, 0, "right").trial.outcome == "pass"


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
    assert not_contained(sandbox, [network]) == ["socket pair: pass, 1 calls, 1 assertions"]


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
    | st.floats(allow_nan=False)
    | st.sampled_from([int, str, bool, list, ValueError, object]),
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
def test_the_filter_is_whole_instructions(machine: str) -> None:
    rules = seccomp_filter(machine)
    assert rules is not None and len(rules) % 8 == 0
    assert seccomp_filter("riscv64") is None


def test_a_program_does_not_begin_where_nobody_waits_for_it() -> None:
    def gone() -> None:
        raise BrokenPipeError

    calls = io.BytesIO()
    task: dict[str, object] = {
        "setup": "",
        "tests": "assert f() == 1",
        "entries": [],
        "classes": [],
        "held": None,
    }
    answers = io.BytesIO(b'{"hello": true}\n{"ready": true}\n{"value": 1}\n')
    assert judge(task, calls, answers, gone)[0] == "harness"
    assert calls.getvalue() == b""
    answers.seek(0)
    assert judge(task, calls, answers, lambda: None) == ("pass", "1 calls, 1 assertions", [1])


def test_a_killed_evaluation_leaves_no_program(sandbox: Sandbox, tmp_path: Path) -> None:
    script = (
        "from engine.evaluate.sandbox import *\n"
        "s = open_sandbox()\nprint('ready', flush=True)\n"
        "s.try_program('import time\\ntime.sleep(1000)', Exam(setup='', tests='assert f()'))\n"
    )
    running = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None and running.stdout.readline() == "ready\n"
    deadline_s = time.monotonic() + 240
    children: list[str] = []
    while len(children) < 2 and time.monotonic() < deadline_s:
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    running.send_signal(signal.SIGKILL)
    running.wait()
    running.stdout.close()
    assert len(children) == 2
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
    trial = sandbox.try_program(HOLDS, exam("assert held() <= 64 << 20\nassert writable() == []"))
    assert trial.outcome == "pass", trial.reason


def test_a_program_gets_no_more_than_its_memory(sandbox: Sandbox) -> None:
    program = (
        "import mmap\ndef grown():\n    kept = []\n    try:\n        while len(kept) < 64:\n"
        "            kept.append(mmap.mmap(-1, 1 << 26))\n    except OSError:\n        pass\n"
        "    return len(kept)\n"
    )
    trial = sandbox.try_program(program, exam("assert 8 <= grown() < 16"))
    assert trial.outcome == "pass", trial.reason
