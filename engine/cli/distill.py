"""Distil a student according to a spec, or continue a run.

    engine distill kd.toml                          start, follow, and print the result
    engine distill kd.toml --check                  check the inputs, and measure time and memory in two steps
    engine distill kd.toml --set loss.alpha=0.5     with one setting changed
    engine distill --resume runs/kd-20260101-120000 continue after a kill, a stop or a full disk; with
                                                    --set KEY=VALUE --allow-change KEY with another setting
    engine distill kd.toml --smoke 20               20 steps, and what the whole run would take
    engine distill kd.toml --gpus 4                 on four GPUs of this machine, with torchrun
    engine distill kd.toml --detach                 start and return; prints the run folder
    engine distill kd.toml --gpus 16 --create       make the run folder for several hosts, and then on each of them:
    engine distill --join runs/big --host 0/2 --meet node0:29400

--join starts this host's trainers and a supervisor that samples it; where the run has a checkpoint, it is continued.
srun gives --host by itself. APR_WORKBENCH_HOST is the name of this host, for hosts that share one.

The run belongs to a supervisor in its own session: closing the terminal does not end it,
Ctrl-C asks it to finish its step, save and stop, and a second Ctrl-C ends it at once.

MANAGED_MEMORY=1|0 and APR_DISTILL_TEACHER_BACKEND=auto|cudatrainer|realizar-q4k are read from the
environment as settings of memory.allocator and teacher.backend; --set has priority over them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import limits
from engine.cli.answers import put_json
from engine.cli.arguments import (
    add_flag,
    add_json,
    add_number,
    add_path,
    add_repeated,
    add_set,
)
from engine.errors import EXIT_FAIL, EXIT_UNKNOWN, BadInput, UsageError
from engine.terminal import put, say

if TYPE_CHECKING:
    from engine.log.folder import RunFolder
    from engine.plan.inputs import Inputs
    from engine.spec import RunSpec

HELP = "distil a student from a spec, or resume a run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path(parser, "spec", None, "the spec, a TOML file (`engine spec` prints one)", nargs="?")
    add_path(parser, "--resume", "RUN", "continue this run folder instead")
    add_flag(
        parser,
        "--allow-fallback",
        "with --resume: when the newest checkpoint is damaged, or not of this run, continue from an older one",
    )
    add_flag(
        parser,
        "--allow-restart",
        "with --resume: when every checkpoint is gone, start again from step 0",
    )
    add_repeated(
        parser,
        "--allow-change",
        "KEY",
        "with --resume: let --set or the environment change this setting of the run",
    )
    add_set(parser)
    add_number(
        parser,
        "--smoke",
        limits.STEPS,
        "run N steps, then report the projected cost of the whole run and the results of the checks",
        metavar="N",
    )
    add_number(
        parser,
        "--gpus",
        limits.JOBS,
        "train on N GPUs of this machine; short for --set compute.gpus=N",
        metavar="N",
    )
    add_path(parser, "--out", "DIR", "the new run folder (default: runs/SPEC-DATE-TIME)")
    add_flag(parser, "--detach", "return when it is running; print the run folder")
    add_flag(
        parser,
        "--create",
        "make the run folder, print its path, start nothing: for --join on several hosts",
    )
    add_path(parser, "--join", "RUN", "train this host's part of a run that --create has made")
    parser.add_argument(
        "--host",
        metavar="NUMBER/HOSTS",
        help="with --join: which host this is, from 0 on (default: srun's SLURM_NODEID/SLURM_NNODES)",
    )
    parser.add_argument(
        "--meet",
        metavar="HOST:PORT",
        help="with --join: the first host, as the others reach it, and a free port there",
    )
    checks = parser.add_mutually_exclusive_group()
    add_flag(
        checks,
        "--check",
        "check spec and inputs, and measure time and memory of two steps; keeps no files",
    )
    add_flag(checks, "--check-inputs", "only check spec and inputs, start nothing")
    add_json(parser, "print the result as one JSON value on stdout")


def run(arguments: argparse.Namespace) -> int:
    if [arguments.spec, arguments.resume, arguments.join].count(None) != 2:
        raise UsageError(
            "expected one of a spec, --resume RUN and --join RUN", hint="engine distill --help"
        )
    if arguments.smoke is not None and arguments.detach:
        raise UsageError("--smoke waits for its steps; --detach does not wait")
    if arguments.check or arguments.check_inputs:
        return _check(arguments)
    if arguments.join is not None:
        return _join(arguments)
    folder = _resume(arguments) if arguments.resume else _start(arguments)
    if arguments.create:
        put(folder.path)
        return 0
    from engine.cli.progress import attend
    from engine.watch.start_and_stop import launch

    launched = launch(
        folder,
        resume=arguments.resume is not None,
        allow_fallback=arguments.allow_fallback,
        allow_restart=arguments.allow_restart,
    )
    if arguments.detach:
        launched.leave(b"d")
        put(folder.path)
        return 0
    if arguments.smoke is None:
        return attend(launched, as_json=arguments.json)
    code = attend(launched, as_json=False, results=False)
    return _project(folder, code, as_json=arguments.json)


def _join(arguments: argparse.Namespace) -> int:
    """Train this host's part of a run over several hosts; the first host follows the run on screen."""
    from engine.checkpoint_folders import published
    from engine.cli.progress import attend
    from engine.log.folder import must_have_settings, open_run
    from engine.spec import spec_from_dict
    from engine.watch.hosts import Place
    from engine.watch.start_and_stop import launch

    folder = open_run(arguments.join.absolute())
    must_have_settings(folder)
    by_slurm = "/".join(os.environ.get(name, "") for name in ("SLURM_NODEID", "SLURM_NNODES"))
    place = Place.parse(f"{arguments.host or by_slurm}@{arguments.meet or '127.0.0.1:0'}")
    if place.hosts > 1 and arguments.meet is None:
        raise UsageError("--join: expected --meet HOST:PORT, the same on each host, found none")
    place.ranks(spec_from_dict(folder.read_effective()["spec"]).compute.gpus)
    # No host gets past the first step without the others, so all find the same checkpoints.
    launched = launch(folder, resume=any(published(folder.checkpoints)), place=place)
    if arguments.detach:
        launched.leave(b"d")
        return 0
    return attend(launched, as_json=arguments.json, results=not launched.run.host)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _NewRun:
    """A new run whose inputs are sound."""

    spec: RunSpec
    text: str
    sets: list[str]
    inputs: Inputs
    path: Path
    """Its folder, which does not exist."""


