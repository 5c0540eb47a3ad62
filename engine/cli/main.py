"""`engine`: the headless half of the workbench. Each command imports what it needs when it runs, so
`engine --help` is instant.

stdout carries data (a path, a table, one JSON value); everything said to a person on the way goes
to stderr. Exit codes: 0 pass, 1 fail, 2 unknown, 64 usage, 65 bad input, 70 our mistake, 130 and
143 stopped by SIGINT and SIGTERM.
"""

from __future__ import annotations

import argparse

from engine.cli import (
    bench,
    checks,
    contracts,
    convert,
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
    inspect,
    prepare,
    publish,
    report,
    runs,
    spec,
    stop,
    tail,
    why,
)
from engine.crash import run_command
from engine.signals import guard_command, leave_command
from engine.terminal import ArgumentParser
from engine.version import VERSION

COMMANDS = (
    distill,
    prepare,
    tail,
    diagnose,
    checks,
    runs,
    stop,
    flip,
    flips,
    why,
    evidence,
    report,
    contracts,
    spec,
    inspect,
    convert,
    generate,
    eval,
    gate,
    publish,
    doctor,
    drill,
    bench,
)

EPILOG = (
    "exit codes: 0 pass, 1 fail, 2 unknown, 64 usage, 65 bad input, 70 internal, "
    "130/143 stopped by SIGINT/SIGTERM, 128+n killed by signal n"
)


def build_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="engine",
        description="Distil language models and see what is really happening. "
        "`apr-workbench` shows the same on screen.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"engine {VERSION}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in COMMANDS:
        name = module.__name__.rsplit(".", 1)[-1]
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(handler=module.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = build_parser().parse_args(argv)
    is_process = argv is None
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
