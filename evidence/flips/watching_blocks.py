"""What watching costs, within one run: `python evidence/flips/watching_blocks.py SPEC RUN [--set KEY=VALUE ...]`.

The sampler, the watcher and its rules all live in the supervisor, a process of its own. This starts the
spec as a user would, and while it trains stops the supervisor (SIGSTOP) and lets it go on (SIGCONT) in
blocks of a few seconds: two blocks a pair, in an order drawn for each pair. A pair's number is the
log-ratio of the median steps without and with watching. Two processes of one program differ by more
than watching could cost; two neighbouring blocks of one process do not, so a margin of 0.5 % can be
decided where pairs of runs cannot decide it.

It errs against watching: a supervisor that continues first reads what was logged while it was stopped.
The number of pairs is fixed before the run, so the interval is Student's (level 90 %, a verdict being a
claim about one side); `engine.flips.statistics` diagnoses order, trend and correlation.
"""

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from engine.flips.statistics import decide, diagnose
from tests.support.fixed_interval import fixed_interval

ALPHA = 0.10
Block = tuple[bool, float, float]
"""Watched or not, from, to."""
SKIP = 3
"""Steps after a switch that belong to neither block."""


def records(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [
        json.loads(line)
        for line in path.read_bytes().splitlines(keepends=True)
        if line.endswith(b"}\n")
    ]


def wait_for_steps(run: Path, count: int) -> None:
    while sum(r["kind"] == "step" for r in records(run / "events.jsonl")) < count:
        if any(r["kind"] == "trainer_exited" for r in records(run / "watch.jsonl")):
            raise SystemExit(f"{run}: the run ended before step {count}")
        time.sleep(0.5)


def alternate(pid: int, pairs: int, block_s: float, seed: int) -> list[tuple[bool, float, float]]:
    """(watched, from, to) of each block in seconds of the wall clock."""
    coin = random.Random(seed)
    blocks = []
    try:
        for _ in range(pairs):
            first = coin.random() < 0.5
            for watched in (first, not first):
                os.kill(pid, signal.SIGCONT if watched else signal.SIGSTOP)
                began = time.time()
                time.sleep(block_s)
                blocks.append((watched, began, time.time()))
    finally:
        os.kill(pid, signal.SIGCONT)
    return blocks


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("spec")
    parser.add_argument("run", type=Path)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--block", type=float, default=4.0, help="seconds of a block")
    parser.add_argument("--after", type=int, default=40, help="steps before the first block")
    parser.add_argument("--margin", type=float, default=0.005)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    command = [
        sys.executable,
        "-m",
        "engine",
        "distill",
        options.spec,
        "--detach",
        "--out",
        str(options.run),
    ]
    for setting in options.set:
        command += ["--set", setting]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wait_for_steps(options.run, options.after)
    supervisor = records(options.run / "watch.jsonl")[0]["pid"]
    blocks = alternate(supervisor, options.pairs, options.block, options.seed)
    subprocess.run(
        [sys.executable, "-m", "engine", "stop", str(options.run)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    print(json.dumps(compared(options.run, blocks, options), indent=1))
    return 0


def compared(run: Path, blocks: list[Block], options: argparse.Namespace) -> dict[str, Any]:
    log = records(run / "events.jsonl")
    origin = log[0]["unix_s"]  # of the writer's t_s = 0
    steps = [(origin + r["t_s"], r["step_s"]) for r in log if r["kind"] == "step"]
    medians = [
        statistics.median([seconds for at, seconds in steps if began <= at <= ended][SKIP:])
        for _, began, ended in blocks
    ]
    differences, off_first, rows = [], [], []
    for (first, _, _), a, b in zip(blocks[::2], medians[::2], medians[1::2], strict=True):
        on, off = (a, b) if first else (b, a)
        differences.append(math.log(off / on))
        off_first.append(not first)
        rows.append(
            {
                "on_ms": round(on * 1e3, 3),
                "off_ms": round(off * 1e3, 3),
                "first": "on" if first else "off",
            }
        )
    interval = fixed_interval(differences, alpha=ALPHA)
    return {
        "spec": options.spec,
        "set": options.set,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "block_s": options.block,
        "steps_a_block": sum(blocks[0][1] <= at <= blocks[0][2] for at, _ in steps),
        "pairs": rows,
        "off_over_on": round(interval.ratio, 6),
        "low": round(math.exp(interval.low), 6),
        "high": round(math.exp(interval.high), 6),
        "level": 1 - ALPHA,
        "margin": options.margin,
        "verdict": decide(interval, options.margin) or "INCONCLUSIVE",
        "diagnosis": [
            *diagnose(differences, off_first, [began for _, began, _ in blocks[::2]]).values()
        ],
        "readings": sum(r["kind"] in ("gpu", "host") for r in records(run / "device.jsonl")),
    }


if __name__ == "__main__":
    raise SystemExit(main())
