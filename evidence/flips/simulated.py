"""Simulated flips under the noise of a real host: how often equal arms are called different, and in how
many pairs an effect is decided.

    python evidence/flips/simulated.py > evidence/flips/simulated.json

The noise and the whole experiment are those of tests/system/flips/test_verdict.py.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.flip_experiments import experiment

EXPERIMENTS = 1000


def main() -> None:
    rows = []
    for drift in ("ramp", "walk"):
        for process_deviation in (0.005, 0.01, 0.015):
            for ratio in (1.0, 1.05, 0.5, 0.9, 1.1, 1.15, 1.25):
                found = [
                    experiment(seed, ratio, drift, process_deviation=process_deviation)
                    for seed in range(EXPERIMENTS)
                ]
                expected = (
                    "EQUIVALENT" if ratio in (1, 1.05) else "B_FASTER" if ratio < 1 else "B_SLOWER"
                )
                rows.append(
                    {
                        "drift": drift,
                        "process_deviation": process_deviation,
                        "b_over_a": ratio,
                        "verdicts": Counter(said for said, _ in found),
                        "right_within_8_pairs": sum(s == expected and n <= 8 for s, n in found)
                        / EXPERIMENTS,
                        "mean_pairs": sum(n for _, n in found) / EXPERIMENTS,
                    }
                )
    print("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]")


if __name__ == "__main__":
    main()
