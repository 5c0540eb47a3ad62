"""`engine`: the command-line half of the workbench. Each command imports what it needs when it runs, so
`engine --help` is instant.

stdout carries data (a path, a table, one JSON value); messages for a person go to stderr. Exit codes: 0 pass,
1 fail, 2 unknown, 64 usage, 65 bad input, 70 our mistake, 130 and 143 stopped by SIGINT and SIGTERM.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

from engine.bytecode import keep_bytecode
from engine.cli import (
    checks,
    completion,
    contracts,
    data,
    diagnose,
    distill,
    doctor,
    drill,
    eval,
    evidence,
    flip,
    flips,
    gate,
    generate,
    init,
    interchange,
    mcp,
    notify,
    prepare,
    publish,
    report,
    runs,
    serve,
    spec,
    verify,
    watch,
    weights,
    why,
)
from engine.crash import run_command
from engine.signals import guard_command, leave_command
from engine.terminal import ArgumentParser
from engine.version import VERSION


class Command(NamedTuple):
    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Its docstring, or that of its module, is the long text of `--help`."""


def _of(module: ModuleType) -> Command:
    """Return the command that is a module of its own, named like it."""
    name = module.__name__.rpartition(".")[2]
    return Command(name, module.HELP, module.add_arguments, module.run)


GROUPS: dict[str, tuple[Command, ...]] = {
    "every day": (
        _of(watch),
        _of(init),
        _of(distill),
        Command(
            "runs", "list runs: state, progress, losses", runs.add_runs_arguments, runs.list_runs
        ),
        Command(
            "tail",
            "show a run: state, losses, decisions, device, log",
            runs.add_tail_arguments,
            runs.tail,
        ),
        _of(diagnose),
        _of(flip),
        Command("stop", "ask a run to save and stop", runs.add_stop_arguments, runs.stop_run),
        _of(report),
        _of(serve),
        _of(doctor),
    ),
    "more of a run": (
        Command(
            "checks",
            "list the first-minute checks, or show their results in a run",
            checks.add_checks_arguments,
            checks.checks,
        ),
        _of(verify),
        _of(flips),
        Command("tag", "tag a run, or write a note on it", runs.add_tag_arguments, runs.tag),
        Command(
            "import",
            interchange.IMPORT_HELP,
            interchange.add_import_arguments,
            interchange.import_,
        ),
        Command(
            "export", interchange.EXPORT_HELP, interchange.add_export_arguments, interchange.export
        ),
        _of(mcp),
        _of(notify),
        _of(why),
        _of(evidence),
    ),
    "data and models": (
        _of(data),
        _of(spec),
        _of(prepare),
        Command(
            "inspect",
            "describe a weight file: safetensors, GGUF, .apr",
            weights.add_inspect_arguments,
            weights.inspect,
        ),
        Command(
            "convert",
            "write a model in another weight format",
            weights.add_convert_arguments,
            weights.convert,
        ),
        _of(generate),
        _of(eval),
        _of(gate),
        _of(publish),
    ),
    "the workbench itself": (
        _of(drill),
        _of(contracts),
        _of(completion),
    ),
}
"""Commands by group, the most used first, those for experts last."""
COMMANDS = tuple(itertools.chain.from_iterable(GROUPS.values()))

_OTHER_NAMES_OF = {
    "distill": "train run fit finetune kd start launch",
    "init": "new create setup quickstart",
    "distill --resume RUN": "resume continue",
    "distill SPEC --check": "validate lint check",
    "verify": "replay reproduce audit",
    "runs": "list ls ps",
    "tail": "log logs status show",
    "stop": "kill cancel",
    "tag": "note label annotate",
    "spec": "settings config options",
    "inspect": "info describe",
    "convert": "quantize quantise",
    "generate": "sample chat infer",
    "prepare": "cache precompute",
    "publish": "upload push",
    "serve": "server web browser dashboard",
}
OTHER_NAMES = {word: name for name, words in _OTHER_NAMES_OF.items() for word in words.split()}
"""Words that users of other tools try first, and our command for each."""
EPILOG = (
    "exit codes: 0 pass, 1 fail, 2 unknown, 64 usage, 65 bad input, 70 internal, "
    "130/143 stopped by SIGINT/SIGTERM, 128+n killed by signal n"
)


class _Grouped(argparse.HelpFormatter):
    """Puts the title of a group above its first command."""

    def _format_action(self, action: argparse.Action) -> str:
        text = super()._format_action(action)
        firsts = {commands[0].name: title for title, commands in GROUPS.items()}
        title = None if action.option_strings else firsts.get(action.dest)
        return f"\n  {title}\n{text}" if title else text


def build_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="engine",
        description="Distil language models and see what is really happening. "
        "`apr-workbench` shows the same on screen.",
        epilog=EPILOG,
        formatter_class=_Grouped,
    )
    parser.other_names = OTHER_NAMES
    parser.set_defaults(root=parser)
    parser.add_argument("--version", action="version", version=f"engine {VERSION}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for row in COMMANDS:
        subparser = commands.add_parser(
            row.name,
            help=row.help,
            description=inspect.getdoc(row.run) or sys.modules[row.run.__module__].__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        row.add_arguments(subparser)
        subparser.set_defaults(handler=row.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    is_process = argv is None
    if is_process:
        keep_bytecode()
    arguments = build_parser().parse_args(argv)
    if is_process:
        guard_command()
    code = run_command(
        f"engine {arguments.command}",
        lambda: arguments.handler(arguments),
        debug=arguments.debug,
    )
    if is_process:
        leave_command(code)
    return code
