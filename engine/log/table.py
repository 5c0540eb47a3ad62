"""Tables of numbers that grow for as long as a run lasts; all snapshots of a table share its columns.

A column is float64. An absent entry is a NaN with a special payload (ABSENT), because a NaN without it is a value
that was logged. Rows are only appended, so a snapshot is a reference to the storage and a length: it costs nothing
and never changes. Truncation, which a resumed run needs, makes new storage.

numpy is imported only where rows are touched, so that a screen without rows starts without it.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers: TypeAlias = NDArray[np.float64]

Column: TypeAlias = "Sequence[float | None] | Numbers"

_ABSENT_BITS = 0x7FF8_0000_0000_07A2
ABSENT: float = struct.unpack("<d", struct.pack("<Q", _ABSENT_BITS))[0]
"""A quiet NaN with a payload that survives copies and that no log can hold."""

STEP_FIELDS = (
    "step",
    "loss",
    "ce",
    "kd",
    "agreement",
    "lr",
    "grad_norm",
    "rows",
    "labelled",
    "tokens",
    "step_s",
    "data_s",
    "teacher_s",
    "wall_s",
    "outside_s",
    "position",
    "unix_s",
    "tokens_per_s",
    "clock_s",
)
"""Columns of the table of steps. `tokens_per_s` is absent if no time passed. `clock_s` is `unix_s` made
non-decreasing: it stays constant until a clock that was set back catches up."""
HOST_FIELDS = (
    "unix_s",
    "host_available_bytes",
    "trainer_rss_bytes",
    "trainer_cpu_pct",
    "load1",
    "psi_cpu_some_avg10_pct",
    "psi_memory_full_avg10_pct",
    "psi_io_full_avg10_pct",
    "major_faults_per_s",
    "duty_pct",
    "family_cpu_pct",
    "family_io_bytes_per_s",
    "memory_held_bytes",
    "memory_reserved_bytes",
    "memory_peak_bytes",
)
GPU_FIELDS = (
    "unix_s",
    "gpu_util_pct",
    "gpu_mem_util_pct",
    "gpu_mem_used_bytes",
    "family_gpu_mem_bytes",
    "gpu_power_w",
    "sm_clock_mhz",
    "gpu_temperature_c",
    "sm_util_pct",
    "sm_occupancy_pct",
    "tensor_util_pct",
    "dram_util_pct",
    "slowed",
)
HELD = 3.0
"""Maximum time for which a reading counts without a newer one, in multiples of the median time between readings."""
SPACED = 4096
"""Number of newest rows from which the median distance between the entries of a column is computed."""
_ROWS = {"step", "host", "gpu"}
"""Kinds of events that become rows of a table."""
_DERIVED = {"unix_s", "clock_s", "tokens_per_s"}


@dataclass(frozen=True, slots=True)
class Range:
    """The range of the entries in some rows of a column."""

    low: float | None
    """The lowest finite value; None when there is none."""
    high: float | None
    non_finite: bool
    """Whether any entry is NaN or infinite."""


class Table:
    """Named columns of equal length: numbers, each of which may be absent."""

    __slots__ = ("_storage", "length")

    def __init__(self, fields: Iterable[str]) -> None:
        self._storage = _Storage(dict.fromkeys(fields, array("d")))
        self.length = 0

    @property
    def columns(self) -> dict[str, Any]:
        """The storage, which may be longer than this snapshot; read it with `value` and `values`."""
        return self._storage.columns

    def extended(self, rows: Iterable[Mapping[str, float | None]]) -> Table:
        """Return this table with `rows` appended; a column that a row does not name is absent in it."""
        rows = list(rows)
        return self.extended_by({name: [row.get(name) for row in rows] for name in self.columns})

    def extended_by(self, columns: Mapping[str, Column]) -> Table:
        """Return this table with rows appended, whose entries are given by column. A column that is not given is
        absent in them; a new column is absent in the earlier rows.

        The storage is shared if this is the newest snapshot and no column is new; otherwise it is copied.
        """
        import numpy as np

        new = {name: numbers(column) for name, column in columns.items()}
        (rows,) = {len(column) for column in new.values()}
        if not rows:
            return self
        is_newest = self._storage.rows == self.length and new.keys() <= self.columns.keys()
        table = self.first(self.length) if is_newest else self.cut(self.length, adding=new)
        stored, begin, end = table.columns, self.length, self.length + rows
        for name, column in stored.items():
            if len(column) < end:
                # An older snapshot reads the same first rows from either storage.
                stored[name] = np.empty(max(end, 2 * len(column)))
                stored[name][:begin] = column[:begin]
            stored[name][begin:end] = new.get(name, ABSENT)
        table._storage.rows = table.length = end
        return table

    def first(self, length: int) -> Table:
        """Return the first `length` rows, with the same storage."""
        table = Table.__new__(Table)
        table._storage, table.length = self._storage, min(length, self.length)
        return table

    def cut(self, length: int, *, adding: Iterable[str] = ()) -> Table:
        """Return a new table of the first `length` rows with its own storage; the columns `adding` are added as
        absent."""
        import numpy as np

        table = self.first(length)
        length = table.length
        columns = {name: np.array(column[:length]) for name, column in self.columns.items()}
        for name in adding:
            columns.setdefault(name, np.full(length, ABSENT))
        table._storage = _Storage(columns, length)
        return table

    def __len__(self) -> int:
        return self.length

    def value(self, name: str, index: int) -> float | None:
        """Return one entry: None if it is absent, NaN only if NaN was logged. Negative indices count from the end."""
        row = index + self.length if index < 0 else index
        if not 0 <= row < self.length:
            raise IndexError(f"row {index} of {self.length}")
        entry: float = self.columns[name].item(row)
        # Only a NaN may stand for an absent entry: other numbers need no further test, and rules read thousands.
        return self.values(name, row, row + 1)[0] if math.isnan(entry) else entry

    def values(self, name: str, start: int = 0, stop: int | None = None) -> list[float | None]:
        """Return entries [start, stop) of a column, as in a slice; None where absent."""
        part = self.column(name, start, stop)
        if not len(part):
            return []
        entries: list[float | None] = part.tolist()
        for row in is_absent(part).nonzero()[0]:
            entries[row] = None
        return entries

    def finite(self, name: str, start: int = 0, stop: int | None = None) -> list[float]:
        """Return the finite entries in rows [start, stop) of a column."""
        import numpy as np

        part = np.asarray(self.column(name, start, stop))
        entries: list[float] = part[np.isfinite(part)].tolist()
        return entries

    def range(self, name: str, start: int = 0, stop: int | None = None) -> Range:
        """Return the lowest and highest finite value in rows [start, stop) of a column."""
        import numpy as np

        part = self.column(name, start, stop)
        finite = np.isfinite(part)
        non_finite = False
        if not finite.all():
            non_finite = not (finite | is_absent(part)).all()
            part = part[finite]
        if not len(part):
            return Range(None, None, non_finite)
        return Range(float(part.min()), float(part.max()), non_finite)

    def find(self, name: str, value: float) -> int:
        """Return the first row whose entry is at least `value`, in a non-decreasing column; the number of rows if
        there is none."""
        return self.find_each(name, (value,))[0]

    def find_each(self, name: str, values: Sequence[float]) -> list[int]:
        """Return the result of `find` for each of many values, in one call, because a call costs more than a
        search."""
        import numpy as np

        rows: list[int] = np.searchsorted(self.column(name), values).tolist()
        return rows

    def means(self, name: str, x: str, edges: Sequence[float]) -> list[float | None]:
        """Return the mean of the finite entries of a column in each of the C intervals between the C + 1
        non-decreasing `edges` on the column `x`, (C,). An interval without an entry gets the preceding entry, but for
        no longer than HELD times the median distance between entries."""
        import numpy as np

        xs, values = self.column(x), self.column(name)
        known = np.isfinite(xs) & np.isfinite(values)
        if not known.any():
            return [None] * (len(edges) - 1)
        # The time stays constant until a clock that was set back catches up.
        xs, values = np.maximum.accumulate(xs[known]), values[known]
        rows = np.searchsorted(xs, np.asarray(edges, dtype=np.float64)).tolist()
        sums = np.concatenate([[0.0], np.cumsum(values)])
        longest = HELD * float(np.median(np.diff(xs))) if len(xs) > 1 else math.inf
        means: list[float | None] = []
        for (begin, end), edge in zip(pairwise(rows), edges[1:], strict=True):
            if end > begin:
                means.append(float(sums[end] - sums[begin]) / (end - begin))
            elif begin and edge - xs[begin - 1] <= longest:
                means.append(float(values[begin - 1]))
            else:
                means.append(None)
        return means

    def spacing(self, name: str, x: str) -> float:
        """Return the median distance on `x` between consecutive entries of a column in the newest SPACED rows; 0 if
        there are fewer than two entries."""
        import numpy as np

        xs, values = (np.asarray(self.column(column, -SPACED)) for column in (x, name))
        known = xs[np.isfinite(xs) & ~is_absent(values)]
        return float(np.median(np.diff(known))) if len(known) > 1 else 0.0

    def interpolated(self, name: str, x: str, at: Sequence[float]) -> list[float]:
        """Return a column at some values of the non-decreasing column `x`, interpolated linearly between rows; before
        the first row and after the last row it is constant."""
        import numpy as np

        values: list[float] = np.interp(at, self.column(x), self.column(name)).tolist()
        return values

    def last(self, name: str) -> float | None:
        """Return the newest entry; None if there is none or it is absent."""
        return self.value(name, -1) if self.length else None

    def column(self, name: str, start: int = 0, stop: int | None = None) -> Numbers:
        """Return rows [start, stop) of a column, (N,), as they are stored: not to be changed, with ABSENT for absent
        entries."""
        start, stop, _ = slice(start, stop).indices(self.length)
        return numbers(self.columns[name][start:stop])


@dataclass(slots=True, eq=False)
class _Storage:
    """The storage that the snapshots of a table share."""

    columns: dict[str, Any]
    rows: int = 0
    """Rows of the newest snapshot; the columns may have capacity for more."""


def numbers(column: Column) -> Numbers:
    """Return a column as a table stores it. Raises TypeError for a value that is not a number."""
    import numpy as np

    if isinstance(column, np.ndarray):
        return column
    try:
        # The fastest conversion from objects to doubles.
        return np.frombuffer(struct.pack(f"{len(column)}d", *column))
    except struct.error:
        return np.frombuffer(array("d", [ABSENT if entry is None else entry for entry in column]))


def is_absent(column: Numbers) -> NDArray[np.bool_]:
    import numpy as np

    absent: NDArray[np.bool_] = column.view(np.int64) == _ABSENT_BITS
    return absent


# Events as columns.


def split(events: Sequence[Any]) -> tuple[dict[str, list[Any]], list[Any]]:
    """Split events into rows of tables, by table name (`step`, `host`, `gpu0`), and the other events."""
    groups: dict[str, list[Any]] = {}
    kinds = list(map(type, events))
    tags: dict[Any, Any] = {kind: kind.__struct_config__.tag for kind in set(kinds)}  # type: ignore[attr-defined]

    def of_kinds(tags_wanted: Container[Any]) -> list[Any]:
        of_kind = {kind for kind, tag in tags.items() if tag in tags_wanted}
        return [event for event, kind in zip(events, kinds, strict=True) if kind in of_kind]

    row_tags = _ROWS & set(tags.values())
    for tag in sorted(row_tags):
        rows = of_kinds({tag})
        if tag != "gpu":
            groups[tag] = rows
            continue
        for index in sorted({row.index for row in rows}):
            groups[f"gpu{index}"] = [row for row in rows if row.index == index]
    return groups, of_kinds(set(tags.values()) - row_tags)


def fields_of(table: str) -> list[str]:
    """Return the fields, `t_s` included, that a log line contributes to the rows of a table of this name."""
    fields = {"step": STEP_FIELDS, "host": HOST_FIELDS}.get(table, GPU_FIELDS)
    return ["t_s", *(name for name in fields if name not in _DERIVED)]


def columns_of(table: str, rows: Sequence[Any]) -> dict[str, Numbers]:
    """Return the columns of a table from its rows, as `split` gives them."""
    return {name: numbers(list(map(attrgetter(name), rows))) for name in fields_of(table)}
