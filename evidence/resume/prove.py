"""Whether any check keeps a healthy run from going on: asked from every checkpoint of many of them.

    PYTHONPATH=. python evidence/resume/prove.py WORK RESULTS.json --runs 100 --resumes 200 --seconds 2400

Askings: `loss_gradient` in this process from every checkpoint of `--runs` runs of 20 steps, and all checks of
a resumed session from every fourth. Resumes: processes that restore a run folder as the supervisor's trainer
does, take one step and are killed (SIGKILL) right after they have saved it; each is forked from this one, so
that a resume costs no import of torch. The shapes, rates and precisions are `tests/attack/healthy_runs.py`'s.

Ends by itself after `--seconds`, and then says how far it came.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch

from engine.checks.check import Result
from engine.checks.gradients import loss_gradient
from engine.checks.runner import undisturbed
from engine.distill import run as trainer_module
from engine.distill.keep import Keeper
from engine.runlog.folder import RunFolder, create_run
from engine.runlog.follow import Follower
from engine.spec import build_spec
from tests.attack.healthy_runs import HIGH_RATE, Drawn, asked, drawn
from tests.checked_runs import World, make_world
from tests.conftest import Kit, make_kit, tiny_config

ALL_EVERY = 4
RESUMES_OF_A_RUN = 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("results", type=Path)
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
    for seed in range(arguments.runs):
        if time.monotonic() - begun > arguments.seconds:
            break
        run = drawn(world, seed)
        ask_from_every_checkpoint(run, arguments.work / "run", tally)
        # Spread over the runs, so that one that is cut short has some of both.
        if seed * resumes_of // arguments.runs != (seed - 1) * resumes_of // arguments.runs:
            resume_after_every_step(kit, world, run, arguments.work / "killed", tally)
        tally.write(arguments.results, time.monotonic() - begun)
        print(seed, json.dumps(tally.counts), flush=True)


class Tally:
    """What was asked, and every answer that was no pass."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.refused: list[dict[str, Any]] = []
        self.unknown: collections.Counter[str] = collections.Counter()
        self.smallest_share: collections.Counter[str] = collections.Counter()

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
            "loss_gradient_by_smallest_step": dict(self.smallest_share),
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
    for number, path in enumerate(saved):
        resumed = run.resume(path)
        step = resumed.trainer.step
        if number % ALL_EVERY == 0:
            tally.counts["askings_of_all_checks"] += 1
            answers: list[Result] = asked(resumed)
            for answer in answers:
                tally.take(run, step, answer.id, answer.verdict, answer.about.stops)
            gradient = next(one for one in answers if one.id == "loss_gradient")
            numbers = gradient.numbers
        else:
            with undisturbed(resumed.context):
                found = loss_gradient(resumed.context)
            tally.take(run, step, "loss_gradient", found.verdict, True)
            numbers = found.numbers
        tally.counts["askings"] += 1
        tally.smallest_share[str(numbers.get("step_share"))] += 1


def resume_after_every_step(kit: Kit, world: World, run: Drawn, folder: Path, tally: Tally) -> None:
    """One process for each step of the run, each killed when it has saved."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "student.json").write_text(json.dumps(tiny_config(**run.student)))
    steps = RESUMES_OF_A_RUN + 1
    tree = run.settings | {
        "train": run.settings["train"] | {"steps": steps + 1},
        "data": run.settings["data"] | {"corpus": str(kit.corpus), "heldout_fraction": 0.2},
        "teacher": {"path": str(kit.teacher)},
        "student": {"config": str(folder / "student.json"), "precision": run.precision},
        "eval": {"rows": 4},
        "checkpoint": {"every": 1, "keep_last": 1},
        "compute": {"device": "cpu", "threads": 1},
    }
    if not run.settings["loss"]["alpha"] < 1:
        tree["data"] |= {"tokenizer": str(kit.teacher / "tokenizer.json")}
        tree["teacher"] = {}
    spec = build_spec(tree)
    target = RunFolder(folder / "run")
    create_run(target.path, "", {"spec": spec.to_dict(), "spec_sha256": spec.sha256})
    for step in range(1, steps + 1):
        code = _in_a_process(target, resume=step > 1)
        view = Follower(target).read_all()
        tally.counts["resumes_as_processes"] += step > 1
        if code == -signal.SIGKILL and view.last_step == step:
            continue
        reason = "" if view.finished is None else view.finished.reason
        if step == 1:
            # Refused before it had anything to lose: counted, and no resume can follow.
            tally.counts["starts_refused"] += 1
        tally.refused.append({"seed": run.seed, "step": step, "code": code, "reason": reason})
        return


def _in_a_process(target: RunFolder, *, resume: bool) -> int:
    """How a trainer ended that saves once: minus the signal, or its exit code."""
    child = os.fork()
    if child == 0:
        save = Keeper.save

        def saves_and_dies(keeper: Keeper, *arguments: Any) -> Path:
            save(keeper, *arguments)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("a killed process goes on")

        Keeper.save = saves_and_dies  # type: ignore[method-assign]
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 2)
        os._exit(
            trainer_module.run(target.path, resume=resume, allow_fallback=False, keep_alive_fd=None)
        )
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    main()
