"""Reading a log as fast as can be: its bulk as packs, the rest line by line.

A `Gatherer` reads through a LogReader. Where much of the log is unread it has packs made of that, with
helpers in other processes if it may have any, or takes those that are kept beside the log. Packs are used
only where they begin exactly at the reader's place and carry on its numbers; everything between them is read
by the reader itself, which alone says what is wrong with a log.

The newest LINES_KEPT lines of each session stay whole, because by the clock they may be the newest of the
run. So a pack is used only when it is known that so many lines of the same session follow it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import engine.log.skim as skim
from engine.limits import LOG_FILE
from engine.log.pack import Pack
from engine.log.pack_files import PackFiles
from engine.log.read import READ_BYTES, BrokenLog, FileId, LogReader, id_of
from engine.log.shares import Shares

FROM_BYTES = 4 << 20
"""So much has to be unread for packs to be worth it."""

FILED_BYTES = 64 << 20
"""Of so much of a log packs out of files are given at once: a tenth of a second."""

Gathered = Sequence[skim.Skimmed] | Sequence[Pack]


class Gatherer:
    """Reads one log with up to `helpers` other processes. Used from one thread at a time."""

    def __init__(
        self, reader: LogReader, *, helpers: int = 0, files: bool = False, keep: bool = False
    ) -> None:
        """With `files` packs kept beside the log are used, and with `keep` those made are kept there."""
        self.reader = reader
        self._helpers, self._keep = helpers, keep
        self._files = PackFiles(reader.path) if files or keep else None
        self._shares: Shares | None = None
        self._shared_to = 0
        self._file_id: FileId | None = None
        self._ahead: deque[Pack] = deque()

    def read(self, max_bytes: int = READ_BYTES) -> Gathered:
        """What follows: packs, or events with steps as their columns alone; at most about `max_bytes` that are
        read line by line. Empty when there is nothing new. Raises BrokenLog."""
        if self._shares is None:
            self._share(max_bytes)
        try:
            if packs := self._usable():
                for pack in packs:
                    self.reader.pass_over(pack.places)
                return packs
            if self._ahead:
                max_bytes = min(max_bytes, self._ahead[0].begin - self.reader.read_bytes)
            return self.reader.skim(max_bytes)
        except BrokenLog:
            self.close()
            raise

    def close(self) -> None:
        """Stop what goes on in other processes; reading on is possible."""
        if self._shares is not None:
            self._shares.close()
        self._shares = None
        self._ahead.clear()

    def _share(self, max_bytes: int) -> None:
        """Have packs made of what is unread, when that is much and nobody has tried."""
        begin, reader = self.reader.read_bytes, self.reader
        try:
            status = reader.path.stat()
        except OSError:
            return
        unread = status.st_size - max(begin, self._shared_to)
        if status.st_size > LOG_FILE.most:
            return
        if min(unread, max_bytes) >= FROM_BYTES and reader.file_id in (None, id_of(status)):
            self._file_id, self._shared_to = id_of(status), status.st_size
            self._shares = Shares(
                reader.path,
                begin,
                status.st_size,
                helpers=self._helpers,
                files=self._files,
                keep=self._keep,
            )

    def _usable(self) -> list[Pack]:
        """Packs that carry on where the reader is; none where it has to read for itself."""
        ahead = self._ahead
        while self._shares is not None:
            while ahead and not self._carries_on(ahead[0]):
                if ahead[0].begin > self.reader.read_bytes:
                    return []
                ahead.popleft()
            length = self._length()
            lines, usable = 0, length
            while usable and lines < skim.LINES_KEPT:
                usable -= 1
                lines += ahead[usable].lines
            if usable:
                span = ahead[usable - 1].end - ahead[0].begin
                goes_on = length == len(ahead) and self._shares.is_next_filed
                if goes_on and span < FILED_BYTES:
                    self._take()
                    continue
                return [ahead.popleft() for _ in range(usable)]
            if length < len(ahead):
                # Too few before a place that the reader has to look at.
                for _ in range(length):
                    ahead.popleft()
                return []
            self._take()
            if not ahead:
                # What has no packs may be no log at all: the reader says so before more is looked at.
                return []
        return []

    def _carries_on(self, pack: Pack) -> bool:
        return (pack.begin, pack.first) == (self.reader.read_bytes, self.reader.lines_read)

    def _length(self) -> int:
        """How many packs ahead follow each other without a gap."""
        for index in range(1, len(self._ahead)):
            last, following = self._ahead[index - 1], self._ahead[index]
            if (last.end, last.first + last.lines) != (following.begin, following.first):
                return index
        return len(self._ahead)

    def _take(self) -> None:
        assert self._shares is not None
        try:
            taken = self._shares.take()
        except OSError:
            taken = None
        if taken is None or taken.file_id != self._file_id:
            self.close()
        else:
            self._ahead += taken.packs
