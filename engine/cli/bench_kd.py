"""`engine bench kd`: whole distillation steps beside those of other libraries."""

from __future__ import annotations

import argparse
import json
from typing import Any

from engine import limits
from engine.cli.numbers import real, whole
from engine.terminal import say

RIVALS = "trl,liger,transformers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("kd")
    group.add_argument(
        "--against",
        default=RIVALS,
        metavar="NAMES",
        help=f"rivals that run beside us where they are installed ({RIVALS}); empty for none",
    )
    group.add_argument(
        "--steps",
        type=whole(limits.ROUNDS.most),
        default=10,
        help="measured steps of each arm (10)",
    )
    group.add_argument(
        "--alpha", type=real(1e6), default=0.5, help="weight of the cross entropy (0.5)"
    )
    group.add_argument("--temperature", type=real(1e6), default=2.0, help="T of the divergence (2)")
    group.add_argument(
        "--timeout",
        type=real(limits.WAIT.most),
        default=900.0,
        metavar="S",
        help="seconds an arm may take (900)",
    )


def check(arguments: argparse.Namespace) -> list[str]:
    """The rivals that were asked for. Raises BadInput for one that nobody knows, and for numbers that are
    none."""
    from engine.errors import BadInput

    known = RIVALS.split(",")
    wanted = [name.strip() for name in arguments.against.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in known]:
        raise BadInput.expected(
            "--against", arguments.against, f"some of {', '.join(known)}", ", ".join(unknown)
        )
    numbers = {"--steps": arguments.steps, "--seq-len": arguments.seq_len}
    numbers["--rows"] = min(arguments.rows or [1])
    for name, number in numbers.items():
        if number < 1:
            raise BadInput.expected(name, number, "1 or more", number)
    if not 0 <= arguments.alpha < 1 or not 0 < arguments.temperature < float("inf"):
        raise BadInput.expected(
            "--alpha and --temperature",
            f"{arguments.alpha:g}, {arguments.temperature:g}",
            "from 0 to below 1, as there would be nothing to distil, and above 0",
            f"{arguments.alpha:g} and {arguments.temperature:g}",
        )
    return wanted


def run(arguments: argparse.Namespace, shape: str, device: Any, flop_per_s: float) -> Any:
    """Rows, and the shape they were measured on; see `check`."""
    from engine.bench.kd import KdRow, bench_kd, row_of, run_arm
    from engine.bench.kd_arm import OURS
    from engine.bench.kd_rivals import missing
    from engine.bench.kd_shape import KdShape

    wanted = check(arguments)
    cuda = device.type == "cuda"
    work = KdShape(
        teacher=shape,
        student="qwen2.5-0.5b" if shape != "tiny" else "tiny",
        rows=(arguments.rows or [8 if cuda else 2])[0],
        seq_len=arguments.seq_len if cuda else min(arguments.seq_len, 128),
        alpha=arguments.alpha,
        temperature=arguments.temperature,
        steps=arguments.steps,
        warm_up=4 if cuda else 1,
    )
    teacher, student = work.configs()

    def measure(arm: str) -> KdRow:
        found = run_arm(arm, device.type, work.dumps(), timeout_s=arguments.timeout)
        return row_of(
            found,
            tokens=work.tokens,
            seq_len=work.seq_len,
            teacher=teacher,
            student=student,
            flop_per_s=flop_per_s,
        )

    arms = {**dict.fromkeys(OURS), **{name: missing(name) for name in wanted}}
    rows = bench_kd(arms, measure, say)
    return rows, json.loads(work.dumps())
