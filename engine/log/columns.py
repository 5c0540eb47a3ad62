"""Columns of long logs in files beside them, so that their lines need not be decoded a second time.

    columns/events-000017.columns    a segment: what the lines say that begin in the 17th CHUNK_BYTES of events.jsonl

A segment describes itself, so that each may have other columns than the one before:

    MAGIC, CRC-32 of all that follows, length of the header
    header         JSON, filled up with spaces to a multiple of 8 bytes: which lines of which log, the tables with
                   the names of their columns and their rows
    columns        float64, little-endian, one behind the other, as the header names them (they can be mapped)
    lines          those that are neither steps nor readings, verbatim, and the steps and readings
                   that tell the newest values

It holds nothing that the log does not say: any of them may be deleted. The supervisor writes them while the run goes
on (`SegmentWriter`); a viewer that had to decode the lines may leave them here. A file is written under another name,
renamed when it is whole, and never changed, so there is no lock and no order between writers. It is never synced:
what a power loss leaves of it is found out. What opens a session is never in one, nor what breaks the order or is no
record: such a stretch has no segment, and the reader of the log, who alone says what is wrong with it, reads it.

**When a segment is believed.** Its file must be whole and of this layout. Then the log is asked whether it still has
these lines:

- It is the same file, on a machine that has not restarted since. Such a log is appended to; and it is cut, but only
  behind its last whole line, or in front of what a power loss left (`engine.log.write`), after which other lines
  follow, whose numbers and microseconds are others. So where the last TAIL_BYTES of the lines stand where they stood,
  everything in front of them does.
- Anything else: a copy, a log put in its place, a machine that was started again, whose disk may have zeros where its
  memory had lines, a segment that another user wrote. Every byte is compared (CRC-32).

One doubt, and the file counts for nothing: the lines are read. What is not noticed is somebody who overwrites bytes in
the middle of a log in place. So this is for looking at a run; what proves something reads the lines.
"""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args

import msgspec
import numpy as np

from engine.errors import BadInput, RunLogError
from engine.files import open_plain, read_bytes
from engine.limits import COLUMNS_FILE, LOG_ELAPSED, LOG_FILE, LOG_GPU, LOG_LINE, LOG_NUMBER
from engine.log.events import (
    AnyEvent,
    Count,
    Elapsed,
    Known,
    LogOpened,
    Number,
    RunStarted,
    StepDone,
)
from engine.log.folder import RunFolder
from engine.log.read import (
    LINES_KEPT,
    NOT_JSON,
    FileId,
    LogReader,
    decode_line,
    decode_lines,
    id_of,
)
from engine.log.table import NOT_A_READING, columns_of, fields_of, split
from engine.log.write import read_boot_id

if TYPE_CHECKING:
    from engine.log.table import Numbers

FOLDER = "columns"
VERSION = 1
"""One more whenever the same lines would give another segment."""
CHUNK_BYTES = 1 << 20
PART_LINES = 256
"""Between two places from which the log can be read again."""
TAIL_BYTES = 1 << 10
LEFT_BYTES = 1 << 30
"""So much of a disk stays free for the run itself."""
SHARE = 0.003
"""Of a core, at most, for a supervisor to write segments."""
HELP_FROM_BYTES = 48 << 20
"""So much has to be decoded for other processes to be asked: starting one takes a fifth of a second."""
UNKNOWN = "unknown"
_HEAD = struct.Struct("<8sII")
_MAGIC = b"aprcols1"
_PARTIAL = ".partial-"
_PLACES = ("line", "byte", "t_s")
"""Where the log can be read again: how many lines are before, at which byte, and `t_s` of the line before."""
_WHOLE = {"t_s", "step", "rows", "tokens", "labelled", "position", *_PLACES}
"""Columns that are there and finite in every row."""


class StepRow(msgspec.Struct, kw_only=True, gc=False, tag_field="kind", tag="step"):
    """What a table keeps of a `StepDone`: decoded from the same line in two thirds of the time."""

    seq: Count = -1
    t_s: Elapsed = -1.0
    nf: dict[str, str] | None = None
    step: Count
    loss: Number | None
    ce: Number | None
    kd: Number | None
    agreement: Number | None
    lr: Number | None
    grad_norm: Number | None
    rows: Count
    tokens: Count
    labelled: Count
    step_s: Number | None
    data_s: Number | None
    teacher_s: Number | None
    position: Count


