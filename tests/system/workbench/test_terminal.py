"""The workbench in a real terminal: it draws, obeys, and leaves the terminal as it found it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.judged import alert_event
from tests.support.lacks import skip_for
from tests.support.perf import many, within
from tests.support.run_folders import completed, running
from tests.support.terminals import (
    DEADLINE_S,
    ENTER_ALTERNATE,
    LEAVE_ALTERNATE,
    MOUSE_OFF,
    ROOT,
    SHOW_CURSOR,
    STALE,
    Terminal,
)


def assert_restored(output: str) -> None:
    assert output.rindex(LEAVE_ALTERNATE) > output.rindex(ENTER_ALTERNATE)
    assert output.rindex(SHOW_CURSOR) > output.rindex(ENTER_ALTERNATE)
    assert output.rindex(MOUSE_OFF) > output.rindex(ENTER_ALTERNATE)


def test_without_utf8_a_list_opens_shows_its_run_and_quits_in_ascii(tmp_path: Path) -> None:
    completed(tmp_path / "kd-small")
    terminal = Terminal(str(tmp_path), LANG="C")
    terminal.read_until(ENTER_ALTERNATE, "kd-small", "completed")
    terminal.press("\r")
    terminal.read_until("COMPLETED", "nats per token")
    terminal.press("q")
    assert terminal.wait() == 0
    assert_restored(terminal.output)
    assert terminal.output.isascii()


def test_quitting_a_run_that_goes_on_says_how_to_come_back(tmp_path: Path) -> None:
    scene = running(tmp_path / "kd-small")
    terminal = Terminal(str(scene.run.path))
    terminal.read_until("kd-small", "RUNNING")
    terminal.press("q")
    assert terminal.wait() == 0
    scene.close()
    assert_restored(terminal.output)
    after = terminal.output[terminal.output.rindex(LEAVE_ALTERNATE) :]
    assert "RUNNING | step 30/60" in after
    assert f"apr-workbench {scene.run.path}" in after


def test_a_resized_terminal_is_drawn_again_and_ctrl_c_quits_from_under_a_question(
    tmp_path: Path,
) -> None:
    terminal = Terminal(str(completed(tmp_path / "kd-small").path), columns=39, rows=8)
    terminal.read_until("COMPLETED")
    assert "5 log" not in terminal.output
    terminal.resize(120, 40)
    terminal.read_until("5 log", "6 result", "all steps done")
    terminal.press("?")
    terminal.read_until("esc closes")
    terminal.press("\x03")
    assert terminal.wait() == 0
    assert_restored(terminal.output)


BROKEN = """
import sys
from workbench import cli
from {module} import {name}
def broken(self, *_, **__):
    raise ZeroDivisionError("planted")
{name}.{method} = broken
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("module", "name", "method"),
    [
        pytest.param(
            *("workbench.tui.widgets.status_line", "StatusLine", "watch_snapshot"),
            marks=pytest.mark.soak,
        ),
        ("workbench.tui.widgets.status_line", "StatusLine", "render_line"),
        pytest.param(
            *("workbench.tui.screens.run", "RunScreen", "compose"), marks=pytest.mark.soak
        ),
        ("workbench.feed", "RunFeed", "poll"),
    ],
    ids=["watcher", "drawing", "composing", "thread"],
)
def test_a_crash_restores_the_terminal_and_shows_where_it_was(
    tmp_path: Path, module: str, name: str, method: str
) -> None:
    code = BROKEN.format(module=module, name=name, method=method)
    terminal = Terminal(str(completed(tmp_path / "kd-small").path), code=code)
    assert terminal.wait() == 70
    assert_restored(terminal.output)
    after = terminal.output[terminal.output.rindex(LEAVE_ALTERNATE) :]
    assert "ZeroDivisionError" in after
    assert "planted" in after
    assert "the screen crashed; the run is not affected" in after


def test_a_terminated_workbench_restores_the_terminal(tmp_path: Path) -> None:
    terminal = Terminal(str(completed(tmp_path / "kd-small").path))
    terminal.read_until("COMPLETED")
    os.kill(terminal.pid, signal.SIGTERM)
    assert terminal.wait() == 143
    assert_restored(terminal.output)


@pytest.mark.perf
@pytest.mark.parametrize("all_read", [False, True], ids=["reading", "read"])
def test_a_run_with_50_000_alerts_is_left_within_two_seconds(
    tmp_path: Path, all_read: bool
) -> None:
    scene, count = running(tmp_path / "many"), many(50_000, 2_000)
    alerts = (alert_event(id=f"rule_{i}", level="suspicion", text="t") for i in range(count))
    scene.watch(*alerts)
    terminal = Terminal(str(scene.run.path))
    terminal.read_until(f"(and {count - 1} more)" if all_read else "RUNNING")
    begun_s = time.monotonic()
    os.kill(terminal.pid, signal.SIGTERM)
    assert terminal.wait() == 143
    within(time.monotonic() - begun_s, 2)
    scene.close()
    assert_restored(terminal.output)


