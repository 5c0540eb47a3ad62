"""Store the columns of long logs in separate files, so that their lines need not be decoded a second time.

    columns/events-000017.columns    a segment: the content of the lines that begin in chunk 17 (each of
                                     CHUNK_BYTES) of events.jsonl

A segment describes itself, so segments may have different columns:

    MAGIC, CRC-32 of everything after it, length of the header
    header         JSON, padded with spaces to a multiple of 8 bytes: which lines of which log, the tables with
                   their column names and row counts
    columns        float64, little-endian, contiguous, in the order of the header (they can be mmapped)
    lines          verbatim: those that are neither steps nor readings, and the steps and readings that carry
                   the newest values

A segment holds nothing that the log does not hold, so any of them may be deleted. The supervisor writes them
while the run goes on (`SegmentWriter`); a viewer that had to decode the lines may write them too. A file is
written under a temporary name, renamed when complete and never changed, so writers need no lock and no
ordering. It is never synced: damage from a power loss is detected on reading. A segment never contains the
opening of a session, a line out of sequence or an invalid record: such a chunk has no segment, and the log
reader, which alone reports faults, reads it.

**When a segment is valid.** Its file must be complete and of this layout version. Then the log is tested for
whether it still has these lines:

- The log is the same file, on a machine that has not rebooted since. Such a log is only appended to, or cut after
  its last whole line or before the hole that a power loss left (`engine.log.write`); the lines that follow a cut
  have other sequence numbers and timestamps. So if the last TAIL_BYTES of the lines are unchanged and in place,
  everything before them is unchanged too.
- Anything else: a copy, a replaced log, a rebooted machine whose disk may have zeros where its page cache had
  lines, a segment written by another user. Then every byte is compared (CRC-32).

When any test fails the segment is ignored and the lines are decoded. Overwriting bytes in the middle of a log
in place is not detected. So segments are for looking at a run; code that verifies something reads the lines.
"""

from __future__ import annotations

import contextlib
import math
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
from functools import cached_property
from io import BytesIO
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args

import msgspec

from engine import child
from engine.errors import BadInput, RunLogError
from engine.files import open_plain, read_bytes
from engine.limits import COLUMNS_FILE, LOG_ELAPSED, LOG_FILE, LOG_GPU, LOG_LINE, LOG_NUMBER
from engine.log.events import AnyEvent, Count, Known, LogOpened, RunStarted, StepDone
from engine.log.folder import RunFolder
from engine.log.read import (
    LINES_KEPT,
    NOT_JSON,
    READ_BYTES,
    FileId,
    LogReader,
    Point,
    decode_line,
    end_of_lines,
    id_of,
)
from engine.log.table import NOT_A_READING, Batch, batches_of, fields_of, split
from engine.log.view import PHASES_KEPT
from engine.log.write import read_boot_id

if TYPE_CHECKING:
    from engine.log.table import Numbers

FOLDER = "columns"
VERSION = 1
"""Layout version; increase it whenever an older reader would misread a segment."""
CHUNK_BYTES = 1 << 20
TAIL_BYTES = 1 << 10
LEFT_BYTES = 1 << 30
"""Disk space in bytes that segments leave free for the run itself."""
SHARE = 0.003
"""Maximum share of one core, 0 to 1, that a supervisor may spend on writing segments."""
HELP_FROM_BYTES = 48 << 20
"""Bytes left to decode from which helper processes are started; starting one takes about 0.2 s."""
UNKNOWN = "unknown"
_HEAD = struct.Struct("<8sII")
_MAGIC = b"aprcols1"
_PARTIAL = ".partial-"
_PLACES = ("line", "byte", "t_s")
"""A place from which the log can be read again: lines before it, its byte offset, `t_s` of the line before it."""
_WHOLE = {"t_s", "step", *_PLACES}
"""Columns that are present and finite in every row."""


# A step as its table keeps it: without its phases it decodes in two thirds of the time, and decoding is most of what
# making a segment costs.
_FIELDS = {"seq", "t_s", "nf", *fields_of("step")}
_record: Any = msgspec.defstruct(
    "StepRow",
    [
        (field.name, field.type) if field.required else (field.name, field.type, field.default)
        for field in msgspec.structs.fields(StepDone)
        if field.name in _FIELDS
    ],
    kw_only=True,
    gc=False,
    tag_field="kind",
    tag="step",
)
for _kind in get_args(Known):
    if _kind is not StepDone:
        _record = _record | _kind
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_record)