def _check_new_run(arguments: argparse.Namespace) -> _NewRun:
    from engine.notify.receivers import choose_receivers
    from engine.plan.inputs import check_inputs
    from engine.spec import load_spec
    from engine.spec.environment import sets_from_environment

    sets = sets_from_environment(os.environ) + arguments.set
    if arguments.smoke is not None:
        sets.append(f"train.stop_after={arguments.smoke}")
    if arguments.gpus is not None:
        sets.append(f"compute.gpus={arguments.gpus}")
    spec, text = load_spec(arguments.spec, sets)
    smoke = "" if arguments.smoke is None else "-smoke"
    name = spec.run.name or f"{arguments.spec.stem}{smoke}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = (arguments.out or Path(spec.run.out) / name).absolute()
    if path.exists():
        raise BadInput(
            f"run folder: {path} — expected a new folder, found one that exists",
            hint="choose another with --out, or continue it with --resume",
        )
    choose_receivers(spec.notify.to, os.environ)
    return _NewRun(spec=spec, text=text, sets=sets, inputs=check_inputs(spec, path), path=path)


def _check(arguments: argparse.Namespace) -> int:
    """Print the data, time and memory of a new run. Return the trainer's exit code if its first steps fail, 1 if the
    check of the teacher stops the run, 2 if the steps cannot be run or timed on this machine."""
    from engine.models.transformers_config import library_warnings
    from engine.plan.data_size import measure_data

    if arguments.resume:
        raise UsageError("--check and --check-inputs are for a new run; --resume continues a run")
    new_run = _check_new_run(arguments)
    spec = new_run.spec
    size = measure_data(spec, new_run.inputs)
    say(f"{arguments.spec}: the spec and its inputs are sound")
    engines = _engines(new_run.inputs)
    notes = [*new_run.inputs.notes, *library_warnings()]
    for line in (
        *new_run.inputs.models,
        *(f"{role}: run by {words}" for role, words in engines.items()),
        *(f"warning: {note}" for note in notes),
        *size.lines(spec.train.steps),
    ):
        say(line)
    record = {
        "engines": engines,
        "notes": notes,
        "spec_sha256": spec.sha256,
        "spec": spec.to_dict(),
        "data": dataclasses.asdict(size),
    }
    code = 0
    if arguments.check:
        from engine.cli.first_steps import measure_first_steps

        steps = measure_first_steps(spec, size)
        record["first_steps"] = steps.to_dict()
        new_warnings = [text for text in steps.warnings if text not in notes]
        notes += new_warnings
        for text in new_warnings:
            say(f"warning: {text}")
        code = EXIT_UNKNOWN if steps.step_s.number is None else 0
        if steps.failed:
            code = steps.exit_code or EXIT_FAIL
            say(f"{arguments.spec}: its first steps fail: {steps.failed}")
        else:
            for line in steps.lines(spec.train.steps):
                say(line)
            if steps.teacher_fails:
                code = EXIT_FAIL
    if arguments.json:
        put_json("distill-check", record)
    return code


