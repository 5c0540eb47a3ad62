"""A `Reading` is a number with its source, or a reason why there is none.

    Reading(value=25276510208, source="/proc/meminfo MemTotal", absent=None)
    Reading(value=None, source="nvmlDeviceGetMemoryInfo", absent="Not Supported")

This rules out three ways in which a monitor can mislead: a missing number has no value that could be drawn as
0, -1 or inf; a number cannot lose its source; a reason cannot be empty. So a chart shows a gap, a budget
declines to answer, and the user sees why.

Invariant: exactly one of `value` and `absent` is given. A float that is not finite is no reading.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    value: float | int | str | None
    source: str
    """The file and key, or the call: `/proc/meminfo MemTotal`, `nvmlDeviceGetPowerUsage`."""
    absent: str | None
    """Reason why there is no value. It contains no counter or time, so that it changes only when the cause does."""

    def __post_init__(self) -> None:
        assert (self.value is None) != (self.absent is None) and self.source, self
        assert self.absent != "" and (
            not isinstance(self.value, float) or math.isfinite(self.value)
        ), self

    @property
    def number(self) -> float | int | None:
        """Return the value of a numeric reading, None when it is absent."""
        assert not isinstance(self.value, str), self
        return self.value

    def __str__(self) -> str:
        return f"not measured ({self.absent})" if self.value is None else str(self.value)


def measured(value: float | int | str, source: str) -> Reading:
    """Make a reading from a value and its source."""
    return Reading(value=value, source=source, absent=None)


def absent(reason: str, source: str) -> Reading:
    """Make a reading without a value, from the reason and the source that was read."""
    return Reading(value=None, source=source, absent=reason)


def event_fields(name: str, reading: Reading) -> dict[str, float | int | str | None]:
    """Return flat fields of a log line: `name`, `name_source` and, without a value, `name_absent`."""
    fields: dict[str, float | int | str | None] = {
        name: reading.value,
        f"{name}_source": reading.source,
    }
    if reading.absent is not None:
        fields[f"{name}_absent"] = reading.absent
    return fields
