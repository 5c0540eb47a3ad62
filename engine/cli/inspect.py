"""Describe a weight file or a model folder, from its headers alone.

engine inspect model.gguf              format, architecture, sizes, vocabulary, warnings
engine inspect models/qwen --tensors   and every tensor
engine inspect model.apr --json        as one JSON value
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

HELP = "describe a weight file: safetensors, GGUF, .apr"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", type=Path, metavar="FILE|FOLDER", help="weight file, or folder of one model"
    )
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="print one JSON value")


def run(arguments: argparse.Namespace) -> int:
    from engine.publish.describe import as_json, as_lines, describe

    found = describe(arguments.path)
    if arguments.json:
        print(json.dumps(as_json(found, tensors=arguments.tensors), allow_nan=False))
    else:
        print("\n".join(as_lines(found, tensors=arguments.tensors)))
    return 0
