"""Run a training script that is not ours, and watch it: its steps, loss, machine, stalls and how it ends.

    engine watch -- python train.py --lr 1e-4
    engine watch --name try-3 -- torchrun --nproc-per-node 2 train.py
    engine watch --pid 4242         a process that runs already, from outside: Ctrl-C ends the watching alone
    apr-workbench runs/NAME         the same run on screen, from another terminal, now or later

The script is not changed and keeps its terminal, its signals and its exit code. In each of its Python processes that
imports torch, a probe that needs only the standard library (`apr_watch`) records each optimizer step. A process that
runs already is seen through the kernel, the GPU and py-spy alone: its machine, its stacks, whether it works at all and
how it ended are known, its steps and its loss are not.
"""

from __future__ import annotations

import argparse
import os

from engine import limits
from engine.cli.arguments import (
    add_flag,
    add_number,
    add_path,
    add_real,
    add_repeated,
    read_variable,
)
from engine.errors import UsageError
from engine.flips.script_settings import SCRIPT_SETTINGS, read_script_settings
from engine.terminal import say

HELP = "run a training script that is not ours, and watch it; or watch one that runs already"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path(
        parser, "--runs", "DIR", "folder for the run folder (runs; your own where it is read-only)"
    )
    what = "watch this process, which runs already, and what it has started, without touching it"
    add_number(parser, "--pid", limits.LOG_PID, what, least=1, metavar="PID")
    parser.add_argument("--name", help="name of the run folder (default: SCRIPT-DATE-TIME)")
    parser.add_argument(
        "--ask",
        action="append",
        choices=["none"],
        default=[],
        help="none: run no forward passes to test the model (by default a few on two rows after the second step, "
        "which change nothing)",
    )
    add_number(
        parser,
        "--steps",
        limits.STEPS,
        "end the script after N optimizer steps, as if it had no more",
        least=1,
        metavar="N",
    )
    what = "make every step longer by this share, 0.1 is a tenth: to try what would be noticed"
    add_real(parser, "--slow-by", 10.0, what, metavar="SHARE", default=0.0)
    what = "a variable of the command's environment, which the run folder keeps"
    add_repeated(parser, "--env", "NAME=VALUE", what)
    what = f"change a setting in the script without its help: {', '.join(SCRIPT_SETTINGS)}"
    add_repeated(parser, "--set", "NAME=VALUE", what)
    what = "what the command prints goes to stderr.txt of the run folder, not to the terminal"
    add_flag(parser, "--keep-output", what)
    what = "send messages to this URL, $VARIABLE or receiver of notify.toml, or to none (all of notify.toml)"
    add_repeated(parser, "--notify", "RECEIVER", what)
    add_flag(
        parser,
        "--quiet",
        "print neither what is found wrong while it runs, nor the summary",
    )
    parser.add_argument("program", nargs="*", metavar="COMMAND", help="after --: what to run")


def run(arguments: argparse.Namespace) -> int:
    from engine.attach.command import end_as, new_run, run_command
    from engine.attach.summary import summary_lines

    command: list[str] = arguments.program
    if arguments.pid is not None:
        return _watch_pid(arguments)
    if not command:
        raise UsageError(
            "expected a command after --, or --pid PID",
            hint="engine watch -- python train.py",
        )
    variables = dict(read_variable("--env", text) for text in arguments.env)
    changed = read_script_settings(arguments.set)
    notify = _notify(arguments)
    folder = new_run(command, arguments.runs, arguments.name, arguments.env, changed=changed)
    code = run_command(
        command,
        folder,
        arguments.ask,
        steps=arguments.steps,
        slow_by=arguments.slow_by,
        variables=variables,
        changed=changed,
        keep_output=arguments.keep_output,
        report=not arguments.quiet,
        notify=notify,
    )
    if not arguments.quiet:
        for line in summary_lines(folder):
            say(line)
    return end_as(code)


def _notify(arguments: argparse.Namespace) -> str:
    """Return who gets messages. Raises BadInput for a receiver that cannot be used."""
    from engine.notify.receivers import ALL, NOTIFY_VARIABLE, choose_receivers

    wanted = ",".join(arguments.notify) or os.environ.get(NOTIFY_VARIABLE, ALL)
    choose_receivers(wanted, os.environ)
    return wanted


def _watch_pid(arguments: argparse.Namespace) -> int:
    from engine.attach.command import new_run
    from engine.attach.process import find_process, watch_process
    from engine.attach.summary import summary_lines

    names = ("program", "ask", "steps", "slow_by", "env", "set", "keep_output")
    given = [name for name in names if getattr(arguments, name)]
    if given:
        name = "a command" if given[0] == "program" else f"--{given[0].replace('_', '-')}"
        raise UsageError(
            f"{name} — expected no other option with --pid, which starts no command, found {name}",
            hint="engine watch --pid PID",
        )
    process = find_process(arguments.pid)
    notify = _notify(arguments)
    folder = new_run(
        process.arguments,
        arguments.runs,
        arguments.name,
        process.variables,
        pid=process.pid,
        runs_in=process.folder,
    )
    say(
        f"watching process {process.pid}; Ctrl-C ends the watching alone; apr-workbench {folder.path}"
    )
    watch_process(folder, process, notify)
    if not arguments.quiet:
        for line in summary_lines(folder):
            say(line)
    return 0
