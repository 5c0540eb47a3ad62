"""What a row of one tensor at each step costs (`engine.train.sampled_updates`): runs with and without it, in turns.

    python evidence/audit/sampled_updates.py SPEC OUT [--steps 45] [--turns 2]

SPEC is a run's, as `evidence/distill/runs.py` writes it. Without it the trainer is the same but for the observer.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

WITHOUT = """
import sys
from engine.train import sampled_updates
kept = sampled_updates.SampledUpdates.__init__
def quiet(self, trainer):
    before = trainer.observers
    kept(self, trainer)
    trainer.observers = before
sampled_updates.SampledUpdates.__init__ = quiet
"""
RUN = """
import runpy, sys
sys.argv = ["engine.train", {run!r}]
runpy.run_module("engine.train", run_name="__main__")
"""
SETTINGS = ("checks.every=-1", "checkpoint.at_end=false")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("spec", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    for turn in range(arguments.turns):
        for arm in ("without", "with"):
            run = arguments.out / f"{arm}-{turn}"
            shutil.rmtree(run, ignore_errors=True)
            made = [sys.executable, "-m", "engine", "distill", str(arguments.spec), "--create"]
            for one in (*SETTINGS, f"train.steps={arguments.steps}"):
                made += ["--set", one]
            subprocess.run([*made, "--out", str(run)], check=True, stdout=subprocess.DEVNULL)
            code = (WITHOUT if arm == "without" else "") + RUN.format(run=str(run))
            ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            steps = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
            steps = [
                one for one in steps if 5 < one.get("step", 0) < arguments.steps and "step_s" in one
            ]
            print(f"{arm:8} exit {ended.returncode}, {len(steps)} steps:", _said(steps), flush=True)


def _said(steps: list[dict[str, object]]) -> str:
    def median(of: str, part: str = "") -> float:
        values = [one[of] if not part else one[of].get(part, 0.0) for one in steps]  # type: ignore[attr-defined]
        return 1e3 * statistics.median(values)

    return (
        f"step {median('step_s'):.2f} ms, wall {median('wall_s'):.2f}, idle {median('phases', 'idle'):.2f}, host: "
        f"observers {median('host', 'observers'):.2f}, checks {median('host', 'checks'):.2f}"
    )


if __name__ == "__main__":
    main()
