"""Write a model in another weight format, or with other types of weights.

engine convert models/qwen qwen.gguf --quant q4_k_m    as llama.cpp would quantize it
engine convert qwen.gguf qwen.apr --quant q4_k_m       blocks that fit move byte for byte
engine convert qwen.gguf models/new --quant bf16       a Hugging Face folder

The suffix of DST says the format (.gguf, .apr; a folder is safetensors), or --format does. Nothing
is overwritten, and DST appears when all of it is on the disk.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from engine.terminal import StatusLine, put, put_json, say

if TYPE_CHECKING:
    from engine.export.convert import Converted, Progress

HELP = "write a model in another weight format"

_PLAIN_EVERY_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from engine.export.mixture import QUANTS, TYPES_OF

    parser.add_argument("source", type=Path, metavar="SRC", help="weight file or model folder")
    parser.add_argument("target", type=Path, metavar="DST", help="what to write; must not exist")
    parser.add_argument(
        "--quant", required=True, choices=list(QUANTS), help="type of the weights to write"
    )
    parser.add_argument(
        "--format", choices=list(TYPES_OF), help="format of DST, instead of its suffix's"
    )
    parser.add_argument(
        "--no-tokenizer", action="store_true", help="leave the tokenizer out of DST"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where to quantize (cpu)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON value")


class Reporter:
    """How many tensors are done, on stderr."""

    def __init__(self) -> None:
        self.line = StatusLine(plain_every_s=_PLAIN_EVERY_S, plain_at_once=False)

    def __call__(self, progress: Progress) -> None:
        self.line.show(f"{progress.done}/{progress.total} {progress.name}")
        if progress.done == progress.total:
            self.line.clear()


def run(arguments: argparse.Namespace) -> int:
    from engine.machine.threads import VARIABLE, choose_thread_wait

    # Before torch loads: OpenMP reads it once.
    os.environ[VARIABLE] = choose_thread_wait("auto", os.environ).choice

    from engine.export.convert import convert

    done = convert(
        arguments.source,
        arguments.target,
        arguments.quant,
        format_=arguments.format,
        tokenizer=not arguments.no_tokenizer,
        device=arguments.device,
        on_tensor=Reporter(),
    )
    for text in done.warnings:
        say(f"warning: {text}")
    if not done.tokenizer:
        say(f"warning: {done.target} has no tokenizer")
    if arguments.json:
        put_json(_as_json(done))
        return 0
    say(_summary(done))
    put(done.target)
    return 0


def _summary(done: Converted) -> str:
    from engine.units import format_bytes, format_seconds

    types = ", ".join(f"{count} {name}" for name, count in done.tensors.items())
    return (
        f"{sum(done.tensors.values())} tensors ({types}): {done.kept} kept, {done.cast} cast, "
        f"{done.quantized} quantized; {format_bytes(done.bytes)}, "
        f"{done.bits_per_weight:.2f} bits per weight, in {format_seconds(done.elapsed_s)}"
    )


def _as_json(done: Converted) -> dict[str, object]:
    from dataclasses import asdict

    record = asdict(done)
    return {
        **record,
        "source": str(done.source),
        "target": str(done.target),
        "bits_per_weight": done.bits_per_weight,
    }
