"""`python -m engine.train RUN`: the trainer process of one run; started by its supervisor."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
from collections.abc import MutableMapping
from pathlib import Path

from engine.terminal import say

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def grow_segments(environment: MutableMapping[str, str]) -> None:
    """Let torch's allocator grow its segments, unless the user has set it up. Blocks of one size can then be reused for
    another; otherwise a run within a limit may run out of memory with gigabytes free. Call before torch is imported."""
    if not any(name in environment for name in ALLOCATOR_SETTINGS):
        environment[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.train", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--allow-fallback", action="store_true")
    parser.add_argument("--allow-restart", action="store_true")
    parser.add_argument("--keep-alive-fd", type=int)
    arguments = parser.parse_args()

    from engine.watch.stacks import register

    if "RANK" in os.environ:
        from engine.train.ranks.torchrun import die_with_parent

        die_with_parent()
    grow_segments(os.environ)
    # Default handling until the run installs its own handlers: nothing has started, and a traceback would not
    # help.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Before torch is imported, because that may hang too.
    register(arguments.run, int(os.environ.get("RANK", "0")))
    # Imported objects stay alive: scanning them for garbage, now and at exit, takes a fifth of a start's CPU
    # time.
    gc.disable()
    from engine.errors import EngineError
    from engine.signals import Stopped
    from engine.train.run import run

    gc.freeze()
    gc.enable()
    try:
        return run(
            arguments.run,
            resume=arguments.resume,
            allow_fallback=arguments.allow_fallback,
            allow_restart=arguments.allow_restart,
            keep_alive_fd=arguments.keep_alive_fd,
        )
    except Stopped as stopped:
        # Stopped before the log could record it.
        return stopped.exit_code
    except EngineError as error:
        # The log itself could not be written, so the error is not in it.
        say(error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