class Shape(msgspec.Struct, frozen=True):
    """Name, columns and rows of a table in a segment."""

    rows: Annotated[int, msgspec.Meta(ge=1, le=COLUMNS_FILE.most)]
    columns: list[str]


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a segment."""

    version: int
    boot_id: str
    """Boot id of the machine that wrote it."""
    file_id: FileId
    """Device and inode of the log."""
    begin: Count
    end: Count
    """The lines occupy bytes [begin, end) of the log."""
    first: Count
    """`seq` of the first line."""
    lines: Count
    crc: int
    """CRC-32 of all these bytes."""
    tail_crc: int
    """CRC-32 of the last TAIL_BYTES of them (of all, when there are fewer)."""
    tables: dict[str, Shape] = {}
    dtype: str = "<f8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive whole lines of a log, decoded; none of them opens a session."""

    begin: int
    end: int
    """The lines occupy bytes [begin, end) of the log."""
    first: int
    """`seq` of the first line."""
    lines: int
    file_id: FileId
    """Device and inode of the log."""
    batch: Batch
    places: dict[str, Numbers]
    rest: list[bytes]
    """The lines that are kept one by one."""


class Stretch(NamedTuple):
    """The whole lines that begin in one chunk of a log."""

    file_id: FileId
    begin: int
    lines: bytes


def read_stretch(log: Path, number: int) -> Stretch | None:
    """Read a chunk; None when its last line is not complete, or may be missing. Raises OSError."""
    # The byte before the chunk tells whether a line begins with it.
    start, size = max(0, number * CHUNK_BYTES - 1), CHUNK_BYTES + bool(number)
    with open_plain(log) as file:
        file_id = id_of(os.fstat(file.fileno()))
        # The last line ends within a few bytes of the chunk, unless it is one of the longest.
        for margin in (16 << 10, LOG_LINE.most):
            block = os.pread(file.fileno(), size + margin, start)
            if end := block.find(b"\n", size - 1) + 1:
                begin = block.find(b"\n") + 1 if number else 0
                return Stretch(file_id, start + begin, block[begin:end])
    return None


def segment_of(stretch: Stretch) -> Segment | None:
    """Build a segment; None where a log reader has to read the lines."""
    import numpy as np

    lines = stretch.lines
    try:
        first = decode_line(lines[: lines.find(b"\n")], "").seq
        at = Point(first, stretch.begin, 0.0, -math.inf)
        reader = LogReader(Path(), at=at, decoder=_decoder)
        events = reader.decode(lines)
    except RunLogError:
        return None
    (batch, *further) = batches_of(events)
    if further or end_of_lines(lines) != len(lines) or type(events[0]) in (LogOpened, RunStarted):
        return None
    kept = [
        *batch.others,
        *(event for name, rows in batch.rows.items() for event in _rows_kept_as_lines(name, rows)),
    ]
    kept.sort(key=attrgetter("seq"))
    raw = BytesIO(lines).readlines()
    rest = [raw[event.seq - first][:-1] for event in kept]
    points = reader.points[1:]
    return Segment(
        begin=stretch.begin,
        end=stretch.begin + len(lines),
        first=first,
        lines=len(events),
        file_id=stretch.file_id,
        batch=_batch_of(batch.tables, [decode_line(line, "") for line in rest]),
        places={
            "line": np.array([point.number - first for point in points], float),
            "byte": np.array([point.offset for point in points], float),
            "t_s": np.array([point.unix_s for point in points]),
        },
        rest=rest,
    )


def _batch_of(tables: dict[str, dict[str, Numbers]], kept: list[AnyEvent]) -> Batch:
    rows, others = split(kept)
    return Batch(tables, rows, others, others)


def _rows_kept_as_lines(table: str, rows: list[Any]) -> list[Any]:
    """Return the last row, and for each reading the last row with its value and the last with a reason why it is
    missing; of steps, those whose phases a view keeps."""
    if table == "step":
        return rows[-PHASES_KEPT:]
    kept = {len(rows) - 1}
    reason_at: dict[str, int] = {}
    for place, row in enumerate(rows):
        if row.absent:
            reason_at |= dict.fromkeys(row.absent, place)
    kept.update(reason_at.values())
    for name in set(rows[-1].__struct_fields__) - NOT_A_READING:
        if getattr(rows[-1], name) is None:
            places = (n for n in range(len(rows) - 1, -1, -1) if getattr(rows[n], name) is not None)
            kept.update(islice(places, 1))
    return [rows[place] for place in kept]


# Files.


