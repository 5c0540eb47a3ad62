"""Columns of numbers that grow for as long as a run lasts, shared by every snapshot of them.

A column is an array of float64 and, beside it, one byte per row that says whether the number is
absent: NaN is a number that was logged, absence is not a number. Rows are only ever added behind
the last, so a snapshot is the storage and a length, costs nothing, and never changes. Cutting back,
which a resumed run does, makes new storage.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from engine.log.extremes import Extremes, Known, Range

Column = Sequence[float | None]
Packed: TypeAlias = "tuple[Sequence[memoryview], Sequence[bytes]]"
"""The bytes of the numbers of a column, float64, and a byte for each that is 1 where it is absent: both in
pieces."""

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
clock that was set back catches up, it stands still."""
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


class Table:
    """Named columns of equal length: numbers, each of which may be absent."""

    __slots__ = ("_absent", "_extremes", "_known", "columns", "length")

    def __init__(self, fields: Iterable[str]) -> None:
        self.columns: dict[str, array[float]] = {name: array("d") for name in fields}
        """The storage, which may be longer than this snapshot: read it with `value` and
        `values`."""
        self._absent: dict[str, bytearray] = {name: bytearray() for name in self.columns}
        self._extremes: dict[str, Extremes] = {}
        self._known: dict[str, list[Known]] = {name: [] for name in self.columns}
        """Ranges that came with the rows."""
        self.length = 0

    def extended(self, rows: Iterable[Mapping[str, float | None]]) -> Table:
        """This table and `rows` behind it; a column that a row does not name is absent in it."""
        rows = list(rows)
        return self.extended_by({name: [row.get(name) for row in rows] for name in self.columns})

    def extended_by(self, columns: Mapping[str, Column]) -> Table:
        """This table and as many rows as each of `columns` has entries; all columns are named.

        Storage is shared when this is the newest snapshot, else copied: one table can grow in two
        ways.
        """
        return self.extended_packed({name: pack(columns[name]) for name in self.columns})

    def extended_packed(
        self, packed: Mapping[str, Packed], known: Mapping[str, Sequence[Known]] | None = None
    ) -> Table:
        """As `extended_by`, of columns that are packed already; `known` are ranges of some of the new rows,
        which are counted from 0, by name."""
        (rows,) = {sum(map(len, absent)) for _, absent in packed.values()}
        table = self._snapshot() if self._is_newest() else self.cut(self.length)
        for name, (numbers, absent) in packed.items():
            column, gone = table.columns[name], table._absent[name]
            for piece in numbers:
                column.frombytes(piece)
            for part in absent:
                gone += part
        for name, pieces in (known or {}).items():
            table._known[name] += [(self.length + first, n, ranges) for first, n, ranges in pieces]
        table.length += rows
        return table

    def _is_newest(self) -> bool:
        return all(len(column) == self.length for column in self.columns.values())

    def _snapshot(self) -> Table:
        table = Table.__new__(Table)
        table.columns, table._absent, table.length = self.columns, self._absent, self.length
        table._extremes, table._known = self._extremes, self._known
        return table

    def first(self, length: int) -> Table:
        """The first `length` rows, of the same storage."""
        table = self._snapshot()
        table.length = min(length, self.length)
        return table

    def cut(self, length: int) -> Table:
        """A new table of the first `length` rows, with storage of its own."""
        length = min(length, self.length)
        table = Table(())
        table.columns = {name: column[:length] for name, column in self.columns.items()}
        table._absent = {name: absent[:length] for name, absent in self._absent.items()}
        table._known = {
            name: [piece for piece in pieces if piece[0] + piece[1] <= length]
            for name, pieces in self._known.items()
        }
        table.length = length
        return table

    def __len__(self) -> int:
        return self.length

    def value(self, name: str, index: int) -> float | None:
        """One entry; None when it was absent, NaN only when NaN was logged. Negative indices count
        from the end."""
        row = index + self.length if index < 0 else index
        if not 0 <= row < self.length:
            raise IndexError(f"row {index} of {self.length}")
        return None if self._absent[name][row] else self.columns[name][row]

    def values(self, name: str, start: int = 0, stop: int | None = None) -> list[float | None]:
        """Entries [start, stop) of a column, as in a slice; None where absent."""
        start, stop, _ = slice(start, stop).indices(self.length)
        entries: list[float | None] = list(self.columns[name][start:stop])
        absent = self._absent[name][start:stop]
        if 1 not in absent:
            return entries
        return [None if gone else entry for entry, gone in zip(entries, absent, strict=True)]

    def range(self, name: str, start: int = 0, stop: int | None = None) -> Range:
        """The lowest and highest finite value in rows [start, stop) of a column, in time that hardly
        depends on how many rows they are."""
        extremes = self._extremes.get(name)
        if extremes is None:
            # Two threads may both make one: each is right, and one of them is kept.
            extremes = self._extremes[name] = Extremes(
                self.columns[name], self._absent[name], self._known[name]
            )
        start, stop, _ = slice(start, stop).indices(self.length)
        return extremes.of(start, stop, self.length)

    def find(self, name: str, value: float) -> int:
        """The first row of a column that never decreases whose entry is not under `value`."""
        return bisect_left(self.columns[name], value, 0, self.length)

    def last(self, name: str) -> float | None:
        """The newest entry, None when there is none or it was absent."""
        return self.value(name, -1) if self.length else None


def pack(column: Column) -> Packed:
    """A column as a table holds it."""
    try:
        return as_packed(array("d", column)), [bytes(len(column))]  # type: ignore[arg-type]
    except TypeError:
        numbers = array("d", [math.nan if entry is None else entry for entry in column])
        return as_packed(numbers), [bytes([entry is None for entry in column])]


def as_packed(numbers: array[float]) -> list[memoryview]:
    return [memoryview(numbers).cast("B")]
