"""The result of a proof harness, and the process that runs one.

A harness is a function without arguments that returns a `Proved`. If the solver gives up, the result is unknown.

    python -m engine.contracts.proving contracts.proofs.allocator:every_wish
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

PROVED, REFUTED, UNKNOWN, ABSENT = "proved", "refuted", "unknown", "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proved:
    result: str
    cases: int
    """Number of cases checked; for a solver, number of claims."""
    detail: str


def main(reference: str) -> int:
    # Harnesses and test helpers are imported from the project, which is the current folder.
    sys.path.insert(0, str(Path.cwd()))
    module, _, name = reference.partition(":")
    try:
        proved: Proved = getattr(importlib.import_module(module), name)()
    except ModuleNotFoundError as error:
        if error.name != "z3":
            raise
        proved = Proved(result=ABSENT, cases=0, detail="z3 is not installed")
    print(json.dumps(asdict(proved)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
