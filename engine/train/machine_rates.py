"""What this machine does in a second: measured by one large matmul and one large copy, and kept over runs.

    ~/.cache/apr-workbench/rates/<device, dtype, threads>.json    the newest KEPT measurements, or below $XDG_CACHE_HOME

Rates are an upper bound of what the parts of a step reach. What earlier runs measured says whether the machine itself
has become slower: a clock that is throttled, a power limit, somebody else's work.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch

from engine import limits
from engine.errors import BadInput
from engine.files import read_json_object, user_cache
from engine.machine.accounts import Accounts, between, look

SIDE = {"cuda": 4096, "cpu": 768}
"""Of the square matrices that are multiplied: 12 ms on a slow GPU, 20 on two slow cores."""
COPIED_BYTES = {"cuda": 256 << 20, "cpu": 32 << 20}
ROUNDS = 3
KEPT = 32
LEAST_KEPT = 3
"""Measurements from which is said what is usual."""


@dataclass(frozen=True, slots=True)
class Rates:
    flops: float
    bytes: float

    def seconds(self, flops: float = 0.0, moved: float = 0.0) -> float:
        return flops / self.flops + moved / self.bytes

    def lower(self, other: Rates) -> Rates:
        return Rates(min(self.flops, other.flops), min(self.bytes, other.bytes))


def measure(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measure a square matmul, and a copy from memory to memory of the device."""
    side, copied = SIDE[device.type], COPIED_BYTES[device.type]
    left = torch.ones(side, side, device=device, dtype=dtype)
    source = torch.ones(copied // 4, device=device)
    target = torch.empty_like(source)
    matmul_s = _shortest(lambda: left @ left, device)
    copy_s = _shortest(lambda: target.copy_(source), device)
    return Rates(2.0 * side**3 / matmul_s, 2.0 * copied / copy_s)


def _shortest(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(ROUNDS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun_s = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun_s)
    return min(times[1:])


class KeptRates:
    """What earlier runs have measured on this device, in this dtype, with as many threads."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        # A home may be shared by machines: a GPU is known by its name, CPUs by their machine.
        name = f"{platform.node()} {os.cpu_count()} CPUs"
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
        parts = (name, str(dtype).removeprefix("torch."), f"{torch.get_num_threads()} threads")
        self._path = user_cache("rates") / (re.sub(r"\W+", "-", " ".join(parts)).lower() + ".json")

    @property
    def usual(self) -> Rates | None:
        """The medians; None from fewer than LEAST_KEPT measurements."""
        kept = self._read()
        if len(kept) < LEAST_KEPT:
            return None
        flops, moved = zip(*kept, strict=True)
        return Rates(statistics.median(flops), statistics.median(moved))

    def add(self, rates: Rates) -> None:
        """Keep one more. What cannot be written is not kept: a run does not end by it."""
        kept = [*self._read(), astuple(rates)][-KEPT:]
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            new.write_text(json.dumps({"rates": kept}), encoding="utf-8")
            new.replace(self._path)

    def _read(self) -> list[tuple[float, float]]:
        try:
            found = read_json_object(
                self._path, "rates of this machine", limits.RUN_FILE, having=("rates",)
            )
            return [(float(flops), float(moved)) for flops, moved in found["rates"]]
        except (BadInput, TypeError, ValueError):
            return []


def others_want_the_cpus(since: Accounts | None = None) -> bool:
    """Say whether more wants to run than the CPUs and the trainer's own threads, or others have had since then what the
    threads of this process wanted: rates of such a time say nothing. The load of a minute comes late."""
    now = look() if since is not None else None
    if since is not None and now is not None and between(since, now).crowded:
        return True
    load = os.getloadavg()[0]
    return load > torch.get_num_threads() + 1 or load > (os.cpu_count() or 1) + 1
