"""Run the teacher once over the rows of a spec and store its outputs.

    engine prepare kd.toml --out kd-teacher             hidden states: exact, for any loss
    engine prepare kd.toml --form top_k --top-k 64      a sixteenth of that, for one temperature
    engine prepare kd.toml --dry-run                    rows, bytes per token and disk; nothing is written

A run whose teacher.cache is the folder reads it instead of running a forward pass, and runs the teacher
for rows that are not stored. The rows are those that the run trains on, each once, and are identified by
their content: the same rows in another order, batch or seed read the same store.

After a kill, a full disk or Ctrl-C, give the same command again: finished shards are verified and kept.
Ctrl-C finishes the shard and stops (130); a second one ends at once.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from engine import limits
from engine.cli.answers import answer
from engine.cli.arguments import (
    add_choice,
    add_flag,
    add_json,
    add_number,
    add_path,
    add_set,
    prepare_threads,
)
from engine.errors import UsageError
from engine.terminal import StatusLine, say

if TYPE_CHECKING:
    from engine.spec import RunSpec
    from engine.train.prepare import Job, Prepared, PrepareOptions

_PLAIN_EVERY_S = 5.0

HELP = "run the teacher once and store its outputs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path(parser, "spec", None, "the spec of the run, a TOML file")
    add_choice(
        parser,
        "--form",
        ("hidden", "top_k", "sampled"),
        "hidden",
        "hidden states, the top-k tokens with the rest as one, or sampled tokens (hidden)",
    )
    add_number(
        parser,
        "--top-k",
        limits.VOCABULARY,
        "tokens per position with --form top_k (64)",
        default=64,
        metavar="K",
    )
    add_number(
        parser,
        "--draws",
        limits.VOCABULARY,
        "samples per position with --form sampled (32)",
        default=32,
        metavar="M",
    )
    add_path(parser, "--out", "DIR", "the store (default: teacher.cache of the spec)")
    amount = parser.add_mutually_exclusive_group()
    add_number(amount, "--rows", limits.STEPS, "only the first N rows of training", metavar="N")
    add_number(amount, "--steps", limits.STEPS, "only the rows of the first N steps", metavar="N")
    add_set(parser)
    add_flag(parser, "--dry-run", "print the plan and write nothing")
    add_json(parser, "print the result as one JSON value")


def run(arguments: argparse.Namespace) -> int:
    from engine.spec import load_spec
    from engine.spec.environment import sets_from_environment

    sets = sets_from_environment(os.environ) + arguments.set
    spec, _ = load_spec(arguments.spec, sets)
    # Before torch is loaded, which `_wanted` does.
    prepare_threads(spec.compute.thread_wait)
    wanted = _wanted(arguments, spec)

    from engine.train.prepare import plan_job, prepare
    from engine.train.stop_request import StopRequest

    say("reading and hashing the rows")
    job = plan_job(spec, wanted)
    say("\n".join(job.plan.lines()))
    if arguments.dry_run:
        job.plan.check_disk_space(wanted.out)
        return answer(arguments, "prepare-plan", {"out": wanted.out, **job.plan.as_dict()}, ())
    stop = StopRequest()
    # There is no supervisor here, so a hang-up ends the command instead of leaving it to run unseen.
    hang_up = signal.getsignal(signal.SIGHUP)
    stop.watch_signals()
    signal.signal(signal.SIGHUP, hang_up)
    progress = _Progress(job)
    done = prepare(job, stop=stop, say=progress.line.say, progress=progress)
    progress.line.clear()
    return _report(job, done, stop.exit_code, arguments)


def _wanted(arguments: argparse.Namespace, spec: RunSpec) -> PrepareOptions:
    from engine.train.prepare import PrepareOptions

    out = arguments.out or (Path(spec.teacher.cache) if spec.teacher.cache else None)
    if out is None:
        raise UsageError("expected --out DIR, or teacher.cache in the spec")
    rows = arguments.rows
    if arguments.steps is not None:
        rows = arguments.steps * spec.rows_per_step
    for option in ("rows", "steps"):
        given = getattr(arguments, option)
        if given is not None and given < 1:
            raise UsageError(f"--{option}: expected 1 or more, found {given}")
    count = {"hidden": 0, "top_k": arguments.top_k, "sampled": arguments.draws}[arguments.form]
    return PrepareOptions(out=out.absolute(), form=arguments.form, count=count, rows=rows)


class _Progress:
    """Progress on stderr: one line redrawn on a terminal, a line every few seconds elsewhere."""

    def __init__(self, job: Job) -> None:
        self.rows = job.plan.missing
        self.seq_len = job.plan.identity.seq_len
        self.token_bytes = job.plan.identity.token_bytes
        self.line = StatusLine(plain_every_s=_PLAIN_EVERY_S)

    def __call__(self, rows: int, seconds: float) -> None:
        from engine.units import format_bytes, format_seconds

        rate = rows / max(seconds, 1e-9)
        tokens_s = rate * self.seq_len
        self.line.show(
            f"{rows:,}/{self.rows:,} rows  {tokens_s:,.0f} tok/s  "
            f"{format_bytes(tokens_s * self.token_bytes)}/s  "
            f"{format_seconds((self.rows - rows) / rate)} left"
        )


def _report(job: Job, done: Prepared, stop_code: int, arguments: argparse.Namespace) -> int:
    from engine.units import format_bytes, format_seconds

    out, left = job.wanted.out, done.plan.missing - done.rows
    code = 0 if done.stopped is None else stop_code
    rate = done.rows * job.plan.identity.seq_len / max(done.seconds, 1e-9)
    say(
        f"{done.rows:,} rows, {format_bytes(done.bytes)}, in {format_seconds(done.seconds)} "
        f"({rate:,.0f} tok/s)"
    )
    if done.stopped is not None:
        say(
            f"stopped by {done.stopped}: {left:,} rows are left; the same command continues with them"
        )
    else:
        say(f"to train with it: --set teacher.cache={out}")
    result = {
        "out": out,
        **done.plan.as_dict(),
        "rows_done": done.rows,
        "rows_left": left,
        "bytes_done": done.bytes,
        "seconds": done.seconds,
        "tokens_per_s": rate,
        "stopped": done.stopped,
        "exit_code": code,
    }
    return answer(arguments, "prepare", result, [out], code)
