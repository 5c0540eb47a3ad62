"""Measure what the checks of a run cost: `python evidence/checks/cost.py FOLDER [--steps 30 500] [--demo]`.

The same spec is run with checks and without, in turns, from the command to the saved student: a Q4_K_M teacher of
Qwen2.5-7B's shapes and a student of Qwen2.5-0.5B's with 8 x 1024 tokens a step, or with --demo the demo cut to 20
steps.
One line of JSON for each run. A first run of each length, which fills the caches, is not counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from engine.log.fold import Follower
from engine.log.folder import open_run

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "engine/demo/demo.toml"
DEMO_SETS = ("train.steps=20", "train.warmup_steps=4", "eval.every=10", "checkpoint.every=20")


def seconds(spec: Path, out: Path, sets: tuple[str, ...], *, checks: bool) -> dict[str, object]:
    """Carry out one run, and return what it took in seconds."""
    words = [
        word for one in (*sets, f"checks.enabled={str(checks).lower()}") for word in ("--set", one)
    ]
    begun_s = time.monotonic()
    command = [sys.executable, "-m", "engine", "distill", str(spec), "--out", str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    wall_s = time.monotonic() - begun_s
    if done.returncode:
        return {"checks": checks, "exit": done.returncode, "said": done.stderr[-800:]}
    view = Follower(open_run(out)).read_all()
    first = view.first_step_unix_s
    slowest = sorted(view.checks.values(), key=lambda one: -(one.cost_s or 0))[:5]
    return {
        "checks": checks,
        "steps": view.last_step,
        "wall_s": round(wall_s, 1),
        "first_step_after_s": round(first - view.first_unix_s, 1) if first else None,
        "checks_s": round(sum(one.cost_s or 0 for one in view.checks.values()), 1),
        "slowest": {one.id: round(one.cost_s or 0, 2) for one in slowest},
        "failed": [one.id for one in view.checks.values() if one.level == "fail"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, nargs="+", default=[30])
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.demo:
        spec, arms = DEMO, [DEMO_SETS]
    else:
        sys.path.insert(0, str(ROOT / "evidence/cuda-engine"))
        from seven_b_runs import write_inputs

        spec = write_inputs(options.folder, steps=max(options.steps))
        # Random weights predict no text, and the check for that would stop the run.
        saved = ("checks.on_fail=report", "checkpoint.at_end=true")
        arms = [(*saved, f"train.steps={steps}") for steps in options.steps]
    for sets in arms:
        # A long run compiles more than a short one.
        out = options.folder / f"warm-up-{sets[-1].replace('=', '-')}"
        seconds(spec, out, (*sets, "train.stop_after=2"), checks=False)
        for number in range(options.rounds):
            for checks in (True, False):
                out = options.folder / f"run-{sets[-1].replace('=', '-')}-{number}-{checks}"
                print(json.dumps(seconds(spec, out, sets, checks=checks)), flush=True)


if __name__ == "__main__":
    main()
