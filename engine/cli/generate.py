"""Continue a text, as it comes.

engine generate models/qwen --prompt "def add(a, b):"           the likeliest continuation
engine generate runs/demo --prompt "Once" --temperature 0.8 --seed 3
engine generate model.gguf --prompt-file task.txt --stop $'\\n\\n' --json

MODEL is a weight file, a model folder, or the folder of a finished run. Exit 2 when the model's
logits are not finite: nothing is printed in place of a token.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine import limits
from engine.cli.numbers import positive, real, whole
from engine.errors import BadInput, UsageError
from engine.files import read_text
from engine.terminal import put, put_json, say

if TYPE_CHECKING:
    from engine.evaluate.model import Model
    from engine.models.decode import GraphSetting

HELP = "continue a text with a model"

_MOST_TOKENS = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    text.add_argument(
        "--prompt-file",
        type=Path,
        metavar="FILE",
        help="a file that holds it; - reads standard input",
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; repeatable",
    )
    add_sampling_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON value, at the end")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, and how it computes."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="weight file, folder or run")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), default="auto")
    parser.add_argument(
        "--weights",
        choices=("dense", "packed"),
        default="dense",
        help="packed: matrices stay in the blocks of their file (dense)",
    )
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="instead of the model's")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-tokens",
        type=positive(limits.POSITIONS.most),
        metavar="N",
        help="(512, or what the model has room for)",
    )
    parser.add_argument(
        "--temperature", type=real(1e6), default=0.0, help="0 takes the likeliest token (0)"
    )
    parser.add_argument(
        "--top-k",
        type=whole(limits.VOCABULARY.most),
        default=0,
        help="draw among the K likeliest; 0: all",
    )
    parser.add_argument(
        "--top-p", type=real(1e6), default=1.0, help="draw among those that reach P (1)"
    )
    parser.add_argument("--seed", type=whole(limits.SEED.most), default=0, help="of the draws (0)")
    parser.add_argument(
        "--cuda-graph",
        choices=("auto", "on", "off"),
        default="auto",
        help="replay the steps of a GPU as one graph; the same tokens, faster (auto)",
    )


def prepare_threads() -> None:
    """How CPU threads wait; before torch loads, because OpenMP reads it once."""
    from engine.machine.threads import VARIABLE, choose_thread_wait

    os.environ[VARIABLE] = choose_thread_wait("auto", os.environ).choice


def run(arguments: argparse.Namespace) -> int:
    prepare_threads()

    from engine.models.completions import complete
    from engine.models.generate import Sampling

    sampling = Sampling(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    prompt = _prompt(arguments)
    model = open_asked(arguments, arguments.model)
    for line in graph_decision(model, 1, arguments.cuda_graph):
        say(line)
    text, tokens, ended = "", 0, None
    start_s = time.monotonic()
    for piece in complete(
        model.decoder,
        model.tokenizer,
        [prompt],
        max_tokens=most_tokens(model, [prompt], arguments.max_tokens),
        stops=arguments.stop,
        sampling=sampling,
        tile=1,
        cuda_graph=arguments.cuda_graph,
    ):
        text += piece.text
        tokens, ended = piece.tokens, piece.ended
        if not arguments.json:
            put(piece.text, end="", exact=True, flush=True)
    elapsed_s = time.monotonic() - start_s
    if arguments.json:
        record = {
            "model": str(model.path),
            "prompt": prompt,
            "text": text,
            "tokens": tokens,
            "ended": ended,
            "elapsed_s": elapsed_s,
        }
        put_json(record)
        return 0
    put()
    say(f"{tokens} tokens, {tokens / elapsed_s:.1f} a second; ended by {ended}")
    return 0


def open_asked(arguments: argparse.Namespace, path: Path) -> Model:
    """The model at `path`, as the arguments of `add_model_arguments` want it."""
    from engine.evaluate.model import open_model

    return open_model(
        path,
        device=arguments.device,
        precision=arguments.precision,
        weights=arguments.weights,
        tokenizer=arguments.tokenizer,
    )


def graph_decision(model: Model, rows: int, setting: GraphSetting) -> list[str]:
    """How steps are made on a GPU, as lines; none on a CPU, which has no choice. UsageError where
    graphs are asked for and cannot be."""
    from engine.models.decode import choose_cuda_graph

    decision = choose_cuda_graph(model.decoder, rows, setting)
    if setting == "on" and decision.choice != "on":
        raise UsageError(
            f"--cuda-graph on — expected a model whose steps can be captured, found that "
            f"{decision.rejected[0][1]}",
            hint="leave it out: the decoder makes each step, and the tokens are the same",
        )
    return [] if model.device.type == "cpu" else decision.lines()


def most_tokens(model: Model, prompts: Sequence[str], wanted: int | None) -> int:
    """`wanted`, or where nothing is, 512 or as many as fit after the longest of `prompts`."""
    if wanted is not None:
        return wanted
    longest = max(len(ids) for ids in model.tokenizer.encode_documents(prompts))
    return max(1, min(_MOST_TOKENS, model.decoder.config.max_position_embeddings - longest))


def _prompt(arguments: argparse.Namespace) -> str:
    if arguments.prompt_file is None:
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