_skimmed: Any = StepRow
for _kind in get_args(Known):
    if _kind is not StepDone:
        _skimmed = _skimmed | _kind
_decoder = msgspec.json.Decoder(_skimmed)


class Shape(msgspec.Struct, frozen=True):
    """A table in a segment."""

    rows: Annotated[int, msgspec.Meta(ge=1, le=COLUMNS_FILE.most)]
    columns: list[str]


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a segment says of itself."""

    version: int
    boot_id: str
    """Of the machine that made it."""
    file_id: FileId
    """Of the log that it was made of: device and inode."""
    begin: Count
    end: Count
    """Which bytes of the log its lines are."""
    first: Count
    """`seq` of the first of them."""
    lines: Count
    crc: int
    """CRC-32 of all these bytes."""
    tail_crc: int
    """Of the last TAIL_BYTES of them (of all, where they are fewer)."""
    tables: dict[str, Shape] = {}
    dtype: str = "<f8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Whole lines of a log, one after the other, none of which opens a session."""

    begin: int
    end: int
    """Which bytes of the log they are."""
    first: int
    """`seq` of the first."""
    lines: int
    file_id: FileId
    """Of the log that has them."""
    tables: dict[str, dict[str, Numbers]]
    """By the names that `split` gives, with `t_s`."""
    places: dict[str, Numbers]
    rest: list[bytes]
    """The lines that are looked at one by one."""
    events: list[AnyEvent]
    """What they say."""


class Stretch(NamedTuple):
    """The whole lines that begin in one chunk of a log."""

    file_id: FileId
    begin: int
    lines: bytes


def read_stretch(log: Path, number: int) -> Stretch | None:
    """None where the last of these lines is not whole yet, or may be none. Raises OSError."""
    # The byte in front tells whether a line begins with the chunk.
    start, size = max(0, number * CHUNK_BYTES - 1), CHUNK_BYTES + bool(number)
    with open_plain(log) as file:
        file_id = id_of(os.fstat(file.fileno()))
        for more in (16 << 10, LOG_LINE.most):
            block = os.pread(file.fileno(), size + more, start)
            if end := block.find(b"\n", size - 1) + 1:
                begin = block.find(b"\n") + 1 if number else 0
                return Stretch(file_id, start + begin, block[begin:end])
    return None


def segment_of(stretch: Stretch) -> Segment | None:
    """None when the lines want to be read one by one."""
    raw = BytesIO(stretch.lines).readlines()
    events = _decoded(raw)
    # The decoder passes over empty lines.
    if len(events) != len(raw) or not events:
        return None
    first = events[0].seq
    groups, others = split(events)
    tables = {name: columns_of(name, rows) for name, rows in groups.items()}
    if (
        [event.seq for event in events] != list(range(first, first + len(events)))
        or not all(columns["t_s"].min() >= 0 for columns in tables.values())
        or not all(event.t_s >= 0 for event in others)
        or len(max(raw, key=len)) > LOG_LINE.most
        or {LogOpened, RunStarted} & set(map(type, others))
    ):
        return None
    told = [*others, *(event for name, rows in groups.items() for event in _telling(name, rows))]
    rows = sorted(event.seq - first for event in told)
    rest = [raw[row][:-1] for row in rows]
    places = np.array([*range(PART_LINES, len(raw), PART_LINES), len(raw)])
    ends = stretch.begin + np.cumsum([len(line) for line in raw])
    return Segment(
        begin=stretch.begin,
        end=stretch.begin + len(stretch.lines),
        first=first,
        lines=len(events),
        file_id=stretch.file_id,
        tables=tables,
        places={
            "line": places.astype(float),
            "byte": ends[places - 1].astype(float),
            "t_s": np.array([events[place - 1].t_s for place in places]),
        },
        rest=rest,
        events=[decode_line(line, "") for line in rest],
    )


def _decoded(raw: list[bytes]) -> list[Any]:
    """The events of lines, steps as StepRows; too few when one is no record."""
    events: list[Any] = []
    for start in range(0, len(raw), PART_LINES):
        part = raw[start : start + PART_LINES]
        try:
            events += decode_lines(_decoder, b"".join(part))
        except (*NOT_JSON, LookupError, ValueError):
            # One line of a form of its own must not make all of them slow.
            try:
                events += map(_decoded_alone, part)
            except RunLogError:
                return []
    return events


