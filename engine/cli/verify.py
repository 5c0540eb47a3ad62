"""Verify a run: train it again in a fresh process, and compare its record step by step.

    engine verify runs/kd-1                 every step, and the files that its receipt names
    engine verify runs/kd-1 --steps 50      the first 50 steps
    engine verify runs/kd-1 --step 120      step 120, stage by stage, compared with a textbook step
    engine verify runs/kd-1 --all           from checkpoint to checkpoint, and what was saved; the corpus too
    engine verify runs/kd-1 --keep          and keep the run folders of the replays next to the run

A replay has the run's settings, data and models. It begins at step 0, and where a resume changed settings at the
checkpoint of that step. It leaves out checks, evaluations between steps and checkpoints, which change no step. Compared
are the settings as built, the tokens of the data, the models' hashes, and of each step its rows by content on every
rank, labels, losses, agreement, gradient norm, learning rate, and the numbers that were recorded of hidden states, a
gradient, its moments and weights. The first that differs names the stage of the step, and a textbook step says which
side is wrong.

--all begins at each checkpoint that is still there, and compares the checkpoint, the saved student and the held-out
losses with those that the replay leaves. --data reads and tokenizes the corpus again, without the cache.

On a CPU with the same torch, threads and decisions every bit has to be the same. On a GPU or another torch losses may
differ by 0.1 % and agreement by 0.01 for each step since both had the same weights (30 times as much at most), and the
student's hidden states, gradients, moments and weights are compared in the first of these alone; rows, labels, tokens
and learning rates have to be the same, and the reason is printed. What a log lacks, and a checkpoint,
corpus or teacher that is gone, is unknown, never passed.

The outcome is kept in the run folder, as verified.json, where a step was compared or something differs; an earlier
outcome of more steps of the same log stays unless the new one is a failure. It is stale
once the log has changed.

Exit codes: 0 the replay gives the record, 1 something differs (it is named), 2 something could not be compared.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from engine import limits
from engine.cli.answers import answer
from engine.cli.arguments import add_flag, add_json, add_number, add_path, add_run
from engine.terminal import aligned, say

if TYPE_CHECKING:
    from engine.log.folder import RunFolder
    from engine.verify.kept_outcome import Log
    from engine.verify.verified import Verified

HELP = "train a run again and compare it with its record, step by step"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_number(parser, "--steps", limits.STEPS, "only the first N steps", metavar="N", least=1)
    add_number(parser, "--step", limits.STEPS, "step N alone, stage by stage", metavar="N", least=1)
    add_flag(parser, "--data", "read and tokenize the corpus again, too")
    add_flag(parser, "--all", "from each checkpoint too, with what was saved, and --data")
    add_path(parser, "--scratch", "DIR", "where to replay it (default: the folder of the run)")
    add_flag(parser, "--keep", "keep the run folders of the replays")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from engine.log.folder import open_run
    from engine.verify.kept_outcome import digest_log
    from engine.verify.verified import verify

    folder = open_run(arguments.run.absolute())
    log = digest_log(folder)
    verification = verify(
        folder,
        steps=arguments.steps,
        step=arguments.step,
        chain=arguments.all,
        data=arguments.data or arguments.all,
        scratch=arguments.scratch,
        keep=arguments.keep,
    )
    verdict = verification.verdict
    if log is not None:
        _keep(folder, log, verification)
    if verification.kept is not None:
        say(f"the replays: {verification.kept}")
    checks = verification.lines.items()
    lines = aligned([(f"{c.level.name.lower():7}", name, c.reason) for name, c in checks])
    lines += [f"not compared: {text}" for text in verification.not_compared]
    lines.append(f"{arguments.run}: {verdict}")
    return answer(arguments, "verify", _fields(arguments, verification), lines, verdict.exit_code)


def _keep(folder: RunFolder, log: Log, verification: Verified) -> None:
    """Keep the outcome in the run folder, or say why it is not kept."""
    from engine.errors import DiskFull, RunLogError
    from engine.verdict import Level
    from engine.verify.kept_outcome import NAME, keep_outcome

    steps = verification.steps if verification.difference is None else verification.difference.step
    if not steps and verification.verdict.level is not Level.FAIL:
        return
    try:
        kept = keep_outcome(folder, log, verification.verdict, steps, verification.rounding)
    except (RunLogError, DiskFull) as error:
        say(f"{NAME} is not written: {error.message}")
        return
    if kept.steps > steps:
        say(f"{NAME} keeps the earlier outcome, of {kept.steps:,} steps: {kept.level}")


def _fields(arguments: argparse.Namespace, verification: Verified) -> dict[str, Any]:
    rows = [
        {"name": name, "level": check.level, "reason": check.reason}
        for name, check in verification.lines.items()
    ]
    return {
        "run": arguments.run,
        "level": verification.verdict.level,
        "reason": verification.verdict.reason,
        "steps": verification.steps,
        "rounding": verification.rounding or None,
        "first_difference": verification.difference,
        "compared": rows,
        "not_compared": verification.not_compared,
        "replay": verification.kept,
    }
