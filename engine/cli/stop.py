"""Ask a run to finish its step, save a checkpoint and stop; it can be resumed.

engine stop RUN          finish the step, save, stop (exit code of the run: 143)
engine stop RUN --now    kill the trainer without saving
"""

from __future__ import annotations

import argparse
from pathlib import Path

from engine.terminal import say

HELP = "ask a run to save and stop"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("--now", action="store_true", help="kill it without saving")


def run(arguments: argparse.Namespace) -> int:
    from engine.log.folder import open_run
    from engine.watch.launch import stop

    say(stop(open_run(arguments.run), now=arguments.now))
    return 0