def _engines(inputs: Inputs) -> dict[str, str]:
    """Return what runs each model, by its role: teacher, student."""
    from engine.models.transformers_config import TransformersConfig

    engines = {}
    for role, config in (("teacher", inputs.teacher), ("student", inputs.student)):
        if isinstance(config, TransformersConfig):
            engines[role] = f"transformers, as a {config.title}: {config.why}"
        elif config is not None:
            engines[role] = "the native decoder"
    return engines


def _start(arguments: argparse.Namespace) -> RunFolder:
    from engine.log.folder import create_run
    from engine.version import VERSION

    new_run = _check_new_run(arguments)
    path = new_run.path
    run = dataclasses.replace(new_run.spec.run, name=path.name, out=str(path.parent))
    spec = dataclasses.replace(new_run.spec, run=run)
    effective = {
        "engine": VERSION,
        "spec_file": str(arguments.spec.absolute()),
        "sets": new_run.sets,
        "spec": spec.to_dict(),
        "spec_sha256": spec.sha256,
    }
    return create_run(path, new_run.text, effective)


def _resume(arguments: argparse.Namespace) -> RunFolder:
    from engine.log.fold import Follower
    from engine.log.folder import must_have_settings, open_run
    from engine.log.read import BrokenLog
    from engine.plan.inputs import check_inputs
    from engine.spec.environment import sets_from_environment
    from engine.train.checkpoint.continuing import missing_newest, require_logged_checkpoint

    if arguments.out or arguments.gpus is not None or arguments.smoke is not None:
        raise UsageError("--gpus, --smoke and --out make a new run; --resume continues one")
    folder = open_run(arguments.resume.absolute())
    must_have_settings(folder)
    effective = folder.read_effective()
    sets = sets_from_environment(os.environ) + arguments.set
    spec = _settings_to_resume(folder, effective, sets, arguments.allow_change)
    follower = Follower(folder)
    try:
        follower.read_all()
    except BrokenLog as error:
        if not error.hole:
            raise
        # The next writer of the log cuts off the hole.
        say(f"engine distill: {error.message}")
    if follower.view.finished is not None and follower.state == "completed":
        raise BadInput(
            f"run folder: {folder.path} — expected a run with steps left, found one that completed",
            hint="start a new run with another train.steps",
        )
    require_logged_checkpoint(folder, follower.view, arguments.allow_restart)
    if arguments.detach and (missing := missing_newest(folder, follower.view)):
        # When attached, the log reports it.
        say(f"engine distill: {missing}")
    check_inputs(spec, folder.path)
    _write_changes(folder, effective, spec)
    return folder


