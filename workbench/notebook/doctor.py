"""Doctor: what this machine is, and what cannot be measured on it, as `engine doctor` reports.

The engine queries the CUDA driver and NVML in its own process, which takes seconds on a machine with many
GPUs; the cell shows the report when it arrives. No comm is opened.
"""

from __future__ import annotations

import subprocess
import threading
import uuid
from typing import Any

from engine.errors import InternalError
from workbench.engine_commands import ask
from workbench.notebook.outputs import replace, show
from workbench.notebook.panel import still_html

LEVELS = {0: "pass", 1: "fail", 2: "unknown"}


class Doctor:
    """One examination of this machine."""

    def __init__(self) -> None:
        self._key, self._shown = uuid.uuid4().hex[:12], False
        self._done: subprocess.CompletedProcess[str] | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._ask, name="apr-doctor", daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        done = ask(["doctor"])
        with self._lock:
            self._done = done
            if self._shown:
                replace(self._bundle(), self._key)

    @property
    def level(self) -> str:
        """Return pass, fail or unknown; waits for the report. Raises InternalError when there is none."""
        self._thread.join()
        assert self._done is not None
        if self._done.returncode not in LEVELS:
            raise InternalError(
                f"engine doctor ended with code {self._done.returncode}: {self._done.stderr}"
            )
        return LEVELS[self._done.returncode]

    @property
    def lines(self) -> list[str]:
        """Return the lines of its report so far."""
        if self._done is None:
            return ["engine doctor: asking"]
        return (self._done.stdout or self._done.stderr).splitlines()

    def _bundle(self) -> dict[str, Any]:
        return {
            "text/html": still_html(self._key, [], self.lines),
            "text/plain": "\n".join(self.lines),
        }

    def _ipython_display_(self) -> None:
        with self._lock:
            self._shown = True
            show(self._bundle(), self._key)
