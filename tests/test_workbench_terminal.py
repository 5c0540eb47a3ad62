"""The workbench in a real terminal: it draws, obeys, and leaves the terminal as it found it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import sys
import termios
import time
from pathlib import Path

from run_folders import completed, running

ROOT = Path(__file__).parent.parent
DEADLINE_S = 20.0
ENTER_ALTERNATE, LEAVE_ALTERNATE = "\x1b[?1049h", "\x1b[?1049l"
SHOW_CURSOR, MOUSE_OFF = "\x1b[?25h", "\x1b[?1000l"


def set_size(fd: int, columns: int, rows: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


class Terminal:
    """`python -m workbench` on a pseudo-terminal of its own."""

    def __init__(self, *arguments: str, columns: int = 100, rows: int = 30, **environ: str) -> None:
        self.output = ""
        self.deadline_s = time.monotonic() + DEADLINE_S
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            # Before the program begins, so that it never sees another size.
            set_size(0, columns, rows)
            unset = ("LC_", "LANG", "COLUMNS", "LINES", "NO_COLOR", "SSH_", "TMUX")
            kept = {k: v for k, v in os.environ.items() if not k.startswith(unset)}
            kept |= {
                "TERM": "xterm-256color",
                "LANG": "C.UTF-8",
                "PYTHONPATH": str(ROOT),
                **environ,
            }
            os.execve(sys.executable, [sys.executable, "-m", "workbench", *arguments], kept)

    def read_until(self, *texts: str) -> None:
        """Read until each of `texts` has been written."""
        while not all(text in self.output for text in texts):
            assert self._read(), f"expected {texts}, found the end of {self.output[-2000:]!r}"

    def _read(self) -> bool:
        left_s = self.deadline_s - time.monotonic()
        ready, _, _ = select.select([self.fd], [], [], max(0.0, left_s))
        assert ready, f"expected more within {DEADLINE_S} s, found {self.output[-2000:]!r}"
        try:
            block = os.read(self.fd, 65536)
        except OSError:
            # Linux reports the end of a terminal whose last process is gone as EIO.
            return False
        self.output += block.decode("utf-8", errors="replace")
        return bool(block)

    def resize(self, columns: int, rows: int) -> None:
        """Change the size, of which the kernel tells the process by SIGWINCH."""
        set_size(self.fd, columns, rows)

    def press(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def wait(self) -> int:
        """Read to the end; the exit code."""
        while self._read():
            pass
        _, status = os.waitpid(self.pid, 0)
        os.close(self.fd)
        return os.waitstatus_to_exitcode(status)


def assert_restored(output: str) -> None:
    assert output.rindex(LEAVE_ALTERNATE) > output.rindex(ENTER_ALTERNATE)
    assert output.rindex(SHOW_CURSOR) > output.rindex(ENTER_ALTERNATE)
    assert output.rindex(MOUSE_OFF) > output.rindex(ENTER_ALTERNATE)


def test_a_list_opens_shows_its_run_and_quits(tmp_path: Path) -> None:
    completed(tmp_path / "kd-small")
    terminal = Terminal(str(tmp_path))
    terminal.read_until(ENTER_ALTERNATE, "kd-small", "completed")
    terminal.press("q")
    assert terminal.wait() == 0
    assert_restored(terminal.output)


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


def test_a_resized_terminal_is_drawn_again_and_ctrl_c_quits(tmp_path: Path) -> None:
    terminal = Terminal(str(completed(tmp_path / "kd-small").path), columns=39, rows=8)
    terminal.read_until("COMPLETED")
    assert "5 log" not in terminal.output
    terminal.resize(120, 40)
    terminal.read_until("5 log", "6 result", "all steps done")
    terminal.press("\x03")
    assert terminal.wait() == 0
    assert_restored(terminal.output)


def test_a_terminal_without_utf8_gets_ascii(tmp_path: Path) -> None:
    completed(tmp_path / "kd-small")
    terminal = Terminal(str(tmp_path / "kd-small"), LANG="C")
    terminal.read_until("kd-small", "COMPLETED")
    terminal.press("q")
    assert terminal.wait() == 0
    assert terminal.output.isascii()
