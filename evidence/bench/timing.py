"""Timing on the device, with arms in turns.

Times are measured with CUDA events around the work, after a warm-up. Arms take turns within one run, so that
clock drift affects all of them alike. With `queue_first` the device waits until the host has launched a call, as
within a step that was launched while the previous one was running; the time is then the device's alone. On a
CPU the host's clock is used, and only ratios are meaningful.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from evidence.bench.rows import Timing

WAIT_CYCLES = 20_000_000
"""Cycles of the GPU's clock: about 10 ms, longer than a host needs for its launches."""


def time_arms(
    arms: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int = 20,
    warm_up: int = 3,
    inner: int = 1,
    queue_first: bool = False,
) -> dict[str, Timing]:
    """Measure each arm's time for one call. `inner` calls are timed together, `rounds` times, with arms in
    turns."""
    for arm in arms.values():
        for _ in range(warm_up):
            arm()
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            samples[name].append(_time(arm, device, inner, queue_first))
    return {name: _summary(values) for name, values in samples.items()}


def _time(arm: Callable[[], object], device: torch.device, inner: int, queue_first: bool) -> float:
    if device.type != "cuda":
        begun = time.perf_counter()
        for _ in range(inner):
            arm()
        return (time.perf_counter() - begun) / inner
    begin: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    if queue_first:
        torch.cuda._sleep(WAIT_CYCLES)  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(inner):
        arm()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / inner


def _summary(values: list[float]) -> Timing:
    values = sorted(values)
    median = statistics.median(values)
    low, high = values[len(values) // 10], values[-1 - len(values) // 10]
    return Timing(seconds=median, spread=(high - low) / median)