def _settings_to_resume(
    folder: RunFolder, effective: dict[str, Any], sets: list[str], allowed: list[str]
) -> RunSpec:
    """Return the settings of the run with `sets` applied, from the environment and the command line. Only the
    settings in `allowed` may differ.

    Raises UsageError for an unknown key in `allowed`; BadInput with the refused differences, or where the number of
    rows in a step would change.
    """
    from engine.spec import KEYS, build_spec, spec_from_dict

    unknown = [key for key in allowed if key not in KEYS]
    if unknown:
        raise UsageError(f"--allow-change: expected the key of a setting, found {unknown[0]!r}")
    spec = spec_from_dict(effective["spec"])
    if not sets:
        return spec
    changed = build_spec(spec.to_dict(), file="effective.json", base=Path("/"), sets=sets)
    changed_keys = _differing(spec, changed)
    refused = [key for key in changed_keys if key not in allowed]
    if refused:
        words = ", ".join(
            f"{key} = {changed_keys[key][1]!r} (was {changed_keys[key][0]!r})" for key in refused
        )
        flags = " ".join(f"--allow-change {key}" for key in refused)
        raise BadInput.expected(
            "settings",
            folder.path,
            "those the run began with",
            words,
            hint=f"they come from --set or from the environment; {flags} goes on with them",
        )
    if spec.rows_per_step != changed.rows_per_step:
        # The place in the data, its order and the schedule are counted in steps of as many rows.
        raise BadInput.expected(
            "settings",
            folder.path,
            f"{spec.rows_per_step} rows in a step, train.rows * train.accumulation * compute.gpus, as it began",
            f"{changed.rows_per_step}",
            hint="change them together so that their product stays, or start a new run",
        )
    return changed


def _differing(was: RunSpec, now: RunSpec) -> dict[str, tuple[Any, Any]]:
    """Return the keys whose values differ, each with both values."""
    before, after = was.to_dict(), now.to_dict()
    return {
        f"{section}.{name}": (before[section][name], value)
        for section, values in after.items()
        for name, value in values.items()
        if before[section][name] != value
    }


def _write_changes(folder: RunFolder, effective: dict[str, Any], spec: RunSpec) -> None:
    """Write changed settings into effective.json, each with its previous value and with the hash of all settings
    before the change, which identifies checkpoints of that time (`engine.train.checkpoint.continuing`).

    Raises DiskFull, RunLogError.
    """
    from engine.log.folder import write_whole
    from engine.spec import spec_from_dict

    changed_keys = _differing(spec_from_dict(effective["spec"]), spec)
    if not changed_keys:
        return
    changes = [
        {"key": key, "was": was, "is": value, "spec_sha256": effective.get("spec_sha256")}
        for key, (was, value) in changed_keys.items()
    ]
    new_effective = effective | {
        "changes": [*effective.get("changes", []), *changes],
        "spec": spec.to_dict(),
        "spec_sha256": spec.sha256,
    }
    write_whole(folder.effective, json.dumps(new_effective, indent=2, sort_keys=True) + "\n")


def _project(run: RunFolder, code: int, *, as_json: bool) -> int:
    """Print the projection of the whole run from the first steps of a run that ended with `code`. Returns
    `code` unless it is 0; then 1 when a check failed, 2 when one is unknown or no step was timed, else 0."""
    from engine.log.fold import Follower
    from engine.spec import spec_from_dict
    from engine.train.checkpoint.continuing import resume_command
    from engine.watch.projection import project, projection_lines

    spec = spec_from_dict(run.read_effective()["spec"])
    projection = project(Follower(run).read_all(), spec)
    if as_json:
        fields = dataclasses.asdict(projection) | {
            "total_s": projection.total_s,
            "missing": projection.missing,
        }
        put_json("projection", fields | {"run": run.path, "exit_code": code})
    else:
        for line in projection_lines(projection):
            put(line)
        key = "train.stop_after"
        say(f"go on with it: {resume_command(run)} --set {key}=0 --allow-change {key}")
    if code:
        return code
    if projection.failed:
        return EXIT_FAIL
    return EXIT_UNKNOWN if projection.unknown or projection.step_s is None else 0
