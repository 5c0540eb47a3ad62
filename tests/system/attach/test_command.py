"""`engine watch -- COMMAND`: the command keeps its terminal, its signals and its exit code, and lives on whatever
happens to what watches it."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import BadInput
from engine.log.events import AnyEvent, LauncherGone, Note, TrainerExited, TrainerStarted
from engine.log.fold import Follower
from engine.log.folder import RunFolder, read_command
from engine.log.observed import observation
from engine.log.read import LogReader
from engine.watch.rules.rule import read_settings
from engine.watch.start_and_stop import stop
from tests.support.attached import BEGIN
from tests.support.attached_scripts import SLEEPING
from tests.support.forked import start_python
from tests.support.paths import ROOT
from tests.support.running import engine_here

WATCH = ["-m", "engine", "watch"]
LIMIT_S = 60.0


def command(folder: Path, *words: str, name: str = "run", quiet: bool = True) -> list[str]:
    options = ["--runs", str(folder), "--name", name, *(["--quiet"] if quiet else [])]
    return [*WATCH, *options, "--", *words]


def watched(
    folder: Path, *words: str, **more: Any
) -> tuple[subprocess.CompletedProcess[str], RunFolder]:
    quiet = more.pop("quiet", True)
    return forked(*command(folder, *words, quiet=quiet), **more), RunFolder(folder / "run")


def forked(*words: str, input: str | None = None, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run Python to its end, as a fork."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with start_python(*words, text=True, **pipes, **how) as process:
        stdout, stderr = process.communicate(input, LIMIT_S)
    return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)


def watch_log(run: RunFolder) -> list[AnyEvent]:
    return list(LogReader(run.watch).poll())


def wait_for_file(path: Path) -> None:
    """Wait until a file is there, by the events of its folder."""
    waiter = (
        "import sys, time, pathlib\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)"
    )
    subprocess.run([sys.executable, "-S", "-c", waiter, str(path)], check=True, timeout=LIMIT_S)


def wait_for_supervisor(run: RunFolder) -> None:
    """Wait until the supervisor has left, by its lock on the log."""
    waiter = "import fcntl, sys\nwith open(sys.argv[1]) as file: fcntl.flock(file, fcntl.LOCK_SH)"
    subprocess.run(
        [sys.executable, "-S", "-c", waiter, str(run.watch)], check=True, timeout=LIMIT_S
    )


@pytest.mark.parametrize("code", [0, 255])
def test_the_exit_code_is_the_commands_own(tmp_path: Path, code: int) -> None:
    done, run = watched(tmp_path, "sh", "-c", f"echo out; echo err >&2; exit {code}")
    assert (done.returncode, done.stdout, done.stderr) == (code, "out\n", "err\n")
    (exit_,) = [e for e in watch_log(run) if isinstance(e, TrainerExited)]
    assert (exit_.returncode, exit_.state) == (code, "FAILED" if code else "COMPLETED")


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.soak), signal.SIGTERM],
)
def test_it_dies_of_the_signal_that_the_command_died_of(tmp_path: Path, number: int) -> None:
    done, run = watched(tmp_path, "sh", "-c", f"kill -{int(number)} $$")
    assert done.returncode == -number
    (exit_,) = [e for e in watch_log(run) if isinstance(e, TrainerExited)]
    assert exit_.returncode == -number
    assert "OOM" not in exit_.state


def test_the_command_reads_our_stdin_and_its_arguments_arrive_as_they_are(tmp_path: Path) -> None:
    script = 'cat; printf "%s|" "$@"'
    words = ["a b", "--name", "--", "*", "-x", ""]
    done, run = watched(tmp_path, "sh", "-c", script, "sh", *words, input="line\n")
    assert done.stdout == "line\n" + "".join(f"{word}|" for word in words)
    command = read_command(run)
    assert command is not None and command.arguments == ("sh", "-c", script, "sh", *words)


def test_signals_sent_to_the_watch_reach_the_command(tmp_path: Path) -> None:
    script = (
        "trap ': > hup' HUP; trap ': > usr1' USR1; trap 'exit 5' TERM; : > up\n"
        "while :; do sleep 0.05; done"
    )
    # Under nohup it is ignored, and what is ignored at a start no shell can trap.
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        words = command(tmp_path, "sh", "-c", script)
        process = subprocess.Popen([sys.executable, *words], cwd=tmp_path)
    finally:
        signal.signal(signal.SIGHUP, inherited)
    wait_for_file(tmp_path / "up")
    for number, answer in ((signal.SIGHUP, "hup"), (signal.SIGUSR1, "usr1")):
        process.send_signal(number)
        wait_for_file(tmp_path / answer)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 5


def test_ctrl_c_of_a_terminal_reaches_the_command_once_and_its_answer_counts(
    tmp_path: Path,
) -> None:
    # The signal may come while `print` still holds its buffer, which must not be entered twice.
    program = (
        "import os, signal, sys\n"
        "def got(n, f): os.write(1, b'interrupted\\n')\n"
        "signal.signal(signal.SIGINT, got)\n"
        "print('tty', sys.stdin.isatty(), sys.stdout.isatty(), flush=True)\n"
        "sys.stdin.readline()\n"
        "sys.exit(3)\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        words = command(tmp_path, sys.executable, "-S", "-c", program)
        os.execv(sys.executable, [sys.executable, *words])
    screen = read_until(terminal, "tty True True")
    os.write(terminal, b"\x03")
    screen += read_until(terminal, "interrupted")
    os.write(terminal, b"go on\n")
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 3
    assert screen.count("interrupted") == 1


COUNTS = """
import os, signal
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
    signal.signal(number, lambda n, f: os.write(1, b"got %d\\n" % n))
