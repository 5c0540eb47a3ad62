"""The doctor's screen: the report of `engine doctor`, a row for each of its parts.

The doctor queries the CUDA driver, NVML and the kernel, which takes seconds, so it runs in its own
process and never in a viewer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from engine.errors import InternalError
from engine.units import format_seconds
from engine.verdict import Level, Verdict
from workbench.engine_commands import ask
from workbench.listing import TONE_OF, Listing, Row, Tone

LEVELS = {Verdict(level, "").exit_code: level for level in Level}
VERDICT = "Verdict"
TONES: dict[str, Tone] = {"Broken": "bad", "Cannot be measured here": "unsure"}
"""The tones of parts that a report has only where something is wrong."""


def diagnosis() -> tuple[Level, list[str]]:
    """Run the doctor; returns its verdict and the lines of its report. Raises InternalError when there is none."""
    done = ask(["doctor"])
    if done.returncode not in LEVELS or not done.stdout:
        raise InternalError(
            f"engine doctor — expected a report, found code {done.returncode}: {done.stderr.strip()}"
        )
    return LEVELS[done.returncode], done.stdout.splitlines()


class DoctorFeed:
    """Runs the doctor once, and again after `forget`."""

    def __init__(self) -> None:
        self._rows: tuple[Row, ...] | None = None
        self._asked_s = 0.0
        self._took_s = 0.0
        self._head = ""

    def forget(self) -> None:
        """Make the next poll run the doctor again."""
        self._rows = None

    def poll(self) -> Listing:
        """Return the doctor's report and its age. Raises InternalError when there is none."""
        if self._rows is None:
            begun_s = time.monotonic()
            level, lines = diagnosis()
            self._asked_s = time.monotonic()
            self._took_s = self._asked_s - begun_s
            self._rows = tuple(rows_of(level, lines))
            self._head = f"doctor: {level.name}"
        age = format_seconds(float(int(time.monotonic() - self._asked_s)))
        took = format_seconds(self._took_s)
        return Listing(head=f"{self._head} (asked {age} ago, took {took})", rows=self._rows)


def rows_of(level: Level, lines: Sequence[str]) -> Iterator[Row]:
    """Yield the parts of a report, its verdict first."""
    parts: dict[str, list[str]] = {}
    for line in filter(None, lines):
        if not line.startswith(" "):
            title = line
        parts.setdefault(title, []).append(line)
    tones = {**TONES, VERDICT: TONE_OF[level]}
    for title in sorted(parts, key=lambda title: title != VERDICT):
        text = f"{title}: {level.name}" if title == VERDICT else title
        yield Row(key=title, text=text, tone=tones.get(title, "plain"), lines=tuple(parts[title]))
