"""Measure the rates of this machine: FLOP/s of a large matmul, and bytes/s of a large copy from memory to memory.

`python -m engine.runtime.rates` measures with the dtype and the threads that a run chooses here by default, and prints
one JSON line. `engine doctor` starts it as a child process, because it loads no torch and holds no GPU memory itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict

import torch

from engine.machine.rates import Rates, machine_name
from engine.runtime.device import choose_device, choose_precision, choose_threads, torch_dtype

SIDE = {"cuda": 8192, "cpu": 768}
"""Rows and columns of the square matrices that are multiplied: 2 ms on a fast GPU, 20 on two slow cores."""
COPIED_BYTES = {"cuda": 256 << 20, "cpu": 64 << 20}
"""Bytes that are copied: more than a cache holds."""
CALLS = {"cuda": 10, "cpu": 1}
"""Number of calls between two readings of the clock, so that launches do not add to the time."""
ROUNDS = 5
"""Number of timed rounds, after one that warms up."""


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measure a square matmul and a copy: the shortest of some rounds counts."""
    side, copied = SIDE[device.type], COPIED_BYTES[device.type]
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    matmul_s = _shortest(lambda: left @ right, device)
    source = torch.ones(copied // 4, device=device)
    target = torch.empty_like(source)
    copy_s = _shortest(lambda: target.copy_(source), device)
    return Rates(2.0 * side**3 / matmul_s, 2.0 * copied / copy_s)


def name_here(device: torch.device, dtype: torch.dtype) -> str:
    """Return the name under which rates of this process are kept."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return machine_name(gpu, str(dtype), torch.get_num_threads())


def _shortest(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call in the fastest round."""
    calls, times = CALLS[device.type], []
    for _ in range(ROUNDS + 1):
        _wait(device)
        begun_s = time.perf_counter()
        for _ in range(calls):
            work()
        _wait(device)
        times.append((time.perf_counter() - begun_s) / calls)
    return min(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    device = torch.device(choose_device("auto").choice)
    torch.set_num_threads(int(choose_threads(0).choice))
    dtype = torch_dtype(choose_precision("student.precision", "auto", device.type).choice)
    rates = measure_rates(device, dtype)
    print(json.dumps({"machine": name_here(device, dtype), **asdict(rates)}))
