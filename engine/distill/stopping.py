"""Why a trainer should stop before its last step, and how it learns of it.

Three things ask: SIGTERM and SIGINT (finish the step, save, stop; a second one ends the process at
once), and the death of the supervisor, seen as the end of the keep-alive pipe it holds. The trainer
looks at `reason` between steps. If the supervisor dies while the trainer hangs inside a step,
nobody would be left to notice: after `GRACE_S` without an answer the process writes so and leaves.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from engine.errors import EXIT_INTERRUPTED, EXIT_TERMINATED

GRACE_S = 120.0


class StopRequest:
    """The first request to stop wins; `reason` is None until there is one."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.exit_code = EXIT_TERMINATED
        self._answered = threading.Event()

    def watch_signals(self) -> None:
        """Take SIGTERM and SIGINT as requests; the second of them gets the system's default and
        ends the process.
        """
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        # A closed terminal is the launcher's business; the run goes on.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _on_signal(self, number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self._request(
            signal.Signals(number).name,
            EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_TERMINATED,
        )

    def watch_supervisor(self, keep_alive_fd: int, write_note: Callable[[str], None]) -> None:
        """Ask to stop when the other end of `keep_alive_fd` closes; `write_note` puts a line
        into the log.
        """

        def wait() -> None:
            # Nothing is ever written to this pipe: read returns when its last writer is gone.
            os.read(keep_alive_fd, 1)
            if self._answered.is_set():
                return  # the run is over; the supervisor closed it in good order
            write_note("the supervisor is gone: saving and stopping, so that nothing runs unseen")
            self._request("supervisor lost", EXIT_TERMINATED)
            if not self._answered.wait(GRACE_S):
                write_note(
                    f"no step ended within {GRACE_S:.0f} s of losing the supervisor: leaving unsaved"
                )
                os._exit(EXIT_TERMINATED)

        threading.Thread(target=wait, name="keep-alive", daemon=True).start()

    def _request(self, reason: str, exit_code: int) -> None:
        if self.reason is None:
            self.exit_code = exit_code
            self.reason = reason

    def answered(self) -> None:
        """Say that the trainer is acting on it, or has ended by itself."""
        self._answered.set()
