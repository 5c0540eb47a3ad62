"""Columns of numbers that grow for as long as a run lasts, shared by every snapshot of them.

A column is float64. An entry that is absent is a NaN with bits of its own (ABSENT): NaN is a number that was
logged, absence is not a number. Rows are only ever added behind the last, so a snapshot is the storage and a
length, costs nothing, and never changes. Cutting back, which a resumed run does, makes new storage.

numpy is imported where rows are touched: a screen without rows starts without it.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from engine.log.events import GpuSample

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers: TypeAlias = NDArray[np.float64]

Column: TypeAlias = "Sequence[float | None] | Numbers"

_ABSENT_BITS = 0x7FF8_0000_0000_07A2
ABSENT: float = struct.unpack("<d", struct.pack("<Q", _ABSENT_BITS))[0]
"""A quiet NaN with a payload, which copies keep and which no log can hold."""

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
    "position",
    "unix_s",
    "tokens_per_s",
    "clock_s",
)
"""`tokens_per_s` is absent where no time passed; `clock_s` is `unix_s` that never goes back: while a
clock that was set back catches up, it is held."""
HOST_FIELDS = (
    "unix_s",
    "host_available_bytes",
    "trainer_rss_bytes",
    "trainer_cpu_pct",
    "load1",
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
    "gpu_power_w",
    "sm_clock_mhz",
    "gpu_temperature_c",
    "sm_util_pct",
    "sm_occupancy_pct",
    "tensor_util_pct",
    "dram_util_pct",
    "slowed",
)
NOT_A_READING = frozenset({"v", "seq", "t_s", "nf", "index", "absent"})
"""Fields of a sample that nobody measured."""
_DERIVED = {"unix_s", "clock_s", "tokens_per_s"}


@dataclass(frozen=True, slots=True)
class Range:
    """What is in some rows of a column."""

    low: float | None
    """Of the finite values; None when there is none."""
    high: float | None
    non_finite: bool
    """Whether one is NaN or infinite."""


class Table:
    """Named columns of equal length: numbers, each of which may be absent."""

    __slots__ = ("_storage", "length")

    def __init__(self, fields: Iterable[str]) -> None:
        self._storage = _Storage(dict.fromkeys(fields, array("d")))
        self.length = 0

    @property
    def columns(self) -> dict[str, Any]:
        """The storage, which may be longer than this snapshot: read it with `value` and `values`."""
        return self._storage.columns

    def extended(self, rows: Iterable[Mapping[str, float | None]]) -> Table:
        """This table and `rows` behind it; a column that a row does not name is absent in it."""
        rows = list(rows)
        return self.extended_by({name: [row.get(name) for row in rows] for name in self.columns})

    def extended_by(self, columns: Mapping[str, Column]) -> Table:
        """This table and as many rows as each of `columns` has entries; a column that is not named is absent in
        them, and one that is new is absent in the rows before.

        Storage is shared when this is the newest snapshot, else copied: one table can grow in two ways.
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
                # An older snapshot reads the same first rows, here or there.
                stored[name] = np.empty(max(end, 2 * len(column)))
                stored[name][:begin] = column[:begin]
            stored[name][begin:end] = new.get(name, ABSENT)
        table._storage.rows = table.length = end
        return table

    def first(self, length: int) -> Table:
        """The first `length` rows, of the same storage."""
        table = Table.__new__(Table)
        table._storage, table.length = self._storage, min(length, self.length)
        return table

    def cut(self, length: int, *, adding: Iterable[str] = ()) -> Table:
        """A new table of the first `length` rows, with storage of its own, and with more columns that are absent."""
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
        """One entry; None when it was absent, NaN only when NaN was logged. Negative indices count
        from the end."""
        row = index + self.length if index < 0 else index
        if not 0 <= row < self.length:
            raise IndexError(f"row {index} of {self.length}")
        return self.values(name, row, row + 1)[0]

    def values(self, name: str, start: int = 0, stop: int | None = None) -> list[float | None]:
        """Entries [start, stop) of a column, as in a slice; None where absent."""
        part = self._rows(name, start, stop)
        if not len(part):
            return []
        entries: list[float | None] = part.tolist()
        for row in is_absent(part).nonzero()[0]:
            entries[row] = None
        return entries

    def range(self, name: str, start: int = 0, stop: int | None = None) -> Range:
        """The lowest and highest finite value in rows [start, stop) of a column."""
        import numpy as np

        part = self._rows(name, start, stop)
        finite = np.isfinite(part)
        non_finite = False
        if not finite.all():
            non_finite = not (finite | is_absent(part)).all()
            part = part[finite]
        if not len(part):
            return Range(None, None, non_finite)
        return Range(float(part.min()), float(part.max()), non_finite)

    def find(self, name: str, value: float) -> int:
        """The first row of a column that never decreases whose entry is not under `value`."""
        import numpy as np

        return int(np.searchsorted(self._rows(name), value))

    def last(self, name: str) -> float | None:
        """The newest entry, None when there is none or it was absent."""
        return self.value(name, -1) if self.length else None

    def _rows(self, name: str, start: int = 0, stop: int | None = None) -> Any:
        start, stop, _ = slice(start, stop).indices(self.length)
        return self.columns[name][start:stop]


