"""The man pages of both commands, made from their parsers: engine.1, one for each command of it, and apr-workbench.1.

    python -m wheels.man FOLDER

`wheels/split.py` puts them into the wheel of the viewer, from where pip installs them into share/man/man1: `man` finds
them beside the folder of the commands.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from docs.pages import arguments_of, subcommands
from engine.cli.main import EPILOG, GROUPS, build_parser
from engine.version import VERSION
from workbench.cli import demo_parser, watch_parser

WORKBENCH = "watch runs in the terminal, or start the demo and watch it"


def pages() -> dict[str, str]:
    """Return the text of each page by the name of its file."""
    engine = build_parser()
    parsers = dict(subcommands(engine))
    lines = [".SH COMMANDS"]
    for title, group in GROUPS.items():
        lines += [f".SS {roff(title)}"]
        for one in group:
            lines += [".TP", rf"\fBengine\-{roff(one.name)}\fR(1)", roff(one.help)]
    lines += [".SH EXIT STATUS", roff(EPILOG.removeprefix("exit codes: "))]
    see = ", ".join(rf"\fB{roff(name)}\fR(1)" for name in ("apr-workbench", "engine-NAME"))
    found = {
        "engine.1": page("engine", "distil language models and diagnose training runs", [engine])
        + "\n".join([*lines, ".SH SEE ALSO", see, ""])
    }
    for group in GROUPS.values():
        for one in group:
            text = page(f"engine-{one.name}", one.help, below(parsers[one.name]))
            found[f"engine-{one.name}.1"] = f"{text}.SH SEE ALSO\n\\fBengine\\fR(1)\n"
    found["apr-workbench.1"] = page("apr-workbench", WORKBENCH, [watch_parser(), demo_parser()])
    return found


def below(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and those of its actions."""
    yield parser
    for _, one in subcommands(parser):
        yield from below(one)


def page(name: str, what: str, parsers: Iterable[argparse.ArgumentParser]) -> str:
    """Return a page: the first parser has its sections, each other one a section of its own."""
    lines = [f'.TH "{roff(name.upper())}" 1 "" "apr\\-workbench {VERSION}" "User Commands"']
    # Neither hyphenated nor spread: a broken option cannot be searched or copied.
    lines += [".nh", ".ad l", ".SH NAME", rf"{roff(name)} \- {roff(what)}"]
    for number, parser in enumerate(parsers):
        usage = " ".join(parser.format_usage().split()).removeprefix("usage: ")
        lines += [".SH SYNOPSIS" if number == 0 else f'.SH "{roff(parser.prog)}"', roff(usage)]
        lines += [".SH DESCRIPTION" if number == 0 else ".PP", *described(parser.description or "")]
        rows = arguments_of(parser)
        lines += [".SH OPTIONS"] if number == 0 and rows else []
        for names, meaning in rows:
            lines += [".TP", rf"\fB{roff(names)}\fR", roff(meaning)]
    return "\n".join(lines) + "\n"


def described(text: str) -> Iterator[str]:
    """Yield paragraphs: those with columns or indented lines as they are, others filled."""
    for part in text.strip().split("\n\n"):
        as_it_is = any("  " in line for line in part.split("\n"))
        lines = [roff(line) for line in part.split("\n")]
        yield from [".PP", *([".nf", *lines, ".fi"] if as_it_is else lines)]


def roff(text: str) -> str:
    """Escape a line of text: hyphens are those of options, and other characters than ASCII have their code."""
    text = text.replace("\\", r"\e").replace("-", r"\-").replace("\n", " ")
    text = "".join(c if c.isascii() else f"\\[u{ord(c):04X}]" for c in text)
    return rf"\&{text}" if text.startswith((".", "'")) else text


if __name__ == "__main__":
    for name, text in pages().items():
        (Path(sys.argv[1]) / name).write_text(text)
