"""Make the table of a run's GPUs for the terminal, the notebook, the report and the live page.

A column is a row of `COLUMNS`: its title, and the function that makes its cell from the readings of one GPU. A
missing reading gives a cell marked as unknown, never a 0; its reason, if known, is a line below the table. A row
has the newest readings of one GPU, or their medians and peaks over the whole run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from engine.log.beats import Beat, behind
from engine.log.events import SLOWED, GpuSample
from engine.log.table import Table
from engine.log.view import RunView
from engine.units import format_bytes, format_value

UNKNOWN = "unknown"
GIB = 2**30
_NUMBER = re.compile(r"[0-9]{1,15}")
_REASONS = {
    "gpu_idle": "idle",
    "sw_power_cap": "at the power limit",
    "hw_slowdown": "slowed down by heat or power",
    "sw_thermal_slowdown": "slowed down by heat",
    "hw_thermal_slowdown": "slowed down by heat",
    "hw_power_brake": "slowed down by the power supply",
}
"""Meaning of NVML's reasons for low clocks; a reason without an entry is shown by its name."""


class Process(NamedTuple):
    """A process on a GPU."""

    pid: int
    bytes: int | None
    name: str


def read_processes(text: str) -> list[Process]:
    """Return the processes in the field `gpu_processes` of a sample; entries of another form are left out."""
    processes = []
    for entry in text.split(";"):
        pid, _, rest = entry.partition(" ")
        size, _, name = rest.partition(" ")
        if _NUMBER.fullmatch(pid) and name:
            size_bytes = int(size) if _NUMBER.fullmatch(size) else None
            processes.append(Process(int(pid), size_bytes, name))
    return processes


class Cell(NamedTuple):
    text: str
    shares: tuple[float, ...] = ()
    """Shares of a bar, 0 to 1; for memory, first the trainer's share and then the other processes'."""
    is_bad: bool = False


