"""Measure what `engine watch` costs a script, in pairs of runs: watched and alone, in alternating order.

    python evidence/attach/cost.py --pairs 6 --out FILE [-- arguments of train.py]

One observation is log(watched / alone) of a pair's seconds per step; the interval is Student's, over pairs. Also
printed: whether the weights at the end are equal, and whether the watched run's log holds every step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def run(arguments: list[str], folder: Path | None) -> dict[str, object]:
    command = [sys.executable, str(Path(__file__).with_name("train.py")), *arguments]
    if folder is not None:
        watch = [sys.executable, "-m", "engine", "watch", "--quiet"]
        command = [*watch, "--runs", str(folder), "--name", "run", "--", *command]
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    if folder is not None:
        lines = (folder / "run" / "events.jsonl").read_text().splitlines()
        steps = [one for one in map(json.loads, lines) if one["kind"] == "step"]
        found["logged"] = len(steps)
        found["last_logged_loss"] = steps[-1]["loss"] if steps else None
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("more", nargs="*")
    given = parser.parse_args()
    ratios = []
    for pair in range(given.pairs):
        found = {}
        for arm in ("alone", "watched") if pair % 2 else ("watched", "alone"):
            with tempfile.TemporaryDirectory() as folder:
                found[arm] = run(given.more, Path(folder) if arm == "watched" else None)
        ratios.append(math.log(found["watched"]["step_s"] / found["alone"]["step_s"]))
        found["same_weights"] = found["watched"]["weights"] == found["alone"]["weights"]
        with given.out.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(json.dumps(found), flush=True)
    mean = statistics.fmean(ratios)
    half = 0.0
    if len(ratios) > 1:
        half = T_95[len(ratios) - 1] * statistics.stdev(ratios) / math.sqrt(len(ratios))
    low, high = math.exp(mean - half), math.exp(mean + half)
    print(
        f"watched / alone {math.exp(mean):.4f}, 95 % {low:.4f} to {high:.4f}, {len(ratios)} pairs"
    )


if __name__ == "__main__":
    main()