@dataclass(slots=True, eq=False)
class _Storage:
    """What the snapshots of a table share."""

    columns: dict[str, Any]
    rows: int = 0
    """Those of the newest snapshot; the columns may have room for more."""


def numbers(column: Column) -> Numbers:
    """A column as a table holds it; TypeError for what is no number."""
    import numpy as np

    if isinstance(column, np.ndarray):
        return column
    try:
        return np.frombuffer(array("d", column))  # type: ignore[type-var]
    except TypeError:
        return np.frombuffer(array("d", [ABSENT if entry is None else entry for entry in column]))


def is_absent(column: Numbers) -> NDArray[np.bool_]:
    import numpy as np

    absent: NDArray[np.bool_] = column.view(np.int64) == _ABSENT_BITS
    return absent


# Events as columns.


def split(events: Sequence[Any]) -> tuple[dict[str, list[Any]], list[Any]]:
    """Events that are rows of tables, by the name of their table: `step`, `host`, `gpu0`; and the others."""
    groups: dict[str, list[Any]] = {}
    kinds = list(map(type, events))
    tags: dict[Any, Any] = {kind: kind.__struct_config__.tag for kind in set(kinds)}  # type: ignore[attr-defined]
    for kind, tag in tags.items():
        if tag not in ("step", "host", "gpu"):
            continue
        rows = [event for event, one in zip(events, kinds, strict=True) if one is kind]
        if kind is not GpuSample:
            groups[tag] = rows
            continue
        for index in sorted({row.index for row in rows}):
            groups[f"gpu{index}"] = [row for row in rows if row.index == index]
    is_other = {kind: tag not in ("step", "host", "gpu") for kind, tag in tags.items()}
    return groups, [event for event, kind in zip(events, kinds, strict=True) if is_other[kind]]


def fields_of(table: str) -> list[str]:
    """What a line gives to the rows of a table by its name in `split`, with `t_s`."""
    fields = {"step": STEP_FIELDS, "host": HOST_FIELDS}.get(table, GPU_FIELDS)
    return ["t_s", *(name for name in fields if name not in _DERIVED)]


def columns_of(table: str, rows: Sequence[Any]) -> dict[str, Numbers]:
    """The rows of a table, as `split` gives them, column by column."""
    import numpy as np

    columns = {}
    for name in fields_of(table):
        entry = attrgetter(name)
        column = np.fromiter(map(entry, rows), float, len(rows))
        if (odd := np.isnan(column)).any():
            # numpy makes NaN of None, too.
            odd[odd] = [entry(rows[row]) is None for row in odd.nonzero()[0]]
            column[odd] = ABSENT
        columns[name] = column
    return columns
