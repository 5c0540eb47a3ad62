"""`python -m tests.support.faulty_rank RUN ...`: the launcher of several ranks, or one of them, where FAULTS says what
goes wrong on which rank from the third step on: `raise:0`, `kill:1`, several apart by commas. A supervisor
starts it when APR_WORKBENCH_TRAINER names it."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

MODULE = "tests.support.faulty_rank"
FROM_STEP = 3


def main() -> int:
    if "RANK" not in os.environ:
        from engine.train.ranks import torchrun

        torchrun.RANK = MODULE
        return torchrun.main()
    faults = dict(one.split(":")[::-1] for one in os.environ["FAULTS"].split(","))
    if (fault := faults.get(os.environ["RANK"])) is not None:
        _plant(fault)
    from engine.train.__main__ import main as train

    return train()


def _plant(fault: str) -> None:
    from engine.train.trainer import Trainer

    launch = Trainer.launch

    def failing(trainer: Trainer, *given: Any) -> Any:
        if trainer.step + 1 >= FROM_STEP:
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("division by zero in a rank")
        return launch(trainer, *given)

    Trainer.launch = failing  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
