"""`engine distill SPEC --smoke N`: what the first steps say about the whole run."""

from __future__ import annotations

import dataclasses

from engine.errors import EXIT_FAIL, EXIT_UNKNOWN
from engine.log.folder import RunFolder
from engine.log.follow import Follower
from engine.spec import spec_from_dict
from engine.terminal import put, put_json, say
from engine.train.checkpoint.continuing import resume_command
from engine.watch.projection import project, projection_lines


def report(run: RunFolder, code: int, *, as_json: bool) -> int:
    """Print the projection of a run that ended with `code`; the exit code of the verdict: 0 when
    the steps were made and every check passed, 1 when one failed, 2 when one is unknown.
    """
    spec = spec_from_dict(run.read_effective()["spec"])
    view = Follower(run).read_all()
    found = project(view, spec)
    if as_json:
        fields = dataclasses.asdict(found) | {"total_s": found.total_s, "missing": found.missing}
        put_json(fields | {"run": str(run.path), "exit_code": code})
    else:
        for line in projection_lines(found):
            put(line)
        key = "train.stop_after"
        say(f"go on with it: {resume_command(run)} --set {key}=0 --allow-change {key}")
    if code:
        return code
    if found.failed:
        return EXIT_FAIL
    return EXIT_UNKNOWN if found.unknown or found.step_s is None else 0
