"""Format numbers for display, and parse times and shares that users type. Records keep SI base units (bytes,
seconds); text is made only for display.

A number that is not known is `None` in a record and "not measured" in text, never 0 or -1. A number that is NaN or
infinite is written out (`NaN`, `+inf`), because the reader must see it. A number that is not zero never reads as
zero.

Each threshold between units is the value from which the smaller unit's text would round up to the next unit, so that
1023.9 bytes are `1.0 KiB` and never `1024 B`.
"""

from __future__ import annotations

import math
import re

from engine.errors import UsageError

NOT_MEASURED = "not measured"


def _without_digits(value: float | None) -> str:
    """Return the text of a number that is absent, NaN or infinite."""
    if value is None:
        return NOT_MEASURED
    if math.isnan(value):
        return "NaN"
    return "+inf" if value > 0 else "-inf"


def format_bytes(count: float | None) -> str:
    """Format bytes: 1536 -> '1.5 KiB'."""
    if count is None or not math.isfinite(count):
        return _without_digits(count)
    size = float(count)
    if 0 < abs(size) <= 0.5:
        return f"{size:.1g} B"
    if abs(size) < 1023.5:
        return f"{size:z.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if abs(size) < 1023.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def format_seconds(seconds: float | None) -> str:
    """Format seconds: 0.0123 -> '12 ms', 75 -> '1m15s', 7260 -> '2h01m'; minutes and hours are rounded down."""
    if seconds is None or not math.isfinite(seconds):
        return _without_digits(seconds)
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if 0 < seconds < 0.0009995:
        return f"{seconds * 1e6:.0f} µs" if seconds > 0.5e-6 else f"{seconds:.1e} s"
    if seconds < 0.9995:
        return f"{seconds * 1000:z.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = whole // 60
    if minutes < 48 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes // 1440}d{minutes % 1440 // 60:02d}h"


def format_count(count: float | None) -> str:
    """Format a count: 12345 -> '12.3k'; a rate under ten keeps two digits: 0.25 -> '0.25'."""
    if count is None or not math.isfinite(count):
        return _without_digits(count)
    size = float(count)
    if abs(size) < 9.95 and not size.is_integer():
        return f"{size:.2g}"
    if abs(size) < 999.5:
        return f"{size:z.0f}"
    for unit in ("k", "M", "G"):
        size /= 1000
        if abs(size) < 999.95:
            return f"{size:.1f}{unit}"
    return f"{size / 1000:.1f}T"


def format_value(value: float | None, digits: int = 4) -> str:
    """Format a loss or a norm with `digits` decimals, or as 1.234e-05 or 1.234e+05 if the decimals would hide its
    value."""
    if value is None or not math.isfinite(value):
        return _without_digits(value)
    smallest = 10.0**-digits
    if abs(value) >= 10_000 - smallest / 2 or 0 < abs(value) < smallest:
        return f"{value:.3e}"
    return f"{value:z.{digits}f}"


def format_need(needed_bytes: int, available_bytes: int | None) -> str:
    """Format needed and available memory: `31.2 GiB of 80.0 GiB available`."""
    if available_bytes is None:
        return format_bytes(needed_bytes)
    return f"{format_bytes(needed_bytes)} of {format_bytes(available_bytes)} available"


def format_capability(capability: tuple[int, int]) -> str:
    """Format the compute capability of a GPU: `9.0`."""
    return f"{capability[0]}.{capability[1]}"


def parse_time(what: str, text: str) -> float:
    """Parse seconds from `90s`, `5m`, `1h30m` or `90`. Raises UsageError."""
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    parts = re.fullmatch(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?", text)
    if parts is None or not any(parts.groups()):
        raise UsageError(f"{what}: expected a time as 90s, 5m or 1h30m, found {text!r}")
    return sum(float(n) * unit for n, unit in zip(parts.groups(), (3600, 60, 1), strict=True) if n)


def parse_share(what: str, text: str) -> float:
    """Parse a fraction from `5%` or `0.05`. Raises UsageError for a number that could mean either."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text)
    if match is None or (not match[2] and float(match[1]) >= 1):
        raise UsageError(f"{what}: expected a share as 5% or 0.05, found {text!r}")
    return float(match[1]) / (100 if match[2] else 1)
