"""Write to a terminal or a pipe: `put` to stdout, `say` and `StatusLine` to stderr.

stdout carries data, stderr messages to the user. The text may come from anywhere: the name of a folder, a
line of another program's log, text that a model generated. A terminal obeys escape sequences, so only printable
characters are written:

    newline and tab           are kept
    any other control, format or surrogate character      becomes its ASCII escape, `\\x1b`
    a line of more than LINE_CHARACTERS                   is cut, and its length appended
    a character that the encoding of the stream lacks     becomes its escape, `\\u2014`

`put(..., exact=True)` is for data of which every character matters, such as a path or generated text: in a
pipe or a file it is written unchanged, on a terminal it is made printable but not cut. JSON is ASCII already
and is treated the same way.

No other module writes to these streams; a test enforces that. A page is escaped here too, by `as_html`: browsers
show control characters, and a file with half a surrogate pair cannot be written.
"""

from __future__ import annotations

import argparse
import difflib
import html
import os
import shutil
import sys
import time
from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any, NoReturn, TextIO

from engine import limits
from engine.errors import UsageError

REDRAWN_EVERY_S = 0.1
_SHOWN = 40
_KEPT = frozenset("\n\t")
_CLEARED = "\r\x1b[K"


def printable(text: str, *, longest: int | None = limits.PRINTED_LINE.most) -> str:
    """Return `text` without anything that a terminal would obey; lines longer than `longest` characters are cut."""
    if longest is not None and len(text) > longest:
        text = "\n".join(clipped(line, longest) for line in text.split("\n"))
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in _KEPT else _escape(c) for c in text)


def as_html(text: str) -> str:
    """Return `text` for an HTML or SVG page, as content or in an attribute: printable, and without markup."""
    return html.escape(printable(text))


def clipped(text: str, longest: int) -> str:
    """Return `text`, or its beginning and its length."""
    if len(text) <= longest:
        return text
    return f"{text[:longest]}… ({len(text):,} characters)"


def aligned(rows: Sequence[Sequence[str]], *, right: Container[int] = ()) -> list[str]:
    """Format rows of cells with columns as wide as their widest cell; the columns in `right` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def put(*texts: object, end: str = "\n", exact: bool = False, flush: bool = False) -> None:
    """Write data to stdout."""
    text = " ".join(str(part) for part in texts)
    if not exact:
        text = printable(text)
    elif _is_terminal(sys.stdout):
        text = printable(text, longest=None)
    _write(sys.stdout, text + end, flush=flush)


def put_marked(parts: Sequence[tuple[str, bool]]) -> None:
    """Write text to stdout with highlighted parts: in reverse video on a terminal, else between ⟦ and ⟧."""
    in_reverse = _is_terminal(sys.stdout) and not os.environ.get("NO_COLOR")
    before, after = ("\x1b[7m", "\x1b[27m") if in_reverse else ("⟦", "⟧")
    text = "".join(
        f"{before}{shown}{after}" if marked else shown
        for shown, marked in ((printable(part), marked) for part, marked in parts)
    )
    _write(sys.stdout, text + "\n", flush=False)


def say(*texts: object, end: str = "\n") -> None:
    """Write a message to the user to stderr, and flush it."""
    _write(sys.stderr, printable(" ".join(str(part) for part in texts)) + end, flush=True)


def can_ask() -> bool:
    """Return whether questions can be answered: stdin is a terminal."""
    return _is_terminal(sys.stdin)


def ask(question: str) -> str | None:
    """Ask on stderr, so that stdout stays data, and return a line of the answer; None at the end of the input."""
    say(question, end="")
    line = sys.stdin.readline(limits.PRINTED_LINE.most)
    if not line:
        say()
        return None
    return line.rstrip("\n")


class StatusLine:
    """Progress on stderr: one line that is redrawn on a terminal. In a pipe, or if TERM is dumb, it is a new line
    every `plain_every_s` seconds."""

    def __init__(self, *, plain_every_s: float, plain_at_once: bool = True) -> None:
        self.redrawn = _is_terminal(sys.stderr) and os.environ.get("TERM", "dumb") != "dumb"
        self._every_s = REDRAWN_EVERY_S if self.redrawn else plain_every_s
        waits = not (self.redrawn or plain_at_once)
        self._next_s = time.monotonic() + plain_every_s if waits else 0.0
        self._stands = False

    def show(self, text: str) -> None:
        """Show `text`, unless the last update is too recent."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._every_s
        if not self.redrawn:
            say(text)
            return
        # Cut the line so that it never wraps: a line that wraps is repeated instead of redrawn.
        line = printable(text).replace("\n", " ")[: columns_of(sys.stderr) - 1]
        _write(sys.stderr, f"{_CLEARED}{line}", flush=True)
        self._stands = True

    def say(self, *lines: str) -> None:
        """Print permanent lines above the redrawn line."""
        self.clear()
        for line in lines:
            say(line)

    def clear(self) -> None:
        if self._stands:
            _write(sys.stderr, _CLEARED, flush=True)
            self._stands = False


class ArgumentParser(argparse.ArgumentParser):
    """An argparse parser that prints through this module, uses this project's exit code for a wrong command line,
    and suggests the nearest command for one that it does not have."""

    other_names: Mapping[str, str] = {}
    """Suggested commands for words that resemble no command: `distill` for `train`."""
    words_options: Collection[str] = ()
    """Options whose value is the arguments of another command, which may begin with `-`: `--a --fused`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        for place in reversed(range(end - 1)):
            if words[place] in self.words_options:
                words[place : place + 2] = [f"{words[place]}={words[place + 1]}"]
        return super().parse_known_args(words, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if not isinstance(action, argparse._SubParsersAction) or value in action.choices:
            super()._check_value(action, value)
            return
        known = tuple(action.choices)
        word = str(value).lower()
        near = self.other_names.get(word) or next(
            iter(difflib.get_close_matches(word, known, n=1)), None
        )
        found = f"expected a command, found {clipped(str(value), _SHOWN)!r}"
        rest = f"did you mean {near}?" if near else f"the commands are {', '.join(known)}"
        raise argparse.ArgumentError(None, f"{found}; {rest}")

    def error(self, message: str) -> NoReturn:
        say(f"{self.format_usage().rstrip()}\n{self.prog}: {message}")
        sys.exit(UsageError.exit_code)

    def _print_message(self, message: str, file: Any = None) -> None:
        if message:
            (say if file is sys.stderr else put)(message, end="")


def columns_of(stream: TextIO, fallback: int = 80) -> int:
    """Return the width of the terminal of `stream`, in characters; for a pipe COLUMNS, or `fallback`.

    The terminal's own size has priority. `shutil.get_terminal_size` prefers COLUMNS, which is the size that
    another terminal had when a parent exported it. It also queries stdout, which may be a pipe while a line
    is redrawn on stderr: a line that wraps is not redrawn but repeated. A terminal that reports 0 has no
    known size.
    """
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return columns or shutil.get_terminal_size((fallback, 24)).columns


def _escape(char: str) -> str:
    return ascii(char)[1:-1]


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def _write(stream: TextIO, text: str, *, flush: bool) -> None:
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    if flush:
        stream.flush()
