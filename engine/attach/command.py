"""Run a command in the foreground as if the user had started it directly, with a probe and an observer.

    engine watch -- COMMAND
      |-- COMMAND                     this terminal, this process group; APR_WATCH_RUN, PYTHONPATH with the probe
      |-- engine.attach.supervisor    in a separate session

The command keeps stdin, stdout, stderr, the terminal and job control. Signals to the whole process group, such as
Ctrl-C, Ctrl-\\ and Ctrl-Z in a terminal, reach it directly; signals to this process alone are forwarded to it. This
process ends as the command ends: with its exit code, or by the same signal.

A script that watches itself (`apr_watch.start`) runs this file as a program to create its run folder and its observer:

    python train.py --(stdin)--> python -m engine.attach.command PID OUT ARGV...
                                   |-- engine.attach.supervisor    goes on, with the same stdin
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import IO, Any

from engine import child
from engine.errors import BadInput, EngineError, RunLogError
from engine.files import user_state
from engine.log.folder import COMMAND, RunFolder, create_run
from engine.notify.receivers import ALL, NOTIFY_VARIABLE
from engine.redact import Redactor
from engine.terminal import put, say
from engine.watch import flight_recorder

PROBE = Path(__file__).parent / "probe"
RUN_VARIABLE = "APR_WATCH_RUN"
PARENT_VARIABLE = "APR_WATCH_PARENT"
"""Environment variable: id of the command's parent process, by which the probe recognises the command's first
process."""
ASK_VARIABLE = "APR_WATCH_ASK"
STEPS_VARIABLE = "APR_WATCH_STEPS"
SLOW_VARIABLE = "APR_WATCH_SLOW_BY"
SET_VARIABLE = "APR_WATCH_SET"
RUNS = Path("runs")
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP)
PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
GROUP_S = 0.05
"""Time within which a signal to a process group reaches all of its processes, in seconds."""
RECORDED_S = 5.0
"""Maximum time that recording the end of the command may block the terminal, in seconds."""


def new_run(
    arguments: Sequence[str],
    folder: Path | None,
    name: str | None,
    variables: Sequence[str] = (),
    pid: int | None = None,
    changed: Mapping[str, str] = MappingProxyType({}),
    runs_in: str | None = None,
) -> RunFolder:
    """Create the run folder of a command. Secrets in arguments and variables are redacted.

    folder     folder to create it in; None is `runs`, or the user's state folder if `runs` is not writable
    variables  environment variables to record, as `NAME=VALUE`
    pid        a process that watches itself, or a process that runs already
    changed    settings that the probe changes in the script
    runs_in    current folder of a process that runs already

    Raises BadInput if there is no such command.
    """
    if runs_in is None and shutil.which(arguments[0]) is None:
        raise BadInput.expected("command", arguments[0], "a program to start", "none")
    name = name or _name_of(arguments)
    about: dict[str, Any] = {
        "arguments": list(Redactor().argv(arguments)[0]),
        "folder": runs_in or os.getcwd(),
        "commit": _commit(runs_in),
    }
    if pid is not None:
        about["pid"] = pid
    if variables:
        about["environment"] = list(Redactor().argv(variables)[0])
    if changed:
        about["set"] = dict(changed)
    effective = {"spec": {}, COMMAND: about}
    if folder is not None:
        return create_run((folder / name).absolute(), "", effective)
    try:
        return create_run((RUNS / name).absolute(), "", effective)
    except RunLogError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno not in READ_ONLY:
            raise
        run = create_run(user_state("runs").absolute() / name, "", effective)
        say(f"{RUNS.absolute()}: {cause.strerror}; the run folder is {run.path}")
        return run


def _name_of(arguments: Sequence[str]) -> str:
    word = next((Path(a).stem for a in arguments if a.endswith(".py")), Path(arguments[0]).stem)
    return f"{word}-{datetime.now():%Y%m%d-%H%M%S}"


def run_command(
    arguments: Sequence[str],
    run: RunFolder,
    asked: Sequence[str] = (),
    *,
    steps: int | None = None,
    slow_by: float = 0.0,
    variables: Mapping[str, str] = MappingProxyType({}),
    changed: Mapping[str, str] = MappingProxyType({}),
    keep_output: bool = False,
    report: bool = False,
    notify: str = ALL,
) -> int:
    """Run a command to its end; return its exit code, or minus the number of the signal that ended it.

    asked        checks to run that need extra forward passes
    steps        number of optimizer steps after which the command ends
    slow_by      extra time of each step, as a share of its duration
    variables    variables to add to the command's environment
    changed      settings that the probe changes in the script
    keep_output  write the command's output to the run folder
    report       print each problem once on stderr while the command runs
    notify       receivers of messages (`choose_receivers`)

    Raises BadInput if the command cannot be started.
    """
    witness = _Witness()
    early: list[int] = []
    for number in FROM_TERMINAL:
        # Use a handler: the command would inherit SIG_IGN.
        signal.signal(number, lambda number, _frame: early.append(number))
    # Pass it neither as an argument, which every user can read, nor in the command's environment.
    supervisor = _start_supervisor(
        run,
        report_fd=sys.stderr.fileno() if report else None,
        variables={NOTIFY_VARIABLE: notify},
    )
    environment = {**os.environ, **variables, RUN_VARIABLE: str(run.path)}
    probed = os.pathsep.join(filter(None, (str(PROBE), environment.get("PYTHONPATH"))))
    environment["PYTHONPATH"] = probed
    environment |= flight_recorder.variables(run.path, environment)
    environment[PARENT_VARIABLE] = str(os.getpid())
    environment[ASK_VARIABLE] = ",".join(asked)
    environment |= {STEPS_VARIABLE: str(steps or ""), SLOW_VARIABLE: str(slow_by or "")}
    environment[SET_VARIABLE] = ";".join(f"{name}={value}" for name, value in changed.items())
    try:
        with run.stderr.open("ab") if keep_output else contextlib.nullcontext() as output:
            process = subprocess.Popen(arguments, env=environment, stdout=output, stderr=output)
    except OSError as error:
        _send_exit_code(supervisor, None)
        raise BadInput.expected(
            "command", arguments[0], "a program to start", str(error.strerror)
        ) from error

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if not witness.has_got(number):
            process.send_signal(number)

    for number in (*FROM_TERMINAL, *PASSED_ON):
        signal.signal(number, pass_on)
    if early and not witness.has_got(early[-1]):
        process.send_signal(early[-1])
    _send(supervisor, f"{process.pid}\n")
    code = _wait(process)
    witness.dismiss()
    _send_exit_code(supervisor, code)
    return code


class _Witness:
    """A process in this process group that blocks all signals. A signal that does not reach it was sent to this process
    alone and must be forwarded. A signal handler cannot see that: shells, notebooks and service managers signal the
    group, as a terminal does. Forwarding a group's signal would signal the command twice and interrupt its clean-up."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def has_got(self, number: int) -> bool:
        """Return whether the witness received the signal too. Without a witness, return whether terminals send it."""
        if self._process is None:
            return number in FROM_TERMINAL
        until_s = time.monotonic() + GROUP_S
        while not (is_pending := self._is_pending(number)) and time.monotonic() < until_s:
            time.sleep(GROUP_S / 10)
        if is_pending:
            # A blocked signal stays pending, so that the next one needs a new witness.
            self.dismiss()
            self._start()
        return is_pending

    def dismiss(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> None:
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*FROM_TERMINAL, *PASSED_ON))
        try:
            # `cat` ends with this process, which closes its standard input.
            self._process = subprocess.Popen(
                ["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        except OSError:
            self._process = None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)

    def _is_pending(self, number: int) -> bool:
        assert self._process is not None
        try:
            lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        except OSError:
            return False
        masks = [int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd:")]
        return any(mask >> (number - 1) & 1 for mask in masks)


def end_as(code: int) -> int:
    """Return the exit code of a command, or end this process by the signal that ended the command."""
    if code >= 0:
        return code
    number = -code
    # Write no core dump of this process: a core file must be the command's.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    os.kill(os.getpid(), number)
    time.sleep(1.0)
    return 128 + number


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of the command. If the command is stopped (Ctrl-Z), stop too, so that the shell gets the
    terminal."""
    while True:
        try:
            _, status = os.waitpid(process.pid, os.WUNTRACED)
        except ChildProcessError:
            # The command had ended, and `send_signal` of a handler has reaped it.
            return process.wait()
        if os.WIFSTOPPED(status):
            os.kill(os.getpid(), signal.SIGSTOP)
            # A shell continues the whole group. If only this process was continued, continue the command too.
            if _is_stopped(process.pid):
                process.send_signal(signal.SIGCONT)
            continue
        process.returncode = os.waitstatus_to_exitcode(status)
        return process.returncode


def _is_stopped(pid: int) -> bool:
    try:
        # The state follows the process name, which may contain any characters.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] == "T"
    except OSError:
        return False


def _start_supervisor(
    run: RunFolder,
    stdin: IO[str] | int = subprocess.PIPE,
    *,
    report_fd: int | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.Popen[str] | None:
    # Duplicate stderr: the supervisor's own goes to the run folder.
    if report_fd is not None:
        report_fd = os.dup(report_fd)
    arguments = [] if report_fd is None else [str(report_fd)]
    try:
        with run.stderr.open("ab") as output:
            return subprocess.Popen(
                child.command("engine.attach.supervisor", str(run.path), *arguments),
                stdin=stdin,
                stdout=output,
                stderr=output,
                text=True,
                env={**child.environment(), **variables},
                start_new_session=True,
                pass_fds=[] if report_fd is None else [report_fd],
            )
    except OSError as error:
        say(f"the observer could not be started: {error.strerror}")
        return None
    finally:
        if report_fd is not None:
            os.close(report_fd)


def _send(supervisor: subprocess.Popen[str] | None, line: str) -> None:
    if supervisor is not None and supervisor.stdin is not None:
        with contextlib.suppress(OSError):
            supervisor.stdin.write(line)
            supervisor.stdin.flush()


def _send_exit_code(supervisor: subprocess.Popen[str] | None, code: int | None) -> None:
    """Send the exit code to the supervisor, and wait until the supervisor has recorded it."""
    if supervisor is None or supervisor.stdin is None:
        return
    if code is not None:
        _send(supervisor, f"{code}\n")
    with contextlib.suppress(OSError):
        supervisor.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        supervisor.wait(RECORDED_S)


def _commit(folder: str | None = None) -> str | None:
    """Return the commit of a folder (None: the current folder), with `+` if files differ from the commit; None outside
    a repository."""
    try:
        description = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=2,
            cwd=folder,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return description.stdout.strip() or None


def main() -> int:
    """Create the run folder of process PID, start its observer, and print the folder's path."""
    pid, folder, *arguments = sys.argv[1:]
    first_path = Path(folder) if folder else RUNS / _name_of(arguments)
    try:
        for number in itertools.count(1):
            path = (
                first_path if number == 1 else first_path.with_name(f"{first_path.name}-{number}")
            )
            if os.path.lexists(path):
                continue
            try:
                run = new_run(arguments, path.parent if folder else None, path.name, pid=int(pid))
                break
            except BadInput:
                # Another process of the same sweep may have created it in the meantime.
                if not os.path.lexists(path):
                    raise
    except EngineError as error:
        say(error)
        return error.exit_code
    _start_supervisor(run, sys.stdin)
    put(str(run.path), exact=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
