"""`engine watch --pid PID`: a process that runs already is seen from outside and never touched, and what a stranger
cannot know is said to be unknown."""

from __future__ import annotations

import json
import os
import platform
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.attach.process import exit_code, find_process, ranks_in
from engine.errors import BadInput
from engine.log.events import AnyEvent, ProcessFound, StackDump, TrainerExited
from engine.log.fold import Follower
from engine.log.folder import RunFolder, read_command
from engine.log.read import LogReader
from engine.machine.surroundings import find_command, may_attach
from engine.watch.start_and_stop import stop
from tests.support.lacks import needs
from tests.support.running import engine_here
from tests.support.screens import texts_of

LIMIT_S = 120.0
WATCH = [sys.executable, "-m", "engine", "watch"]
CAN_READ = needs("py-spy", find_command("py-spy").absent is None and may_attach().absent is None)
TELLS_EXITS = tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= (6, 15)
"""Whether the kernel tells the exit status of a reaped process to others than its parent."""

HANGS = """
import signal, sys, threading
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGRTMIN + 3):
    signal.signal(number, lambda number, frame: open(f"got-{number}", "w").close())

def load():
    threading.Event().wait()  # LOADER

def wait_for_ever():
    lock = threading.Lock()
    lock.acquire()
    print("up", flush=True)
    lock.acquire()  # HERE

threading.Thread(target=load, name="loader", daemon=True).start()
wait_for_ever()
"""
READS = "import sys; print('up', flush=True); sys.exit(int(sys.stdin.readline()))"


def line_of(mark: str) -> int:
    return next(n for n, line in enumerate(HANGS.splitlines(), 1) if mark in line)


