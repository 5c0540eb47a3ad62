"""One line of a log: its envelope `v, seq, t_s, kind`, and what is not finite in it.

Numbers are floats or absent, never a placeholder. JSON has no NaN, so a non-finite value is written
as null with its name under `nf`: `{"loss": null, "nf": {"loss": "nan"}}`. Missing and NaN can
therefore be told apart, and every parser can read the line. A value inside a field is named by its
path, as in a JSON pointer without the first slash: `facts/gpu0_power_w`, with `~1` for a slash in a
name and `~0` for a tilde. Reading puts the values back and empties `nf`: it belongs to the line,
not to the event.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from engine.limits import LOG_COUNT, LOG_ELAPSED, LOG_GPU, LOG_NUMBER, LOG_PID, LOG_UNIX

VERSION = 1

# Numbers of records have ranges, checked where a line is decoded: whatever is read has a date, fits a
# column and can be subtracted and squared. A line with another number is a broken line.
_MOST = float(LOG_NUMBER.most)
Number = Annotated[float, Meta(ge=-_MOST, le=_MOST)]
"""What was measured. A writer names one beyond the range as it names an infinite one."""
Count = Annotated[int, Meta(ge=0, le=LOG_COUNT.most)]
Whole = Annotated[int, Meta(ge=-LOG_COUNT.most, le=LOG_COUNT.most)]
Elapsed = Annotated[float, Meta(ge=0, le=LOG_ELAPSED.most)]
"""Seconds on the monotonic clock since the log was opened."""
UnixTime = Annotated[float, Meta(ge=0, le=LOG_UNIX.most)]
"""Seconds since 1970; with any `Elapsed` added it still has a date."""
Pid = Annotated[int, Meta(ge=1, le=LOG_PID.most)]
"""Of one process: a signal to 0 or less goes to groups of them."""
GpuIndex = Annotated[int, Meta(ge=0, le=LOG_GPU.most)]

NON_FINITE = {"nan": math.nan, "+inf": math.inf, "-inf": -math.inf}


def is_written(value: float) -> bool:
    """Whether a line can hold a float as a number: not one that is NaN, infinite or beyond `Number`."""
    return abs(value) <= _MOST


def name_of_non_finite(value: float) -> str:
    """The name a float has in a log that no line can hold: 'nan', '+inf' or '-inf'."""
    if math.isnan(value):
        return "nan"
    return "+inf" if value > 0 else "-inf"


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """The envelope. A writer fills `seq` and `t_s`; `seq` counts lines of one file from 0, across
    resumes."""

    v: Count = VERSION
    seq: Count = -1
    t_s: Elapsed = -1.0
    nf: dict[str, str] | None = None


class LogOpened(Event, frozen=True, kw_only=True, tag="log_opened"):
    """First line of each session of a writer: ties its monotonic `t_s` to the wall clock."""

    unix_s: UnixTime
    boot_id: str
    pid: Pid
    writer: str
    torn_bytes_dropped: Count = 0
    """Bytes of an unfinished last line, left by a killed writer and removed on reopening."""


class Unrecognised(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a kind this version does not know: kept and shown, never an error."""

    kind: str
    v: Count = VERSION
    seq: Count = -1
    t_s: Elapsed = -1.0
    fields: dict[str, Any] = {}
