"""Stretches of a log as columns: what a view keeps of steps and readings, and the other lines as they are.

Nearly every line of a long log is a step or a reading, and of those a view keeps numbers in columns. A
`Pack` holds the numbers of some hundred lines column by column, so that a view takes them without looking
at each line again, and so that another process can make it: it is a few flat pieces of bytes. Lines of
other kinds are in it as they stand in the file.

A pack stands for lines of which every one was decoded, checked against its type, and found to follow the
one before it. What opens a session, what is no record and what breaks the order is never in one: those
lines are read one by one. `sums` tell later whether these lines still stand in the file.
"""

from __future__ import annotations

import math
import struct
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BytesIO
from itertools import accumulate
from operator import truediv
from typing import Any

import msgspec

from engine.errors import RunLogError
from engine.limits import LOG_ELAPSED, LOG_GPU, LOG_LINE, LOG_NUMBER
from engine.log.events import GpuSample, HostSample, LogOpened, Note, RunStarted, StepDone
from engine.log.extremes import Ranges, ranges_of
from engine.log.read import NOT_JSON, decode_line
from engine.log.skim import Skimmed, StepRow, decode_rows
from engine.log.table import GPU_FIELDS, HOST_FIELDS

NOT_A_READING = frozenset({"v", "seq", "t_s", "nf", "index", "absent"})
"""Fields of a sample that nobody measured."""
PACKED_STEPS = (*StepRow.__struct_fields__[3:-1], "tokens_per_s")
PACKED_HOSTS = tuple(name for name in HOST_FIELDS if name != "unix_s")
PACKED_GPUS = tuple(name for name in GPU_FIELDS if name != "unix_s")
TAIL_BYTES = 1 << 10
RANGED = ("loss", "ce", "kd", "step_s")
"""Columns of steps whose least and greatest values are wanted as soon as a run is on screen."""
_RANGED = [PACKED_STEPS.index(name) + 1 for name in RANGED]
_COUNTS = ("step", "rows", "tokens", "labelled", "position")
"""Columns of steps that are there and finite in every row."""
_TOKENS, _STEP_S = PACKED_STEPS.index("tokens"), PACKED_STEPS.index("step_s")


