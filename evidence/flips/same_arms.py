"""Flips of a spec against itself on this machine: how often equal arms are called different.

    python evidence/flips/same_arms.py FOLDER [FLIPS] [PAIRS]

Writes FOLDER/NN/ (ordinary flip folders) and prints one JSON line for each flip and a summary last.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

from engine.flips.flip import run_flip
from engine.flips.plan import make_plan

SPEC = Path(__file__).with_name("tiny.toml")
STEPS = 23
"""Twenty of them are measured."""


def main() -> None:
    folder = Path(sys.argv[1])
    flips, pairs = (int(n) for n in (sys.argv[2:] + ["20", "8"][len(sys.argv) - 2 :]))
    said: Counter[str] = Counter()
    for number in range(1, flips + 1):
        plan = make_plan(
            SPEC, [], order_seed=number, steps=STEPS, pairs_max=pairs, budget_s=600
        ).control(slow=False)
        path = folder / f"{number:02}"
        if not path.exists():
            run_flip(replace(plan, pairs_max=pairs), path, use_controls="skip")
        fields = json.loads((path / "verdict.json").read_text())
        said[fields["verdict"]] += 1
        row = {
            name: fields[name] for name in ("verdict", "effect", "interval", "n_pairs", "cost_s")
        }
        row |= {"flip": number, "deviation": fields["diagnostics"]["deviation"]}
        row |= {"reason": fields["reason"], "load1": os.getloadavg()[0]}
        print(json.dumps(row), flush=True)
    print(json.dumps({"flips": flips, **said}))


if __name__ == "__main__":
    main()