@contextmanager
def running(folder: Path, *words: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is up, and is ended and reaped by its parent, the test, in the end."""
    process = subprocess.Popen(
        words,
        cwd=folder,
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def hanging(folder: Path, **environment: str) -> Any:
    (folder / "hangs.py").write_text(HANGS)
    return running(folder, sys.executable, "-S", str(folder / "hangs.py"), **environment)


class Watching:
    """`engine watch --pid`, once it has looked at the stacks."""

    def __init__(self, folder: Path, pid: int, *before: str) -> None:
        self.run = RunFolder(folder / "run")
        options = ["--pid", str(pid), "--runs", str(folder), "--name", "run"]
        self.process = subprocess.Popen(
            [*before, *WATCH, *options], stderr=subprocess.PIPE, text=True
        )
        self.wait_for("stack_dump")

    def wait_for(self, kind: str) -> None:
        waiter = (
            "import sys, time, pathlib\nlog, word = pathlib.Path(sys.argv[1]), sys.argv[2]\n"
            "while not (log.exists() and word in log.read_text()): time.sleep(0.02)"
        )
        words = [sys.executable, "-S", "-c", waiter, str(self.run.watch), f'"kind":"{kind}"']
        subprocess.run(words, check=True, timeout=LIMIT_S)

    def end(self) -> str:
        """Wait for its end; returns its summary."""
        _, said = self.process.communicate(timeout=LIMIT_S)
        assert self.process.returncode == 0, said
        return said

    def of(self, kind: type[Any]) -> list[Any]:
        events: list[AnyEvent] = list(LogReader(self.run.watch).poll())
        return [event for event in events if isinstance(event, kind)]


@CAN_READ
def test_a_hang_is_named_by_the_line_of_every_thread_and_a_kill_from_outside_is_not_called_oom(
    tmp_path: Path,
) -> None:
    secret = {"HF_TOKEN": "hf_abcdefghijklmnop1234", "NCCL_DEBUG": "WARN", "SOMETHING": "else"}
    with hanging(tmp_path, **secret) as process:
        watching = Watching(tmp_path, process.pid)
        process.kill()
        process.wait()
        said = watching.end()
    (dump,) = watching.of(StackDump)
    script = tmp_path / "hangs.py"
    assert dump.python_frame == f"{script}:{line_of('HERE')} in wait_for_ever"
    assert dump.others == [f"loader: {script}:{line_of('LOADER')} in load"]
    assert dump.state == "waiting for a lock" and not dump.missing
    (ended,) = watching.of(TrainerExited)
    assert (ended.state, ended.signal) in [("KILLED_EXTERNAL", "SIGKILL"), ("UNKNOWN", None)]
    assert "OOM" not in ended.state and "out of memory" not in said
    assert "observed from outside only: steps unknown" in said
    text = watching.run.effective.read_text()
    assert "NCCL_DEBUG=WARN" in text and "SOMETHING" not in text and "hf_abc" not in text
    command = read_command(watching.run)
    assert command is not None and command.folder == str(tmp_path)
    view = Follower(watching.run).read_all()
    assert view.last_step == 0 and not len(view.steps) and view.process is not None


def test_the_end_of_the_watching_touches_nothing_and_the_run_says_that_nobody_watches(
    tmp_path: Path,
) -> None:
    with hanging(tmp_path) as process:
        watching = Watching(tmp_path, process.pid)
        follower = Follower(watching.run)
        follower.read_all()
        assert follower.state == "running"
        with pytest.raises(BadInput, match="gets no signal"):
            stop(watching.run)
        watching.process.send_signal(signal.SIGINT)
        said = watching.end()
        assert process.poll() is None
    assert not list(tmp_path.glob("got-*")), "the process got a signal"
    assert "still running, unwatched" in said and "engine watch --pid" in said
    follower = Follower(watching.run)
    assert follower.read_all().exit is None and follower.state == "unwatched"
    told = json.loads(engine_here("diagnose", str(watching.run.path), "--json").stdout)
    assert told["alerts"] == []
    seen = texts_of(watching.run.path, (110, 34), "2", "4")
    assert all("UNWATCHED" in words for words in seen)
    assert "does not report its steps" in seen[1] and "its steps are unknown" in seen[2]


@pytest.mark.parametrize("code", [0, 5])
def test_an_exit_code_is_the_processes_own_or_unknown(tmp_path: Path, code: int) -> None:
    with running(tmp_path, sys.executable, "-S", "-c", READS) as process:
        watching = Watching(tmp_path, process.pid)
        assert process.stdin is not None
        process.stdin.write(f"{code}\n")
        process.stdin.flush()
        process.wait()
        said = watching.end()
    (ended,) = watching.of(TrainerExited)
    if not TELLS_EXITS:
        assert (ended.returncode, ended.state) == (None, "UNKNOWN")
        return
    assert ended.returncode == code
    assert ended.state == ("FAILED" if code else "COMPLETED")
    assert f"exit code {code}" in said


def test_the_exit_code_of_a_process_that_was_reaped_is_known_from_linux_6_15_on() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    held = os.pidfd_open(process.pid)
    process.kill()
    process.wait()
    process.stdin.close()  # type: ignore[union-attr]
    assert exit_code(process.pid, held) == (-9 if TELLS_EXITS else None)
    os.close(held)


def test_of_its_environment_what_says_how_it_computes_is_kept_and_no_secret(tmp_path: Path) -> None:
    given = {"LOCAL_RANK": "0", "HF_HOME": "/h", "DS_API_KEY": "abc4", "SOMETHING": "else"}
    with running(tmp_path, sys.executable, "-c", READS, **given) as process:
        kept = [text for text in find_process(process.pid).variables if text.split("=")[0] in given]
    assert kept == ["HF_HOME=/h", "LOCAL_RANK=0"]


def test_what_cannot_be_watched_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.Popen(["true"])
    held = os.pidfd_open(ended.pid)
    select.select([held], [], [])
    os.close(held)
    with pytest.raises(BadInput, match="found one that has ended"):
        find_process(ended.pid)
    ended.wait()
    done = engine_here("watch", "--pid", str(ended.pid), "--runs", str(tmp_path / "runs"))
    assert done.returncode == 65 and "expected a running process, found none" in done.stderr
    assert not (tmp_path / "runs").exists()
    with pytest.raises(BadInput, match="this command itself"):
        find_process(os.getpid())
    go = threading.Event()
    thread = threading.Thread(target=go.wait)
    thread.start()
    with pytest.raises(BadInput, match=f"a thread of process {os.getpid()}"):
        find_process(thread.native_id or 0)
    go.set()
    thread.join()
    if Path("/proc/2/comm").exists() and Path("/proc/2/comm").read_text() == "kthreadd\n":
        with pytest.raises(BadInput, match="is the kernel's"):
            find_process(2)
    with running(tmp_path, sys.executable, "-S", "-c", READS) as process:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(BadInput, match="found one of user"):
            find_process(process.pid)


def test_a_command_beside_pid_is_refused(tmp_path: Path) -> None:
    done = engine_here("watch", "--pid", "1", "--", "true")
    assert (
        done.returncode == 64 and "a command — expected no other option with --pid" in done.stderr
    )


RANKS = """
import os, subprocess, sys
for rank in (1, 0):
    words = [sys.executable, "-S", "-c", sys.argv[1]]
    environment = os.environ | {"RANK": str(rank)}
    one = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    print(one.pid, flush=True) if one.stdout.readline() == "up\\n" else sys.exit(1)
print("all", flush=True)
sys.stdin.readline()
"""
RANK = """
import subprocess, sys
loader = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
print("up", flush=True)
sys.stdin.readline()
"""


def test_ranks_are_named_by_their_environment_and_not_by_what_they_started(tmp_path: Path) -> None:
    words = [sys.executable, "-S", "-c", f"print('up', flush=True)\n{RANKS}", RANK]
    environment = {name: "" for name in ("RANK",)}
    with running(tmp_path, *words, **environment) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        assert parent.stdout.readline() == "all\n"
        assert ranks_in(parent.pid) == {"0": pids[1], "1": pids[0]}
        found = find_process(parent.pid)
        assert found.trainers() == [pids[1], pids[0]]
        assert found.about().processes == 5
        # A rank itself, and a process of no rank.
        assert find_process(pids[0]).trainers() == [pids[0]]
        watching = Watching(tmp_path, parent.pid)
        watching.process.send_signal(signal.SIGTERM)
        watching.end()
    names = {path.name.partition("-")[0] for path in (watching.run.path / "stacks").iterdir()}
    assert names == {str(pid) for pid in pids}
    (seen,) = watching.of(ProcessFound)
    assert seen.ranks == {"0": pids[1], "1": pids[0]}


GUARDED = "import ctypes\nctypes.CDLL(None).prctl(4, 0)\n"
"""PR_SET_DUMPABLE: only who has CAP_SYS_PTRACE may read such a process."""


@needs("root", os.geteuid() == 0)
def test_where_stacks_may_not_be_read_it_says_what_to_do_and_goes_on(tmp_path: Path) -> None:
    program = find_command("py-spy")
    with running(tmp_path, sys.executable, "-S", "-c", GUARDED + READS) as process:
        drop = ("setpriv", "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace")
        watching = Watching(tmp_path, process.pid, *drop)
        process.kill()
        process.wait()
        said = watching.end()
    (dump,) = watching.of(StackDump)
    reason = "--cap-add SYS_PTRACE" if program.absent is None else "py-spy is not installed"
    assert reason in dump.missing[0] and reason in " ".join(said.split())
    assert dump.python_frame == "" and dump.summary
    (ended,) = watching.of(TrainerExited)
    assert "OOM" not in ended.state
