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
from engine.errors import EXIT_FAIL, EXIT_PASS, UsageError
from engine.terminal import StatusLine, say

if TYPE_CHECKING:
    from engine.export.convert import Converted, Progress

_PLAIN_EVERY_S = 5.0


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    add_path(
        parser, "path", "FILE|FOLDER", "weight file, folder of one model, or ORG/NAME of the hub"
    )
    add_flag(parser, "--tensors", "list every tensor")
    add_flag(parser, "--values", "also read every value; exit 1 when one is NaN or infinite")
    add_json(parser)


def inspect(arguments: argparse.Namespace) -> int:
    """Describe a weight file or a model folder, from its headers alone unless --values is given.

    engine inspect model.gguf              format, architecture, sizes, vocabulary, warnings
    engine inspect models/qwen --tensors   and every tensor
    engine inspect model.apr --json        as one JSON value
    engine inspect model.gguf --values     and read every value: NaN and infinity (exit 1), constants
    """
    from engine.export.describe import describe, description_lines
    from engine.formats.open import open_weights
    from engine.formats.values import check_values

    path = model_argument(arguments.path)
    found = describe(path, tensors=arguments.tensors)
    problems = []
    if arguments.values:
        with open_weights(path) as weights:
            problems = check_values(weights)
    texts = [problem.text for problem in problems]
    lines = description_lines(found)
    if arguments.values:
        found |= {"value_problems": texts}
        lines += [f"  {text}" for text in texts or ["values: sound"]]
    code = EXIT_PASS if all(problem.finite for problem in problems) else EXIT_FAIL
    return answer(arguments, "weights", found, lines, code)


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    from engine.quant.blocks import QUANTS, TYPES_OF

    add_path(parser, "source", "SRC", "weight file, model folder, or ORG/NAME of the hub")
    add_path(parser, "target", "DST", "what to write; must not exist")
    parser.add_argument("--quant", choices=list(QUANTS), help="type of the weights to write")
    add_flag(
        parser,
        "--from-pickle",
        "SRC is a folder with pytorch_model.bin: write its tensors, of whatever architecture, as safetensors",
    )
    parser.add_argument(
        "--format", choices=list(TYPES_OF), help="format of DST, instead of its suffix's"
    )
    add_flag(parser, "--no-tokenizer", "leave the tokenizer out of DST")
    add_path(parser, "--text", "FILE", "held-out text: also measure what rounding costs, as a KL")
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
    engine convert runs/kd/student merged --quant bf16 --text heldout.txt     an adapter, merged into its base
    engine convert --from-pickle models/old models/new     pytorch_model.bin, as safetensors

    A pickle can name any function; --from-pickle reads it by torch.load(weights_only=True), which makes tensors and
    refuses everything else.

    The suffix of DST selects the format (.gguf, .apr; a folder is safetensors), or --format does. Nothing
    is overwritten, and DST appears only when it is complete on disk.
    """
    prepare_threads()
    if arguments.from_pickle:
        return _unpickle(arguments)
    if arguments.quant is None:
        raise UsageError(
            "expected --quant TYPE", hint="--quant bf16 writes floats; q8_0 and q4_k_m quantise"
        )

    from engine.export.convert import convert as write
    from engine.export.convert import rounding_of

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
    cost = None
    if arguments.text is not None:
        say(f"comparing {done.target} with {done.source} on {arguments.text}")
        cost = rounding_of(done, arguments.text, arguments.device)
    say(_summary(done))
    if cost is not None:
        say(
            f"rounding costs a KL of {cost.kl:.2g} nats on {cost.tokens:,} tokens of {cost.text}; "
            f"{cost.top1_agreement:.1%} keep their most probable token"
        )
    rounding = None if cost is None else asdict(cost)
    extra = {"bits_per_weight": done.bits_per_weight, "rounding": rounding}
    return answer(arguments, "convert", asdict(done) | extra, [done.target])


def _unpickle(arguments: argparse.Namespace) -> int:
    from engine.export.unpickle import unpickle
    from engine.units import format_bytes

    if arguments.quant or arguments.format:
        raise UsageError(
            "expected --from-pickle alone, found --quant or --format",
            hint="convert the safetensors that it writes in a second command",
        )
    line = StatusLine(plain_every_s=_PLAIN_EVERY_S, plain_at_once=False)
    done = unpickle(arguments.source, arguments.target, line.show)
    line.clear()
    say(f"{done.tensors} tensors, {format_bytes(done.bytes)}")
    return answer(arguments, "unpickle", asdict(done), [done.target])


def _summary(done: Converted) -> str:
    from engine.units import format_bytes, format_seconds

    types = ", ".join(f"{count} {name}" for name, count in done.tensors.items())
    return (
        f"{sum(done.tensors.values())} tensors ({types}): {done.kept} kept, {done.cast} cast, "
        f"{done.quantized} quantized; {format_bytes(done.bytes)}, "
        f"{done.bits_per_weight:.2f} bits per weight, in {format_seconds(done.elapsed_s)}"
    )
