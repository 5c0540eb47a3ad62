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

from docs.json_answers import ANSWERS
from engine.cli.answers import schema_of
from engine.cli.main import EPILOG, build_parser
from engine.export import published
from engine.export.peers import Absent
from engine.log.folder import RunFolder
from tests.support.findings import asked, flip, hanging_run
from tests.support.finished_runs import finish, train_here
from tests.support.kit import Kit
from tests.support.paths import ROOT
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
VARYING |= {"dtypes", "tensors", "device_facts", "tool", "variables"}
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


def types_of(value: Any, path: str = "") -> dict[str, set[str]]:
    """The types of the values at each path of keys; an empty list or object is a value."""
    inside: list[tuple[str, Any]] = []
    if path.rpartition(".")[2] not in VARYING:
        if isinstance(value, list):
            inside = [(f"{path}[]", one) for one in value]
        # Keys that are no identifiers are names of files, packages and the like.
        elif isinstance(value, dict) and all(map(str.isidentifier, value)):
            inside = [(f"{path}.{key}".lstrip("."), one) for key, one in value.items()]
    if not inside:
        return {path: {TYPES[type(value)]}}
    found: dict[str, set[str]] = {}
    for name, one in inside:
        for at, types in types_of(one, name).items():
            found.setdefault(at, set()).update(types)
    return found


TYPES = {
    **{dict: "object", list: "list", str: "text", int: "integer", float: "number"},
    **{bool: "true or false", type(None): "null"},
}


def agree(found: set[str], recorded: set[str]) -> bool:
    """Whether types found in one answer are those recorded: what is absent may be null or empty in either."""
    nothing, numbers = {"null", "list", "object"}, {"integer", "number"}
    known = recorded - nothing
    return not known or all(
        one in known or one in nothing or (one in numbers and known & numbers) for one in found
    )


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
def printed(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """The fields and types of each kind of object that commands print of a finished run without a supervisor."""
    folder = tmp_path_factory.mktemp("surface")
    run = finish(kit, folder).path
    spec, work, flips = folder / "spec.toml", folder / "work", folder / "flips"
    flip(flips / "one")
    hanging = hanging_run(folder / "hanging").path
    asked(RunFolder(hanging), folder=folder / "evidence")
    commands: tuple[tuple[object, ...], ...] = (
        ("spec",),
        ("distill", spec, "--check", "--out", folder / "new"),
        ("distill", spec, "--out", folder / "second"),
        ("distill", spec, "--smoke", 4, "--out", folder / "third"),
        (
            *("init", "--teacher", kit.teacher, "--student", kit.student),
            *("--data", kit.corpus, "--name", "first"),
        ),
        ("prepare", spec, "--out", folder / "store", "--dry-run"),
        ("prepare", spec, "--out", folder / "store"),
        ("data", spec),
        ("data", run, "--step", "1"),
        ("tag", run, "good", "--note", "kept"),
        ("tail", run),
        ("tail", "-f", run),
        ("runs", folder, "--since", "2000-01-01"),
        ("diagnose", run),
        ("diagnose", hanging),
        ("diagnose", folder),
        ("diagnose", "--list"),
        ("checks", run),
        ("checks", hanging),
        ("checks", "--list"),
        ("verify", run, "--steps", "1"),
        ("drill", "--list"),
        ("flip", spec, "--set", "train.rows=8", "--dry-run"),
        ("flip", run, "--propose"),
        ("flips", flips),
        ("why", "show", "--evidence", folder / "evidence"),
        ("why", "check", "--evidence", folder / "evidence"),
        ("evidence", "list", folder / "evidence"),
        ("evidence", "receipt", run),
        ("inspect", run / "student", "--tensors"),
        ("convert", run / "student", folder / "student.gguf", "--quant", "q8_0"),
        ("generate", run, "--prompt", "def ", "--max-tokens", "2"),
        ("eval", "ppl", run, "--data", kit.corpus, "--against", kit.teacher),
        ("gate", run, "--only", "heldout,eval"),
        ("publish", run, folder / "published", "--gguf", "none", "--apr", "none"),
        ("publish", "--verify", folder / "published"),
        ("report", run),
        ("export", run, "--to", "csv", "--out", "values.csv"),
        ("import", "csv", "values.csv", "--out", "imported"),
        ("contracts", "validate"),
    )
    work.mkdir()
    found: dict[str, dict[str, set[str]]] = {}
    with pytest.MonkeyPatch.context() as patch:
        asked_once(patch)
        train_here(patch)
        patch.chdir(work)  # `init` writes into the working folder
        (work / "contracts").symlink_to(ROOT / "contracts")
        for words in commands:
            done = engine_here(*words, "--json")
            assert done.returncode in (0, 1, 2), f"{words}: {done.stderr}"
            for line in done.stdout.splitlines():
                answer = json.loads(line)
                for one in answer if isinstance(answer, list) else [answer]:
                    fields = found.setdefault(one.pop("schema"), {})
                    for path, types in types_of(one).items():
                        fields.setdefault(path, set()).update(types)
    return {
        schema: {path: ", ".join(sorted(types)) for path, types in fields.items()}
        for schema, fields in found.items()
    }


NOT_RECORDED = {
    "doctor": "differs from machine to machine",
    "drills": "takes minutes",
    "identities": "needs a watched script",
    "log-line": "needs a run that goes on",
    "notify": "needs a receiver",
    "problems": "needs a sandbox",
    "stop": "needs a run that goes on",
    "contract": "of checks that this machine has not run",
    "contracts": "of checks that this machine has not run",
}


def test_the_fields_of_json_are_those_recorded(printed: dict[str, dict[str, str]]) -> None:
    assert set(printed) | set(map(schema_of, NOT_RECORDED)) == set(map(schema_of, ANSWERS))
    record: dict[str, dict[str, str]] = json.loads(RECORD.read_text())["json"]
    for schema in printed.keys() & record.keys():
        gone = record[schema].keys() - printed[schema].keys()
        assert not gone, f"{schema}: fields are gone; raise its version in engine/cli/answers.py"
        for path in printed[schema].keys() & record[schema].keys():
            types = [set(one[schema][path].split(", ")) for one in (printed, record)]
            assert agree(*types), f"{schema}: {path} is {types[0]}, recorded as {types[1]}"
    if os.environ.get("RECORD_SURFACE"):
        held("json", printed)
    assert {one: fields.keys() for one, fields in printed.items()} == {
        one: fields.keys() for one, fields in json.loads(RECORD.read_text())["json"].items()
    }


def test_each_answer_is_of_commands_that_there_are() -> None:
    leaves = {one.prog: one for one in parsers(build_parser()) if one._subparsers is None}
    printing = set()
    for answer in ANSWERS.values():
        for line in answer.commands.split(", "):
            words, _, option = f"engine {line}".partition(" --")
            assert not option or f"--{option}" in leaves[words]._option_string_actions, line
            printing.add(words)
    assert printing == leaves.keys() - SAY_NOTHING_TO_PARSE.keys()
