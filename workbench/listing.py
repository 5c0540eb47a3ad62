"""A list with details: frozen rows, each with its full text.

Screens draw these and decide nothing. The sign of a row repeats its colour, so that neither a terminal
without colour nor a reader without colour vision loses a verdict.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from engine.units import format_seconds
from engine.verdict import Level
from workbench.jobs import Job
from workbench.traces import Trace

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
    words: str = ""
    """A sentence that the details have as well: drawn after the text in a list that has room for all of them."""
    tone: Tone = "plain"
    sign: str = ""
    """One character before the text; the sign of the tone when empty."""
    struck: bool = False
    """Whether the entry was withdrawn: drawn struck through."""
    lines: tuple[str, ...] = ()
    """Details. A line that does not begin with a space is a heading of those that do."""
    trace: Trace | None = None
    """A plot above the details."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A whole list at one poll."""

    head: str
    rows: tuple[Row, ...] = ()
    empty: str = ""
    """What to do to get a row, when there is none."""
    job: tuple[str, ...] = ()
    """The newest output of a command that a key started; empty without one."""
    job_runs: bool = False


def beside(folders: Iterable[Path], name: str) -> tuple[Path, ...]:
    """Return the folders called `name` to search: here, and beside and inside each of some folders."""
    found = {Path(name).resolve(): Path(name)}
    for folder in folders:
        for place in (folder / name, folder.parent / name):
            if place.is_dir():
                found.setdefault(place.resolve(), place)
    return tuple(found.values())


def with_job(listing: Listing, job: Job | None) -> Listing:
    """Return the list with the newest output of a command below it."""
    if job is None:
        return listing
    return replace(listing, job=job.lines(), job_runs=job.is_alive)


def age_text(age_s: float | None) -> str:
    """Format how long ago something was: days and hours, or less; `never` where there is no time."""
    if age_s is None:
        return "never"
    days, hours = divmod(int(max(0.0, age_s)) // 3600, 24)
    return f"{days}d{hours:02d}h" if days else format_seconds(max(0.0, float(int(age_s))))