class SegmentFiles:
    """The segment files of one log."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.folder = log.parent / FOLDER

    @cached_property
    def _boot_id(self) -> str:
        return read_boot_id()

    def path(self, number: int) -> Path:
        return self.folder / f"{self.log.stem}-{number:06}.columns"

    def load(self, number: int) -> Segment | None:
        """Load the segment of a chunk; None when there is no valid one."""
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
                if not self._is_in_log(header, path, file_id, log.fileno()):
                    return None
            return _decode_body(header, data[_HEAD.size + length :], file_id)
        except (OSError, BadInput, struct.error, ValueError, KeyError, *NOT_JSON):
            return None

    def _is_in_log(self, header: Header, path: Path, file_id: FileId, log: int) -> bool:
        """Return whether the open log still has the segment's lines in the same place."""
        is_same = (header.boot_id, header.file_id) == (self._boot_id, file_id)
        # A file of another user may contain anything, so only ours and root's are trusted.
        is_ours = path.stat().st_uid in (os.geteuid(), 0)
        in_part = is_same and is_ours and self._boot_id != UNKNOWN
        begin = max(header.begin, header.end - TAIL_BYTES) if in_part else header.begin
        size = header.end - begin
        if not 0 < size <= CHUNK_BYTES + LOG_LINE.most:
            return False
        block = os.pread(log, size, begin)
        crc = header.tail_crc if in_part else header.crc
        return len(block) == size and zlib.crc32(block) == crc

    def save(self, number: int, segment: Segment, lines: bytes) -> bool:
        """Write a segment of `lines`; False without the space or the permission. Never raises."""
        import numpy as np

        tables = {**segment.batch.tables, "places": segment.places}
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
            tables={n: Shape(len(columns["t_s"]), list(columns)) for n, columns in tables.items()},
        )
        head = msgspec.json.encode(header)
        head += b" " * (-len(head) % 8)
        data = [np.asarray(c, "<f8").tobytes() for table in tables.values() for c in table.values()]
        body = b"".join([struct.pack("<I", len(head)), head, *data, b"\n".join(segment.rest)])
        path = self.path(number)
        partial = path.with_name(f"{path.name}{_PARTIAL}{os.getpid()}-{threading.get_ident()}")
        try:
            self.folder.mkdir(exist_ok=True)
            disk = os.statvfs(self.folder)
            if disk.f_bavail * disk.f_frsize < LEFT_BYTES:
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
        """Return whether a chunk is complete, and its segment if it has one; `keep` also saves the segment.
        Raises OSError."""
        stretch = read_stretch(self.log, number)
        if stretch is None:
            return False, None
        segment = segment_of(stretch)
        if keep and segment is not None:
            self.save(number, segment, stretch.lines)
        return True, segment

    def sweep(self) -> None:
        """Remove the partial files of processes that died. A process that is writing now loses its partial file."""
        with contextlib.suppress(OSError):
            for path in self.folder.glob(f"{self.log.stem}-*{_PARTIAL}*"):
                path.unlink(missing_ok=True)


def _decode_body(header: Header, body: memoryview, file_id: FileId) -> Segment | None:
    """Decode an untrusted segment body; None where its parts are inconsistent, or a log reader would reject
    their content."""
    import numpy as np

    tables: dict[str, dict[str, Numbers]] = {}
    for name, shape in header.tables.items():
        size = 8 * shape.rows
        if size * len(shape.columns) > len(body):
            return None
        blocks = [body[place * size :][:size] for place in range(len(shape.columns))]
        tables[name] = {
            column: np.frombuffer(block, "<f8").astype(np.float64, copy=False)
            for column, block in zip(shape.columns, blocks, strict=True)
        }
        body = body[size * len(shape.columns) :]
    if not all(_is_sound(name, columns) for name, columns in tables.items()):
        return None
    rest = bytes(body).split(b"\n") if len(body) else []
    events = [decode_line(line, "") for line in rest]
    if any(isinstance(e, LogOpened | RunStarted) or not e.t_s >= 0 for e in events):
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
        batch=_batch_of(tables, events),
        places=places,
        rest=rest,
    )