_MISSING = Cell(UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gpu:
    """The readings of one GPU."""

    view: RunView
    index: int
    whole_run: bool
    host: str = ""
    """Name of the GPU's host; empty in a run on one host."""
    ranks: Mapping[int, int] = field(default_factory=dict)
    """The ranks on the GPU's host, by process id."""

    @property
    def label(self) -> str:
        return f"{self.host} {self.index}".strip()

    @property
    def sample(self) -> GpuSample | None:
        return self.view.gpus.get(self.index)

    @property
    def table(self) -> Table | None:
        return self.view.gpu_tables.get(self.index)

    def read(self, name: str, over: Literal["median", "highest"] = "median") -> float | None:
        """Return the newest reading; over the whole run, the median or peak of its column, if it has one."""
        if self.whole_run and self.table is not None and name in self.table.columns:
            return over_run(self.table, name, over)
        newest: float | None = getattr(self.sample, name, None)
        return newest

    def own_bytes(self) -> tuple[float | None, bool]:
        """Return the memory of the trainer and its descendants, and whether it is only what the trainer's allocator has
        reserved, without descendants and CUDA contexts."""
        own = self.read("family_gpu_mem_bytes", "highest")
        # The allocator reports one process, without the GPU that the process uses.
        if own is not None or len(self.view.gpu_tables) > 1:
            return own, False
        if self.whole_run:
            return over_run(self.view.hosts, "memory_reserved_bytes", "highest"), True
        return getattr(self.view.host, "memory_reserved_bytes", None), True

    def others_bytes(self) -> tuple[float | None, bool]:
        """Return the memory of other processes, and whether it is an upper bound."""
        if self.whole_run and self.table is not None:
            columns = (
                self.table.values(name) for name in ("gpu_mem_used_bytes", "family_gpu_mem_bytes")
            )
            differences = [
                a - b for a, b in zip(*columns, strict=True) if a is not None and b is not None
            ]
            return max(differences, default=None), False
        (own, is_bound), used = self.own_bytes(), self.read("gpu_mem_used_bytes")
        return (None if own is None or used is None else max(0.0, used - own)), is_bound


def over_run(table: Table, name: str, over: Literal["lowest", "median", "highest"]) -> float | None:
    """Return the min, median or max of a reading over all finite entries of its column; None if there are none."""
    known = sorted(table.finite(name))
    return known[{"lowest": 0, "median": len(known) // 2, "highest": -1}[over]] if known else None


def _number(value: float) -> str:
    return f"{value:.0f}" if math.isfinite(value) else format_value(value)


def _gib(count: float) -> str:
    if not math.isfinite(count):
        return format_value(count)
    return f"{count / GIB:.1f}" if abs(count) < 99.95 * GIB else f"{count / GIB:.0f}"


def _share(part: float, whole: float | None) -> tuple[float, ...]:
    if not whole or not math.isfinite(part) or not math.isfinite(whole):
        return ()
    return (min(1.0, max(0.0, part / whole)),)


def _reading_column(
    name: str,
    over: Literal["median", "highest"] = "median",
    *,
    limit: str = "",
    text: Callable[[float], str] = _number,
) -> Callable[[_Gpu], Cell]:
    """Return the cell function for a column of numbers, which shows the number with its limit if it has one."""

    def cell(gpu: _Gpu) -> Cell:
        value, most = gpu.read(name, over), gpu.read(limit) if limit else None
        if value is None:
            return _MISSING
        shares = _share(value, 100.0 if name == "gpu_util_pct" else most)
        own, _ = gpu.own_bytes()
        if (
            shares
            and most
            and name == "gpu_mem_used_bytes"
            and own is not None
            and math.isfinite(own)
        ):
            trainer_share = min(shares[0], max(0.0, own / most))
            shares = (trainer_share, shares[0] - trainer_share)
        return Cell(text(value) if most is None else f"{text(value)}/{text(most)}", shares)

    return cell


def _trainer_cell(gpu: _Gpu) -> Cell:
    own, _ = gpu.own_bytes()
    return _MISSING if own is None else Cell(_gib(own))


def _others_cell(gpu: _Gpu) -> Cell:
    others, is_bound = gpu.others_bytes()
    return _MISSING if others is None else Cell(f"{'<=' * is_bound}{_gib(others)}")


def _clock_cell(gpu: _Gpu) -> Cell:
    value = gpu.read("sm_clock_mhz")
    if value is None:
        return _MISSING
    is_bad = _slowed_share(gpu) > 0
    return Cell(f"{_number(value)}{'!' * is_bad}", is_bad=is_bad)


def _slowed_share(gpu: _Gpu) -> float:
    """Return the share of the readings in which heat or a power brake held the clocks down."""
    if not gpu.whole_run:
        return (gpu.sample.slowed or 0.0) if gpu.sample is not None else 0.0
    known = [] if gpu.table is None else [y for y in gpu.table.values("slowed") if y is not None]
    return sum(known) / len(known) if known else 0.0


def _low_clocks_cell(gpu: _Gpu) -> Cell:
    if gpu.whole_run:
        if gpu.table is None or over_run(gpu.table, "slowed", "median") is None:
            return _MISSING
        share = _slowed_share(gpu)
        return Cell(
            f"heat or power, in {share:.0%} of the readings" if share else "", (), share > 0
        )
    words = None if gpu.sample is None else gpu.sample.clock_event_reasons
    if words is None:
        return _MISSING
    named = [f"{_REASONS[w]} ({w})" if w in _REASONS else w for w in words.split(",")]
    text = "" if words in ("", "none") else ", ".join(named)
    return Cell(text, (), not SLOWED.isdisjoint(words.split(",")))


def _processes_cell(gpu: _Gpu) -> Cell:
    text = None if gpu.whole_run or gpu.sample is None else gpu.sample.gpu_processes
    if text is None:
        return _MISSING
    ranks = gpu.ranks
    return Cell(
        ", ".join(
            f"{process.name} {process.pid}"
            + (f" (rank {ranks[process.pid]})" if process.pid in ranks else "")
            + (f" {format_bytes(process.bytes)}" if process.bytes is not None else "")
            for process in read_processes(text)
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    title: str
    cell: Callable[[_Gpu], Cell]
    reading: str = ""
    """The field of a sample whose reason for being missing is shown if the cell is unknown."""
    is_note: bool = False
    """Whether the value is shown as a line below the table, once for all GPUs with the same value."""
    is_optional: bool = False
    """Whether the column is left out if no GPU has the reading: few GPUs have performance counters, for
    example."""
    keep: int = 0
    """Priority in a narrow terminal: columns with the lowest number are left out first."""


COLUMNS = (
    Column(title="GPU", cell=lambda gpu: Cell(gpu.label), keep=99),
    Column(
        title="util %",
        cell=_reading_column("gpu_util_pct"),
        reading="gpu_util_pct",
        keep=98,
    ),
    Column(
        title="memory GiB",
        cell=_reading_column(
            "gpu_mem_used_bytes", "highest", limit="gpu_mem_total_bytes", text=_gib
        ),
        reading="gpu_mem_used_bytes",
        keep=97,
    ),
    Column(title="trainer", cell=_trainer_cell, reading="family_gpu_mem_bytes", keep=50),
    Column(title="others", cell=_others_cell, keep=50),
    Column(
        title="power W",
        cell=_reading_column("gpu_power_w", limit="gpu_power_limit_w"),
        reading="gpu_power_w",
        keep=70,
    ),
    Column(
        title="temp C",
        cell=_reading_column("gpu_temperature_c", "highest"),
        reading="gpu_temperature_c",
        keep=60,
    ),
    Column(title="SM MHz", cell=_clock_cell, reading="sm_clock_mhz", keep=65),
    Column(title="SM busy %", cell=_reading_column("sm_util_pct"), is_optional=True, keep=20),
    Column(title="tensor %", cell=_reading_column("tensor_util_pct"), is_optional=True, keep=30),
    Column(title="DRAM %", cell=_reading_column("dram_util_pct"), is_optional=True, keep=10),
    Column(title="occupancy %", cell=_reading_column("sm_occupancy_pct"), is_optional=True, keep=5),
    Column(title="low clocks", cell=_low_clocks_cell, reading="clock_event_reasons", is_note=True),
    Column(
        title="processes",
        cell=_processes_cell,
        reading="gpu_processes",
        is_note=True,
        is_optional=True,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTable:
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    """The cells of each GPU, one for each column."""
    whole_run: bool
    reasons: tuple[str, ...]
    """The known reasons of unknown cells, as lines."""

    @property
    def notes(self) -> list[str]:
        """Lines below the table, each once for all GPUs with the same value."""
        lines = []
        for at, column in enumerate(self.columns):
            gpus_by_text: dict[str, list[str]] = {}
            for row in self.rows if column.is_note else ():
                if row[at].text not in ("", UNKNOWN):
                    gpus_by_text.setdefault(" ".join(row[at].text.split()), []).append(row[0].text)
            lines += [
                f"GPU {', '.join(gpus)}: {column.title}: {text}"
                for text, gpus in gpus_by_text.items()
            ]
        return [
            *lines,
            *self.reasons,
            *["over the whole run: medians, and peaks of memory and temperature"] * self.whole_run,
        ]


def gpu_table(view: RunView, *, whole_run: bool = False) -> GpuTable:
    """Return the table of a run's GPUs. With several hosts, the host with the slowest rank comes first. The table has
    no rows if no GPU was read."""
    places = {rank: place for place, rank in enumerate(_slowest_first(view))}
    pids = {rank: report.clock.pid for rank, report in view.ranks_now.items()}
    if pids and "events" in view.clocks:
        pids[0] = view.clocks["events"].pid
    hosts = [(view.rank_hosts.get(0, ""), view), *view.hosts_now.items()]
    gpus = []
    for host, host_view in hosts:
        ranks = {
            pids[n]: n
            for n, rank_host in view.rank_hosts.items()
            if rank_host == host and n in pids
        }
        gpus += [
            _Gpu(
                view=host_view,
                index=index,
                whole_run=whole_run,
                host=host if len(hosts) > 1 else "",
                ranks=ranks,
            )
            for index in sorted(host_view.gpu_tables if whole_run else host_view.gpus)
        ]
    gpus.sort(key=lambda gpu: min((places.get(n, n) for n in gpu.ranks.values()), default=0))
    by_column = {column: [column.cell(gpu) for gpu in gpus] for column in COLUMNS}
    shown = {
        column: cells
        for column, cells in by_column.items()
        if not column.is_optional or any(cell.text != UNKNOWN for cell in cells)
    }
    unknown: dict[tuple[str, str], list[str]] = {}
    for column, cells in shown.items():
        for gpu, cell in zip(gpus, cells, strict=True):
            reason = gpu.view.absent.get(f"gpu{gpu.index}.{column.reading}")
            if cell.text == UNKNOWN and reason:
                key = gpu.label, " ".join(reason.split())
                unknown.setdefault(key, []).append(column.title)
    reasons: dict[str, list[str]] = {}
    for (label, reason), titles in unknown.items():
        reasons.setdefault(f"{', '.join(titles)} {UNKNOWN}: {reason}", []).append(label)
    return GpuTable(
        columns=tuple(shown),
        rows=tuple(zip(*shown.values(), strict=True)),
        whole_run=whole_run,
        reasons=tuple(f"GPU {', '.join(labels)}: {words}" for words, labels in reasons.items()),
    )


def _slowest_first(view: RunView) -> dict[int, Beat]:
    """Return the beats by rank, the rank with the least progress first."""
    return {beat.rank: beat for beat in sorted(view.beats, key=lambda beat: beat.reached)}


RANKS = ("rank", "host", "step", "")
RANKS_SHOWN = 16
"""Maximum number of ranks shown, the slowest first."""


def rank_rows(view: RunView) -> list[tuple[str, ...]]:
    """Return the cells of RANKS for each rank, the slowest first: its progress, and either the ranks that it waits for
    or how many ranks wait for it. After RANKS_SHOWN ranks, one row counts the rest. Empty for a run of one rank."""
    rows: list[tuple[str, ...]] = []
    late, hosts = behind(view.beats), view.rank_hosts
    names = ", ".join(str(beat.rank) for beat in late[:4]) + ", ..." * (len(late) > 4)
    waiting = f"waits for rank {names}" if late else ""
    for beat in _slowest_first(view).values():
        waits = f"{len(view.beats) - len(late)} wait for it" if beat in late else waiting
        rows.append((str(beat.rank), hosts.get(beat.rank) or UNKNOWN, str(beat.step), waits))
    if (more := len(rows) - RANKS_SHOWN) > 0:
        rows[RANKS_SHOWN:] = [("", "", "", f"{more} more have the same progress or more")]
    return rows


# Text


def rank_lines(view: RunView) -> list[str]:
    """Return the rows of ranks as text, the slowest first."""
    rows = rank_rows(view)
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(RANKS, *rows, strict=True)]
    return [
        "  ".join(f"{cell:<{wide}}" for cell, wide in zip(row, widths, strict=True)).rstrip()
        for row in (RANKS, *rows)
    ]


def gpu_lines(view: RunView, width: int = 100, *, whole_run: bool = False) -> list[str]:
    """Return the table as text for a width in cells, then the notes."""
    table = gpu_table(view, whole_run=whole_run)
    if not table.rows:
        return []
    columns = [
        (column, [column.title, *(row[at].text for row in table.rows)])
        for at, column in enumerate(table.columns)
        if not column.is_note
    ]
    for narrowest in sorted(columns, key=lambda one: one[0].keep):
        if sum(map(_width, columns)) <= width + 2 or len(columns) == 2:
            break
        columns.remove(narrowest)
    rows = zip(*([f"{cell:>{_width(one) - 2}}" for cell in one[1]] for one in columns), strict=True)
    return [*map("  ".join, rows), *(f"     {note}" for note in table.notes)]


def _width(column: tuple[Column, list[str]]) -> int:
    """Return the width of a column, with the gap after it."""
    return max(map(len, column[1])) + 2
