"""What the sampler saw of the machine's memory before a trainer ended, in one sentence."""

from __future__ import annotations

import bisect
import math

from engine.log.view import RunView
from engine.units import format_bytes

WINDOW_S = 60.0


def memory_words(view: RunView) -> str | None:
    """The least available memory and the highest pressure of the last minute; None without readings."""
    table = view.hosts
    newest = table.last("unix_s")
    if newest is None:
        return None
    begin = bisect.bisect_left(
        range(len(table)), newest - WINDOW_S, key=lambda row: table.value("unix_s", row) or 0.0
    )
    available = _finite(table.values("host_available_bytes", begin))
    pressure = _finite(table.values("psi_memory_full_avg10_pct", begin))
    if not available:
        return None
    total = view.host.host_total_bytes if view.host else None
    words = f"In its last {WINDOW_S:.0f} s the least memory available was {format_bytes(min(available))}"
    words += f" of {format_bytes(total)}" if total else ""
    words += f" and the highest memory pressure {max(pressure):.0f} %" if pressure else ""
    return f"{words}."


def _finite(values: list[float | None]) -> list[float]:
    return [v for v in values if v is not None and math.isfinite(v)]
