"""Random access to the log of a run without holding it in memory.

The lines of the trainer's log are numbered, and its reader indexes about every hundredth of them, so a
page of lines is read from disk when it is shown. The supervisor's lines are few: each is placed before
the first later line of the trainer. Lines of one log never change their order.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from engine.errors import RunLogError
from engine.files import open_plain
from engine.log.events import AnyEvent, LogOpened, StepDone, Unrecognised
from engine.log.read import LogReader, Point, decode_line
from engine.log.text import line_text
from engine.log.view import LogLine

PARTS_KEPT = 32
STEP_WORDS = (
    "step loss ce kd agree lr g time not measured nan inf µs ms s m h d e".casefold().split()
)
"""Every word that the text of a step can contain."""


class Parts:
    """Decodes the lines between two points of a log on request; the newest PARTS_KEPT parts are kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines = lru_cache(PARTS_KEPT)(self._lines)

    def _lines(self, begin: Point, end: Point) -> tuple[LogLine, ...]:
        """Return the decoded lines; a line that can no longer be read is replaced by a message."""
        try:
            with open_plain(self._path) as file:
                file.seek(begin.offset)
                raw = file.read(end.offset - begin.offset).split(b"\n")
        except OSError:
            raw = []
        lines, opened_s = [], begin.opened_unix_s
        for number in range(begin.number, end.number):
            event: AnyEvent
            try:
                event = decode_line(raw[number - begin.number], "")
            except (RunLogError, IndexError):
                event = Unrecognised(kind="this line cannot be read any more", seq=number)
            if isinstance(event, LogOpened):
                opened_s = event.unix_s
            lines.append(LogLine(unix_s=opened_s + event.t_s, source="events", event=event))
        return tuple(lines)


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
        row, stop = max(0, start), min(stop, len(self))
        while row < stop:
            # The first aside at this row or after it; each of those before it takes a row.
            asides = range(len(self.places))
            aside = bisect_left(asides, row, key=lambda index: self.places[index] + index)
            until = self.places[aside] if aside < len(self.places) else self.count
            number = row - aside
            if number == until:
                lines.append(self.asides[aside])
                row += 1
                continue
            index = bisect_right(self.points, number, key=_number) - 1
            begin, end = self.points[index], self.points[index + 1]
            last = min(end.number, until, number + stop - row)
            lines += self.parts.lines(begin, end)[number - begin.number : last - begin.number]
            row += last - number
        return lines

    def matching(self, start: int, stop: int, pattern: str) -> list[int]:
        """Return the rows in [start, stop) whose text matches a filter.

        The text of steps, which are almost all lines, is made only where the filter could tell them apart.
        """
        rule = step_rule(pattern)
        return [
            row
            for row, line in enumerate(self.lines(start, stop), start=max(0, start))
            if (
                matches(line_text(line), pattern)
                if rule is None or not isinstance(line.event, StepDone)
                else rule
            )
        ]


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
            # The position of an aside before a line is final; one after the last line is computed again.
            known = bisect_left(self._places, newest.count)
        places = self._places[:known]
        for line in asides[known:]:
            place = _number_at(self._parts, points, count, line.unix_s)
            places.append(max(place, places[-1] if places else 0))
        self._asides, self._places = asides, places
        self._newest = Log(self._parts, points, count, asides, tuple(places))
        return self._newest


def matches(text: str, pattern: str) -> bool:
    """Return whether a line matches a filter: a text to search for, ignoring case, or after a `!` one to leave out."""
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
