"""Check the gates of a distillation: what has to hold before the next phase is worth its cost.

    engine gate kd.toml                                     smoke: before the run
    engine gate runs/kd --eval runs/kd-humaneval.jsonl      and of the finished run: heldout, eval
    engine gate runs/kd --set gate.heldout_loss=3.0 --set gate.pass_at_1=0.15 --only heldout,eval

smoke    train on one batch of the run's rows for some steps: its loss has to fall (gate.smoke_steps)
heldout  the student's held-out loss, or its share of the way to the teacher's (gate.heldout_*)
eval     the lower end of the interval of pass@1 (gate.pass_at_1)

Thresholds are settings of the spec's section [gate]; --set changes one for this call. They are not part of
the experiment: two specs that differ only in them count as the same. A gate with nothing to judge does not
apply (n/a), with the reason; one that was not measured is unknown.

Exit codes: 0 every gate that applies holds, 1 one does not, 2 one is unknown.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from engine.cli.answers import answer
from engine.cli.arguments import (
    add_json,
    add_path,
    add_repeated,
    prepare_threads,
)
from engine.errors import UsageError
from engine.terminal import put, say

if TYPE_CHECKING:
    from engine.export.gate.gate import Subject

HELP = "report which gates a distillation passes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path(parser, "subject", "SPEC|RUN", "a TOML file, or a run folder")
    add_repeated(
        parser,
        "--eval",
        "FILE",
        "results of `engine eval humaneval` or `mbpp`; repeatable",
        type=Path,
    )
    parser.add_argument("--only", default="", metavar="IDS", help="comma-separated gates to run")
    add_repeated(parser, "--set", "KEY=VALUE", "change one setting")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from engine.export.gate import IDS

    only = [name.strip() for name in arguments.only.split(",") if name.strip()] or list(IDS)
    if unknown := [name for name in only if name not in IDS]:
        raise UsageError(f"--only {unknown[0]} — expected some of {', '.join(IDS)}")
    prepare_threads()
    subject = _subject(arguments)

    from engine.export.gate.gate import verdict_of
    from engine.export.gate.run import run_gates

    gates = []
    for gate in run_gates(subject, only):
        gates.append(gate)
        if not arguments.json:
            put(f"{gate.level:7} {gate.id:8} {gate.reason}", flush=True)
    verdict = verdict_of(gates)
    say(f"gates: {verdict.level.name.lower()}")
    rows = [gate.as_dict() for gate in gates]
    value = {"level": verdict.level, "subject": arguments.subject, "gates": rows}
    return answer(arguments, "gate", value, (), verdict.exit_code)


def _subject(arguments: argparse.Namespace) -> Subject:
    from engine.export.gate.gate import Subject
    from engine.log.folder import must_have_settings, open_run
    from engine.receipts.context import view_of
    from engine.spec import build_spec, load_spec
    from engine.spec.environment import sets_from_environment

    path, evaluations = arguments.subject, tuple(arguments.eval)
    if not path.is_dir():
        spec, _ = load_spec(path, sets_from_environment(os.environ) + arguments.set)
        return Subject(spec=spec, run=None, view=None, evaluations=evaluations, say=say)
    run = open_run(path)
    must_have_settings(run)
    other_sets = [text for text in arguments.set if not text.startswith("gate.")]
    if other_sets:
        raise UsageError(
            f"--set {other_sets[0]} — expected a setting of [gate]: the other settings of a finished run are fixed"
        )
    tree = run.read_effective()["spec"]
    spec = build_spec(
        tree, file="effective.json", base=Path("/"), sets=arguments.set, check_paths=False
    )
    return Subject(spec=spec, run=run, view=view_of(run), evaluations=evaluations, say=say)
