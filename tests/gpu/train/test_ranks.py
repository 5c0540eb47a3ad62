"""Two real GPUs train as one does, and a rank that dies or hangs is named: NCCL, through the command."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from engine.log.beats import read_beats, read_lost_rank
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.log.view import RunView
from tests.support.kit import Kit
from tests.support.lacks import skip_for
from tests.support.running import engine, start, wait_for, wait_until_ended

pytestmark = pytest.mark.gpu
ON_GPU = dict(
    compute__device="cuda",
    student__precision="fp32",
    teacher__precision="fp32",
    data__include_tests=False,
)


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    import torch

    if torch.cuda.device_count() < 2:
        skip_for("two CUDA GPUs", f"torch sees {torch.cuda.device_count()}")


def _run(kit: Kit, folder: Path, *, gpus: int, rows: int, **changes: object) -> RunView:
    folder.mkdir()
    spec = kit.spec(folder, **(ON_GPU | {"train__rows": rows, "train__steps": 6} | changes))
    done = engine("distill", spec, "--gpus", gpus, "--out", folder / "run", "--json")
    assert done.returncode == 0, done.stderr
    return Follower(RunFolder(folder / "run")).read_all()


def test_two_gpus_lose_as_one_does_and_both_are_sampled(kit: Kit, tmp_path: Path) -> None:
    sharded = dict(checkpoint__sharded="on", checkpoint__every=3)
    two = _run(kit, tmp_path / "two", gpus=2, rows=2, teacher__shard="on", **sharded)
    one = _run(kit, tmp_path / "one", gpus=1, rows=4, checkpoint__every=3)
    for name in ("loss", "ce", "kd", "grad_norm"):
        assert two.steps.values(name) == pytest.approx(one.steps.values(name), rel=1e-4), name
    known = [view.eval_of("teacher") for view in (one, two)]
    assert known[0] is not None and known[1] is not None
    assert (
        known[0].loss == known[1].loss
        and len({v.models["teacher"].sha256 for v in (one, two)}) == 1
    )
    assert sorted(two.gpus) == [0, 1]
    assert [beat.step for beat in read_beats(RunFolder(tmp_path / "two" / "run"))] == [6, 6]


def test_parts_written_by_two_gpus_are_continued_on_one(kit: Kit, tmp_path: Path) -> None:
    one = _run(kit, tmp_path / "one", gpus=1, rows=4)
    _run(kit, tmp_path / "two", gpus=2, rows=2, checkpoint__sharded="on", train__stop_after=3)
    sets = ("compute.gpus=1", "train.rows=4", "train.stop_after=0")
    words = [word for each in sets for word in ("--set", each)]
    allowed = [w for each in sets for w in ("--allow-change", each.partition("=")[0])]
    done = engine("distill", "--resume", tmp_path / "two" / "run", *words, *allowed)
    assert done.returncode == 0, done.stderr
    resumed = Follower(RunFolder(tmp_path / "two" / "run")).read_all()
    assert resumed.steps.values("loss") == pytest.approx(one.steps.values("loss"), rel=1e-4)


def test_a_killed_rank_ends_the_run_with_its_name(kit: Kit, tmp_path: Path) -> None:
    run, launched = _long_run(kit, tmp_path)
    victim = read_beats(RunFolder(run))[1]
    os.kill(victim.pid, signal.SIGKILL)
    launched.communicate(timeout=240)
    ended = wait_until_ended(run)
    lost = read_lost_rank(RunFolder(run))
    assert lost is not None and (lost.rank, lost.pid, lost.returncode) == (1, victim.pid, -9)
    assert ended.view.exit is not None and "rank 1" in ended.view.exit.sentence


def test_a_stopped_rank_ends_the_run_with_its_name(kit: Kit, tmp_path: Path) -> None:
    run, launched = _long_run(kit, tmp_path, compute__collective_timeout_s=10)
    victim = read_beats(RunFolder(run))[1]
    os.kill(victim.pid, signal.SIGSTOP)
    _, stderr = launched.communicate(timeout=240)
    ended = wait_until_ended(run)
    lost = read_lost_rank(RunFolder(run))
    assert lost is not None and (lost.rank, lost.pid) == (1, victim.pid), stderr
    assert "rank 1" in lost.sentence and "wait" in lost.sentence
    assert ended.view.exit is not None and "rank 1" in ended.view.exit.sentence


def _long_run(kit: Kit, folder: Path, **changes: object) -> tuple[Path, subprocess.Popen[str]]:
    quiet = dict(train__steps=100_000, train__rows=2, checkpoint__every=0, eval__every=0)
    spec = kit.spec(folder, **(ON_GPU | quiet | changes))
    launched = start("distill", spec, "--gpus", 2, "--out", folder / "run")
    wait_for(folder / "run", lambda view: view.last_step >= 3)
    return folder / "run", launched
