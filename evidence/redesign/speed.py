"""The benchmarks of two checkouts in turns on one GPU: how much slower or faster the second is.

    python evidence/redesign/speed.py --before DIR --after DIR --seconds 460 --out FILE
    python evidence/redesign/speed.py --table FILE [FILE ...]

Each `engine bench` runs as a process of its own, first from one checkout, then from the other, the order
turned round at each pair; all benchmarks get a pair before any gets its next. The command was removed on
2026-12-01: both checkouts are older. What is compared is each row's median time inside its process. Of a
benchmark the mean of `log(after / before)` over its rows is one observation per pair; the interval is
Student's, over pairs. Every row of our own arms is listed too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BENCHES = {
    "kd": ["--steps", "8"],
    "loss": ["--rounds", "9"],
    "few": ["--rounds", "9"],
    "decode": ["--rounds", "5"],
    "teacher": ["--rounds", "7"],
}
"""Arguments of each benchmark; shapes are its own default on a GPU (a 7B decoder's)."""

T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Two-sided 95 % quantiles of Student's t by degrees of freedom."""


def measure(checkout: Path, bench: str, more: list[str], timeout_s: float) -> dict[str, Any]:
    """One process of `engine bench`, from `checkout`: its JSON, or why there is none."""
    command = [sys.executable, "-m", "engine", "bench", bench, "--json", *BENCHES[bench], *more]
    path = f"{checkout}:{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=checkout, env=env, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer in {timeout_s:.0f} s"}
    if done.returncode:
        return {"failed": f"exit {done.returncode}: {done.stderr.strip()[-800:]}"}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"wall_s": time.monotonic() - began, **answer}


def seconds_by_row(answer: dict[str, Any]) -> dict[str, float]:
    rows = answer.get("rows", [])
    named = {f"{r['arm']} | {r.get('shape', '')} | {r.get('rows', '')}": r for r in rows}
    times = {name: r.get("seconds", r.get("step_s")) for name, r in named.items()}
    return {name: value for name, value in times.items() if value}


def table(pairs: list[dict[str, Any]]) -> list[str]:
    lines = ["bench | pairs | after / before | 95 % interval | slowest row", "---|---|---|---|---"]
    for bench in BENCHES:
        of_rows: dict[str, list[float]] = {}
        of_pairs = []
        for pair in pairs:
            if pair["bench"] != bench:
                continue
            before, after = seconds_by_row(pair["before"]), seconds_by_row(pair["after"])
            ratios = {n: math.log(after[n] / before[n]) for n in before if n in after}
            if ratios:
                of_pairs.append(statistics.fmean(ratios.values()))
                for name, ratio in ratios.items():
                    of_rows.setdefault(name, []).append(ratio)
        if not of_pairs:
            lines.append(f"{bench} | 0 | not measured | |")
            continue
        mean = statistics.fmean(of_pairs)
        interval = "one pair: none"
        if len(of_pairs) > 1:
            half = T_95[len(of_pairs) - 1] * statistics.stdev(of_pairs) / math.sqrt(len(of_pairs))
            interval = f"{math.exp(mean - half):.4f} to {math.exp(mean + half):.4f}"
        worst = max(of_rows, key=lambda name: statistics.fmean(of_rows[name]))
        slowest = f"{worst}: {math.exp(statistics.fmean(of_rows[worst])):.4f}"
        lines.append(f"{bench} | {len(of_pairs)} | {math.exp(mean):.4f} | {interval} | {slowest}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--before", type=Path)
    parser.add_argument("--after", type=Path)
    parser.add_argument(
        "--seconds", type=float, default=460.0, help="no pair begins that would end later"
    )
    parser.add_argument("--only", nargs="+", choices=sorted(BENCHES), default=list(BENCHES))
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--table", type=Path, nargs="+", help="print the table of kept pairs, run nothing"
    )
    parser.add_argument("more", nargs="*", help="after --: further arguments of engine bench")
    given = parser.parse_args()
    if given.table:
        kept = [line for path in given.table for line in path.read_text().splitlines()]
        print("\n".join(table([json.loads(line) for line in kept])))
        return 0
    checkouts = {"before": given.before.resolve(), "after": given.after.resolve()}
    began, pairs, took = time.monotonic(), [], dict.fromkeys(given.only, 0.0)
    for turn in range(9):
        for bench in given.only:
            left = given.seconds - (time.monotonic() - began)
            if took[bench] > left:
                continue
            started = time.monotonic()
            order = (
                ["before", "after"]
                if (turn + given.only.index(bench)) % 2 == 0
                else ["after", "before"]
            )
            # The compiler's cache is shared, so only the first process of all pays for compiling.
            pair: dict[str, Any] = {"bench": bench, "order": order}
            for arm in order:
                left = given.seconds - (time.monotonic() - began)
                pair[arm] = measure(checkouts[arm], bench, given.more, max(left, 5.0))
                print(
                    bench,
                    arm,
                    pair[arm].get("failed", f"{pair[arm].get('wall_s', 0):.0f} s"),
                    flush=True,
                )
            took[bench] = 1.05 * (time.monotonic() - started)
            pairs.append(pair)
            with given.out.open("a") as file:
                file.write(json.dumps(pair) + "\n")
    print("\n".join(table(pairs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
