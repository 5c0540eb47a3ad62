"""Show the data of a spec before anything is trained on it, or what a step of a run has trained on.

    engine data SPEC                  documents, tokens, lengths, labels, what is left out and why, copies
    engine data SPEC --samples 5      with the beginning of five documents, in which tokens with labels are marked
    engine data SPEC --ask-teacher    also whether the teacher knows the text; a run stops if it does not
    engine data SPEC --json           the same as one JSON value
    engine data RUN --step 137        the rows of one step: documents, text, and whether these rows were expected

All numbers count the tokens that the models would read. Of a large corpus at most 16 MiB are read; --all reads
everything. Tokens with labels are shown in reverse, or between ⟦ and ⟧ where there is no terminal or NO_COLOR is set.
The rows of a step are found in the corpus by their hashes in the run's records, so the rows that are shown are those
that were trained on. A row that the order of the data does not give for this step is marked.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import TYPE_CHECKING

from engine import limits
from engine.cli.answers import put_json
from engine.cli.arguments import add_flag, add_json, add_number, add_path, add_set
from engine.errors import EXIT_FAIL, UsageError
from engine.terminal import StatusLine, put, put_marked
from engine.units import format_bytes

if TYPE_CHECKING:
    from engine.data.token_cache import Progress
    from engine.plan.inputs import Inputs
    from engine.spec import RunSpec

PLAIN_EVERY_S = 10.0
HELP = "show what the data of a spec holds, or what a step trained on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path(parser, "subject", "SPEC|RUN", "a spec file, or a run folder")
    add_set(parser)
    add_number(parser, "--step", limits.STEPS, "show the rows of this step of a run", least=1)
    add_number(
        parser, "--samples", limits.SHOWN_DOCUMENTS, "documents or rows to show (2)", default=2
    )
    add_flag(parser, "--all", "read all of the corpus, however large")
    add_flag(
        parser,
        "--ask-teacher",
        "run two steps in a temporary folder, to test whether the teacher knows the text",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from engine.log.folder import must_have_settings, open_run
    from engine.plan.inputs import check_inputs
    from engine.spec import load_spec, spec_from_dict
    from engine.spec.environment import sets_from_environment

    if arguments.subject.is_dir():
        folder = open_run(arguments.subject)
        must_have_settings(folder)
        if arguments.set:
            raise UsageError("--set — expected a spec file, found a run, whose settings are fixed")
        spec = spec_from_dict(folder.read_effective()["spec"])
    elif arguments.step is not None:
        if not arguments.subject.exists():
            open_run(arguments.subject)
        raise UsageError("--step — expected a run folder, found a file")
    else:
        sets = sets_from_environment(os.environ) + arguments.set
        spec, _ = load_spec(arguments.subject, sets)
    inputs = check_inputs(spec)
    status = StatusLine(plain_every_s=PLAIN_EVERY_S, plain_at_once=False)

    def progress(what: str, done: int, total: int | None) -> None:
        status.show(f"{what} {format_bytes(done)}{f' of {format_bytes(total)}' if total else ''}")

    try:
        if arguments.step is not None:
            return _show_step(arguments, spec, inputs, progress, status)
        return _show_data(arguments, spec, inputs, progress, status)
    finally:
        status.clear()


def _show_data(
    arguments: argparse.Namespace,
    spec: RunSpec,
    inputs: Inputs,
    progress: Progress,
    status: StatusLine,
) -> int:
    from engine.plan.data_overview import overview_of_data

    overview = overview_of_data(
        spec, inputs, samples=arguments.samples, everything=arguments.all, progress=progress
    )
    status.clear()
    first_steps = None
    if arguments.ask_teacher and spec.has_teacher:
        from engine.cli.first_steps import measure_first_steps
        from engine.plan.data_size import measure_data

        first_steps = measure_first_steps(spec, measure_data(spec, inputs))
    code = (
        EXIT_FAIL
        if first_steps is not None and (first_steps.failed or first_steps.teacher_fails)
        else 0
    )
    if arguments.json:
        put_json(
            "data",
            dataclasses.asdict(overview) | {"first_steps": first_steps and first_steps.to_dict()},
        )
        return code
    for line in overview.lines():
        put(line)
    if first_steps is not None:
        put(first_steps.asked_text)
    elif spec.has_teacher:
        put("teacher: not tested on this text (--ask-teacher)")
    for text in inputs.models:
        put(text)
    for note in inputs.notes:
        put(f"note: {note}")
    for sample in overview.samples:
        put(f"\n--- {sample.name}, {sample.tokens:,} tokens")
        put_marked(sample.parts)
        if sample.tokens > sample.shown:
            put(f"... {sample.tokens - sample.shown:,} more")
    return code


def _show_step(
    arguments: argparse.Namespace,
    spec: RunSpec,
    inputs: Inputs,
    progress: Progress,
    status: StatusLine,
) -> int:
    from engine.log.folder import RunFolder
    from engine.plan.step_rows import rows_of_step

    step_rows = rows_of_step(RunFolder(arguments.subject), spec, inputs, arguments.step, progress)
    status.clear()
    if arguments.json:
        put_json("step", step_rows.as_dict())
        return 0
    for line in step_rows.lines():
        put(line)
    for number, row in enumerate(step_rows.rows):
        rank = f", rank {row.rank}" if step_rows.ranks > 1 else ""
        put(f"\n--- {number + 1}{rank}: {row}, {row.labels:,} labels")
        for piece in row.pieces:
            put(piece)
        if number < arguments.samples:
            put_marked(row.text)
    return 0
