"""Real runs carried out to their end in this process, and evaluations of their students."""

from __future__ import annotations

import io
import json
import subprocess
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest

from engine.cli import first_steps
from engine.evaluate.model import weights_sha256
from engine.log.folder import RunFolder, create_run
from engine.spec import load_spec
from engine.train import run as trainer_module
from engine.verify import replay
from engine.watch import start_and_stop
from engine.watch.start_and_stop import Launched
from tests.support.kit import Kit


def finish(kit: Kit, folder: Path, **changes: object) -> RunFolder:
    """Make a completed run of six steps in `folder`/run."""
    run, code = carried_out(kit, folder, **changes)
    assert code == 0
    return run


def carried_out(kit: Kit, folder: Path, **changes: object) -> tuple[RunFolder, int]:
    """Carry out a run in `folder`/run, of six steps by default; returns it with the trainer's exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"train__steps": 6, "checkpoint__every": 0, "eval__every": 0} | changes
    return carry_out(kit.spec(folder, **settings), folder / "run")


def carry_out(spec_file: Path, run: Path, *sets: str) -> tuple[RunFolder, int]:
    """Carry out the run of a spec in the new folder `run`; returns it with the trainer's exit code."""
    spec, text = load_spec(spec_file, list(sets))
    create_run(run, text, {"spec": spec.to_dict(), "spec_sha256": spec.sha256})
    code = trainer_module.run(run, resume=False, allow_fallback=False, keep_alive_fd=None)
    return RunFolder(run), code


class Ended(Launched):
    """A run that was carried out before anybody attended it."""

    def leave(self, byte: bytes) -> None:
        pass

    def end(self) -> None:
        pass


def launched_here(run: RunFolder, *, resume: bool = False, **allowed: bool) -> Launched:
    """Carry out a run as `launch` does, but in this process, with nobody who watches the trainer."""
    with run.stderr.open("a") as output, redirect_stderr(output):
        code = trainer_module.run(
            run.path, resume=resume, keep_alive_fd=None, **({"allow_fallback": False} | allowed)
        )
    process: subprocess.Popen[bytes] = subprocess.Popen(["sh", "-c", f"exit {code}"])
    process.wait()
    return Ended(run, process, 0.0)


def train_here(patch: pytest.MonkeyPatch) -> None:
    """Let every command that starts a trainer carry it out in this process, which has imported torch."""
    for module in (start_and_stop, first_steps, replay):
        patch.setattr(module, "launch", launched_here)


def resumed_here(run: Path, **allowed: bool) -> subprocess.CompletedProcess[str]:
    """Resume a run that the launcher would not refuse, as `engine distill --resume` does, with the trainer in
    this process: another process would only add its start-up time."""
    with redirect_stderr(io.StringIO()) as err:
        code = trainer_module.run(
            run, resume=True, keep_alive_fd=None, **({"allow_fallback": False} | allowed)
        )
    return subprocess.CompletedProcess([str(run)], code, "", err.getvalue())


def results_file(path: Path, run: RunFolder, *, right: int, judged: int, problems: int) -> Path:
    """Write partial results of `engine eval humaneval`: `right` of `judged` programs pass."""
    about: dict[str, Any] = {
        "kind": "evaluation",
        "v": 1,
        "benchmark": "humaneval",
        "problems": problems,
        "model": str(run.path),
        "weights_sha256": weights_sha256(run.student),
        "data_sha256": "d" * 64,
        "without": [],
        "settings": {"samples": 1},
    }
    lines: list[dict[str, Any]] = [
        {
            "kind": "result",
            "task_id": f"HumanEval/{index}",
            "sample": 0,
            "completion": "    return 1\n",
            "outcome": "pass" if index < right else "fail",
            "reason": "",
            "tokens": 4,
            "ended": "stop",
        }
        for index in range(judged)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in [about, *lines]))
    return path
