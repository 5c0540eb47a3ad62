"""Distil a student as a spec says, or continue a run.

    engine distill kd.toml                          start, follow, and print the result
    engine distill kd.toml --set loss.alpha=0.5     with one setting changed
    engine distill --resume runs/kd-20260101-120000 continue after a kill, a stop or a full disk; with
                                                    --set KEY=VALUE --allow-change KEY otherwise than it began
    engine distill kd.toml --smoke 20               20 steps, and what the whole run would take
    engine distill kd.toml --gpus 4                 on four GPUs of this machine, with torchrun
    engine distill kd.toml --detach                 start and return; prints the run folder

The run belongs to a supervisor in a session of its own: closing the terminal does not end it,
Ctrl-C asks it to finish its step, save and stop, and a second Ctrl-C ends it at once.

MANAGED_MEMORY=1|0 and APR_DISTILL_TEACHER_BACKEND=auto|cudatrainer|realizar-q4k are read from the
environment as settings of memory.allocator and teacher.backend; --set goes before them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from pathlib import Path
from typing import Any

from engine import limits
from engine.cli.numbers import whole
from engine.errors import UsageError
from engine.terminal import put, put_json, say

HELP = "distil a student as a spec says, or resume a run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "spec", type=Path, nargs="?", help="the spec, a TOML file (`engine spec` prints one)"
    )
    parser.add_argument(
        "--resume", type=Path, metavar="RUN", help="continue this run folder instead"
    )
    parser.add_argument(
        "--allow-fallback",
        action="store_true",
        help="with --resume: when the newest checkpoint is damaged, continue from an older one",
    )
    parser.add_argument(
        "--allow-restart",
        action="store_true",
        help="with --resume: when every checkpoint is gone, begin again from step 0",
    )
    parser.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY",
        help="with --resume: let --set or the environment change this setting of the run",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one setting; may be repeated",
    )
    parser.add_argument(
        "--smoke",
        type=whole(limits.STEPS.most),
        metavar="N",
        help="make N steps, then say what the whole run will take and what the checks found",
    )
    parser.add_argument(
        "--gpus",
        type=whole(limits.JOBS.most),
        metavar="N",
        help="train on N GPUs of this machine; short for --set compute.gpus=N",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="the new run folder (default: runs/SPEC-DATE-TIME)"
    )
    parser.add_argument(
        "--detach", action="store_true", help="return when it is running; print the run folder"
    )
    parser.add_argument(
        "--create",
        action="store_true",
        help="make the run folder, print its path, start nothing: for torchrun on several machines",
    )
    parser.add_argument("--check", action="store_true", help="check spec and inputs, start nothing")
    parser.add_argument(
        "--json", action="store_true", help="print the result as one JSON value on stdout"
    )


def run(arguments: argparse.Namespace) -> int:
    if (arguments.spec is None) == (arguments.resume is None):
        raise UsageError("expected either a spec or --resume RUN", hint="engine distill --help")
    if arguments.smoke is not None and arguments.detach:
        raise UsageError("--smoke waits for its steps; --detach does not wait")
    folder = _resume(arguments) if arguments.resume else _start(arguments)
    if folder is None:
        return 0
    if arguments.create:
        put(folder.path)
        return 0
    from engine.cli.progress import attend
    from engine.watch.launch import launch

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
    from engine.cli.smoke import report

    code = attend(launched, as_json=False, results=False)
    return report(folder, code, as_json=arguments.json)


def _start(arguments: argparse.Namespace) -> Any:
    from engine.log.folder import create_run
    from engine.plan.inputs import check_inputs
    from engine.spec import load_spec
    from engine.spec.environment import sets_from_environment
    from engine.version import VERSION

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
        from engine.errors import BadInput

        raise BadInput(
            f"run folder: {path} — expected a new folder, found one that exists",
            hint="choose another with --out, or continue it with --resume",
        )
    check_inputs(spec, path)
    if arguments.check:
        say(f"{arguments.spec}: the spec and its inputs are sound")
        if arguments.json:
            put_json({"spec_sha256": spec.sha256, "spec": spec.to_dict()})
        return None
    spec = dataclasses.replace(
        spec, run=dataclasses.replace(spec.run, name=path.name, out=str(path.parent))
    )
    effective = {
        "engine": VERSION,
        "spec_file": str(arguments.spec.absolute()),
        "sets": sets,
        "spec": spec.to_dict(),
        "spec_sha256": spec.sha256,
    }
    return create_run(path, text, effective)


def _resume(arguments: argparse.Namespace) -> Any:
    from engine.cli.changes import settings_to_resume, write_changes
    from engine.errors import BadInput
    from engine.log.folder import open_run
    from engine.log.follow import Follower
    from engine.log.read import BrokenLog
    from engine.plan.inputs import check_inputs
    from engine.spec.environment import sets_from_environment
    from engine.train.checkpoint.continuing import check_promised, missing_newest

    if arguments.out or arguments.gpus is not None or arguments.smoke is not None:
        raise UsageError("--gpus, --smoke and --out make a new run; --resume continues one")
    folder = open_run(arguments.resume.absolute())
    effective = folder.read_effective()
    sets = sets_from_environment(os.environ) + arguments.set
    spec = settings_to_resume(folder, effective, sets, arguments.allow_change)
    follower = Follower(folder)
    try:
        follower.read_all()
    except BrokenLog as error:
        if not error.hole:
            raise
        # Who writes the log next cuts the hole off.
        say(f"engine distill: {error.message}")
    if follower.view.finished is not None and follower.state == "completed":
        raise BadInput(
            f"run folder: {folder.path} — expected a run with steps left, found one that completed",
            hint="start a new run with another train.steps",
        )
    check_promised(folder, follower.view, arguments.allow_restart)
    if arguments.detach and (missing := missing_newest(folder, follower.view)):
        # Attached, it is heard from the log.
        say(f"engine distill: {missing}")
    check_inputs(spec, folder.path)
    write_changes(folder, effective, spec)
    return folder
