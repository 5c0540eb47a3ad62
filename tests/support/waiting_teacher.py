"""`python -m tests.support.waiting_teacher -- ARGUMENTS`: a trainer whose teacher in blocks waits for ever while it is
made, and whose other teachers do not. A supervisor starts it when APR_WORKBENCH_TRAINER names it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

TRAINER = "tests.support.waiting_teacher --"


def main() -> int:
    from engine.drills.planting import replaced
    from engine.teachers.frozen import QuantizedTeacher
    from engine.train.__main__ import main as train

    def waiting(begin: Callable[..., None]) -> Callable[..., None]:
        def wait(*_: object, **__: object) -> None:
            threading.Event().wait()

        return wait

    sys.argv = [sys.argv[0], *sys.argv[2:]]
    with replaced(QuantizedTeacher, "__init__", waiting):
        return train()


if __name__ == "__main__":
    sys.exit(main())
