"""Whether the process of a run is as it was set up, and works for nothing but the run: torch's modes and threads, and
the threads of Python beside the main one.

A mode that some code has left on, as anomaly detection, changes no number and costs a third of each step. A thread that
polls takes the core that the step waits for.
"""

from __future__ import annotations

import gc
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch

from engine.log.view import RunView
from engine.train.step import StepObserver
from engine.units import format_bytes
from engine.watch.stacks import compare, look_at

Setting = tuple[Callable[[], object], object]
"""What reads a setting of the process, and its value in a run."""

MODES: Mapping[str, Setting] = {
    "anomaly detection": (torch.is_anomaly_enabled, False),
    "autograd's profiler": (torch._C._autograd._profiler_enabled, False),
    "the default dtype": (torch.get_default_dtype, torch.float32),
    "the precision of float32 matmuls": (torch.get_float32_matmul_precision, "highest"),
}
KERNELS: Mapping[str, Callable[[], bool]] = {
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "memory-efficient kernels": torch.backends.cuda.mem_efficient_sdp_enabled,
    "cuDNN": torch.backends.cuda.cudnn_sdp_enabled,
}
COLLECTED_STEPS = 16
BUSY_PCT, BUSY_S = 20.0, 5.0
"""Of a CPU, what a thread may take, and the least time over which that is measured."""
WORKING = ("hash of", "fresh weights", "import of", "teacher-outputs", "copy")
"""How the names of threads begin that compute something for the run."""
LEAST_PEAK, MOST_PEAK = 0.8, 1.2
"""Of the peak by another count, what may be said of it."""
PACES, SAME_PACE = 100, 1e-6
"""Steps whose pace is computed again; relative."""
LEAST_CPU, CPU_S = 0.5, 2.0
"""The least share of the CPU time that samples add up to, and what they may miss beside."""


def peak_told_wrongly(log: RunView) -> str:
    """Say that the log has another peak of this process's memory than the kernel's accounting of resources; empty when
    it has that one, or none."""
    said = None if log.memory_peak is None else log.memory_peak.host_peak_bytes
    # In kibibytes; of what this process was before it ran this program, too.
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if said is None or LEAST_PEAK * peak <= said <= MOST_PEAK * peak:
        return ""
    return (
        f"the process is said to have held {format_bytes(int(said))} of memory at its peak, by getrusage it was "
        f"{format_bytes(peak)}"
    )


def pace_told_wrongly(log: RunView) -> str:
    """Say that what is shown of a step's pace is not its tokens over its time; empty when it is."""
    for tokens, step_s, pace in zip(
        *(log.steps.values(name, -PACES) for name in ("tokens", "step_s", "tokens_per_s")),
        strict=True,
    ):
        if tokens and step_s and pace and abs(pace * step_s - tokens) > SAME_PACE * tokens:
            return f"{tokens:,} tokens in {step_s:.3g} s are shown as {pace:,.0f} tokens per second"
    return ""


class ProcessState(StepObserver):
    def __init__(self, threads: int, *, deterministic: bool) -> None:
        """`threads` and `deterministic` are what torch was to compute with."""
        self._settings: dict[str, Setting] = {
            **MODES,
            **{f"attention by {name}": (read, read()) for name, read in KERNELS.items()},
            "compute.threads": (torch.get_num_threads, threads),
            "compute.deterministic": (torch.are_deterministic_algorithms_enabled, deterministic),
        }
        self._within: dict[str, object] = {}
        """What torch computed with inside a step, where it was something else."""
        self._steps, self._collected = 0, 0
        self._before, self._told = look_at(os.getpid()), set[str]()
        self._begun_unix_s, self._begun_cpu_s = time.time(), _cpu_s()

    def forwarded(self, *given: object) -> None:
        self._within |= {
            name: found
            for name, (read, value) in self._settings.items()
            if (found := read()) != value
        }

    def look(self) -> Iterator[str]:
        """Yield what is not as it was set up, each thing once; called after each step."""
        self.forwarded()
        for name, found in self._within.items():
            if name in self._settings:
                value = self._settings.pop(name)[1]
                yield f"{name} is to be {value}, and torch computes with {found}: something else has set it"
        self._within.clear()
        if not self._steps:
            self._collected = _collections()
        self._steps += 1
        times = _collections() - self._collected
        if self._steps == COLLECTED_STEPS and times > COLLECTED_STEPS / 2:
            yield f"all objects of Python are gone through {times} times in {COLLECTED_STEPS} steps (gc.collect)"
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

    def cpu_told_wrongly(self, log: RunView) -> str:
        """Say that the samples of this process's CPU use do not add up to the CPU time that it has taken since this was
        made; empty when they do, or do not tell."""
        at_s = np.asarray(log.hosts.column("unix_s"))
        pcts = np.asarray(log.hosts.column("trainer_cpu_pct"))
        # Each is since the look before it; NaN where there is none.
        passed_s = np.diff(at_s)
        known = np.isfinite(pcts[1:]) & (at_s[:-1] >= self._begun_unix_s)
        covered_s = float(passed_s[known].sum())
        said_s = float((pcts[1:] * passed_s)[known].sum()) / 100
        used_s = _cpu_s() - self._begun_cpu_s
        # What was used between the samples, at most.
        beside_s = (time.time() - self._begun_unix_s - covered_s) * (os.cpu_count() or 1)
        if LEAST_CPU * (used_s - beside_s) - CPU_S <= said_s <= used_s / LEAST_CPU + CPU_S:
            return ""
        return (
            f"the samples of this process's CPU use (trainer_cpu_pct) make {said_s:.1f} s in {covered_s:.0f}, by "
            f"getrusage it has used {used_s:.1f} s"
        )


def _collections() -> int:
    """Return how often all objects were gone through, by whom ever."""
    return int(gc.get_stats()[-1]["collections"])


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
