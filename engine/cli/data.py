"""Show the data of a spec before anything is trained on it.

    engine data SPEC                  documents, tokens, lengths, labels, what is left out and why
    engine data SPEC --samples 5      with the beginning of five documents: what is to be predicted is marked
    engine data SPEC --json           the same as one JSON value

The numbers are of the tokens that the models would read. Of a large corpus at most 16 MiB are looked at; --all reads
everything. In a sample what has a label is shown in reverse, or between ⟦ and ⟧ where there is no terminal or NO_COLOR
is set.
"""

from __future__ import annotations

import argparse
import dataclasses
import os

from engine import limits
from engine.cli.arguments import add_flag, add_json, add_number, add_path, add_set
from engine.terminal import StatusLine, put, put_json, put_marked
from engine.units import format_bytes

PLAIN_EVERY_S = 10.0
HELP = "show what the data of a spec holds, and what has labels"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path(parser, "spec", "SPEC", "a spec file")
    add_set(parser)
    add_number(parser, "--samples", limits.SHOWN_DOCUMENTS, "documents to show (2)", default=2)
    add_flag(parser, "--all", "read all of the corpus, however large")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from engine.plan.data_overview import look_at_data
    from engine.plan.inputs import check_inputs
    from engine.spec import load_spec
    from engine.spec.environment import sets_from_environment

    sets = sets_from_environment(os.environ) + arguments.set
    spec, _ = load_spec(arguments.spec, sets)
    inputs = check_inputs(spec)
    status = StatusLine(plain_every_s=PLAIN_EVERY_S, plain_at_once=False)

    def progress(what: str, done: int, total: int | None) -> None:
        status.show(f"{what} {format_bytes(done)}{f' of {format_bytes(total)}' if total else ''}")

    found = look_at_data(
        spec, inputs, samples=arguments.samples, everything=arguments.all, progress=progress
    )
    status.clear()
    if arguments.json:
        put_json(dataclasses.asdict(found))
        return 0
    for line in found.lines():
        put(line)
    for text in inputs.models:
        put(text)
    for note in inputs.notes:
        put(f"note: {note}")
    for sample in found.samples:
        put(f"\n--- {sample.name}, {sample.tokens:,} tokens")
        put_marked(sample.parts)
        if sample.tokens > sample.shown:
            put(f"... {sample.tokens - sample.shown:,} more")
    return 0
