"""The surface of `engine`, as it was recorded: commands, options, exit codes and the keys of --json.

What scripts of users are written against does not change by itself. A change that is wanted is recorded
anew with `RECORD_SURFACE=1 pytest tests/system/cli/test_surface.py`, and its difference is read before it is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.cli.main import EPILOG, build_parser
from engine.export import published
from engine.export.peers import Absent
from tests.support.finished_runs import finish, train_here
from tests.support.kit import Kit
from tests.support.running import engine_here

RECORD = Path(__file__).with_name("surface.json")
PROBES = ("x", "", "-1", "0", "1", "1.5", "nan", "1000000000000000000000000")
"""What each option that reads a number is tried with."""
VARYING = {
    "facts",
    "absent",
    "gpus",
    "host",
    "phases_s",
    "host_s",
    "config",
    "spec",
    "numbers",
    "unjudged",
}
VARYING |= {"dtypes", "tensors"}
"""Keys whose contents are those of a machine, a model, a spec, a check or a rule, each with tests of its own."""


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from parsers(one)


SAY_NOTHING_TO_PARSE = {
    "engine watch": "stdout is that of the script",
    "engine serve": "the address of the page",
    "engine mcp": "stdout is the protocol",
    "engine completion": "a script of a shell",
}


def test_every_command_that_prints_results_prints_them_as_json() -> None:
    without = {
        one.prog
        for one in parsers(build_parser())
        if one._subparsers is None and "--json" not in one._option_string_actions
    }
    assert without == SAY_NOTHING_TO_PARSE.keys()


def documented_codes(parser: argparse.ArgumentParser) -> list[int]:
    """The numbers of the sentences that begin with `Exit`."""
    said = " ".join((parser.description or "").split())
    sentences = re.findall(r"\b[Ee]xit (?:codes? )?[^.;]*", said)
    return sorted({int(n) for text in sentences for n in re.findall(r"\b\d+\b", text)})


def parsed(action: argparse.Action, text: str) -> str:
    """What an option makes of a text: its value, or what it says against it."""
    assert callable(action.type)
    try:
        return repr(action.type(text))
    except (argparse.ArgumentTypeError, ValueError) as error:
        return f"refused: {error}" if isinstance(error, argparse.ArgumentTypeError) else "refused"


def option(action: argparse.Action) -> dict[str, Any]:
    found: dict[str, Any] = {
        "action": type(action).__name__.strip("_"),
        "default": str(action.default) if isinstance(action.default, Path) else action.default,
        "required": action.required,
    }
    if action.nargs is not None:
        found["nargs"] = action.nargs
    if action.metavar is not None:
        found["metavar"] = action.metavar
    if action.choices is not None:
        choices = list(action.choices)
        found["choices"] = choices if len(choices) < 50 else [choices[0], "...", choices[-1]]
    if action.type is Path:
        found["type"] = "path"
    elif action.type is not None:
        found["type"] = {text: parsed(action, text) for text in PROBES}
    return found


def surface() -> dict[str, Any]:
    found: dict[str, Any] = {"exit codes": EPILOG}
    for parser in parsers(build_parser()):
        found[parser.prog] = {
            "exit codes": documented_codes(parser),
            "options": {
                " ".join(action.option_strings) or action.dest: option(action)
                for action in parser._actions
                if not isinstance(action, argparse._HelpAction)
            },
        }
    return found


def key_paths(value: Any, path: str = "") -> set[str]:
    if isinstance(value, list):
        return {one for entry in value for one in key_paths(entry, f"{path}[]")} or {f"{path}[]"}
    if not isinstance(value, dict):
        return {path}
    found: set[str] = set()
    for key, one in value.items():
        inside = f"{path}.{key}" if path else key
        found |= {inside} if key in VARYING else key_paths(one, inside)
    return found or {path}


def written(value: Any, depth: int = 0) -> str:
    """JSON with one option, and one path of keys, on a line: a difference is then read at a glance."""
    if depth == 4 or not value or not isinstance(value, dict | list):
        return json.dumps(value, sort_keys=True)
    rows = (
        [written(one, depth + 1) for one in value]
        if isinstance(value, list)
        else [f"{json.dumps(key)}: {written(value[key], depth + 1)}" for key in sorted(value)]
    )
    begin, end = "[]" if isinstance(value, list) else "{}"
    inside = ",\n".join(f"{' ' * (depth + 1)}{row}" for row in rows)
    return f"{begin}\n{inside}\n{' ' * depth}{end}"


def held(part: str, found: dict[str, Any]) -> None:
    found = json.loads(json.dumps(found))
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if os.environ.get("RECORD_SURFACE"):
        RECORD.write_text(written(record | {part: found}) + "\n")
        return
    assert found.keys() == record[part].keys()
    for name, one in found.items():
        assert one == record[part][name], name


def test_commands_options_and_exit_codes_are_those_recorded() -> None:
    held("commands", surface())


def asked_once(patch: pytest.MonkeyPatch) -> None:
    """A published folder is verified by each of two commands: what one asked, the other is told again. The
    libraries of others are as if not installed, which changes no key."""
    answers: dict[str, Any] = {}
    ask = published.ask

    def told(kind: str, path: Path, scratch: Path, **question: Any) -> Any:
        if kind != "engine":
            return Absent("left out")
        key = json.dumps([kind, question])
        if key not in answers:
            answers[key] = ask(kind, path, scratch, **question)
        return answers[key]

    patch.setattr(published, "ask", told)


@pytest.fixture(scope="module")
def printed(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The keys of every command whose --json can be had of one finished run without a supervisor."""
    folder = tmp_path_factory.mktemp("surface")
    run = finish(kit, folder).path
    spec = folder / "spec.toml"
    commands: dict[str, tuple[object, ...]] = {
        "spec": ("spec",),
        "distill --check": ("distill", spec, "--check", "--out", folder / "new"),
        "init": (
            *("init", "--teacher", kit.teacher, "--student", kit.student),
            *("--data", kit.corpus, "--name", "first"),
        ),
        "prepare --dry-run": ("prepare", spec, "--out", folder / "store", "--dry-run"),
        "prepare": ("prepare", spec, "--out", folder / "store"),
        "tail": ("tail", run),
        "runs": ("runs", folder),
        "diagnose": ("diagnose", run),
        "checks": ("checks", run),
        "checks --list": ("checks", "--list"),
        "verify": ("verify", run, "--steps", "1"),
        "drill --list": ("drill", "--list"),
        "flips": ("flips", folder),
        "inspect": ("inspect", run / "student", "--tensors", "--values"),
        "convert": ("convert", run / "student", folder / "student.gguf", "--quant", "q8_0"),
        "generate": ("generate", run, "--prompt", "def ", "--max-tokens", "2"),
        "eval ppl": ("eval", "ppl", run, "--data", kit.corpus, "--against", kit.teacher),
        "gate": ("gate", run, "--only", "heldout,eval"),
        "publish": ("publish", run, folder / "published", "--gguf", "none", "--apr", "none"),
        "publish --verify": ("publish", "--verify", folder / "published"),
        "report": ("report", run),
        "export": ("export", run, "--to", "csv", "--out", "values.csv"),
        "import": ("import", "csv", "values.csv", "--out", "imported"),
    }
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        asked_once(patch)
        train_here(patch)
        patch.chdir(folder)  # `init` writes into the working folder
        for name, words in commands.items():
            done = engine_here(*words, "--json")
            assert done.returncode in (0, 1, 2), f"{name}: {done.stderr}"
            found[name] = sorted(key_paths(json.loads(done.stdout)))
    return found


def test_the_keys_of_json_are_those_recorded(printed: dict[str, list[str]]) -> None:
    held("json", printed)
