"""`python -m engine.drills.plant DRILL -- ARGUMENTS`: the trainer of a run, with what a drill plants.

Apart from the function that it replaces, this is the ordinary trainer: its arguments are those of
`python -m engine.train`. A supervisor starts it when APR_WORKBENCH_TRAINER names it, and records that in
the log of the run.
"""

from __future__ import annotations

import sys

from engine.terminal import say


def main() -> int:
    arguments = sys.argv[1:]
    if len(arguments) < 3 or arguments[1] != "--":
        say("usage: python -m engine.drills.plant DRILL -- ARGUMENTS")
        return 64
    from engine.drills.planting import plant
    from engine.train.__main__ import main as train

    sys.argv = [sys.argv[0], *arguments[2:]]
    with plant(arguments[0]):
        return train()


if __name__ == "__main__":
    sys.exit(main())
