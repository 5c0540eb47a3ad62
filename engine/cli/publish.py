"""Publish the student of a finished run, or verify a folder that was published.

engine publish runs/kd out/my-student            Hugging Face folder, GGUF in Q4_K_M, .apr, model card
engine publish runs/kd out/my-student --eval runs/kd-humaneval.jsonl --eval ppl.json
engine publish --verify out/my-student           load it three ways and compare

A card shows what was measured, with its source: the run's receipt, and evaluations of exactly these weights
(--eval: the results of `engine eval humaneval`, or the output of `engine eval ppl --json`). Without a receipt
or an evaluation the command refuses to publish, and names the command that makes what is missing; --unevaluated
publishes anyway, and the card says so at its head. Contradictions (changed files, another receipt) are always
refused.

The card says what `engine verify RUN` found, or that the run was not verified. Where a replay did not give the
record, the command refuses in the same way.

The folder appears complete, after it was verified (unless --unverified); nothing is overwritten. receipt.json,
spec.toml and effective.json are copied unchanged, including the folder names in them.

Verification compares this engine, transformers, and llama.cpp if llama-cpp-python is installed (`pip install
'apr-workbench[peers]'`): float weights must give the same 50 greedy tokens, block-quantised weights logits
within the noise of the block type. Exit codes of --verify: 0 all agree, 1 one does not, 2 one is not installed
or inconclusive.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from engine.cli.answers import answer
from engine.cli.arguments import (
    add_flag,
    add_json,
    add_path,
    add_repeated,
    prepare_threads,
)
from engine.cli.weights import Reporter
from engine.errors import UsageError
from engine.terminal import aligned, say

if TYPE_CHECKING:
    from engine.export.publish import Published
    from engine.export.published import Verification

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_ON_HUB = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*/)?[A-Za-z0-9][A-Za-z0-9._-]*")

HELP = "publish a finished run's student, or verify a published folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from engine.quant.blocks import QUANTS, TYPES_OF

    def quants(format_: str) -> list[str]:
        return [name for name, kind in QUANTS.items() if kind in TYPES_OF[format_]]

    add_path(parser, "run", "RUN", "folder of a finished run", nargs="?")
    add_path(parser, "folder", "DIR", "what to make", nargs="?")
    add_path(parser, "--verify", "DIR", "verify a folder instead")
    parser.add_argument("--name", help="name of the model (the name of DIR)")
    parser.add_argument(
        "--gguf",
        choices=[*quants("gguf"), "none"],
        help="type of the GGUF file (q4_k_m, where the format has the model's family)",
    )
    parser.add_argument(
        "--apr",
        choices=[*quants("apr"), "none"],
        help="type of the .apr file (the student's own float type, where the format has the model's family)",
    )
    add_repeated(parser, "--eval", "FILE", "an evaluation of the student; repeatable", type=Path)
    parser.add_argument("--license", metavar="ID", help="instead of the one that is inherited")
    add_repeated(parser, "--base-model", "ID", "a base model's name on the Hub; repeatable")
    add_flag(parser, "--unevaluated", "publish without evidence; the card says so")
    add_flag(parser, "--unverified", "do not load it three ways; the card says so")
    add_json(parser, "print the result as one JSON value")


def run(arguments: argparse.Namespace) -> int:
    if arguments.verify is not None:
        if arguments.run is not None:
            raise UsageError("--verify DIR — expected no RUN as well", hint="one at a time")
        prepare_threads()
        return _verify(arguments)
    if arguments.folder is None:
        raise UsageError("expected RUN and DIR, or --verify DIR")
    name = arguments.name or arguments.folder.resolve().name
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"name: {name!r} — expected letters, digits, '.', '_' and '-'", hint="say --name NAME"
        )
    if arguments.license is not None and not _LICENCE.fullmatch(arguments.license):
        raise UsageError(
            f"--license {arguments.license!r} — expected the Hub's identifier, as apache-2.0"
        )
    for base in arguments.base_model:
        if not _ON_HUB.fullmatch(base):
            raise UsageError(f"--base-model {base!r} — expected a name on the Hub, as org/model")
    prepare_threads()
    return _publish(arguments, name)


def _publish(arguments: argparse.Namespace, name: str) -> int:
    from engine.export.publish import Wanted, publish
    from engine.log.folder import open_run

    done = publish(
        open_run(arguments.run),
        Wanted(
            folder=arguments.folder,
            name=name,
            gguf=arguments.gguf,
            apr=arguments.apr,
            licence=arguments.license,
            base_models=tuple(arguments.base_model),
            evaluations=tuple(arguments.eval),
            unevaluated=arguments.unevaluated,
            unverified=arguments.unverified,
        ),
        say,
        Reporter(),
    )
    for line in _summary(done):
        say(line)
    value = {
        "folder": done.folder,
        "bytes": done.bytes,
        "missing": [proof.what for proof in done.proof.missing],
        "weights_sha256": done.proof.weights_sha256,
        "verification": done.verification and done.verification.as_dict(),
    }
    return answer(arguments, "publish", value, [done.folder])


def _summary(done: Published) -> list[str]:
    from engine.units import format_bytes

    lines = [] if done.verification is None else _outcome_lines(done.verification)
    lines += [
        f"unevaluated: the card says that it lacks {proof.what}" for proof in done.proof.missing
    ]
    count = sum(1 for path in done.folder.iterdir() if path.is_file())
    return [*lines, f"{count} files, {format_bytes(done.bytes)}"]


def _verify(arguments: argparse.Namespace) -> int:
    from engine.export.published import verify

    verification = verify(arguments.verify, say)
    say(f"{verification.prompt!r} goes on with {verification.text[:200]!r}")
    value = {"folder": arguments.verify, **verification.as_dict()}
    lines = _outcome_lines(verification)
    return answer(arguments, "publish-verify", value, lines, verification.verdict.exit_code)


def _outcome_lines(verification: Verification) -> list[str]:
    return aligned([(one.level, one.id, one.reason) for one in verification.outcomes])
