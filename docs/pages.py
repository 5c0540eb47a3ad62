"""The reference pages that are made from the code: `python docs/pages.py` writes them, a test compares them.

Each page is a table that the program itself reads (settings, checks, alert rules, drills, limits, commands),
printed as Markdown. Nothing here imports torch, so the pages are made anywhere.
"""

from __future__ import annotations

import argparse
import json
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


def judged() -> str:
    from engine.catalogue import CHECKS, IDENTITIES
    from engine.log.events import IDENTITY
    from engine.log.text import LEVEL_WORDS
    from engine.watch.rules import RULES

    text = (
        "# What is judged\n\n"
        "Everything that a run can be told is wrong with it, by an id. The log has each result as a line `judged`.\n"
        "\n## Checks\n\n"
        "What is checked before and during the first steps of a run of the engine, and at its checkpoints and its end; "
        "ids that begin with `step_` are the stages of the audit of a step. `engine checks RUN` shows the results, "
        "`checks.skip` leaves one out, and the log says so. A check that stops a run ends it before the next step.\n"
    )
    for about in CHECKS:
        stops = "stops the run" if about.stops else "warns"
        text += f"\n### {about.id}\n\n{about.question}\n\n- asked: {about.when.value.replace('_', ' ')}; {stops}\n"
        text += f"- failed: {about.means}\n- do: {about.remedy}\n"
    text += (
        "\n## Alerts\n\n"
        "The rules by which another process watches a run, and which `engine diagnose RUN` asks afterwards. An alert "
        "carries its numbers, what each is compared with, and the flip that would test the suspicion.\n"
    )
    for rule in RULES:
        level = LEVEL_WORDS.get((rule.about.by, rule.about.level), rule.about.level)
        text += f"\n### {rule.id}\n\n{rule.about.question}\n\n- raises: {level}\n"
        text += f"- fires at: {rule.threshold}\n- reads: {', '.join(rule.reads)}\n"
    text += (
        "\n## Identities of a watched script\n\n"
        "Each holds in every healthy training run. [`engine watch`](../how-to/watch.md) checks each on a few steps: "
        "the first three of an optimizer, then those whose number is a power of two. Nothing is learnt from another "
        "run, and the script is changed in nothing.\n\n"
        "A **contradiction** is an identity that fails, and the only alarm: the summary names it with its numbers. A "
        "**suspicion** holds, and may be a mistake or meant. A **fact** is neither. What cannot be seen is "
        "**unknown**, never a pass.\n"
    )
    for about in IDENTITIES:
        level = LEVEL_WORDS.get((IDENTITY, about.level), about.level)
        text += (
            f"\n### {about.id}\n\n{about.question}\n\n- about: {about.group}; at worst a {level}\n"
        )
        text += f"- failed: {about.means}\n- do, in a plain loop: {about.remedy}\n"
        for name, remedy in (
            ("the Trainer of transformers", about.transformers),
            ("Lightning", about.lightning),
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
    if rows := arguments_of(parser):
        text += "\n" + table(("argument", "meaning"), [(in_code(one), what) for one, what in rows])
    for word, one in subcommands(parser):
        text += command(one, f"{name} {word}", level + 1)
    return text


def in_code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def arguments_of(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """Its arguments and options, each with its meaning."""
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        word = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
        if isinstance(word, tuple):
            word = " ".join(word)
        if action.choices is not None and action.metavar is None:
            word = "{" + ",".join(map(str, action.choices)) + "}"
        names = ", ".join(f"{option} {word}".strip() for option in action.option_strings)
        rows.append((names or word, (action.help or "") % vars(action)))
    return rows


def drills() -> str:
    from engine.drills.catalogue import DRILLS

    text = "# Drills\n\nIncidents that `engine drill` makes happen in a short real run, and what must name each.\n\n"
    rows: list[tuple[object, ...]] = [
        (f"`{drill.id}`", drill.what, ", ".join(f"`{one.id}`" for one in drill.expected))
        for drill in DRILLS
    ]
    return text + table(("drill", "incident", "named by"), rows)


def json_answers() -> str:
    from docs.json_answers import ANSWERS
    from engine.cli.answers import schema_of

    record = json.loads((DOCS.parent / "tests/system/cli/surface.json").read_text())["json"]
    text = (
        "# JSON\n\nEvery command that prints results prints them with `--json` as one line on standard output. "
        "Messages for people are on standard error, and the exit code says the same with and without it.\n\n"
        "- Every object begins with `schema`, such as `apr-workbench/run-2`; its fields follow at the same level.\n"
        "- An answer that is a list, such as that of `engine runs`, has it in each entry; a stream, of "
        "`engine tail --follow`, in each line.\n"
        "- The number grows when a field is removed, or changes its type or meaning. A new field leaves it as it is: "
        "read the fields that you know.\n"
        "- NaN and infinity, which JSON does not have, are the texts `nan`, `+inf` and `-inf`. Anything not known is "
        "`null`.\n\n"
        "The tables below are recorded from answers of a small run on a CPU, and a test compares them. `a[].b` is the "
        "field `b` of each entry of the list `a`. Where a type is `null`, `list` or `object` alone, the recorded "
        "answer had no value, or its contents depend on the machine, the model or the rule.\n\n"
    )
    text += table(
        ("schema", "printed with `--json` by", "what it is"),
        [
            (f"`{schema_of(name)}`", commands_of(one.commands), one.what)
            for name, one in ANSWERS.items()
        ],
    )
    for name in ANSWERS:
        if (fields := record.get(schema_of(name))) is not None:
            text += f"\n## {schema_of(name)}\n\n" + table(
                ("field", "type"), [(f"`{path}`", types) for path, types in fields.items()]
            )
    return text


def commands_of(commands: str) -> str:
    return ", ".join(f"`engine {one}`" for one in commands.split(", "))


def limits() -> str:
    from engine.limits import markdown

    return markdown()


PAGES: dict[str, Callable[[], str]] = {
    "reference/settings.md": settings,
    "reference/judged.md": judged,
    "reference/commands.md": commands,
    "reference/drills.md": drills,
    "reference/json.md": json_answers,
    "limits.md": limits,
}


def main() -> None:
    for name, page in PAGES.items():
        path = DOCS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((HEAD if name != "limits.md" else "") + page(), encoding="utf-8")


if __name__ == "__main__":
    main()
