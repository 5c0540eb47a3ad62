"""Measure this machine's kernels against its roofline: all arms in one run, interleaved.

engine bench teacher            a whole teacher: dense, block-quantised and fp8, compared with torch's operations
engine bench decode             one decode step of 1, 8 and 64 sequences, dense and quantised
engine bench loss               the loss head: ours, plain PyTorch, and the matmuls alone
engine bench kd                 whole distillation steps, with a dense and a block-quantised teacher
engine bench teacher --json     as one JSON value; --out FILE keeps it

On a CPU only ratios are meaningful; `--shape tiny` takes seconds there.
"""

from __future__ import annotations

import argparse
import json
import platform
from typing import Any

from engine import limits
from engine.cli.answers import answer
from engine.cli.arguments import (
    add_choice,
    add_json,
    add_number,
    add_path,
    model_argument,
    real,
)
from engine.errors import EXIT_FAIL, EXIT_PASS, BadInput
from engine.terminal import say

HELP = "benchmark linear layers, a teacher, generation, the loss or whole steps against the roofline and rivals"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("teacher", "decode", "loss", "kd"), help="what to measure")
    parser.add_argument(
        "--shape",
        default=None,
        help="qwen2.5-7b (default on a GPU), qwen2.5-1.5b, qwen2.5-0.5b or tiny (default on a CPU)",
    )
    add_path(parser, "--teacher", "FILE", "teacher: a GGUF or .apr file, not random blocks")
    add_number(
        parser,
        "--rows",
        limits.BENCH_ROWS,
        "teacher, kd: rows of the batch; decode: sequences; loss: tokens",
        nargs="+",
    )
    add_number(
        parser, "--seq-len", limits.BENCH_ROWS, "teacher, kd: tokens in a row (1024)", default=1024
    )
    add_choice(parser, "--device", ("auto", "cpu", "cuda"), "auto")
    add_number(parser, "--rounds", limits.ROUNDS, "repetitions of each arm (15)", default=15)
    add_path(parser, "--out", "FILE", "also keep the result as JSON here")
    add_json(parser)
    group = parser.add_argument_group("kd")
    add_number(group, "--steps", limits.ROUNDS, "measured steps of each arm (10)", default=10)
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