def _is_sound(name: str, columns: dict[str, Numbers]) -> bool:
    """Return whether the columns are those of log lines, with values in the ranges that lines are checked for."""
    import numpy as np

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
    """Writes the segments of a run's logs while the logs grow. Used from one thread.

    The supervisor calls `tick`. Complete chunks are stored one at a time; the next one waits until the
    average cost is below SHARE of a core, however fast the log grows. If the log grows faster than that, some
    chunks are left for the first viewer with write permission. Failures are not reported: no run depends on
    segments.
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
        # The next chunk of each log. The first chunk opens a session, so it has no segment.
        self._numbers = [1 for _ in self._files]
        self._next_s = monotonic()
        for files in self._files:
            files.sweep()

    def tick(self) -> None:
        """Store the next chunk when there is one and it is due. Never raises."""
        if self._monotonic() < self._next_s:
            return
        before_s = self._processor()
        for place, files in enumerate(self._files):
            if self._advance(files, self._numbers[place]):
                self._numbers[place] += 1
                break
        self._next_s = self._monotonic() + (self._processor() - before_s) / SHARE

    def _advance(self, files: SegmentFiles, number: int) -> bool:
        """Store a chunk; False when it is not complete, or cannot be read."""
        try:
            if files.log.stat().st_size < (number + 1) * CHUNK_BYTES:
                return False
            return files.load(number) is not None or files.make(number, keep=True)[0]
        except OSError:
            return False


class BatchReader:
    """Reads one log as batches: the bulk of a long one as segments, from their files or built from its lines.

    A segment is used only when it begins exactly at the reader's position and continues its sequence numbers.
    The newest LINES_KEPT lines of each session are read as lines, because by the clock they may be the newest
    of the run: a segment is used only when at least that many lines of the same session are known to follow
    it.
    """

    def __init__(self, lines: LogReader, *, files: bool = False, keep: bool = False) -> None:
        """`files` uses the segments of the log; `keep` saves those that had to be built."""
        self.lines, self._use, self._keep = lines, files, keep
        self._files = SegmentFiles(lines.path)
        self._has_helpers = False
        self._ahead: deque[Segment] = deque()
        self._refused: set[int] = set()
        """Chunks known to have no segment."""

    def poll(self, max_bytes: int = READ_BYTES) -> list[Batch]:
        """Return the next lines of the log, at most about `max_bytes` of it; empty when there is nothing new. Raises
        BrokenLog."""
        segments, max_bytes = self._segments(max_bytes)
        return segments or batches_of(self.lines.poll(max_bytes))

    def _segments(self, max_bytes: int) -> tuple[list[Batch], int]:
        """Return the next segments; when there are none, how many bytes to read line by line."""
        reader, ahead = self.lines, self._ahead
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
        if self._keep and not self._has_helpers:
            self._has_helpers = True
            self._start_helpers(range(number, status.st_size // CHUNK_BYTES))
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
            if ahead and sum(segment.lines for segment in later) >= LINES_KEPT:
                usable.append(ahead.popleft())
            elif (segment := self._segment_at(place, file_id)) is not None:
                ahead.append(segment)
                place = segment.end, segment.first + segment.lines
            else:
                break
        for segment in usable:
            places = zip(*(segment.places[name].tolist() for name in _PLACES), strict=True)
            reader.pass_over(segment.file_id, places)
        return [segment.batch for segment in usable], min(
            max_bytes, (number + 1) * CHUNK_BYTES - reader.read_bytes
        )

    def _segment_at(self, place: tuple[int, int], file_id: FileId) -> Segment | None:
        """Return the segment that begins at this byte offset and line number; None when there is none."""
        number = place[0] // CHUNK_BYTES
        if number in self._refused:
            return None
        segment = self._files.load(number) if self._use else None
        if segment is None:
            try:
                is_whole, segment = self._files.make(number, keep=self._keep)
            except OSError:
                is_whole = False
            if not is_whole:
                return None
        if segment is None or (segment.begin, segment.first, segment.file_id) != (*place, file_id):
            self._refused.add(number)
            return None
        return segment

    def _start_helpers(self, numbers: range) -> None:
        """Start processes that build the missing segments from the end of the log, while this one starts at the
        front. They are an optimisation: if none can be started, or one dies, this process does all the work."""
        missing = [n for n in numbers if not self._files.path(n).exists()]
        if len(missing) * CHUNK_BYTES < HELP_FROM_BYTES:
            return
        count = min(3, len(os.sched_getaffinity(0)) - 1)
        # -S: everything that `site` would add is in PYTHONPATH already.
        command = child.command("engine.log.columns", str(self.lines.path), options=["-S"])
        environment = child.environment() | {child.PYTHONPATH: os.pathsep.join(child.path())}
        quiet = subprocess.DEVNULL
        for helper in range(count):
            share = map(str, (missing[0], missing[-1] - helper, -count))
            with contextlib.suppress(OSError):
                process = subprocess.Popen(
                    [*command, *share], stdin=quiet, stdout=quiet, stderr=quiet, env=environment
                )
                # Reaps the process when it ends.
                threading.Thread(target=process.wait, name="log-helper", daemon=True).start()


def build_segments(log: Path, first: int, last: int, step: int) -> None:
    """Build the segments of chunks from the last to the first, as long as the parent process lives."""
    files, parent = SegmentFiles(log), os.getppid()
    for number in range(last, first, step):
        if os.getppid() != parent:
            return
        if not files.path(number).exists():
            files.make(number, keep=True)


if __name__ == "__main__":
    build_segments(Path(sys.argv[1]), *map(int, sys.argv[2:]))
