"""Test a suspicion: run two arms of a spec or of any training script alternately, with one setting changed, until it
is clear which is better.

    engine flip runs/kd-1 --set teacher.backend=quantized     a run's spec against the changed one
    engine flip kd.toml --set compute.threads=1 --budget 3m   at most 3 minutes for all pairs
    engine flip kd.toml --set compute.threads=1 --controls run   with both controls: a measured verdict
    engine flip --a "--workers 0" --b "--workers 4" -- python train.py {}   a script: {} is replaced by the arm's words
    engine flip --env-b TOKENIZERS_PARALLELISM=true -- python train.py --out {out}   {out}: a folder of each run's own
    engine flip runs/train-1 --set loader.workers=4   a watched run: A is its command, the probe changes B
    engine flip runs/kd-1 --ends "alert gpu_idle" --set teacher.backend=dequantized   does it end what the run showed?
    engine flip runs/train-1 --propose                what the alerts of a run suggest, with the commands
    engine flip --resume flips/20260101-120000-compute-threads   continue after an interruption

Of a watched run each arm is started in a copy of the script's folder. A script is ended after --steps optimizer
steps, with its trackers offline; {seed} is the number of the pair.

The plan is written and hashed before the first run. Ctrl-C keeps what was measured and prints what it
shows so far. Exit codes: 0 decided, 1 the arms compute different things, 2 invalid or inconclusive,
130 interrupted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import limits
from engine.cli.answers import answer
from engine.cli.arguments import (
    add_choice,
    add_flag,
    add_json,
    add_number,
    add_path,
    add_repeated,
    read_variable,
)
from engine.errors import UsageError
from engine.terminal import ArgumentParser, say

if TYPE_CHECKING:
    from engine.flips.plan import Plan

HELP = "test a setting: two arms in turn, and a verdict"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    assert isinstance(parser, ArgumentParser)
    parser.words_options = ("--a", "--b")
    parser.add_argument(
        "source",
        nargs="*",
        metavar="RUN|SPEC|COMMAND",
        help="arm A: a run folder or a spec; or, after --, the command of both arms",
    )
    difference_help = (
        "a setting that differs in arm B; with several, the verdict is about all of them together"
    )
    add_repeated(parser, "--set", "KEY=VALUE", difference_help)
    for arm in ("a", "b"):
        what = f"what replaces {{}} in the command of arm {arm.upper()}"
        parser.add_argument(f"--{arm}", metavar="WORDS", help=what)
    line_help = "of a watched run: a line of the script's copy for arm B, train.py:42=TEXT"
    add_repeated(parser, "--line", "FILE:N=TEXT", line_help)
    for arm in ("a", "b"):
        what = f"a variable of the environment of arm {arm.upper()}"
        add_repeated(parser, f"--env-{arm}", "NAME=VALUE", what)
    for name, metavar, default, what in (
        ("--hypothesis", "TEXT", "", "the hypothesis to test, in words"),
        ("--budget", "TIME", None, "time for all pairs, as 90s or 5m (5m, or what the run needs)"),
        ("--margin", "SHARE", "5%", "difference that is too small to matter (5%%)"),
        ("--metric", "M", None, "step_s, peak_memory_bytes, energy_per_token_j, final_loss"),
    ):
        parser.add_argument(name, metavar=metavar, default=default, help=what)
    for name, limit, what in (
        ("--steps", limits.STEPS, "steps of each run (12, or what a watched run needs)"),
        ("--pairs", limits.PAIRS, "maximum number of pairs (16)"),
        ("--seed", limits.SEED, "seed of the order inside the pairs (from the clock)"),
    ):
        add_number(parser, name, limit, what, metavar="N")
    add_path(parser, "--out", "DIR", "the new flip folder (default: flips/DATE-KNOB)")
    controls_help = "controls: auto uses those of the last day, run makes them first"
    add_choice(parser, "--controls", ("auto", "run", "skip"), "auto", controls_help)
    add_flag(parser, "--share", "measure while another experiment runs")
    ends_help = "ask whether B ends what the run showed, not by how much a metric changes"
    parser.add_argument("--ends", metavar="OBSERVATION", help=ends_help)
    add_path(parser, "--resume", "DIR", "continue this flip instead")
    add_flag(parser, "--propose", "list what a run's alerts suggest to flip, start nothing")
    add_flag(parser, "--dry-run", "show the plan, start nothing")
    add_json(parser, "print the verdict as one JSON value")


def run(arguments: argparse.Namespace) -> int:
    from engine.cli.flip_progress import Progress
    from engine.flips.flip import resume_flip, run_flip

    if bool(arguments.source) == (arguments.resume is not None):
        raise UsageError(
            "expected either a run or spec, a command after --, or --resume DIR",
            hint="engine flip --help",
        )
    if arguments.propose:
        return _propose(arguments)
    how: dict[str, Any] = {"use_controls": arguments.controls, "share": arguments.share}
    if arguments.resume is not None:
        from engine.flips.flip_folder import read_plan_of

        _refuse_with_resume(arguments)
        folder = arguments.resume
        progress = Progress(read_plan_of(folder))
        progress.say_pairs(folder)
        with progress.watching() as watching:
            fields = resume_flip(folder, watching, **how)
    else:
        plan = _plan(arguments)
        folder = arguments.out or Path("flips") / f"{time.strftime('%Y%m%d-%H%M%S')}-{plan.name}"
        plan = show_plan(
            plan,
            folder,
            arguments.controls,
            dry_run=arguments.dry_run,
            own_budget=arguments.budget is not None,
        )
        if arguments.dry_run:
            return answer(arguments, "plan", plan.fields(), ())
        with Progress(plan).watching() as watching:
            fields = run_flip(plan, folder, watching, **how)
    return _report(fields, folder, arguments)


def _propose(arguments: argparse.Namespace) -> int:
    """Print the flips that are proposed for a run, with their commands."""
    from engine.flips.proposals import proposal_fields, proposal_lines, proposals
    from engine.log.fold import Follower
    from engine.log.folder import open_run, read_command, settings_of

    if len(arguments.source) != 1:
        raise UsageError("--propose: expected one run", hint="engine flip runs/NAME --propose")
    run = open_run(Path(arguments.source[0]))
    view = Follower(run).read_all()
    suggestions = proposals(view, settings_of(run), read_command(run))
    fields = [proposal_fields(proposal) for proposal in suggestions]
    return answer(arguments, "proposal", fields, proposal_lines(suggestions, arguments.source[0]))


def _refuse_with_resume(arguments: argparse.Namespace) -> None:
    given = [f"--{name}" for name in _PLAN_OPTIONS if getattr(arguments, name.replace("-", "_"))]
    if given:
        raise UsageError(f"--resume goes on with the plan as it was registered, without {given[0]}")


_PLAN_OPTIONS = (
    *("set", "a", "b", "env-a", "env-b", "line"),
    *("ends", "hypothesis", "steps", "pairs", "metric", "seed", "out", "dry-run"),
)
"""Options that describe a plan; with --resume there is one already."""


def _plan(arguments: argparse.Namespace) -> Plan:
    """Build the plan that the command line describes, with its inputs checked for both arms."""
    import os

    from engine.flips.command import WORDS
    from engine.flips.plan import make_command_plan, make_plan
    from engine.flips.script_settings import read_script_settings
    from engine.flips.watched import difference, options_for, watched_plan
    from engine.plan.inputs import check_inputs
    from engine.units import parse_share, parse_time

    if arguments.ends is not None:
        return _ending_plan(arguments)
    from engine.spec.environment import sets_from_environment

    changes_words = arguments.a is not None or arguments.b is not None
    changes_words = changes_words or bool(arguments.env_a or arguments.env_b or arguments.line)
    watched = _watched(arguments.source)
    of_command = changes_words or len(arguments.source) > 1 or watched is not None
    if of_command and not changes_words and not arguments.set:
        if watched is not None:
            raise UsageError(
                "expected --set, --env-b, --line or --b: what differs in arm B",
                hint=f"engine flip {watched} --propose",
            )
        raise UsageError(
            "expected --a and --b, --env-a and --env-b, or --set: what differs between the arms of a command",
            hint='engine flip --a "--workers 0" --b "--workers 4" -- python train.py {}',
        )
    if not of_command and not arguments.set:
        raise UsageError(
            "expected --set KEY=VALUE: what differs in arm B",
            hint="`engine spec` lists the settings",
        )
    named = {"steps": arguments.steps, "pairs_max": arguments.pairs, "metric": arguments.metric}
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    given |= {
        "order_seed": int(time.time()) if arguments.seed is None else arguments.seed,
        "hypothesis": arguments.hypothesis,
        "margin": parse_share("--margin", arguments.margin),
    }
    if arguments.budget is not None:
        given["budget_s"] = parse_time("--budget", arguments.budget)
    if of_command:
        arms: dict[str, dict[str, str | None]] = {}
        for arm in ("a", "b"):
            words, variables = getattr(arguments, arm), getattr(arguments, f"env_{arm}")
            arms[arm] = dict(read_variable(f"--env-{arm}", text) for text in variables)
            arms[arm] |= {} if words is None else {WORDS: words}
        for text in arguments.line:
            if watched is None or options_for(text)[0] != "--line":
                expected = "--line: expected FILE:N=TEXT of a watched run"
                raise UsageError(f"{expected}, found {text!r}", hint="engine flip runs/NAME ...")
            arms["b"] |= difference(text)
        arms["b"] |= read_script_settings(arguments.set)
        if watched is not None:
            if arguments.a is not None or arguments.env_a:
                raise UsageError(
                    "arm A is the watched command as it was: expected no --a and --env-a"
                )
            return watched_plan(watched, arms["b"], **given)
        return make_command_plan(arguments.source, arms["a"], arms["b"], **given)
    source, base_sets = Path(arguments.source[0]), sets_from_environment(os.environ)
    plan = make_plan(source, arguments.set, base_sets=base_sets, **given)
    for b in (False, True):
        check_inputs(plan.arm(b, Path.cwd(), "flip"), Path.cwd() / "flips")
    return plan


def _ending_plan(arguments: argparse.Namespace) -> Plan:
    from engine.flips.ending import ending_plan
    from engine.log.folder import open_run
    from engine.log.observed import observation
    from engine.units import parse_time

    changes = [*arguments.set, *arguments.env_b, *arguments.line]
    changes += [] if arguments.b is None else [arguments.b]
    if len(arguments.source) != 1 or len(changes) != 1:
        raise UsageError(
            "--ends: expected one run, and one change by --set, --env-b, --line or --b",
            hint="engine flip runs/NAME --propose",
        )
    for name in ("a", "env_a", "hypothesis", "metric", "pairs"):
        if getattr(arguments, name):
            raise UsageError(
                f"--ends compares with the run as it was: expected no --{name.replace('_', '-')}"
            )
    if arguments.controls == "run":
        raise UsageError("--ends measures no metric: expected no --controls run")
    run = open_run(Path(arguments.source[0]))
    return ending_plan(
        run.path,
        observation(run, arguments.ends),
        changes[0],
        order_seed=int(time.time()) if arguments.seed is None else arguments.seed,
        steps=arguments.steps,
        budget_s=None if arguments.budget is None else parse_time("--budget", arguments.budget),
    )


def _watched(source: list[str]) -> Path | None:
    """Return the folder of the watched run that is to be flipped; None for another source."""
    from engine.log.folder import RunFolder, is_run, read_command

    path = Path(source[0])
    is_watched = len(source) == 1 and is_run(path) and read_command(RunFolder(path)) is not None
    return path if is_watched else None


def show_plan(
    plan: Plan, folder: Path, use_controls: str = "skip", *, dry_run: bool, own_budget: bool = True
) -> Plan:
    """Show the plan and its cost before anything starts, and refuse what cannot fit. Returns the plan with a
    time limit that suits its source."""
    from engine.flips import controls, surroundings, text

    resources = surroundings.find_resources(plan, surroundings.find_surroundings(plan))
    plan = surroundings.with_time_limits(plan, resources, own_budget=own_budget)
    control_runs = len(controls.kinds_of(plan)) if use_controls == "run" else 0
    for line in [
        *text.plan_lines(plan),
        *surroundings.resource_lines(plan, resources, control_runs),
    ]:
        say(line)
    surroundings.check_resources(plan, resources)
    if not dry_run:
        say(f"flip folder: {folder}")
    return plan


def _report(fields: Mapping[str, Any], folder: Path, arguments: argparse.Namespace) -> int:
    from engine.errors import EXIT_INTERRUPTED
    from engine.flips.text import verdict_lines
    from engine.flips.verdicts import VERDICTS
    from engine.verdict import Verdict

    code = Verdict(VERDICTS[fields["verdict"]].level, fields["reason"]).exit_code
    if fields["interrupted"]:
        code = EXIT_INTERRUPTED
    evidence = f"  evidence: {folder / 'verdict.json'}, plan.json, pairs.jsonl, arms/"
    lines = [*verdict_lines(fields), evidence]
    return answer(arguments, "flip", {**fields, "folder": folder.absolute()}, lines, code)
