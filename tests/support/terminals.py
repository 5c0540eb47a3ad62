"""Run `apr-workbench` on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import sys
import termios
import time

from tests.support.paths import ROOT

DEADLINE_S = 120.0
STALE = {"COLUMNS": "71", "LINES": "17"}
"""A size that no terminal of a test has, exported as a shell or a test runner exports an earlier terminal's."""
ENTER_ALTERNATE, LEAVE_ALTERNATE = "\x1b[?1049h", "\x1b[?1049l"
SHOW_CURSOR, MOUSE_OFF = "\x1b[?25h", "\x1b[?1000l"
ASKS_FOR_FRAMES, HAS_FRAMES = "\x1b[?2026$p", "\x1b[?2026;2$y"
"""Whether the terminal shows whole frames only (mode 2026), and that it does."""
FRAME_ENDS = b"\x1b[?2026l"
QUIET_S = 0.15
"""A key has been answered in full when the screen has written nothing for so long."""


def set_size(fd: int, columns: int, rows: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


class Terminal:
    """`python -m workbench`, or other `code`, on its own pseudo-terminal, with another size exported."""

    def __init__(
        self,
        *arguments: str,
        columns: int = 100,
        rows: int = 30,
        code: str | None = None,
        **environ: str,
    ) -> None:
        self.output = ""
        self.bytes_read = 0
        self.deadline_s = time.monotonic() + DEADLINE_S
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            # Set before the program begins, so that it never sees another size.
            set_size(0, columns, rows)
            unset = ("LC_", "LANG", "NO_COLOR", "SSH_", "TMUX")
            kept = {k: v for k, v in os.environ.items() if not k.startswith(unset)}
            kept |= STALE
            kept |= {
                "TERM": "xterm-256color",
                "LANG": "C.UTF-8",
                "PYTHONPATH": str(ROOT),
                **environ,
            }
            program = ["-m", "workbench"] if code is None else ["-c", code]
            os.execve(sys.executable, [sys.executable, *program, *arguments], kept)

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
            # Linux reports EIO on the terminal once its last process is gone.
            return False
        self.bytes_read += len(block)
        self.output += block.decode("utf-8", errors="replace")
        return bool(block)

    def read_for(self, seconds: float) -> int:
        """Read whatever arrives within a time; returns the number of bytes."""
        before, until_s = self.bytes_read, time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            if select.select([self.fd], [], [], left_s)[0] and not self._read():
                break
        self.deadline_s = time.monotonic() + DEADLINE_S
        return self.bytes_read - before

    def frames_after(self, keys: str) -> list[float]:
        """Press keys, and return the seconds until the end of each frame that they caused had been read: those before
        the first pause of QUIET_S. The program has to know that its terminal `HAS_FRAMES`."""
        begun_s = time.monotonic()
        self.press(keys)
        ends: list[float] = []
        rest = b""
        while select.select([self.fd], [], [], QUIET_S if ends else DEADLINE_S)[0]:
            block = rest + os.read(self.fd, 65536)
            ends += [time.monotonic() - begun_s] * block.count(FRAME_ENDS)
            # Whatever of a mark was read may go on in the next block, and a whole mark must not count twice.
            rest = block[block.rfind(FRAME_ENDS) + 1 :][-len(FRAME_ENDS) + 1 :]
        assert ends, f"expected a frame after {keys!r}"
        return ends

    def resize(self, columns: int, rows: int) -> None:
        """Change the size, which the kernel reports to the process by SIGWINCH."""
        set_size(self.fd, columns, rows)

    def press(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def wait(self) -> int:
        """Read to the end; returns the exit code."""
        while self._read():
            pass
        _, status = os.waitpid(self.pid, 0)
        os.close(self.fd)
        return os.waitstatus_to_exitcode(status)
