"""Times and shares as people write them on a command line or in a form."""

from __future__ import annotations

import re

from engine.errors import UsageError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def parse_time(what: str, text: str) -> float:
    """Seconds in `90s`, `5m`, `1h30m` or `90`. Raises UsageError."""
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    parts = re.fullmatch(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?", text)
    if parts is None or not any(parts.groups()):
        raise UsageError(f"{what}: expected a time as 90s, 5m or 1h30m, found {text!r}")
    return sum(float(n) * _UNITS[u] for n, u in zip(parts.groups(), "hms", strict=True) if n)


def parse_share(what: str, text: str) -> float:
    """The share in `5%` or `0.05`. Raises UsageError for a number that could mean either."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text)
    if match is None or (not match[2] and float(match[1]) >= 1):
        raise UsageError(f"{what}: expected a share as 5% or 0.05, found {text!r}")
    return float(match[1]) / (100 if match[2] else 1)
