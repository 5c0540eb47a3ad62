"""Rates of this machine, FLOP/s of a large matmul and bytes/s of a large copy, as measured by `engine doctor`.

    ~/.cache/apr-workbench/rates/<device, dtype, threads>.json    or below $XDG_CACHE_HOME

The best rates ever measured are kept, because other processes on the machine only lower a measurement.
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
"""Seconds that the measurement may take; loading torch takes most of them."""


@dataclass(frozen=True, slots=True)
class Rates:
    flops: float
    """FLOP/s of the matmul."""
    bytes: float
    """Bytes read plus bytes written per second by the copy."""

    def best(self, other: Rates) -> Rates:
        return Rates(max(self.flops, other.flops), max(self.bytes, other.bytes))


def machine_name(gpu: str, dtype: str, threads: int) -> str:
    """Return the name of the measured device: a GPU's own name, or the host's for CPUs, because hosts may share a home
    folder."""
    device = gpu or f"{platform.node()} {os.cpu_count()} CPUs {threads} threads"
    return f"{device} {dtype.removeprefix('torch.')}"


def kept_rates(machine: str) -> Rates | None:
    """Return the best rates measured on a machine of this name; None when none can be read."""
    try:
        fields = read_json_object(
            _path(machine), "rates of this machine", limits.RUN_FILE, having=("flops", "bytes")
        )
        rates = Rates(float(fields["flops"]), float(fields["bytes"]))
    except (BadInput, TypeError, ValueError):
        return None
    return rates if rates.flops > 0 and rates.bytes > 0 else None


def keep_rates(machine: str, now: Rates) -> Rates:
    """Keep the best of these rates and those kept before, and return it. Errors of writing are ignored."""
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
    """Measure matmul and copy in a child process, and return both rates as measured now. The best rates of the machine
    are kept; the sources of the returned rates name them."""
    source = "engine.runtime.rates"
    try:
        done = subprocess.run(
            child.command(source),
            env=child.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIME_LIMIT_S,
        )
        fields = json.loads(done.stdout.splitlines()[-1])
        machine, now = fields["machine"], Rates(float(fields["flops"]), float(fields["bytes"]))
    except subprocess.TimeoutExpired:
        unread = absent(f"not measured within {TIME_LIMIT_S:g} s", source)
        return unread, unread
    except (OSError, IndexError, KeyError, TypeError, ValueError):
        unread = absent("torch could not measure here: the GPU's memory may be in use", source)
        return unread, unread
    best = keep_rates(machine, now)
    return (
        measured(int(float(f"{now.flops:.3g}")), f"{machine}; {best.flops:.3g} at best here"),
        measured(int(float(f"{now.bytes:.3g}")), f"{machine}; {best.bytes:.3g} at best here"),
    )


def _path(machine: str) -> Path:
    return user_cache("rates") / (re.sub(r"\W+", "-", machine).lower() + ".json")
