"""Random access to the log of a run without holding it in memory.

The lines of the trainer's log are numbered, and its reader indexes about every hundredth of them, so a
page of lines is read from disk when it is shown. The supervisor's lines are few: each is placed before
the first later line of the trainer. Lines of one log never change their order.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from engine.errors import RunLogError
from engine.files import open_plain
from engine.log.events import AnyEvent, LogOpened, Unrecognised
from engine.log.read import LogReader, Point, decode_line
from engine.log.text import line_text
from engine.log.view import LogLine

PARTS_KEPT = 32
_STEP = b'"kind":"step"'
STEP_WORDS = (
    "step loss ce kd agree lr g time not measured nan inf µs ms s m h d e".casefold().split()
)
"""Every word that the text of a step can contain."""


class Parts:
    """Decodes the lines between two points of a log on request; the newest PARTS_KEPT parts are kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: OrderedDict[tuple[int, int], tuple[LogLine, ...]] = OrderedDict()
        self._lock = Lock()

    def raw(self, begin: Point, end: Point) -> list[bytes]:
        """Return the lines as bytes; fewer when the file was truncated meanwhile."""
        try:
            with open_plain(self._path) as file:
                file.seek(begin.offset)
                block = file.read(end.offset - begin.offset)
        except OSError:
            return []
        return block.split(b"\n")[: end.number - begin.number]

    def lines(self, begin: Point, end: Point) -> tuple[LogLine, ...]:
        """Return the decoded lines; a line that can no longer be read is replaced by a message."""
        key = begin.offset, end.offset
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        lines = []
        raw, opened_s = self.raw(begin, end), begin.opened_unix_s
        for number in range(begin.number, end.number):
            event: AnyEvent
            try:
                event = decode_line(raw[number - begin.number], "")
            except (RunLogError, IndexError):
                event = Unrecognised(kind="this line cannot be read any more", seq=number)
            if isinstance(event, LogOpened):
                opened_s = event.unix_s
            lines.append(LogLine(unix_s=opened_s + event.t_s, source="events", event=event))
        with self._lock:
            self._kept[key] = tuple(lines)
            if len(self._kept) > PARTS_KEPT:
                self._kept.popitem(last=False)
        return tuple(lines)


@dataclass(frozen=True, slots=True)
class _Aside:
    row: int
    line: LogLine


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Lines [number, last) of the trainer's log, from `row` on, between two points of it."""

    row: int
    begin: Point
    end: Point
    number: int
    last: int


@dataclass(frozen=True, slots=True, eq=False)
class Log:
    """The log at one poll: rows 0 to `len` - 1, in order of time."""

    parts: Parts
    points: Sequence[Point]
    count: int
    """Lines of the trainer's log."""
    asides: tuple[LogLine, ...] = ()
    places: tuple[int, ...] = ()
    """Number of the trainer's log line before which each aside is shown."""

    def __len__(self) -> int:
        return self.count + len(self.asides)

    def lines(self, start: int, stop: int) -> list[LogLine]:
        """Return rows [start, stop)."""
        lines: list[LogLine] = []
        for stretch in self._stretches(start, stop):
            if isinstance(stretch, _Aside):
                lines.append(stretch.line)
            else:
                first = stretch.begin.number
                part = self.parts.lines(stretch.begin, stretch.end)
                lines += part[stretch.number - first : stretch.last - first]
        return lines

    def _stretches(self, start: int, stop: int) -> Iterator[_Aside | _Stretch]:
        """Yield rows [start, stop) as asides, and as stretches of the trainer's lines that are read together."""
        row, stop = max(0, start), min(stop, len(self))
        while row < stop:
            aside, number = self._at(row)
            if aside is not None:
                yield _Aside(row, self.asides[aside])
                row += 1
                continue
            index = bisect_right(self.points, number, key=_number) - 1
            begin, end = self.points[index], self.points[index + 1]
            next_aside = bisect_right(self.places, number)
            until = self.places[next_aside] if next_aside < len(self.places) else self.count
            last = min(end.number, until, number + stop - row)
            yield _Stretch(row, begin, end, number, last)
            row += last - number

    def _at(self, row: int) -> tuple[int | None, int]:
        """Return the aside at a row, or None, and the trainer's line there or next after it."""
        low, high = 0, len(self.places)
        while low < high:
            middle = (low + high) // 2
            if self.places[middle] + middle < row:
                low = middle + 1
            else:
                high = middle
        if low < len(self.places) and self.places[low] + low == row:
            return low, self.places[low]
        return None, row - low

    def until(self, unix_s: float) -> Log:
        """Return the log as it was at a time."""
        asides = bisect_right([line.unix_s for line in self.asides], unix_s)
        count = _number_at(self.parts, self.points, self.count, unix_s)
        places = tuple(min(place, count) for place in self.places[:asides])
        return Log(self.parts, self.points, count, self.asides[:asides], places)

    def matching(self, start: int, stop: int, pattern: str) -> list[int]:
        """Return the rows in [start, stop) whose text matches a filter.

        Steps, which are almost all lines, are decoded only where the filter could tell them apart.
        """
        rule = step_rule(pattern)
        if rule is None:
            lines = self.lines(start, stop)
            return [
                row
                for row, line in enumerate(lines, start=max(0, start))
                if matches(line_text(line), pattern)
            ]
        found = []
        for stretch in self._stretches(start, stop):
            if isinstance(stretch, _Aside):
                found += [stretch.row] if matches(line_text(stretch.line), pattern) else []
                continue
            begin, end, numbers = stretch.begin, stretch.end, range(stretch.number, stretch.last)
            raw = self.parts.raw(begin, end)
            others = {
                n
                for n in numbers
                if n - begin.number >= len(raw) or _STEP not in raw[n - begin.number]
            }
            whole = self.parts.lines(begin, end) if others else ()
            shown = {n for n in others if matches(line_text(whole[n - begin.number]), pattern)}
            shown |= {n for n in numbers if n not in others} if rule else set()
            found += [stretch.row + n - stretch.number for n in sorted(shown)]
        return found