def _decoded_alone(line: bytes) -> Any:
    event = decode_line(line, "")
    if not isinstance(event, StepDone):
        return event
    return StepRow(**{name: getattr(event, name) for name in StepRow.__struct_fields__})


def _telling(table: str, rows: list[Any]) -> list[Any]:
    """The rows that alone give the newest value of each reading and the reason of each that is gone: the last
    that has it, the last that says why it has not, and the last of all."""
    if table == "step":
        return rows[-1:]
    telling = {len(rows) - 1}
    said: dict[str, int] = {}
    for place, row in enumerate(rows):
        if row.absent:
            said |= dict.fromkeys(row.absent, place)
    telling.update(said.values())
    for name in set(rows[-1].__struct_fields__) - NOT_A_READING:
        if getattr(rows[-1], name) is None:
            places = (n for n in range(len(rows) - 1, -1, -1) if getattr(rows[n], name) is not None)
            telling.update(islice(places, 1))
    return [rows[place] for place in telling]


# Files.


class SegmentFiles:
    """The segments of one log."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.folder = log.parent / FOLDER
        self._boot_id = read_boot_id()

    def path(self, number: int) -> Path:
        return self.folder / f"{self.log.stem}-{number:06}.columns"

    def load(self, number: int) -> Segment | None:
        """The segment of a chunk; None when there is none that can be believed."""
        path = self.path(number)
        try:
            data = memoryview(read_bytes(path, "columns", COLUMNS_FILE))
            magic, crc, length = _HEAD.unpack_from(data)
            if magic != _MAGIC or crc != zlib.crc32(data[_HEAD.size - 4 :]):
                return None
            header = msgspec.json.decode(data[_HEAD.size : _HEAD.size + length], type=Header)
            if header.version != VERSION or header.dtype != "<f8":
                return None
            with open_plain(self.log) as log:
                file_id = id_of(os.fstat(log.fileno()))
                if not self._stands(header, path, file_id, log.fileno()):
                    return None
            return _opened(header, data[_HEAD.size + length :], file_id)
        except (OSError, BadInput, struct.error, ValueError, KeyError, *NOT_JSON):
            return None

    def _stands(self, header: Header, path: Path, file_id: FileId, log: int) -> bool:
        """Whether the lines of a segment are in the open log, where they were."""
        is_same = (header.boot_id, header.file_id) == (self._boot_id, file_id)
        # Another user may put anything into a file; root may anyway.
        is_ours = path.stat().st_uid in (os.geteuid(), 0)
        in_part = is_same and is_ours and self._boot_id != UNKNOWN
        begin = max(header.begin, header.end - TAIL_BYTES) if in_part else header.begin
        size = header.end - begin
        if not 0 < size <= CHUNK_BYTES + LOG_LINE.most:
            return False
        found = os.pread(log, size, begin)
        crc = header.tail_crc if in_part else header.crc
        return len(found) == size and zlib.crc32(found) == crc

    def save(self, number: int, segment: Segment, lines: bytes) -> bool:
        """Keep a segment of `lines`; False where there is no room or no right to. Raises nothing."""
        tables = {**segment.tables, "places": segment.places}
        header = Header(
            version=VERSION,
            boot_id=self._boot_id,
            file_id=segment.file_id,
            begin=segment.begin,
            end=segment.end,
            first=segment.first,
            lines=segment.lines,
            crc=zlib.crc32(lines),
            tail_crc=zlib.crc32(lines[-TAIL_BYTES:]),
            tables={n: Shape(len(one["t_s"]), list(one)) for n, one in tables.items()},
        )
        head = msgspec.json.encode(header)
        head += b" " * (-len(head) % 8)
        columns = [np.asarray(c, "<f8").tobytes() for one in tables.values() for c in one.values()]
        body = b"".join([struct.pack("<I", len(head)), head, *columns, b"\n".join(segment.rest)])
        path = self.path(number)
        partial = path.with_name(f"{path.name}{_PARTIAL}{os.getpid()}-{threading.get_ident()}")
        try:
            self.folder.mkdir(exist_ok=True)
            room = os.statvfs(self.folder)
            if room.f_bavail * room.f_frsize < LEFT_BYTES:
                return False
            try:
                with partial.open("wb") as file:
                    file.write(_MAGIC + struct.pack("<I", zlib.crc32(body)) + body)
                partial.replace(path)
            except OSError:
                partial.unlink(missing_ok=True)
                raise
        except OSError:
            return False
        return True

    def make(self, number: int, *, keep: bool) -> tuple[bool, Segment | None]:
        """Whether a chunk is written whole, and its segment, if it has one; with `keep` that is kept. Raises
        OSError."""
        stretch = read_stretch(self.log, number)
        if stretch is None:
            return False, None
        segment = segment_of(stretch)
        if keep and segment is not None:
            self.save(number, segment, stretch.lines)
        return True, segment

    def sweep(self) -> None:
        """Remove what was left by those who died while they wrote. One who writes now keeps nothing then."""
        with contextlib.suppress(OSError):
            for path in self.folder.glob(f"{self.log.stem}-*{_PARTIAL}*"):
                path.unlink(missing_ok=True)


def _opened(header: Header, body: memoryview, file_id: FileId) -> Segment | None:
    """The columns and lines of a segment that anybody may have made; None where its pieces do not fit each other,
    or a reader of the log would not accept what they say."""
    tables: dict[str, dict[str, Numbers]] = {}
    for name, shape in header.tables.items():
        size = 8 * shape.rows
        if size * len(shape.columns) > len(body):
            return None
        found = [body[place * size :][:size] for place in range(len(shape.columns))]
        tables[name] = {
            column: np.frombuffer(one, "<f8").astype(np.float64, copy=False)
            for column, one in zip(shape.columns, found, strict=True)
        }
        body = body[size * len(shape.columns) :]
    if not all(_is_sound(name, columns) for name, columns in tables.items()):
        return None
    rest = bytes(body).split(b"\n") if len(body) else []
    events = [decode_line(line, "") for line in rest]
    if any(isinstance(one, LogOpened | RunStarted) or not one.t_s >= 0 for one in events):
        return None
    places = tables.pop("places")
    ends = np.array([places["line"], places["byte"] - header.begin])
    most = [[header.lines], [header.end - header.begin]]
    if (np.diff(ends, prepend=0) <= 0).any() or (ends[:, -1:] != most).any():
        return None
    return Segment(
        begin=header.begin,
        end=header.end,
        first=header.first,
        lines=header.lines,
        file_id=file_id,
        tables=tables,
        places=places,
        rest=rest,
        events=events,
    )


def _is_sound(name: str, columns: dict[str, Numbers]) -> bool:
    """Whether these are the columns that lines of a log give, in the ranges that a line is held to."""
    wanted = list(_PLACES) if name == "places" else fields_of(name)
    index = name.removeprefix("gpu")
    is_gpu = name.startswith("gpu") and index.isdecimal() and int(index) <= LOG_GPU.most
    if not (is_gpu or name in ("step", "host", "places")) or not set(wanted) <= set(columns):
        return False
    for column, values in columns.items():
        finite = np.isfinite(values)
        if column in _WHOLE and not (finite.all() and values.min() >= 0):
            return False
        if (np.abs(values[finite]) > LOG_NUMBER.most).any():
            return False
    return bool(columns["t_s"].max() <= LOG_ELAPSED.most)


class SegmentWriter:
    """Keeps the segments of the logs of one run while they are written. Used from one thread.

    The supervisor asks at each tick. A chunk that was written whole is kept, one at a time, and the next waits until
    that cost is no more than SHARE of a core, however fast the log grows. A log that grows faster is kept in part,
    and the first viewer that may does the rest. Failures are not reported: a run needs none of it.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        processor: Callable[[], float] = time.thread_time,
    ) -> None:
        self._monotonic, self._processor = monotonic, processor
        self._files = [SegmentFiles(log) for log in (run.events, run.device)]
        # The first chunk of a log opens a session.
        self._numbers = [1 for _ in self._files]
        self._next_s = monotonic()
        for files in self._files:
            files.sweep()

    def tick(self) -> None:
        """Keep one chunk more, when there is one and it is time. Raises nothing."""
        if self._monotonic() < self._next_s:
            return
        before_s = self._processor()
        for place, files in enumerate(self._files):
            if self._advance(files, self._numbers[place]):
                self._numbers[place] += 1
                break
        self._next_s = self._monotonic() + (self._processor() - before_s) / SHARE

    def _advance(self, files: SegmentFiles, number: int) -> bool:
        """Keep a chunk; False where it is not written whole yet, or cannot be read."""
        try:
            if files.log.stat().st_size < (number + 1) * CHUNK_BYTES:
                return False
            return files.load(number) is not None or files.make(number, keep=True)[0]
        except OSError:
            return False


