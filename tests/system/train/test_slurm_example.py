"""The Slurm example runs as it stands, with Slurm's two commands played by a shell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.log.fold import Follower
from engine.log.folder import RunFolder
from tests.support.kit import Kit
from tests.support.paths import ROOT
from tests.support.running import environment

EXAMPLE = ROOT / "engine" / "train" / "ranks" / "slurm.sbatch"


@pytest.mark.soak  # two runs of two processes each
def test_the_slurm_example_makes_a_run_and_continues_it(kit: Kit, tmp_path: Path) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    played = {
        "srun": 'exec "$@"',
        "scontrol": "echo 127.0.0.1",
        "engine": f'exec {sys.executable} -m engine "$@"',
    }
    for name, line in played.items():
        (commands / name).write_text(f"#!/bin/sh\n{line}\n")
        (commands / name).chmod(0o755)
    slurm = {"NNODES": 1, "NODEID": 0, "GPUS_ON_NODE": 2, "JOB_NODELIST": "one"}
    env = environment() | {f"SLURM_{name}": str(value) for name, value in slurm.items()}
    env["PATH"] = f"{commands}:{env['PATH']}"
    spec = kit.spec(tmp_path, train__rows=2, train__steps=6, train__stop_after=3)
    run = tmp_path / "run"
    for last_step in (3, 6):
        done = subprocess.run(
            ["bash", str(EXAMPLE), str(spec), str(run)],
            capture_output=True,
            text=True,
            env=env,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert Follower(RunFolder(run)).read_all().last_step == last_step
