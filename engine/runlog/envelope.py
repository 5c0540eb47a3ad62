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
from typing import Any

import msgspec

VERSION = 1

NON_FINITE = {"nan": math.nan, "+inf": math.inf, "-inf": -math.inf}


def name_of_non_finite(value: float) -> str:
    """The name a non-finite float has in a log: 'nan', '+inf' or '-inf'."""
    if math.isnan(value):
        return "nan"
    return "+inf" if value > 0 else "-inf"


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """The envelope. A writer fills `seq` and `t_s`; `seq` counts lines of one file from 0, across
    resumes."""

    v: int = VERSION
    seq: int = -1
    t_s: float = -1.0
    nf: dict[str, str] | None = None


class LogOpened(Event, frozen=True, kw_only=True, tag="log_opened"):
    """First line of each session of a writer: ties its monotonic `t_s` to the wall clock."""

    unix_s: float
    boot_id: str
    pid: int
    writer: str
    torn_bytes_dropped: int = 0
    """Bytes of an unfinished last line, left by a killed writer and removed on reopening."""


class Unrecognised(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a kind this version does not know: kept and shown, never an error."""

    kind: str
    v: int = VERSION
    seq: int = -1
    t_s: float = -1.0
    fields: dict[str, Any] = {}
