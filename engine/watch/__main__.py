"""`python -m engine.watch RUN [--resume] [--allow-fallback] [--allow-restart] [--host PLACE]`: the
supervisor process of one run on one host; started by `engine.watch.start_and_stop`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from engine.errors import EngineError
from engine.log.folder import open_run
from engine.terminal import say
from engine.watch.hosts import Place
from engine.watch.supervisor import supervise


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.watch", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--allow-fallback", action="store_true")
    parser.add_argument("--allow-restart", action="store_true")
    parser.add_argument("--host", type=Place.parse)
    arguments = parser.parse_args()
    try:
        flags = [
            f"--{name}"
            for name in ("resume", "allow-fallback", "allow-restart")
            if vars(arguments)[name.replace("-", "_")]
        ]
        return supervise(open_run(arguments.run), flags, arguments.host)
    except EngineError as error:
        say(error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
