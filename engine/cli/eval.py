"""Judge a model: how well it foretells a text, how many programming problems it solves.

engine eval ppl MODEL --data texts/                      held-out loss and perplexity, file by file
engine eval ppl STUDENT --data texts/ --against TEACHER  both, their difference, KL, top-1 agreement
engine eval humaneval MODEL --data HumanEval.jsonl.gz    pass@1 of the likeliest programs
engine eval mbpp MODEL --data mbpp.jsonl --samples 20 --temperature 0.8
engine eval humaneval STUDENT --data HumanEval.jsonl.gz --against TEACHER      both, McNemar's exact test
engine eval humaneval STUDENT --data HumanEval.jsonl.gz --against t.jsonl      the teacher's results are there

Programs are run in a sandbox (bubblewrap), which is tried first with programs that mean harm; without one
nothing is run. Each result is a line of --results as it is judged: the same command again goes on where it
was stopped. Exit 2 where nothing is known about the model: no sandbox, a harness that fails its self-test,
logits that are not finite.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from engine import limits
from engine.cli.eval_problems import evaluate_problems
from engine.cli.eval_text import Said, no_answer_json, perplexity_json, perplexity_lines
from engine.cli.generate import (
    add_model_arguments,
    add_sampling_arguments,
    open_asked,
    prepare_threads,
)
from engine.cli.numbers import positive
from engine.errors import EXIT_PASS, NoAnswer
from engine.terminal import put, put_json

HELP = "judge a model: perplexity, programming problems"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="benchmark", metavar="WHAT", required=True)
    text = kinds.add_parser("ppl", help="held-out loss and perplexity")
    add_model_arguments(text)
    text.add_argument("--data", required=True, metavar="FILE|FOLDER", help="text to foretell")
    text.add_argument("--against", type=Path, metavar="MODEL", help="a second model, the teacher")
    text.add_argument(
        "--length",
        type=positive(limits.POSITIONS.most),
        default=1024,
        metavar="N",
        help="tokens of a row (1024)",
    )
    text.add_argument("--json", action="store_true", help="print one JSON value")
    for name, what in (("humaneval", "HumanEval's format"), ("mbpp", "MBPP's format")):
        code = kinds.add_parser(name, help=f"programming problems in {what}")
        add_model_arguments(code)
        code.add_argument(
            "--data", type=Path, required=True, metavar="FILE", help=".jsonl or .json, or gzipped"
        )
        code.add_argument(
            "--samples", type=positive(limits.SAMPLES.most), default=1, metavar="N", help="(1)"
        )
        add_sampling_arguments(code)
        code.add_argument(
            "--results", type=Path, metavar="FILE", help="where results go (MODEL-WHAT.jsonl here)"
        )
        code.add_argument(
            "--against",
            type=Path,
            metavar="MODEL|RESULTS",
            help="a second model, or its file of results: McNemar's test",
        )
        code.add_argument(
            "--without",
            action="append",
            default=[],
            metavar="TASK_ID",
            help="leave one out; repeatable",
        )
        code.add_argument(
            "--unfit",
            type=int,
            choices=range(1000),
            default=0,
            metavar="N",
            help="leave out up to N whose reference solution does not pass on this machine, and name them (0)",
        )
        code.add_argument(
            "--rows", type=int, choices=range(1, 9), metavar="1..8", help="sequences at once (8)"
        )
        code.add_argument("--json", action="store_true", help="print one JSON value")


def run(arguments: argparse.Namespace) -> int:
    prepare_threads()
    if arguments.benchmark == "ppl":
        return _perplexity(arguments)
    return evaluate_problems(arguments)


def _perplexity(arguments: argparse.Namespace) -> int:
    from engine.evaluate.perplexity import documents_sha256, perplexity, read_documents

    documents, skipped = read_documents(arguments.data)
    model = open_asked(arguments, arguments.model)
    against = None if arguments.against is None else open_asked(arguments, arguments.against)
    data_sha256 = documents_sha256(documents)
    try:
        found = perplexity(
            model,
            documents,
            against=against,
            length=arguments.length,
            skipped=skipped,
            progress=Said("tokens"),
        )
    except NoAnswer as error:
        if arguments.json:
            about = {"model": str(model.path), "data_sha256": data_sha256}
            put_json(no_answer_json("ppl", error, about))
        raise
    if arguments.json:
        record = perplexity_json(found, model, against) | {"data_sha256": data_sha256}
        put_json(record)
    else:
        put("\n".join(perplexity_lines(found, against)))
    return EXIT_PASS
