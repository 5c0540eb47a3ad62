"""Stop a trainer before its last step: who can request it, and how the trainer finds out.

There are three sources of a request: SIGTERM, SIGINT (a second signal ends the process at once), and the
death of the supervisor, which closes the keep-alive pipe that it holds. The trainer reads `reason`
between steps, finishes the current step, saves and stops. If the supervisor dies while the trainer hangs
inside a step, no process is left to notice. So when the trainer has not reacted within `GRACE_S`, the process
logs that and exits without saving.

Before the first step (reading, tokenizing, compiling, loading) there is nothing to finish or to save, so
a request raises `Stopped` in the main thread at once. If unwinding takes more than about a second, a
second signal follows (`engine.signals`), which ends the process even inside native code.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from engine.errors import EXIT_INTERRUPTED, EXIT_TERMINATED
from engine.signals import GRACE_S as UNWIND_S
from engine.signals import only_once, raise_stopped

GRACE_S = 120.0
"""Time that a trainer whose supervisor has died gets to finish a step and save, in seconds."""


class StopRequest:
    """A request to stop; the first one wins. `reason` is None until there is one."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.exit_code = EXIT_TERMINATED
        self.before_exit: Callable[[], None] = lambda: None
        """Function that writes the log's last line, called if the process exits before the first step without
        unwinding."""
        self._answered = threading.Event()
        self._steps_begun = True
        self._watches = False

    def watch_signals(self) -> None:
        """Handle SIGTERM and SIGINT as requests to stop.

        A second signal has the system's default action and ends the process. Until `steps_begin`, the
        first one raises `Stopped`.
        """
        self._steps_begun, self._watches = False, True
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
            only_once(number)
        # A closed terminal concerns only the launcher: the run goes on.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def steps_begin(self) -> None:
        """Make requests wait for the end of a step from now on."""
        self._steps_begun = True
        if not self._watches:
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self._request(
            signal.Signals(number).name,
            EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TERMINATED,
        )
        if not self._steps_begun:
            raise_stopped(number, frame, self.before_exit)

    def watch_supervisor(self, keep_alive_fd: int, write_note: Callable[[str], None]) -> None:
        """Request a stop when the other end of `keep_alive_fd` closes; `write_note` writes a line to the log."""

        def wait() -> None:
            # Nothing is ever written to this pipe: `read` returns when its last writer has closed it.
            os.read(keep_alive_fd, 1)
            if self._answered.is_set():
                return  # the run is over, and the supervisor closed the pipe normally
            write_note(
                "the supervisor is gone: saving and stopping, so that no run continues unsupervised"
            )
            self._request("supervisor lost", EXIT_TERMINATED)
            if self._watches and not self._steps_begun:
                os.kill(os.getpid(), signal.SIGTERM)
                if not self._answered.wait(UNWIND_S) and not self._steps_begun:
                    self.before_exit()
                    os._exit(EXIT_TERMINATED)
            if not self._answered.wait(GRACE_S):
                write_note(
                    f"no step ended within {GRACE_S:.0f} s of losing the supervisor: exiting without saving"
                )
                os._exit(EXIT_TERMINATED)

        threading.Thread(target=wait, name="keep-alive", daemon=True).start()

    def _request(self, reason: str, exit_code: int) -> None:
        if self.reason is None:
            self.exit_code = exit_code
            self.reason = reason

    def answered(self) -> None:
        """Record that the trainer is acting on the request, or has ended by itself."""
        self._answered.set()
