"""Rates of this machine, FLOP/s of a large matmul and bytes/s of a large copy, as measured by `engine doctor`.

    ~/.cache/apr-workbench/rates/<device, dtype, threads>.json    or below $XDG_CACHE_HOME

The best that was ever measured is kept: what a part of a step may reach, whoever used the machine at other times.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from engine import child, limits
from engine.errors import BadInput
from engine.files import read_json_object, user_cache
from engine.machine.reading import Reading, absent, measured

TIME_LIMIT_S = 60.0
"""Loading torch takes most of it."""


@dataclass(frozen=True, slots=True)
class Rates:
    flops: float
    """FLOP/s of the matmul."""
    bytes: float
    """Bytes read plus bytes written per second by the copy."""

    def best(self, other: Rates) -> Rates:
        return Rates(max(self.flops, other.flops), max(self.bytes, other.bytes))


def machine_name(gpu: str, dtype: str, threads: int) -> str:
    """Name what rates are measured on: a GPU by its name, CPUs by their host, as several may share a home."""
    device = gpu or f"{platform.node()} {os.cpu_count()} CPUs {threads} threads"
    return f"{device} {dtype.removeprefix('torch.')}"


def kept_rates(machine: str) -> Rates | None:
    """Return the best rates measured on a machine of this name; None when none can be read."""
    try:
        found = read_json_object(
            _path(machine), "rates of this machine", limits.RUN_FILE, having=("flops", "bytes")
        )
        rates = Rates(float(found["flops"]), float(found["bytes"]))
    except (BadInput, TypeError, ValueError):
        return None
    return rates if rates.flops > 0 and rates.bytes > 0 else None


def keep_rates(machine: str, now: Rates) -> Rates:
    """Keep the better of these rates and those kept, and return them. What cannot be written is not kept."""
    before = kept_rates(machine)
    best = now if before is None else now.best(before)
    path = _path(machine)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_text(json.dumps(asdict(best)), encoding="utf-8")
        new.replace(path)
    return best


def measure_in_child() -> tuple[Reading, Reading]:
    """Measure matmul and copy in a process of its own, keep what is best, and return both as they are now."""
    source = "engine.runtime.rates"
    try:
        done = subprocess.run(
            child.command(source),
            env=child.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIME_LIMIT_S,
        )
        found = json.loads(done.stdout.splitlines()[-1])
        machine, now = found["machine"], Rates(float(found["flops"]), float(found["bytes"]))
    except subprocess.TimeoutExpired:
        none = absent(f"not measured within {TIME_LIMIT_S:g} s", source)
        return none, none
    except (OSError, IndexError, KeyError, TypeError, ValueError):
        none = absent("torch could not measure here: the GPU's memory may be in use", source)
        return none, none
    best = keep_rates(machine, now)
    return (
        measured(int(float(f"{now.flops:.3g}")), f"{machine}; {best.flops:.3g} at best here"),
        measured(int(float(f"{now.bytes:.3g}")), f"{machine}; {best.bytes:.3g} at best here"),
    )


def _path(machine: str) -> Path:
    return user_cache("rates") / (re.sub(r"\W+", "-", machine).lower() + ".json")
