"""Serve runs to an agent by the Model Context Protocol, on standard input and output.

engine mcp                         the runs in ./runs
engine mcp ~/project/runs OTHER    of some folders; `flips` and `evidence` are next to the first
engine mcp --allow-flips           the agent may start experiments that are proposed; one of a watched run starts the
                                   command that its run folder names
engine mcp --allow-stop            the agent may ask a run to save and stop
engine mcp --skill                 print how an agent uses all this, as a skill file

Without --allow-flips and --allow-stop the tools only read. A client starts the server; see docs/how-to/agents.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from engine.cli.arguments import add_flag
from engine.terminal import put

HELP = "serve runs to an agent (Model Context Protocol)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "folders of run folders (runs)"
    parser.add_argument("folders", nargs="*", type=Path, metavar="RUNS_FOLDER", help=what)
    add_flag(parser, "--allow-flips", "let the agent start proposed experiments")
    add_flag(parser, "--allow-stop", "let the agent stop runs")
    add_flag(parser, "--skill", "print the skill file")


def run(arguments: argparse.Namespace) -> int:
    from engine import limits
    from engine.errors import BadInput
    from engine.files import read_text
    from engine.version import install_extra

    if arguments.skill:
        path = Path(__file__).parents[1] / "agent" / "SKILL.md"
        put(read_text(path, "skill", limits.RUN_FILE), end="")
        return 0
    try:
        from engine.agent.server import make_server
    except ModuleNotFoundError as error:
        needs = f"engine mcp needs the SDK of the protocol, {error}"
        raise BadInput(needs, hint=install_extra("agent")) from None

    folders = arguments.folders or [Path("runs")]
    may = {"may_flip": arguments.allow_flips, "may_stop": arguments.allow_stop}
    make_server(folders, **may).run("stdio")
    return 0