os.write(1, b"up\\n")
while (line := os.read(0, 1)) not in (b"", b"q"):
    pass
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGQUIT"])
def test_a_signal_arrives_once_whether_the_watch_alone_or_its_group_gets_it(
    tmp_path: Path, name: str
) -> None:
    number = signal.Signals[name]
    words = command(tmp_path, sys.executable, "-S", "-c", COUNTS)
    with start_python(
        *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        # One to the watch alone, as from a service manager or a notebook; two to the group, as from a shell.
        for send in (os.kill, os.killpg, os.killpg, os.kill):
            before = witness_of(process.pid)
            send(process.pid, number)
            assert process.stdout.readline() == b"got %d\n" % number
            # Two signals that arrive before Python runs the handler are one.
            while send is os.killpg and witness_of(process.pid) in (None, before):
                pass
        process.stdin.write(b"q")
        process.stdin.close()
        assert process.stdout.read() == b""
        assert process.wait(LIMIT_S) == 0


def witness_of(watch: int) -> int | None:
    """The process that holds what is sent to the watch's process group."""
    for child in map(int, Path(f"/proc/{watch}/task/{watch}/children").read_text().split()):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{child}/comm").read_text() == "cat\n":
                return child
    return None


ENDS_WITH_A_SIGNAL = """
import os, pathlib, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
status = pathlib.Path(f"/proc/{os.getppid()}/status")
while not int(status.read_text().split("SigCgt:")[1].split()[0], 16) >> signal.SIGTERM - 1 & 1:
    pass
os.kill(os.getppid(), signal.SIGTERM)
sys.exit(3)
"""
"""Program that signals the watch, which looks for who else got the signal, and has ended before it is passed on."""


def test_a_signal_at_the_end_of_the_command_leaves_its_exit_code(tmp_path: Path) -> None:
    done, run = watched(tmp_path, sys.executable, "-S", "-c", ENDS_WITH_A_SIGNAL)
    assert (done.returncode, done.stderr) == (3, "")
    (exit_,) = [e for e in watch_log(run) if isinstance(e, TrainerExited)]
    assert (exit_.returncode, exit_.state) == (3, "FAILED")


def test_an_interrupt_of_the_watch_alone_is_a_keyboard_interrupt_of_the_script(
    tmp_path: Path,
) -> None:
    program = "import sys; print('up', flush=True); sys.stdin.readline()"
    words = command(tmp_path, sys.executable, "-S", "-c", program)
    with start_python(
        *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == -signal.SIGINT
        assert process.stderr.read().count(b"KeyboardInterrupt") == 1


@pytest.mark.parametrize("send", [os.killpg, os.kill])
def test_ctrl_z_stops_the_command_and_the_watch_and_both_go_on(
    tmp_path: Path, send: Callable[[int, int], None]
) -> None:
    program = "import sys; print('up', flush=True); sys.stdin.readline(); sys.exit(4)"
    words = command(tmp_path, sys.executable, "-S", "-c", program)
    with start_python(
        *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        send(process.pid, signal.SIGTSTP)
        # The shell sees its job stopped.
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        send(process.pid, signal.SIGCONT)
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.wait(LIMIT_S) == 4


def read_until(terminal: int, words: str) -> str:
    screen = ""
    while words not in screen:
        ready, _, _ = select.select([terminal], [], [], LIMIT_S)
        assert ready, screen
        screen += os.read(terminal, 4096).decode()
    return screen


def test_the_command_outlives_a_kill_of_the_watch_and_the_log_says_that_its_end_is_not_known(
    tmp_path: Path,
) -> None:
    up, go, alive = tmp_path / "up", tmp_path / "go", tmp_path / "alive"
    script = f": > '{up}'; while ! test -e '{go}'; do sleep 0.02; done; : > '{alive}'"
    process = start_python(*command(tmp_path, "sh", "-c", script))
    wait_for_file(up)
    run = RunFolder(tmp_path / "run")
    wait_for_file(run.watch)
    process.kill()
    process.wait(LIMIT_S)
    go.touch()
    wait_for_file(alive)
    wait_for_supervisor(run)
    events = watch_log(run)
    assert [e.how for e in events if isinstance(e, LauncherGone)] == ["killed"]
    assert not [e for e in events if isinstance(e, TrainerExited)]
    assert "exit code is unknown" in [e.text for e in events if isinstance(e, Note)][-1]
    assert Follower(run).read_all().exit is None


def test_a_kill_of_the_supervisor_never_touches_the_command(tmp_path: Path) -> None:
    up, go = tmp_path / "up", tmp_path / "go"
    script = f": > '{up}'; while ! test -e '{go}'; do sleep 0.02; done; exit 6"
    process = start_python(*command(tmp_path, "sh", "-c", script))
    wait_for_file(up)
    run = RunFolder(tmp_path / "run")
    wait_for_file(run.watch)
    supervisor = next(e.supervisor_pid for e in started(run))
    os.kill(supervisor, signal.SIGKILL)
    go.touch()
    assert process.wait(LIMIT_S) == 6


def test_a_watched_command_is_stopped_by_its_run_folder(tmp_path: Path) -> None:
    up = tmp_path / "up"
    process = start_python(*command(tmp_path, "sh", "-c", f": > '{up}'; exec sleep 60"))
    wait_for_file(up)
    run = RunFolder(tmp_path / "run")
    wait_for_file(run.watch)
    started(run)
    assert stop(run) == "sent SIGTERM to the command of run run"
    assert process.wait(LIMIT_S) == -signal.SIGTERM
    (exit_,) = [e for e in watch_log(run) if isinstance(e, TrainerExited)]
    assert exit_.cause == "stop requested: engine stop"
    with pytest.raises(BadInput, match="still running"):
        stop(run)


def started(run: RunFolder) -> list[TrainerStarted]:
    reader, found = LogReader(run.watch), []
    while not found:
        found = [e for e in reader.poll() if isinstance(e, TrainerStarted)]
    return found


def test_secrets_of_the_command_line_are_not_kept(tmp_path: Path) -> None:
    done, run = watched(
        tmp_path, "true", "--api-key", "s3cr3t-of-mine-0", "HF_TOKEN=hf_abcdefghijklmnopqrs"
    )
    assert done.returncode == 0
    kept = "".join(p.read_text() for p in run.path.iterdir() if p.is_file())
    assert "s3cr3t" not in kept and "hf_abc" not in kept and "--api-key" in kept


def test_a_command_that_is_not_there_leaves_no_folder(tmp_path: Path) -> None:
    done, run = watched(tmp_path, "no-such-command-here")
    assert done.returncode == 65 and "no-such-command-here" in done.stderr
    assert not run.path.exists()
    assert engine_here("watch", "--").returncode == 64


def test_an_exception_before_torch_is_imported_is_recorded(tmp_path: Path) -> None:
    """Without it two such failures would count as the same."""
    signs = []
    for missing in ("nothere", "notthere"):
        (tmp_path / "train.py").write_text(f"import {missing}\n")
        # Python that is given an option is a new process, without torch.
        words = (sys.executable, "-B", str(tmp_path / "train.py"))
        done, run = watched(tmp_path / f"of-{missing}", *words)
        assert done.returncode == 1
        signs.append(observation(run, "exit").sign)
    assert "ModuleNotFoundError at train.py:1 in <module>: No module" in signs[0]
    assert signs[0] != signs[1]


def test_a_command_without_a_probe_is_seen_from_outside_only_and_never_judged_by_our_settings(
    tmp_path: Path,
) -> None:
    done, run = watched(tmp_path, "sh", "-c", "exit 0", quiet=False)
    assert done.stdout == "" and "observed from outside only" in done.stderr
    assert read_settings(run) is None
    assert json.loads(run.effective.read_text())["command"]["folder"] == os.getcwd()


def test_where_the_folder_cannot_be_written_the_run_lies_in_the_users_and_that_is_said(
    tmp_path: Path,
) -> None:
    words = [*WATCH, "--name", "run", "--quiet", "--", "pwd"]
    # No process may make a folder in /sys, not even one of root.
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    more: dict[str, Any] = {"env": environment, "cwd": "/sys"}
    done = forked(*words, **more)
    run = RunFolder(tmp_path / "apr-workbench" / "runs" / "run")
    assert (done.returncode, done.stdout) == (0, "/sys\n")
    assert f"the run folder is {run.path}" in done.stderr and done.stderr.startswith("/sys/runs: ")
    assert [e.returncode for e in watch_log(run) if isinstance(e, TrainerExited)] == [0]
    # A folder that was named is the one that was meant.
    done = forked(*words[:3], "--runs", "/sys/x", *words[3:], **more)
    assert done.returncode == 65


def test_a_script_is_ended_after_the_steps_that_were_asked_for_as_if_it_had_no_more(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(BEGIN + SLEEPING)
    options = ["--steps", "4", "--slow-by", "0.5", "--env", "WANDB_MODE=offline", "--keep-output"]
    words = [*WATCH, "--runs", str(tmp_path), "--name", "run", "--quiet", *options, "--"]
    script = [sys.executable, "train.py", "--out", str(tmp_path), "--sleep", "0.05"]
    done = forked(*words, *script, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    view = Follower(RunFolder(tmp_path / "run")).read_all()
    assert view.last_step == 4 and view.exit is not None and view.exit.state == "COMPLETED"
    assert view.script_ended is not None and view.script_ended.how == "returned"
    # Each step is lengthened by half of what it takes, behind the first.
    assert min(s for s in view.steps.values("step_s", 1) if s is not None) > 1.4 * 0.05
    # What the script has to close is closed, in the environment that the run folder keeps.
    assert (tmp_path / "closed").read_text() == "offline"
    kept = RunFolder(tmp_path / "run").read_effective()["command"]
    assert kept["environment"] == ["WANDB_MODE=offline"]


@pytest.mark.parametrize("text", ["X", "=1", "1X=2"])
def test_a_variable_without_a_name_and_a_value_is_refused(tmp_path: Path, text: str) -> None:
    done = engine_here("watch", "--runs", tmp_path, "--env", text, "--", "true")
    assert done.returncode == 64 and "expected NAME=VALUE" in done.stderr
    assert not list(tmp_path.iterdir())
