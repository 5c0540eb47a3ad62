"""How much of anything is read: every input has a limit, and this is the table of all of them.

Whoever reads a file or an answer that somebody else made names a row of this table, so that a file of
zeros, a number of a million digits or a list in ten thousand lists costs a message and never the machine.
A limit lies far above what real inputs need and far below what harms: where one is in the way of
somebody's real work, it is wrong and should be raised here.

`docs/limits.md` holds the table for people: `python -c "import engine.limits as l; l.write_page()"`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The largest amount of something that is accepted."""

    what: str
    """What has the limit, as the user knows it."""
    most: int
    """The largest that is accepted."""
    unit: str
    beyond: str = "refused, exit 65"
    """What happens to more."""

    def __str__(self) -> str:
        return f"at most {self.most:,} {self.unit}"


PRINTED_LINE = Limit(
    what="a line of text on a terminal or in a pipe",
    most=4096,
    unit="characters",
    beyond="cut, with its length",
)
JSON_DEPTH = Limit(what="nesting of lists and tables in JSON", most=64, unit="levels")
RUN_FILE = Limit(
    what="a small file of a run: effective.json, receipt.json", most=4 * MIB, unit="bytes"
)

# Logs of runs: `engine.runlog.envelope` makes the types of records of these.
_BROKEN_LINE = "a broken line: named, and the log read up to it"
LOG_LINE = Limit(what="a line of a log", most=MIB, unit="bytes", beyond=_BROKEN_LINE)
LOG_FILE = Limit(
    what="a log of a run",
    most=16 * GIB,
    unit="bytes",
    beyond="refused, exit 65; viewers say so",
)
LOG_TEXT = Limit(
    what="one text of a line that a run writes into its log",
    most=64 * KIB,
    unit="characters",
    beyond="cut, with its length",
)
LOG_ELAPSED = Limit(
    what="a time in a log, since the log was opened",
    most=10**10,
    unit="seconds",
    beyond=_BROKEN_LINE,
)
LOG_UNIX = Limit(
    what="a time of day in a log, since 1970",
    most=2 * 10**11,
    unit="seconds",
    beyond=_BROKEN_LINE,
)
LOG_COUNT = Limit(
    what="steps, tokens, bytes and other counts in a log",
    most=2**53,
    unit="",
    beyond=_BROKEN_LINE,
)
LOG_NUMBER = Limit(
    what="any other number in a log, without its sign",
    most=10**100,
    unit="",
    beyond=_BROKEN_LINE,
)
PACK_FILE = Limit(
    what="a file of columns beside a log",
    most=64 * MIB,
    unit="bytes",
    beyond="not used: the lines are read",
)
LOG_PID = Limit(what="the number of a process in a log", most=1 << 22, unit="", beyond=_BROKEN_LINE)
LOG_GPU = Limit(what="the number of a GPU in a log", most=255, unit="", beyond=_BROKEN_LINE)


def table() -> tuple[Limit, ...]:
    """Every limit, in the order of this file."""
    return tuple(value for value in globals().values() if isinstance(value, Limit))


def markdown() -> str:
    """The page of the documentation."""
    lines = [
        "# Limits of inputs",
        "",
        "Every input has a limit. What lies beyond it is refused before it is read, with one line that says",
        "what was found; nothing is half-read. The table is `engine/limits.py`.",
        "",
        "| input | limit | beyond it |",
        "|---|---|---|",
        *(f"| {one.what} | {one.most:,} {one.unit} | {one.beyond} |" for one in table()),
    ]
    return "\n".join(lines) + "\n"


def write_page(path: Path = Path("docs/limits.md")) -> None:
    """Writes the page anew."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(markdown(), encoding="utf-8")
