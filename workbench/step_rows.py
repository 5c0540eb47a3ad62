"""The rows of one step: everything that `engine data RUN --step N --json` prints, as rows of a list.

The command reads the corpus again, which takes seconds, so it runs in its own process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.log.text import one_line
from workbench.engine_commands import ask_json
from workbench.listing import Listing, Row


class StepRowsFeed:
    """Reads the rows of one step after the other."""

    def __init__(self, run: Path, step: int) -> None:
        self._run = run
        self.step = max(step, 1)
        """The step that the next poll reads."""
        self._seen: dict[int, Listing] = {}
        """The viewed steps, so that going back does not read the corpus again."""

    def poll(self) -> Listing:
        """Return the rows of the step. Raises InternalError with the command's message where it is not on record."""
        step = self.step
        if step not in self._seen:
            command = ["data", str(self._run), "--step", str(step), "--json"]
            self._seen[step] = listing_of(ask_json(command, dict[str, Any]))
        return self._seen[step]


def listing_of(fields: Mapping[str, Any]) -> Listing:
    return Listing(
        head="\n".join(fields["about"]),
        rows=tuple(_row(number, row) for number, row in enumerate(fields["rows"], start=1)),
    )


def _row(number: int, row: Mapping[str, Any]) -> Row:
    pieces = [piece["says"] for piece in row["pieces"]]
    text = "".join(f"⟦{part}⟧" if labelled else part for part, labelled in row["text"])
    about = [f"{row['labels']:,} labels, on rank {row['rank']}", *pieces]
    return Row(
        key=str(number),
        name=f"{number}",
        text=one_line(", ".join(piece["document"] for piece in row["pieces"]) or row["says"]),
        tone="plain" if row["in_turn"] else "bad",
        lines=(
            row["says"],
            *(f"  {one_line(line)}" for line in about),
            "text",
            *(f"  {line}" for line in text.split("\n")),
        ),
    )
