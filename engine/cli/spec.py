"""Print every setting with its meaning and default as a spec to start from; with FILE, that
spec with the defaults filled in.

engine spec > kd.toml
engine spec kd.toml --set loss.alpha=0.5
"""

from __future__ import annotations

import argparse

from engine.cli.answers import answer
from engine.cli.arguments import (
    add_json,
    add_path,
    add_set,
)

HELP = "print every setting, as TOML to start from"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path(parser, "file", None, "a spec to fill in with defaults", nargs="?")
    add_set(parser)
    add_json(parser, "print as JSON")


def run(arguments: argparse.Namespace) -> int:
    from engine.spec import RunSpec, build_spec, load_spec, spec_to_toml

    if arguments.file is not None:
        spec, _ = load_spec(arguments.file, arguments.set)
    elif arguments.set:
        spec = build_spec({}, sets=arguments.set)
    else:
        spec = RunSpec()
    return answer(arguments, "spec", spec.to_dict(), [spec_to_toml(spec).rstrip("\n")])
