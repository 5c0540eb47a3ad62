"""A list with details: frozen rows, each with its full text.

Screens draw these and decide nothing. The sign of a row repeats its colour, so that neither a terminal
without colour nor a reader without colour vision loses a verdict.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from engine.verdict import Level
from workbench.jobs import Job

Tone = Literal["good", "bad", "unsure", "quiet", "plain"]
SIGNS: dict[Tone, str] = {"good": "+", "bad": "!", "unsure": "?", "quiet": "-", "plain": " "}
TONE_OF: dict[Level, Tone] = {Level.PASS: "good", Level.FAIL: "bad", Level.UNKNOWN: "unsure"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a list, and its details."""

    key: str
    """Identifies the row from poll to poll."""
    text: str
    name: str = ""
    """Drawn before the text in a column of its own. That column is cut first, so that a narrow list shortens
    names before it loses a verdict."""
    tone: Tone = "plain"
    sign: str = ""
    """One character before the text; the sign of the tone when empty."""
    lines: tuple[str, ...] = ()
    """Details. A line that does not begin with a space is a heading of those that do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A whole list at one poll."""

    head: str
    rows: tuple[Row, ...] = ()
    empty: str = ""
    """Advice shown if there are no rows."""
    job: tuple[str, ...] = ()
    """The newest output of a command that a key started; empty without one."""


def beside(folders: Iterable[Path], name: str) -> tuple[Path, ...]:
    """Return the folders called `name` to search: that of the current folder, which may not exist, and those that
    exist in `folders` and in their parents."""
    found = {Path(name).resolve(): Path(name)}
    for folder in folders:
        for place in (folder / name, folder.parent / name):
            if place.is_dir():
                found.setdefault(place.resolve(), place)
    return tuple(found.values())


class FoldersFeed(ABC):
    """Reads what lies in some folders, as a row each; one is read again when it has changed."""

    TITLE: ClassVar[str]
    NOUN: ClassVar[str]
    EMPTY: ClassVar[str]
    """Advice shown if there are no rows; `{folders}` is replaced by the searched folders."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        self._rows: dict[Path, tuple[object, Row]] = {}

    def poll(self) -> Listing:
        """Return the list, folder by folder."""
        rows = [self._row(path) for folder in self.folders for path in self.find(folder)]
        words = ", ".join(map(str, self.folders))
        count = f"{len(rows)} {self.NOUN}{'' if len(rows) == 1 else 's'}"
        empty = self.EMPTY.format(folders=words)
        return Listing(head=f"{self.TITLE}: {count} in {words}", rows=tuple(rows), empty=empty)

    def _row(self, path: Path) -> Row:
        stamp, known = self.stamp(path), self._rows.get(path)
        if stamp is None or known is None or known[0] != stamp:
            known = self._rows[path] = (stamp, self.read(path))
        return known[1]

    @abstractmethod
    def find(self, folder: Path) -> Iterable[Path]:
        """Return what a folder has, newest first."""

    @abstractmethod
    def stamp(self, path: Path) -> object:
        """Return a value that differs once the row has changed; None if changes cannot be detected, so that the row is
        always read again."""

    @abstractmethod
    def read(self, path: Path) -> Row:
        """Return the row of what lies at a path."""


def with_job(listing: Listing, job: Job | None) -> Listing:
    """Return the list with the newest output of a command below it."""
    return listing if job is None else replace(listing, job=job.lines())
