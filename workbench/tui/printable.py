"""The last filter before the terminal: only printable characters, and only ASCII where nothing else can
be drawn.

A log may contain anything, even an escape sequence in the name of a file; control characters are
dropped and can never act on the terminal. In ASCII mode plots draw ASCII by themselves, and
everything else (borders, scroll bars, names of runs) is replaced here, each character by as many
cells as it had.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.content import Content
from textual.filter import LineFilter

REPLACEMENTS = {
    **dict.fromkeys("─╌—–", "-"),
    **dict.fromkeys("━▔▁", "="),
    **dict.fromkeys("│┃▏▕▎▊▌▐█▂▃▄▅▆▇", "|"),
    **dict.fromkeys("╭╮╰╯┌┐└┘┏┓┗┛┤┬▀▖▗▘▝", "+"),
    **dict.fromkeys("▲↑", "^"),
    **dict.fromkeys("▼▾↓", "v"),
    "×": "x",
    "…": ".",
    "•": "*",
    "→": ">",
    "🔎": "> ",
}


@lru_cache(4096)
def drawable(text: str, *, ascii_only: bool) -> str:
    """Return `text` without control characters, with a space for any white space, and in ASCII if requested."""
    kept = "".join(char for char in text if char.isprintable() or char.isspace())
    kept = "".join(" " if char.isspace() else char for char in kept)
    if not ascii_only or kept.isascii():
        return kept
    return "".join(
        char if char.isascii() else REPLACEMENTS.get(char, "?" * cell_len(char)) for char in kept
    )


def as_title(text: str) -> Any:
    """Return a widget title that shows `text` literally: in a plain string, brackets would be read as markup.
    (The widget's property is typed as a string, hence `Any`.)"""
    return Content(drawable(text, ascii_only=False))


class Printable(LineFilter):
    """Removes what a terminal would obey or could not draw."""

    def __init__(self, *, ascii_only: bool) -> None:
        super().__init__()
        self._ascii_only = ascii_only

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            Segment(drawable(text, ascii_only=self._ascii_only), style, control)
            for text, style, control in segments
        ]


def is_utf8(environ: Mapping[str, str]) -> bool:
    """Return whether the locale of an environment is UTF-8 and its terminal has more than a few hundred
    glyphs."""
    # The Linux console and a dumb terminal have no braille, even in a UTF-8 locale.
    if environ.get("TERM") in ("linux", "dumb"):
        return False
    names = {key: environ.get(key, "") for key in ("LC_ALL", "LC_CTYPE", "LANG")}
    if names["LC_CTYPE"] == "C.UTF-8":
        # Python sets this where the locale is C (PEP 538).
        names["LC_CTYPE"] = ""
    name = next(filter(None, names.values()), "")
    return name.lower().replace("-", "").endswith("utf8")