class SegmentReader:
    """Reads the bulk of a long log as segments: out of their files, or made of its lines.

    A segment is used only where it begins exactly at the reader's place and carries on its numbers. The newest
    LINES_KEPT lines of each session stay whole, because by the clock they may be the newest of the run: a segment is
    used only when it is known that so many lines of the same session follow it.
    """

    def __init__(self, reader: LogReader, *, files: bool, keep: bool) -> None:
        """With `files` segments beside the log are used, and with `keep` those made are kept there."""
        self._reader, self._use, self._keep = reader, files, keep
        self._files = SegmentFiles(reader.path)
        self._has_asked = False
        self._ahead: deque[Segment] = deque()
        self._refused: set[int] = set()
        """Chunks that have no segment."""

    def read(self, max_bytes: int) -> tuple[list[Segment], int]:
        """Segments of about `max_bytes` that follow; and where there are none, how much to read line by line."""
        reader, ahead = self._reader, self._ahead
        begin, first = reader.read_bytes, reader.lines_read
        number = begin // CHUNK_BYTES
        try:
            status = reader.path.stat()
        except OSError:
            return [], max_bytes
        file_id = id_of(status)
        is_long = (number + 2) * CHUNK_BYTES <= status.st_size <= LOG_FILE.most
        if not is_long or reader.file_id not in (None, file_id):
            return [], max_bytes
        if self._keep and not self._has_asked:
            self._has_asked = True
            self._ask_for_help(range(number, status.st_size // CHUNK_BYTES))
        while ahead and (ahead[0].begin, ahead[0].first, ahead[0].file_id) != (
            begin,
            first,
            file_id,
        ):
            ahead.popleft()
        place = (ahead[-1].end, ahead[-1].first + ahead[-1].lines) if ahead else (begin, first)
        usable: list[Segment] = []
        while not usable or usable[-1].end - begin < max_bytes:
            later = list(ahead)[1:]
            if ahead and sum(one.lines for one in later) >= LINES_KEPT:
                usable.append(ahead.popleft())
            elif (segment := self._next(place, file_id)) is not None:
                ahead.append(segment)
                place = segment.end, segment.first + segment.lines
            else:
                break
        for segment in usable:
            places = zip(*(segment.places[name].tolist() for name in _PLACES), strict=True)
            reader.pass_over(segment.file_id, places)
        return usable, min(max_bytes, (number + 1) * CHUNK_BYTES - reader.read_bytes)

    def _next(self, place: tuple[int, int], file_id: FileId) -> Segment | None:
        """The segment that begins at a byte with a line of that number; None when there is none."""
        number = place[0] // CHUNK_BYTES
        if number in self._refused:
            return None
        found = self._files.load(number) if self._use else None
        if found is None:
            try:
                is_whole, found = self._files.make(number, keep=self._keep)
            except OSError:
                is_whole = False
            if not is_whole:
                return None
        if found is None or (found.begin, found.first, found.file_id) != (*place, file_id):
            self._refused.add(number)
            return None
        return found

    def _ask_for_help(self, numbers: range) -> None:
        """Have other processes keep the segments that there are none of, from the end; this one begins in front.
        They are a convenience: where none can be started, or one dies, this process does all there is to do."""
        missing = [n for n in numbers if not self._files.path(n).exists()]
        if len(missing) * CHUNK_BYTES < HELP_FROM_BYTES:
            return
        count = min(3, len(os.sched_getaffinity(0)) - 1)
        # -S: what site would find is in PYTHONPATH already.
        command = [sys.executable, "-S", "-m", "engine.log.columns", str(self._reader.path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        quiet = subprocess.DEVNULL
        for helper in range(count):
            share = map(str, (missing[0], missing[-1] - helper, -count))
            with contextlib.suppress(OSError):
                process = subprocess.Popen(
                    [*command, *share], stdin=quiet, stdout=quiet, stderr=quiet, env=environment
                )
                # Somebody has to hear that it has ended.
                threading.Thread(target=process.wait, name="log-helper", daemon=True).start()


def help_with(log: Path, first: int, last: int, step: int) -> None:
    """Keep the segments of chunks from the last to the first, for as long as who asked for it lives."""
    files, parent = SegmentFiles(log), os.getppid()
    for number in range(last, first, step):
        if os.getppid() != parent:
            return
        if not files.path(number).exists():
            files.make(number, keep=True)


if __name__ == "__main__":
    help_with(Path(sys.argv[1]), *map(int, sys.argv[2:]))
