"""Describe a weight file or a model folder, from its headers alone unless --values is given.

engine inspect model.gguf              format, architecture, sizes, vocabulary, warnings
engine inspect models/qwen --tensors   and every tensor
engine inspect model.apr --json        as one JSON value
engine inspect model.gguf --values     and read every value: NaN and infinity (exit 1), constants
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import EXIT_FAIL, EXIT_PASS
from engine.terminal import put, put_json

if TYPE_CHECKING:
    from engine.formats.values import ValueProblem

HELP = "describe a weight file: safetensors, GGUF, .apr"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", type=Path, metavar="FILE|FOLDER", help="weight file, or folder of one model"
    )
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument(
        "--values",
        action="store_true",
        help="read every value too; exit 1 when one is NaN or infinite",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON value")


def run(arguments: argparse.Namespace) -> int:
    from engine.export.describe import as_json, as_lines, describe

    found = describe(arguments.path)
    problems = _read_values(arguments.path) if arguments.values else []
    if arguments.json:
        record = as_json(found, tensors=arguments.tensors)
        if arguments.values:
            record["value_problems"] = [problem.text for problem in problems]
        put_json(record)
    else:
        put("\n".join(as_lines(found, tensors=arguments.tensors)))
        if arguments.values:
            put("\n".join(f"  {problem.text}" for problem in problems) or "  values: sound")
    return EXIT_PASS if all(problem.finite for problem in problems) else EXIT_FAIL


def _read_values(path: Path) -> list[ValueProblem]:
    from engine.formats.open import open_weights
    from engine.formats.values import check_values

    with open_weights(path) as weights:
        return check_values(weights)
