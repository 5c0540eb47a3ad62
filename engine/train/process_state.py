"""Whether the process of a run is as it was set up, and works for nothing but the run: torch's modes and threads, and
the threads of Python beside the main one.

A mode that some code has left on, as anomaly detection, changes no number and costs a third of each step. A thread that
polls takes the core that the step waits for.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import torch

from engine.watch.stacks import compare, look_at

Setting = tuple[Callable[[], object], object]
"""What reads a setting of the process, and its value in a run."""

MODES: Mapping[str, Setting] = {
    "anomaly detection": (torch.is_anomaly_enabled, False),
    "autograd's profiler": (torch._C._autograd._profiler_enabled, False),
    "the default dtype": (torch.get_default_dtype, torch.float32),
    "the precision of float32 matmuls": (torch.get_float32_matmul_precision, "highest"),
}
BUSY_PCT, BUSY_S = 20.0, 5.0
"""Of a CPU, what a thread may take, and the least time over which that is measured."""
WORKING = ("hash of", "fresh weights", "import of", "teacher-outputs", "copy")
"""How the names of threads begin that compute something for the run."""


class ProcessState:
    def __init__(self, threads: int, *, deterministic: bool) -> None:
        """`threads` and `deterministic` are what torch was to compute with."""
        self._settings: dict[str, Setting] = {
            **MODES,
            "compute.threads": (torch.get_num_threads, threads),
            "compute.deterministic": (torch.are_deterministic_algorithms_enabled, deterministic),
        }
        self._before, self._told = look_at(os.getpid()), set[str]()

    def look(self) -> Iterator[str]:
        """Yield what is not as it was set up, each thing once."""
        for name, (read, value) in list(self._settings.items()):
            if (found := read()) != value:
                del self._settings[name]
                yield f"{name} is to be {value}, and torch computes with {found}: something else has set it"
        if time.monotonic() - self._before.at_s < BUSY_S:
            return
        before, self._before = self._before, look_at(os.getpid())
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        for thread in compare(before, self._before):
            name = names.get(thread.tid, "")
            busy = thread.tid != os.getpid() and (thread.cpu_pct or 0.0) > BUSY_PCT
            if busy and name and name not in self._told and not name.startswith(WORKING):
                self._told.add(name)
                yield f"the thread {name} takes {thread.cpu_pct:.0f} % of a CPU beside the steps"
