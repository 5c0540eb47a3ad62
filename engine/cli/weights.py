"""Weight files: describe one, or write one in another format."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from engine.cli.answers import answer
from engine.cli.arguments import (
    add_choice,
    add_flag,
    add_json,
    add_path,
    model_argument,
    prepare_threads,
)
from engine.terminal import StatusLine, say

if TYPE_CHECKING:
    from engine.export.convert import Converted, Progress

_PLAIN_EVERY_S = 5.0


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    add_path(
        parser, "path", "FILE|FOLDER", "weight file, folder of one model, or ORG/NAME of the hub"
    )
    add_flag(parser, "--tensors", "list every tensor")
    add_json(parser)


def inspect(arguments: argparse.Namespace) -> int:
    """Describe a weight file or a model folder, from its headers alone.

    engine inspect model.gguf              format, architecture, sizes, vocabulary, warnings
    engine inspect models/qwen --tensors   and every tensor
    engine inspect model.apr --json        as one JSON value
    """
    from engine.export.describe import describe, description_lines

    found = describe(model_argument(arguments.path), tensors=arguments.tensors)
    return answer(arguments, "weights", found, description_lines(found))


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    from engine.quant.blocks import QUANTS, TYPES_OF

    add_path(parser, "source", "SRC", "weight file, model folder, or ORG/NAME of the hub")
    add_path(parser, "target", "DST", "what to write; must not exist")
    parser.add_argument(
        "--quant", choices=list(QUANTS), required=True, help="type of the weights to write"
    )
    parser.add_argument(
        "--format", choices=list(TYPES_OF), help="format of DST, instead of its suffix's"
    )
    add_flag(parser, "--no-tokenizer", "leave the tokenizer out of DST")
    add_choice(parser, "--device", ("cpu", "cuda"), "cpu", "where to quantize (cpu)")
    add_json(parser, "print the result as one JSON value")


class Reporter:
    """Prints on stderr how many tensors are done."""

    def __init__(self) -> None:
        self.line = StatusLine(plain_every_s=_PLAIN_EVERY_S, plain_at_once=False)

    def __call__(self, progress: Progress) -> None:
        self.line.show(f"{progress.done}/{progress.total} {progress.name}")
        if progress.done == progress.total:
            self.line.clear()


def convert(arguments: argparse.Namespace) -> int:
    """Write a model in another weight format, or with other weight types.

    engine convert models/qwen qwen.gguf --quant q4_k_m    as llama.cpp would quantize it
    engine convert qwen.gguf qwen.apr --quant q4_k_m       blocks that fit move byte for byte
    engine convert qwen.gguf models/new --quant bf16       a Hugging Face folder
    engine convert runs/kd/student merged --quant bf16     an adapter, merged into its base

    The suffix of DST selects the format (.gguf, .apr; a folder is safetensors), or --format does. Nothing
    is overwritten, and DST appears only when it is complete on disk.
    """
    prepare_threads()
    from engine.export.convert import convert as write

    done = write(
        model_argument(arguments.source),
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
    say(_summary(done))
    value = asdict(done) | {"bits_per_weight": done.bits_per_weight}
    return answer(arguments, "convert", value, [done.target])


def _summary(done: Converted) -> str:
    from engine.units import format_bytes, format_seconds

    types = ", ".join(f"{count} {name}" for name, count in done.tensors.items())
    return (
        f"{sum(done.tensors.values())} tensors ({types}): {done.kept} kept, {done.cast} cast, "
        f"{done.quantized} quantized; {format_bytes(done.bytes)}, "
        f"{done.bits_per_weight:.2f} bits per weight, in {format_seconds(done.elapsed_s)}"
    )
