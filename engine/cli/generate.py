"""Continue a text, printing tokens as they are generated.

engine generate models/qwen --prompt "def add(a, b):"           greedy
engine generate runs/demo --prompt "Once" --temperature 0.8 --seed 3
engine generate model.gguf --prompt-file task.txt --stop $'\\n\\n' --json

MODEL is a weight file, a model folder, the folder of a finished run, or ORG/NAME in the hub's cache. Exit 2 when the
model's logits are not finite: nothing is printed in place of a token.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine import limits
from engine.cli.answers import answer
from engine.cli.arguments import (
    add_json,
    add_model,
    add_path,
    add_repeated,
    add_sampling,
    model_argument,
    prepare_threads,
)
from engine.errors import BadInput
from engine.files import read_text
from engine.terminal import put, say

if TYPE_CHECKING:
    from engine.evaluate.model import Model
    from engine.generation.sampling import Sampling

_MOST_TOKENS = 512
"""Default limit of the tokens to generate."""

HELP = "generate text with a model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    add_path(text, "--prompt-file", "FILE", "a file that holds it; - reads standard input")
    add_repeated(parser, "--stop", "TEXT", "end before this text; repeatable")
    add_sampling(parser)
    add_json(parser, "print one JSON value, at the end")


def run(arguments: argparse.Namespace) -> int:
    prepare_threads()

    from engine.generation.complete import complete

    prompt = _prompt(arguments)
    model = open_asked(arguments, arguments.model)
    text, tokens, ended = "", 0, None
    start_s = time.monotonic()
    for piece in complete(
        model.decoder,
        model.tokenizer,
        [prompt],
        max_tokens=most_tokens(model, [prompt], arguments.max_tokens),
        stops=arguments.stop,
        sampling=sampling_of(arguments),
        slots=1,
    ):
        text += piece.text
        tokens, ended = piece.tokens, piece.ended
        if not arguments.json:
            put(piece.text, end="", exact=True, flush=True)
    elapsed_s = time.monotonic() - start_s
    record = {
        "model": model.path,
        "prompt": prompt,
        "text": text,
        "tokens": tokens,
        "ended": ended,
        "elapsed_s": elapsed_s,
    }
    answer(arguments, "generate", record, [""])
    say(f"{tokens} tokens, {tokens / elapsed_s:.1f} a second; ended by {ended}")
    return 0


def open_asked(arguments: argparse.Namespace, path: Path) -> Model:
    """Open the model at `path` as the arguments of `add_model` describe it."""
    from engine.evaluate.model import open_model

    tokenizer = arguments.tokenizer
    return open_model(
        model_argument(path),
        device=arguments.device,
        precision=arguments.precision,
        weights=arguments.weights,
        tokenizer=None if tokenizer is None else model_argument(tokenizer, "tokenizer"),
    )


def sampling_of(arguments: argparse.Namespace) -> Sampling:
    """Return the sampling that the arguments of `add_sampling` describe."""
    from engine.generation.sampling import Sampling

    return Sampling(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        seed=arguments.seed,
    )


def most_tokens(model: Model, prompts: Sequence[str], wanted: int | None) -> int:
    """Return `wanted`; by default 512, or as many tokens as fit after the longest of `prompts` if they are fewer."""
    if wanted is not None:
        return wanted
    longest = max(len(ids) for ids in model.tokenizer.encode_documents(prompts))
    return max(1, min(_MOST_TOKENS, model.decoder.config.max_position_embeddings - longest))


def _prompt(arguments: argparse.Namespace) -> str:
    if arguments.prompt_file is None:
        try:
            arguments.prompt.encode()
        except UnicodeEncodeError as error:
            found = f"other bytes at character {error.start:,}"
            raise BadInput.expected("prompt", "--prompt", "UTF-8", found) from None
        return str(arguments.prompt)
    if arguments.prompt_file != Path("-"):
        return read_text(arguments.prompt_file, "prompt", limits.PROMPT)
    data = sys.stdin.buffer.read(limits.PROMPT.most + 1)
    if len(data) > limits.PROMPT.most:
        raise BadInput.expected("prompt", "standard input", str(limits.PROMPT), "more")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte {error.start:,} that is not"
        raise BadInput.expected("prompt", "standard input", "UTF-8", found) from None