class Columns(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Columns of equal length, the first of them `t_s`."""

    rows: int
    numbers: memoryview
    """float64, one column behind the other."""
    absent: dict[int, bytes]
    """By the place of a column: a byte for each row, 1 where it is absent. Only of those that have one."""
    ranges: dict[int, Ranges] = {}
    """By the place of a column."""

    def numbers_of(self, place: int) -> memoryview:
        return self.numbers[8 * place * self.rows : 8 * (place + 1) * self.rows]

    def absent_of(self, place: int) -> bytes:
        return self.absent.get(place) or bytes(self.rows)


class Pack(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Whole lines of a log, one after the other, none of which opens a session."""

    begin: int
    end: int
    """Which bytes of the file they are."""
    first: int
    """`seq` of the first of them."""
    lines: int
    earliest_s: float
    latest_s: float
    last_s: float
    """Least, greatest and last `t_s`."""
    in_order: bool
    """Whether `t_s` never goes back."""
    heard_s: float | None
    """`t_s` of the last line that is no note."""
    steps: Columns | None
    phases: bytes
    """JSON, of the last step."""
    hosts: Columns | None
    gpus: dict[int, Columns]
    """By the index of the GPU."""
    readings: list[bytes]
    """The samples that tell what is the newest value of each reading, in their order."""
    others: list[bytes]
    """The lines that are neither steps nor readings."""
    places: list[tuple[int, int, float]] = []
    """Where the log can be read again: how many lines are before, at which byte, and `t_s` of the line before."""
    sums: tuple[int, int] = (0, 0)
    """CRC-32 of all its bytes, and of the last TAIL_BYTES of them (of all, where they are fewer)."""


def pack_lines(parts: Sequence[bytes], begin: int) -> Pack | None:
    """Whole lines in some parts, which begin at a byte of the file and between which the log can be read again;
    None when they want to be read one by one."""
    rows: list[Skimmed] = []
    raw: list[bytes] = []
    ends = []
    for part in parts:
        try:
            rows += decode_rows(part)
        except (*NOT_JSON, LookupError, ValueError):
            rows += _decode_each(part)
        # The decoder passes over empty lines; `readlines` counts twice as fast as `count` does.
        raw += BytesIO(part).readlines()
        if len(rows) != len(raw) or len(max(raw, key=len, default=b"")) > LOG_LINE.most:
            return None
        ends.append(len(rows))
    kinds = set(map(type, rows))
    if not rows or LogOpened in kinds or RunStarted in kinds or StepDone in kinds:
        return None
    try:
        pack = _packed(raw, rows, kinds, begin, begin + sum(map(len, parts)))
    except OverflowError:
        return None
    places = _places(parts, ends, rows, begin)
    return pack and msgspec.structs.replace(pack, places=places, sums=_sums(parts))


def is_sound(pack: Pack) -> bool:
    """Whether a pack that anybody may have made can be shown: its pieces fit each other, and its lines and
    numbers are what a reader accepts. What made it here needs no such look."""
    tables = [(pack.steps, PACKED_STEPS), (pack.hosts, PACKED_HOSTS)]
    tables += [(one, PACKED_GPUS) for one in pack.gpus.values()]
    offsets = [pack.begin, *(offset for _, offset, _ in pack.places), pack.end]
    counts = [0, *(lines for lines, _, _ in pack.places), pack.lines]
    times = [pack.earliest_s, pack.latest_s, pack.last_s, *(t_s for *_, t_s in pack.places)]
    times += [] if pack.heard_s is None else [pack.heard_s]
    if not (
        pack.begin >= 0
        and offsets == sorted(offsets)
        and counts == sorted(counts)
        and all(0 <= index <= LOG_GPU.most for index in pack.gpus)
        and all(0 <= t_s <= LOG_ELAPSED.most for t_s in times)
        and all(_is_table(one, names) for one, names in tables if one is not None)
    ):
        return False
    try:
        samples = [decode_line(line, "") for line in pack.readings]
        others = [decode_line(line, "") for line in pack.others]
    except (RunLogError, *NOT_JSON):
        return False
    return all(isinstance(one, HostSample | GpuSample) for one in samples) and not any(
        isinstance(one, LogOpened | RunStarted | StepDone) for one in others
    )


def _is_table(columns: Columns, names: Sequence[str]) -> bool:
    rows, count = columns.rows, len(names) + 1
    if rows < 1 or len(columns.numbers) != 8 * rows * count:
        return False
    for place, absent in columns.absent.items():
        if not 0 <= place < count or len(absent) != rows or absent.strip(b"\0\1"):
            return False
    found = [array("d", columns.numbers_of(place).cast("d")) for place in range(count)]
    whole = [0, *(names.index(name) + 1 for name in _COUNTS if name in names)]
    if any(any(columns.absent_of(at)) or not all(map(math.isfinite, found[at])) for at in whole):
        return False
    if min(found[0]) < 0 or max(found[0]) > LOG_ELAPSED.most or not all(map(_is_in_range, found)):
        return False
    return all(
        place in _RANGED and ranges == ranges_of(found[place], columns.absent_of(place))
        for place, ranges in columns.ranges.items()
    )


def _is_in_range(column: array[float]) -> bool:
    most = float(LOG_NUMBER.most)
    # Seldom is a number not finite; then each is looked at.
    return max(map(abs, column)) <= most or not any(most < abs(one) < math.inf for one in column)


def _sums(parts: Sequence[bytes]) -> tuple[int, int]:
    whole = 0
    for part in parts:
        whole = zlib.crc32(part, whole)
    tail = parts[-1][-TAIL_BYTES:]
    if len(tail) < TAIL_BYTES:
        tail = b"".join(parts)[-TAIL_BYTES:]
    return whole, zlib.crc32(tail)


def _places(
    parts: Sequence[bytes], ends: Sequence[int], rows: Sequence[Skimmed], begin: int
) -> list[tuple[int, int, float]]:
    offsets = accumulate(map(len, parts), initial=begin)
    next(offsets)
    return [(n, offset, rows[n - 1].t_s) for n, offset in zip(ends, offsets, strict=True)]


def _decode_each(lines: bytes) -> list[Skimmed]:
    """As `decode_rows`, for lines among which some are of a form of their own; none when one is no record."""
    rows: list[Skimmed] = []
    for line in lines[:-1].split(b"\n"):
        try:
            rows += decode_rows(line) or [decode_line(line, "")]
        except (*NOT_JSON, LookupError, ValueError):
            try:
                rows.append(decode_line(line, ""))
            except RunLogError:
                return []
    return rows


def _packed(
    raw: Sequence[bytes], rows: Sequence[Skimmed], kinds: set[type], begin: int, end: int
) -> Pack | None:
    steps, hosts, gpus = None, None, {}
    phases = b""
    readings: list[int] = []
    others: list[int] = []
    if kinds == {StepRow}:
        seqs, times, steps = _step_columns(rows)
        phases = bytes(rows[-1].phases)  # type: ignore[union-attr,arg-type]
    else:
        seqs, times = tuple([row.seq for row in rows]), tuple([row.t_s for row in rows])
        for key, places in _by_kind(rows, kinds):
            some: Any = [rows[place] for place in places]
            if key is StepRow:
                steps, phases = _step_columns(some)[2], bytes(some[-1].phases)
            elif key is HostSample:
                hosts, telling = _sample_columns(some, PACKED_HOSTS)
                readings += [places[row] for row in telling]
            elif isinstance(key, int):
                gpus[key], telling = _sample_columns(some, PACKED_GPUS)
                readings += [places[row] for row in telling]
            else:
                others += places
    earliest_s = min(times)
    if not earliest_s >= 0 or seqs != tuple(range(seqs[0], seqs[0] + len(seqs))):
        return None
    heard = (place for place in range(len(rows) - 1, -1, -1) if type(rows[place]) is not Note)
    last_heard = next(heard, None)
    return Pack(
        begin=begin,
        end=end,
        first=seqs[0],
        lines=len(seqs),
        earliest_s=earliest_s,
        latest_s=max(times),
        last_s=times[-1],
        in_order=list(times) == sorted(times),
        heard_s=None if last_heard is None else times[last_heard],
        steps=steps,
        phases=phases,
        hosts=hosts,
        gpus=gpus,
        readings=[raw[place][:-1] for place in sorted(readings)],
        others=[raw[place][:-1] for place in sorted(others)],
    )


def _by_kind(rows: Sequence[Any], kinds: set[type]) -> Iterator[tuple[type | int, list[int]]]:
    """The places of the rows of each kind; those of each GPU under its index."""
    types = list(map(type, rows))
    for kind in kinds:
        places = [place for place, one in enumerate(types) if one is kind]
        if kind is GpuSample:
            for index in {rows[place].index for place in places}:
                yield index, [place for place in places if rows[place].index == index]
        else:
            yield kind, places


def _step_columns(rows: Sequence[Any]) -> tuple[tuple[int, ...], tuple[float, ...], Columns]:
    """`seq`; `t_s`; and that with PACKED_STEPS as columns. This is where the time of a long log goes."""
    seqs, times, _, *columns, _ = zip(*map(msgspec.structs.astuple, rows), strict=True)
    pace = _pace(columns[_TOKENS], columns[_STEP_S])
    packed = _columns([times, *columns, pace], len(rows))
    ranges = {
        place: ranges_of(array("d", packed.numbers_of(place).cast("d")), packed.absent_of(place))
        for place in _RANGED
    }
    return seqs, times, msgspec.structs.replace(packed, ranges=ranges)


def _pace(tokens: Sequence[int], step_s: Sequence[Any]) -> Sequence[float | None]:
    """Tokens per second; absent where no time passed."""
    try:
        if math.isfinite(sum(step_s)) and min(step_s) > 0:
            return list(map(truediv, tokens, step_s))
    except TypeError:
        pass  # one of them is absent
    return [
        number / seconds if seconds is not None and seconds > 0 else None
        for number, seconds in zip(tokens, step_s, strict=True)
    ]


def _columns(columns: Iterable[Sequence[float | None]], rows: int) -> Columns:
    pack: Callable[..., bytes] = struct.Struct(f"{rows}d").pack
    numbers, absent = [], {}
    for place, column in enumerate(columns):
        try:
            numbers.append(pack(*column))
        except struct.error:
            numbers.append(pack(*[math.nan if entry is None else entry for entry in column]))
            absent[place] = bytes([entry is None for entry in column])
    return Columns(rows, memoryview(b"".join(numbers)), absent)


def _sample_columns(samples: Sequence[Any], names: Sequence[str]) -> tuple[Columns, list[int]]:
    """`t_s` and the named readings as columns; and the places of those samples that alone give the newest value
    of each reading and the reason of each that is gone: the last that has it, the last that says why it has
    not, and the last of all."""
    fields = samples[0].__struct_fields__
    by_name = dict(
        zip(fields, zip(*map(msgspec.structs.astuple, samples), strict=True), strict=True)
    )
    telling = {len(samples) - 1}
    said: dict[str, int] = {}
    for place, absent in enumerate(by_name["absent"]):
        if absent:
            said |= dict.fromkeys(absent, place)
    telling.update(said.values())
    for name in fields:
        column = by_name[name]
        if column[-1] is None and name not in NOT_A_READING and column.count(None) < len(column):
            telling.add(max(place for place, value in enumerate(column) if value is not None))
    if "clock_event_reasons" in by_name:
        reasons = by_name["clock_event_reasons"]
        slowed = {
            reason: one.slowed for reason, one in dict(zip(reasons, samples, strict=True)).items()
        }
        by_name["slowed"] = tuple([slowed[reason] for reason in reasons])
    columns = [by_name["t_s"], *(by_name[name] for name in names)]
    return _columns(columns, len(samples)), sorted(telling)
