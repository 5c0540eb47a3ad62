"""`python -m tests.support.faulty_rank RUN ...`: the launcher of several ranks, or one of them, where FAULTS says what
goes wrong on which rank from the third step on: `rows:1`, `raise:0`, `kill:1`, several apart by commas. A supervisor
starts it when APR_WORKBENCH_TRAINER names it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
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

    launch, part_at = Trainer.launch, Trainer._part_at

    def failing(trainer: Trainer, *given: Any) -> Any:
        if trainer.step + 1 >= FROM_STEP:
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("division by zero in a rank")
        return launch(trainer, *given)

    def elsewhere(trainer: Trainer, position: int, rank: int) -> Any:
        own = rank == trainer.ranks.rank
        return part_at(trainer, position + (own and trainer.step + 1 >= FROM_STEP), rank)

    replaced: dict[str, tuple[str, Callable[..., Any]]] = {
        "rows": ("_part_at", elsewhere),
        "raise": ("launch", failing),
        "kill": ("launch", failing),
    }
    setattr(Trainer, *replaced[fault])


if __name__ == "__main__":
    sys.exit(main())
