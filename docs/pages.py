"""The reference pages that are made from the code: `python docs/pages.py` writes them, a test compares them.

Each page is a table that the program itself reads (settings, checks, alert rules, drills, limits, commands),
printed as Markdown. Nothing here imports torch, so the pages are made anywhere.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent)]

HEAD = "<!-- Made from the code by `make docs`; a change belongs there. -->\n\n"


def cell(text: object) -> str:
    """Text inside a table: a bar would end the cell."""
    return str(text).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def table(header: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


TYPES = {"str": "text", "int": "integer", "float": "number", "bool": "`true`, `false`"}


def settings() -> str:
    from engine.spec import options

    text = "# Settings\n\nEvery setting of a spec, one table for each section of the TOML file. "
    text += "`engine spec` prints the same as a file to start from; `--set section.key=value` changes one.\n"
    text += (
        "A setting that changes results is meant to change what is learnt or on what it is judged; a flip of "
        "any other demands that both arms have the same losses.\n"
    )
    sections: dict[str, list[tuple[object, ...]]] = {}
    for option in options():
        section, key = option.key.split(".", 1)
        values = (
            ", ".join(f"`{value}`" for value in option.allowed or ()) or TYPES[option.type_name]
        )
        default = option.default
        shown = (
            "empty"
            if default == ""
            else f"`{str(default).lower() if isinstance(default, bool) else default}`"
        )
        sections.setdefault(section, []).append(
            (f"`{key}`", values, shown, "yes" if option.changes_results else "", option.doc)
        )
    for section, rows in sections.items():
        text += f"\n## {section}\n\n" + table(
            ("setting", "values", "default", "changes results", "what it does"), rows
        )
    return text


def checks() -> str:
    from engine.checks.catalogue import CATALOGUE

    text = (
        "# First-minute checks\n\n"
        "What is proved about a run before and during its first steps. `engine checks RUN` shows the answers "
        "of a run; `checks.skip` leaves one out, and the log says so. A check that stops a run ends it before "
        "the next step.\n"
    )
    for about in CATALOGUE:
        stops = "stops the run" if about.stops else "warns"
        text += f"\n## {about.id}\n\n{about.question}\n\n"
        text += (
            f"- asked: {about.when.value}; {stops}\n- failed: {about.means}\n- do: {about.remedy}\n"
        )
    return text


def alerts() -> str:
    from engine.watch.rules import RULES

    text = (
        "# Alerts\n\n"
        "The rules that watch a run from another process, and that `engine diagnose RUN` asks afterwards. An "
        "alert carries its numbers, what each is held against, and the flip that would test the suspicion.\n"
    )
    for rule in RULES:
        text += f"\n## {rule.id}\n\n{rule.asks}\n\n- fires at: {rule.threshold}\n- reads: {rule.reads}\n"
    return text


def watch_identities() -> str:
    from engine.attach.identity_catalogue import IDENTITIES
    from engine.log.events import IDENTITY
    from engine.log.text import LEVEL_WORDS

    text = (
        "# Identities of a watched training\n\n"
        "What holds in every healthy training. [`engine watch`](../how-to/watch.md) looks at each on a few steps: the "
        "first three of an optimizer, then those whose number is a power of two. Nothing is learnt from another run, "
        "and the script is changed in nothing.\n\n"
        "A **contradiction** is an identity that fails, and the only alarm: the summary names it with its numbers. A "
        "**suspicion** holds, and may be a mistake or meant. A **fact** is neither. What cannot be seen is "
        "**unknown**, never a pass.\n"
    )
    for row in IDENTITIES:
        text += f"\n## {row.id}\n\n{row.question}\n\n"
        text += f"- identity: {row.identity}; at worst a {LEVEL_WORDS.get((IDENTITY, row.level), row.level)}\n- otherwise: {row.means}\n"
        text += f"- do, in a plain loop: {row.plain}\n"
        for name, remedy in (
            ("the Trainer of transformers", row.transformers),
            ("Lightning", row.lightning),
        ):
            text += f"- with {name}: {remedy}\n" if remedy else ""
    return text


def commands() -> str:
    from engine.cli.main import EPILOG, GROUPS, build_parser

    parser = build_parser()
    text = f"# Commands\n\n{parser.description}\n\n{EPILOG[0].upper()}{EPILOG[1:]}.\n"
    parsers = dict(subcommands(parser))
    for title, group in GROUPS.items():
        text += f"\n## {title[0].upper()}{title[1:]}\n"
        for one in group:
            text += command(parsers[one.name], f"engine {one.name}", level=3)
    return text


def subcommands(parser: argparse.ArgumentParser) -> list[tuple[str, argparse.ArgumentParser]]:
    return [
        (word, one)
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for word, one in action.choices.items()
    ]


def command(parser: argparse.ArgumentParser, name: str, level: int) -> str:
    """Its description, arguments and options, and those of the commands below it."""
    text = f"\n{'#' * level} {name}\n\n"
    if parser.description:
        text += f"```text\n{parser.description.strip()}\n```\n"
    rows: list[tuple[object, ...]] = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        word = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
        if isinstance(word, tuple):
            word = " ".join(word)
        if action.choices is not None and action.metavar is None:
            word = "{" + ",".join(map(str, action.choices)) + "}"
        names = ", ".join(f"`{f'{option} {word}'.strip()}`" for option in action.option_strings)
        rows.append((names or f"`{word}`", (action.help or "") % vars(action)))
    if rows:
        text += "\n" + table(("argument", "meaning"), rows)
    for word, one in subcommands(parser):
        text += command(one, f"{name} {word}", level + 1)
    return text


def drills() -> str:
    from engine.drills.catalogue import DRILLS

    text = "# Drills\n\nIncidents that `engine drill` makes happen in a short real run, and what must name each.\n\n"
    rows: list[tuple[object, ...]] = [
        (f"`{drill.id}`", drill.what, ", ".join(f"`{one.id}`" for one in drill.expected))
        for drill in DRILLS
    ]
    return text + table(("drill", "incident", "named by"), rows)


def limits() -> str:
    from engine.limits import markdown

    return markdown()


PAGES: dict[str, Callable[[], str]] = {
    "reference/settings.md": settings,
    "reference/checks.md": checks,
    "reference/alerts.md": alerts,
    "reference/commands.md": commands,
    "reference/watch-identities.md": watch_identities,
    "reference/drills.md": drills,
    "limits.md": limits,
}


def main() -> None:
    for name, page in PAGES.items():
        path = DOCS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((HEAD if name != "limits.md" else "") + page(), encoding="utf-8")


if __name__ == "__main__":
    main()