def test_a_wrong_theme_is_refused_before_the_screen_changes(tmp_path: Path) -> None:
    terminal = Terminal(str(completed(tmp_path / "kd").path), APR_WORKBENCH_THEME="drak")
    assert terminal.wait() == 64
    assert ENTER_ALTERNATE not in terminal.output
    assert "did you mean 'dark'?" in terminal.output


class Tmux:
    """A tmux server of its own, with no configuration."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket

    def __call__(self, *arguments: str) -> str:
        command = ["tmux", "-S", str(self.socket), "-f", "/dev/null", *arguments]
        unset = ("TMUX", "NO_COLOR", "LC_", "LANG", "SSH_")
        environ = {k: v for k, v in os.environ.items() if not k.startswith(unset)}
        done = subprocess.run(
            command,
            env=environ | STALE | {"LANG": "C.UTF-8", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
            preexec_fn=hear_of_sizes,
        )
        return done.stdout

    def wait_until(self, is_so: Callable[[str], bool]) -> str:
        """The pane, as soon as something holds of it."""
        until_s = time.monotonic() + DEADLINE_S
        while not is_so(shown := self("capture-pane", "-p")):
            assert time.monotonic() < until_s, f"found {shown}"
        return shown

    def resize(self, columns: int, rows: int, is_so: Callable[[str], bool]) -> None:
        """Make the window so large, and wait until something holds of the pane. Once in hundreds of times,
        on a busy machine, the panes of a size before are drawn: the program is then told its size anew, and
        what its terminal has is printed."""
        begun_s = time.monotonic()
        self("resize-window", "-x", str(columns), "-y", str(rows))
        tty = self("display-message", "-p", "#{pane_tty}").strip()
        while not is_so(shown := self("capture-pane", "-p")):
            waited_s = time.monotonic() - begun_s
            has = size_of(tty)
            assert time.monotonic() < begun_s + DEADLINE_S, f"{tty} has {has}, found {shown}"
            if waited_s > DEADLINE_S / 4 or (has != (rows, columns) and waited_s > DEADLINE_S / 12):
                print(f"{tty} has {has} after {waited_s:.0f} s, the pane {(rows, columns)}")
                # Another size first: a program is told of changes only.
                for width in (columns + 1, columns):
                    subprocess.run(
                        ["stty", "-F", tty, "rows", str(rows), "columns", str(width)], check=True
                    )
                    self("run-shell", "sleep 1")

    def wait_for(self, text: str) -> str:
        """The pane, as soon as a text is in it."""
        return self.wait_until(lambda shown: text in shown)


def hear_of_sizes() -> None:
    """Whatever became of this process's signals: a blocked one stays blocked in all that it starts."""
    signal.signal(signal.SIGWINCH, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def size_of(tty: str) -> tuple[int, int]:
    """Lines and columns that programs are told."""
    said = subprocess.run(["stty", "-F", tty, "size"], capture_output=True, text=True, check=True)
    rows, columns = said.stdout.split()
    return int(rows), int(columns)


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Tmux]:
    if shutil.which("tmux") is None:
        skip_for("tmux")
    server = Tmux(tmp_path / "tmux")
    yield server
    subprocess.run(["tmux", "-S", str(server.socket), "kill-server"], capture_output=True)


def test_in_tmux_it_starts_resizes_quits_and_leaves_the_pane_as_it_was(
    tmp_path: Path, tmux: Tmux
) -> None:
    run = completed(tmp_path / "kd-small").path
    command = f"echo before; {sys.executable} -m workbench {run}; echo ended $?; cat"
    tmux("new-session", "-d", "-x", "100", "-y", "30", command)
    tmux.wait_until(lambda shown: "COMPLETED" in shown and "quit" in shown)
    assert tmux("display-message", "-p", "#{alternate_on}").strip() == "1"
    tmux.resize(39, 8, lambda shown: "COMPLETED" in shown and "quit" not in shown)
    tmux.resize(120, 40, lambda shown: "quit" in shown)
    tmux("send-keys", "C-c")
    assert "before" in tmux.wait_for("ended 0")
    flags = "#{alternate_on} #{cursor_flag} #{mouse_any_flag} #{bracket_paste_flag}"
    assert tmux("display-message", "-p", flags).split()[:3] == ["0", "1", "0"]
