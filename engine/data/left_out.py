"""Documents left out of a corpus, counted by reason: invalid records, and conversations that the chat template cannot
render.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.errors import BadInput, CorpusError

ALLOWED = 20
"""Number of invalid records that may be left out whatever their share of the corpus, if at least one document is
valid."""
SKIP_AT_MOST = 0.05
"""Default of `data.skip_at_most`, a share from 0 to 1."""
_REASONS = 100
"""Maximum number of reasons that are counted separately; the bound keeps hostile records from filling the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A file, document or record that is left out of the corpus."""

    name: str
    """Name of a file or document, or file and line of a record."""
    reason: str
    fault: BadInput | None = None
    """Error of an invalid record, with its file and line; None for anything else that is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Documents that are left out for one reason."""

    reason: str
    count: int
    example: str
    """File and line of the first one, or its name."""

    def __str__(self) -> str:
        example = f", first {self.example}" if self.count > 1 else f" ({self.example})"
        return f"{self.count:,} left out: {self.reason}{example}"


def count_left_out(counts: dict[str, LeftOut], skipped: Skipped) -> None:
    """Add one to the count of its reason, or to "other reasons" if there are too many."""
    reason = (
        skipped.reason if skipped.reason in counts or len(counts) < _REASONS else "other reasons"
    )
    previous = counts.get(reason, LeftOut(reason=reason, count=0, example=skipped.name))
    counts[reason] = replace(previous, count=previous.count + 1)


class RecordFaults:
    """Counts the invalid records of a source."""

    def __init__(self, source: str, skip_at_most: float) -> None:
        self._source, self._skip_at_most = source, skip_at_most
        self._counts: dict[str, LeftOut] = {}
        self.count = 0
        self.first: BadInput | None = None

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        return tuple(sorted(self._counts.values(), key=lambda one: -one.count))

    def add(self, skipped: Skipped) -> bool:
        """Count `skipped` if it is an invalid record; return whether it is."""
        if skipped.fault is None:
            return False
        self.first = self.first or skipped.fault
        self.count += 1
        count_left_out(self._counts, skipped)
        return True

    def raise_if_too_many(self, documents: int) -> None:
        """Raise CorpusError if too many records are invalid, or if some are and no document is valid. `documents` is
        the number of valid documents."""
        every = documents + self.count
        if self.first is None or (documents and self.count <= ALLOWED):
            return
        if not documents:
            raise self.first
        if self.count > self._skip_at_most * every:
            reasons = "; ".join(map(str, self.left_out[:3]))
            raise CorpusError(
                f"corpus: {self._source} — expected at most {self._skip_at_most:.3g} of its records to have a fault "
                f"(data.skip_at_most), found {self.count:,} of {every:,}: {reasons}",
                hint=f"fix these records, or raise data.skip_at_most; the first fault: {self.first.message}",
            )