def run(arguments: argparse.Namespace) -> int:
    import torch

    from engine.bench.rows import table
    from engine.bench.teacher import SHAPES
    from engine.runtime.device import choose_device
    from engine.runtime.rates import measure_rates

    device = torch.device(choose_device(arguments.device).choice)
    shape = arguments.shape or ("qwen2.5-7b" if device.type == "cuda" else "tiny")
    if shape not in SHAPES:
        raise BadInput.expected("--shape", shape, f"one of {', '.join(SHAPES)}", shape)
    if arguments.what == "kd":
        _check_kd(arguments)
    say(f"measuring on {_name(device)}")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    roof = measure_rates(device, dtype)
    rows: list[Any]
    if arguments.what == "kd":
        from engine.bench.kd import table as kd_table

        if device.type == "cuda":
            torch.cuda.empty_cache()  # the arms are other processes
        found, work = _kd(arguments, shape, device, roof.flops)
        rows, lines = [row.as_dict() for row in found], kd_table(found)
        extra: dict[str, Any] = {"work": work}
    else:
        measures = {
            "teacher": _teacher,
            "decode": _decode,
            "loss": _loss,
        }
        measured, extra = measures[arguments.what](arguments, shape, device)
        rows, lines = [row.as_dict(roof) for row in measured], table(measured, roof)
    result: dict[str, Any] = {
        "bench": arguments.what,
        "shape": shape,
        "machine": _name(device),
        "torch": str(torch.__version__),
        "roofline": {
            "copy_bytes_per_s": roof.bytes,
            "matmul_flop_per_s": roof.flops,
        },
        "rows": rows,
        **extra,
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    if device.type != "cuda":
        say("times on a CPU depend on other processes: only ratios are meaningful")
    copy, matmul = roof.bytes / 1e12, roof.flops / 1e12
    lines += [f"roofline: copy {copy:.2f} TB/s, bf16 matmul {matmul:.0f} TFLOP/s, in this run"]
    lines += [f"{name}: {value}" for name, value in extra.items()]
    code = EXIT_FAIL if any(row.get("state") == "failed" for row in rows) else EXIT_PASS
    return answer(arguments, "bench", result, lines, code)


def _name(device: Any) -> str:
    import torch

    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def _teacher(arguments: argparse.Namespace, shape: str, device: Any) -> tuple[list[Any], Any]:
    from engine.bench.random_weights import RandomWeights
    from engine.bench.teacher import bench_teacher, config_named
    from engine.formats.open import open_weights
    from engine.models.read_config import config_of

    counts = arguments.rows or ((8,) if device.type == "cuda" else (2,))
    seq_len = arguments.seq_len if device.type == "cuda" else min(arguments.seq_len, 128)
    rows: list[Any] = []
    extra: dict[str, Any] = {}
    for count in counts:
        weights: Any
        if arguments.teacher is not None:
            weights = open_weights(model_argument(arguments.teacher))
            config = config_of(weights)
        else:
            config = config_named(shape)
            weights = RandomWeights(config, "q4_k_m", device)
        with weights:
            measured, extra = bench_teacher(
                weights, config, device, rows=count, seq_len=seq_len, rounds=arguments.rounds
            )
        rows += measured
    return rows, extra


def _decode(arguments: argparse.Namespace, shape: str, device: Any) -> tuple[list[Any], Any]:
    from engine.bench.decode import CONTEXT, ROW_COUNTS, bench_decode
    from engine.bench.teacher import config_named

    return bench_decode(
        config_named(shape),
        device,
        shape=shape,
        row_counts=tuple(arguments.rows or ROW_COUNTS),
        context=CONTEXT if device.type == "cuda" else 32,
        rounds=arguments.rounds,
    )


def _loss(arguments: argparse.Namespace, shape: str, device: Any) -> tuple[list[Any], Any]:
    from engine.bench.loss import LossShape, bench_loss
    from engine.bench.teacher import config_named

    if shape == "tiny":
        shapes = [
            LossShape(
                tokens=256, vocabulary=1000, teacher_vocabulary=1024, width=64, teacher_width=256
            )
        ]
    else:
        teacher = config_named(shape)
        shapes = [
            LossShape(
                tokens=count,
                teacher_vocabulary=teacher.vocab_size,
                teacher_width=teacher.hidden_size,
            )
            for count in arguments.rows or (8192,)
        ]
    rows: list[Any] = []
    extra: dict[str, Any] = {}
    for loss_shape in shapes:
        measured, extra = bench_loss(device, loss_shape, rounds=arguments.rounds)
        rows += measured
    return rows, extra


def _check_kd(arguments: argparse.Namespace) -> None:
    """Refuse invalid numbers. Raises BadInput."""
    numbers = {"--steps": arguments.steps, "--seq-len": arguments.seq_len}
    numbers["--rows"] = min(arguments.rows or [1])
    for name, number in numbers.items():
        if number < 1:
            raise BadInput.expected(name, number, "1 or more", number)
    alpha, temperature = f"{arguments.alpha:g}", f"{arguments.temperature:g}"
    if not 0 <= arguments.alpha < 1:
        expected = "from 0 to below 1 (at 1 there is nothing to distil)"
        raise BadInput.expected("--alpha", alpha, expected, alpha)
    if not 0 < arguments.temperature < float("inf"):
        raise BadInput.expected("--temperature", temperature, "a number above 0", temperature)


def _kd(arguments: argparse.Namespace, shape: str, device: Any, flop_per_s: float) -> Any:
    """Measure whole distillation steps: returns rows, and the shape they were measured on."""
    from engine.bench.kd import ARMS, KdShape, run_arm

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
    rows = []
    for arm in ARMS:
        say(f"  {arm}")
        timeout_s = arguments.timeout
        rows.append(run_arm(arm, device.type, work, flop_per_s=flop_per_s, timeout_s=timeout_s))
    return rows, json.loads(work.dumps())
