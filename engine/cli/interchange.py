"""Runs of other tools as run folders, and the values of a run as files of other tools."""

from __future__ import annotations

import argparse
from pathlib import Path

from engine.cli.answers import answer
from engine.cli.arguments import add_flag, add_json, add_path, add_repeated, add_run
from engine.terminal import say

IMPORT_HELP = "make a run folder of what another tool has logged"
EXPORT_HELP = "write a run's values for TensorBoard, as CSV or as Parquet"
SOURCES = ("tensorboard", "wandb", "mlflow", "trainer_state", "csv", "text")
TARGETS = {"tensorboard": "-tensorboard", "csv": ".csv", "parquet": ".parquet"}
"""Default endings after the run's name, by target."""


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", choices=SOURCES, help="csv: .csv, .tsv, .jsonl or .parquet")
    add_path(parser, "path", "PATH", "its file or folder")
    add_path(parser, "--out", "DIR", "folder for the run folder (runs)", default=Path("runs"))
    parser.add_argument("--name", help="name of the run folder (default: the source's)")
    what = "NAME (loss, held_out, lr, step, ...) is what the source calls TAG; may be repeated"
    add_repeated(parser, "--map", "NAME=TAG", what)
    add_flag(parser, "--partial", "import the values before the fault in a broken file")
    add_json(parser)


def import_(arguments: argparse.Namespace) -> int:
    """Make a run folder of what another tool has logged, so that every screen, rule and report takes it.

    engine import tensorboard logs/run-1       event files of one run
    engine import wandb wandb/offline-run-...  an offline run of Weights & Biases
    engine import mlflow mlruns/0/RUN          a run of MLflow's file store, or a database with one run
    engine import trainer_state FILE           the trainer_state.json of Transformers
    engine import csv history.csv              a table: .csv, .tsv, .jsonl (an object a line), .parquet
    engine import text train.log               what a training has printed
    engine import csv log.csv --map loss=xent --map step=it

    Common names (train/loss, eval_loss, learning_rate, ...) become ours; all other numbers are kept under their own
    names. The path of the run folder goes to stdout; what became of each name to stderr.
    """
    from engine.errors import UsageError
    from engine.interchange.importing import import_run
    from engine.interchange.names import MAPPED

    given: dict[str, str] = {}
    for text in arguments.map:
        our_name, equals, tag = text.partition("=")
        if not equals or not tag or our_name not in MAPPED or our_name in given:
            expected = f"NAME=TAG, once for each NAME of {', '.join(MAPPED)}"
            raise UsageError(f"--map: expected {expected}, found {text[:80]!r}")
        given[our_name] = tag
    run, notes = import_run(
        arguments.source,
        arguments.path,
        arguments.out,
        name=arguments.name,
        given=given,
        partial=arguments.partial,
    )
    for note in notes:
        say(note.text if note.level == "info" else f"{note.level}: {note.text}")
    rows = [{"level": note.level, "text": note.text} for note in notes]
    return answer(arguments, "import", {"run": run.path, "notes": rows}, [run.path])


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--to", choices=tuple(TARGETS), required=True, help="the kind of file")
    add_path(parser, "--out", "PATH", "the new file or folder (NAME.csv, NAME-tensorboard, ...)")
    add_json(parser)


def export(arguments: argparse.Namespace) -> int:
    """Write the values of a run as files of other tools: of each step, each evaluation, and what a script logged.

    engine export RUN --to tensorboard    a folder with an event file; 32 bits a value
    engine export RUN --to csv            a row a step, every digit
    engine export RUN --to parquet        the same as columns of 64 bits

    Its path goes to stdout. `engine import` reads all three.
    """
    from engine.interchange.exporting import export_run
    from engine.log.folder import open_run

    run = open_run(arguments.run)
    out = arguments.out or Path(f"{run.name}{TARGETS[arguments.to]}")
    count = export_run(run, arguments.to, out)
    say(f"{count:,} values")
    return answer(arguments, "export", {"path": out, "values": count}, [out])