def _number(point: Point) -> int:
    return point.number


def _number_at(parts: Parts, points: Sequence[Point], count: int, unix_s: float) -> int:
    """Return the number of lines of the trainer's log up to a time."""
    index = bisect_right(points, unix_s, key=lambda point: point.unix_s)
    # Every line before points[index - 1] is early enough; those between the two points are checked.
    if index >= len(points):
        return count
    begin, end = points[max(0, index - 1)], points[index]
    if begin.number == end.number:
        return min(begin.number, count)
    latest, number = begin.unix_s, begin.number
    for line in parts.lines(begin, end):
        latest = max(latest, line.unix_s)
        if latest > unix_s:
            break
        number += 1
    return min(number, count)


class LogBook:
    """Makes a `Log` after each poll."""

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader
        self._parts = Parts(reader.path)
        self._asides: tuple[LogLine, ...] = ()
        self._places: list[int] = []
        self._newest: Log | None = None

    def log(self, asides: tuple[LogLine, ...]) -> Log:
        """Return the log as far as it has been read; the same value as before when nothing is new."""
        count, newest = self._reader.lines_read, self._newest
        if newest is not None and newest.count == count and newest.asides is asides:
            return newest
        points = self._reader.points
        known = 0
        if asides[: len(self._asides)] == self._asides and newest is not None:
            # The position of an aside before a line is final; after the last line it is looked up again.
            known = bisect_left(self._places, newest.count)
        places = self._places[:known]
        for line in asides[known:]:
            place = _number_at(self._parts, points, count, line.unix_s)
            places.append(max(place, places[-1] if places else 0))
        self._asides, self._places = asides, places
        self._newest = Log(self._parts, points, count, asides, tuple(places))
        return self._newest


def matches(text: str, pattern: str) -> bool:
    """Return whether a line matches a filter: words to look for, ignoring case; with `!` before them, words to leave
    out."""
    if pattern.startswith("!"):
        return len(pattern) == 1 or pattern[1:].casefold() not in text.casefold()
    return pattern.casefold() in text.casefold()


def step_rule(pattern: str) -> bool | None:
    """Return whether a filter shows every step (True), none (False), or some (None)."""
    hides = pattern.startswith("!")
    words = pattern[1:] if hides else pattern
    if not words:
        return True
    if words.casefold() in " step ":
        return not hides
    for run in re.findall(r"[^\W\d_]+", words.casefold()):
        if not any(run in word for word in STEP_WORDS):
            return hides
    return None
