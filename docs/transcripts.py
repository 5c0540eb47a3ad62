"""The commands that pages show, and what they print: `python docs/transcripts.py` runs them and writes what came.

A transcript is a fenced block in which lines that begin with `$ ` are commands; the lines below one are an excerpt
of what it prints. They run in order in one new folder, the README before the tutorial. What is compared is the form
of a line: its words, with every number, unit and date left out.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PAGES = (ROOT / "README.md", DOCS / "tutorial.md")

_FENCED = re.compile(r"^```.*?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_UNIT = r"(?:\s?(?:ns|µs|ms|s|min|h|[KMG]iB|k tok/s|tok/s)\b|[kMG]\b)?"
_NUMBER = re.compile(rf"\d+(?:h\d+m|m\d+s)|[-+]?\d[\d.,]*(?:e-?\d+)?{_UNIT}")
_DATED = re.compile(r"\b\d{8}-\d{6}\b|\b\d{4}-\d\d-\d\d\b")


@dataclass(frozen=True)
class Command:
    """One command of a page, and the excerpt of its output that stands below it."""

    text: str
    excerpt: tuple[str, ...]

    def words(self, extra: Sequence[str] = ()) -> list[str]:
        """Return its arguments, without a comment and the redirection of stdin, and `extra` behind them."""
        return [*shlex.split(self.text.replace("< /dev/null", ""), comments=True), *extra]


def commands(page: Path) -> list[Command]:
    """Return the commands of all transcripts of a page, in order."""
    found: list[Command] = []
    for block in _FENCED.findall(page.read_text(encoding="utf-8")):
        lines = block.splitlines()
        starts = [at for at, line in enumerate(lines) if line.startswith("$ ")]
        for at, end in zip(starts, [*starts[1:], len(lines)], strict=False):
            excerpt = tuple(line for line in lines[at + 1 : end] if line.strip() not in ("", "..."))
            found.append(Command(lines[at][2:], excerpt))
    return found


def form(line: str) -> str:
    """Return the words of a line, with N in the place of each number and its unit."""
    return " ".join(_NUMBER.sub("N", _DATED.sub("N", line)).split())


def run(words: Sequence[str], folder: Path) -> list[str]:
    """Run one command as a user would, without a terminal; returns the lines of stdout and stderr."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [*words],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PATH": path, "COLUMNS": "100"},
    )
    return done.stdout.splitlines()


def as_printed(excerpt: Sequence[str], printed: Sequence[str]) -> list[str]:
    """Return for each line of an excerpt the printed line of its form, in order; ValueError names one that is not
    printed, or not behind the line before it."""
    found: list[str] = []
    rest = iter(printed)
    for wanted in excerpt:
        line = next((line for line in rest if form(line) == form(wanted)), None)
        if line is None:
            raise ValueError(
                f"not printed behind {found[-1:]}: {wanted!r}; printed:\n" + "\n".join(printed)
            )
        found.append(line)
    return found


def main() -> None:
    """Run every page at full size, in one folder, and write its excerpts anew."""
    with tempfile.TemporaryDirectory() as folder:
        for page in PAGES:
            text = page.read_text(encoding="utf-8")
            for command in commands(page):
                lines = as_printed(command.excerpt, run(command.words(), Path(folder)))
                for old, new in zip(command.excerpt, lines, strict=True):
                    text = text.replace(old, new, 1)
            page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
