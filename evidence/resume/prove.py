"""Whether any check keeps a healthy run from going on: asked from every checkpoint of many of them.

    PYTHONPATH=. python evidence/resume/prove.py WORK RESULTS.json --runs 100 --resumes 200 --seconds 2400

Askings: all checks and an audited step of a resumed session, from every checkpoint of `--runs` runs of 20 steps.
Resumes: processes that restore a run folder as the supervisor's trainer
does, take one step and are killed (SIGKILL) right after they have saved it; each is forked from this one, so
that a resume costs no import of torch. The shapes, rates and precisions are `tests/support/healthy_runs.py`'s.

Ends by itself after `--seconds`, and then says how far it came.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from tests.support.checked_runs import make_world
from tests.support.healthy_runs import HIGH_RATE, Drawn, asked, drawn, killed_after_each_step
from tests.support.kit import Kit, make_kit

RESUMES_OF_A_RUN = 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first run")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--resumes", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=2400.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shutil.rmtree(arguments.work, ignore_errors=True)
    (arguments.work / "kit").mkdir(parents=True)
    kit = make_kit(arguments.work / "kit")
    world = make_world(kit, arguments.work / "world")
    begun = time.monotonic()
    tally = Tally()
    resumes_of = -(-arguments.resumes // RESUMES_OF_A_RUN)
    for number in range(arguments.runs):
        seed = arguments.first + number
        if time.monotonic() - begun > arguments.seconds:
            break
        run = drawn(world, seed)
        ask_from_every_checkpoint(run, arguments.work / "run", tally)
        # Spread over the runs, so that one that is cut short has some of both.
        if number * resumes_of // arguments.runs != (number - 1) * resumes_of // arguments.runs:
            resume_after_every_step(kit, run, arguments.work / "killed", tally)
        tally.write(arguments.results, time.monotonic() - begun)
        print(seed, json.dumps(tally.counts), flush=True)


class Tally:
    """What was asked, and every answer that was no pass."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.refused: list[dict[str, Any]] = []
        self.unknown: collections.Counter[str] = collections.Counter()

    def take(self, run: Drawn, step: int, id: str, verdict: Any, stops: bool) -> None:
        if verdict.level.name == "UNKNOWN":
            self.unknown[id] += 1
        elif verdict.level.name == "FAIL":
            self.counts["failed"] += 1
            if stops:
                self.refused.append(
                    {"seed": run.seed, "step": step, "check": id, "reason": verdict.reason}
                )

    def write(self, path: Path, seconds: float) -> None:
        whole = {
            "counts": dict(self.counts),
            "refused": self.refused,
            "unknown": dict(self.unknown),
            "wall_s": round(seconds),
            "torch": str(torch.__version__),
        }
        path.write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n")


def ask_from_every_checkpoint(run: Drawn, folder: Path, tally: Tally) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    saved, _ = run.train(folder)
    tally.counts["runs"] += 1
    tally.counts["runs_at_a_high_rate"] += run.settings["train"]["lr"] >= HIGH_RATE
    tally.counts["runs_in_bf16"] += run.precision == "bf16"
    for path in saved:
        resumed = run.resume(path)
        step = resumed.trainer.step
        tally.counts["askings_of_all_checks"] += 1
        for answer in asked(resumed):
            tally.take(run, step, answer.id, answer.verdict, answer.about.stops)
        tally.counts["askings"] += 1


def resume_after_every_step(kit: Kit, run: Drawn, folder: Path, tally: Tally) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for ended in killed_after_each_step(kit, run, folder, RESUMES_OF_A_RUN + 1):
        tally.counts["resumes_as_processes"] += ended.step > 1
        if not ended.saved:
            # One that was refused before it had anything to lose is a fault, too; no resume can follow it.
            tally.refused.append(dataclasses.asdict(ended) | {"seed": run.seed})


if __name__ == "__main__":
    main()
