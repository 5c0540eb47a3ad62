"""Two processes train as one does: the same losses and weights, the same files; and one that dies or
hangs ends the run with its name. On CPUs, through the command, with torchrun and gloo for real.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.errors import BadInput
from engine.formats.open import open_weights
from engine.log.beats import read_beats, read_lost_rank
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.log.view import RunView
from engine.runtime.ranks import Ranks, ranks_here, use_own_gpu
from tests.support.finished_runs import finish
from tests.support.kit import Kit
from tests.support.running import (
    engine,
    engine_here,
    environment,
    start,
    wait_for,
    wait_until_ended,
)

STEPS = 6
COMMON = dict(train__steps=STEPS, checkpoint__every=3, eval__every=3, data__include_tests=False)


def _run(kit: Kit, folder: Path, **changes: object) -> RunView:
    """Two ranks, with two rows each."""
    folder.mkdir()
    spec = kit.spec(folder, **(COMMON | {"train__rows": 2} | changes))
    done = engine("distill", spec, "--gpus", 2, "--out", folder / "run", "--json")
    assert done.returncode == 0, done.stderr
    return Follower(RunFolder(folder / "run")).read_all()


@pytest.fixture(scope="module")
def alone(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> RunView:
    run = finish(kit, tmp_path_factory.mktemp("ranks") / "alone", **(COMMON | {"train__rows": 4}))
    return Follower(run).read_all()


@pytest.fixture(scope="module")
def pair(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "pair"
    # Shared, though it would fit; other tests' ranks have it whole.
    _run(kit, folder, teacher__shard="on")
    return folder / "run"


def test_the_same_global_batch_gives_the_same_losses(alone: RunView, pair: Path) -> None:
    two = Follower(RunFolder(pair)).read_all()
    for name in ("loss", "ce", "kd", "grad_norm", "lr"):
        # fp32 sums in another order: a few last bits a step.
        assert two.steps.values(name) == pytest.approx(alone.steps.values(name), rel=2e-5), name
    for name in ("rows", "tokens", "labelled"):
        assert two.steps.values(name) == alone.steps.values(name), name
    heldout = [(e.subject, e.step, e.labelled) for e in two.evals]
    assert heldout == [(e.subject, e.step, e.labelled) for e in alone.evals]
    assert [e.loss for e in two.evals] == pytest.approx([e.loss for e in alone.evals], rel=2e-5)


def test_the_rows_of_a_step_are_shown_with_the_rank_that_trained_on_each(pair: Path) -> None:
    done = engine_here("data", pair, "--step", "4", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["ranks"], found["digest_agrees"]) == (2, True)
    assert [row["rank"] for row in found["rows"]] == [0, 0, 1, 1]
    assert "--- 3, rank 1: row" in engine_here("data", pair, "--step", "4").stdout


def test_every_check_that_one_process_answers_is_answered_the_same(
    alone: RunView, pair: Path
) -> None:
    two = Follower(RunFolder(pair)).read_all()
    # Layers of the teacher that are spread over the ranks are in no one's memory.
    levels = {name: c.level for name, c in two.checks.items()}
    assert levels.pop("step_teacher") == "unknown"
    assert levels == {n: c.level for n, c in alone.checks.items() if n != "step_teacher"}


def test_the_teacher_in_parts_is_the_teacher_of_one_process(alone: RunView, pair: Path) -> None:
    two = Follower(RunFolder(pair)).read_all()
    assert {d.knob: d.choice for d in two.decisions}["teacher.shard"] == "on"
    assert two.models["teacher"].sha256 == alone.models["teacher"].sha256
    known = [view.eval_of("teacher") for view in (alone, two)]
    assert known[0] is not None and known[1] is not None and known[0].loss == known[1].loss


def test_no_note_of_a_healthy_run_of_two_ranks_is_an_error(pair: Path) -> None:
    notes = Follower(RunFolder(pair)).read_all().notes
    assert [one.text for one in notes if one.level == "error"] == []


def test_checkpoint_and_student_are_whole_and_equal_to_one_another(pair: Path) -> None:
    kept = sorted(path.name for path in (pair / "checkpoints").iterdir())
    assert kept == ["step-00000003", "step-00000006"]
    with (
        open_weights(pair / "checkpoints" / "step-00000006" / "student.safetensors") as saved,
        open_weights(pair / "student" / "model.safetensors") as student,
    ):
        embedding = saved.get("embed.weight")
        assert isinstance(embedding, torch.Tensor) and embedding.shape == (300, 32)
        published = student.get("model.embed_tokens.weight")
        assert isinstance(published, torch.Tensor) and torch.equal(embedding, published)


def test_the_other_ranks_write_no_line_into_the_runs_log(pair: Path) -> None:
    lines = (pair / "events.jsonl").read_text().splitlines()
    writers = {json.loads(line).get("writer") for line in lines} - {None}
    assert writers == {"trainer"}
    assert (pair / "ranks" / "1.jsonl").stat().st_size > 0
    assert [beat.step for beat in read_beats(RunFolder(pair))] == [STEPS, STEPS]


@pytest.mark.soak  # ten seconds; what is said of a rank that is lost is told in test_ranks_hang
def test_a_rank_that_is_killed_ends_the_run_with_its_name(kit: Kit, tmp_path: Path) -> None:
    run, launched = _long_run(kit, tmp_path)
    victim = read_beats(RunFolder(run))[1]
    os.kill(victim.pid, signal.SIGKILL)
    _, stderr = launched.communicate(timeout=240)
    ended = wait_until_ended(run)
    lost = read_lost_rank(RunFolder(run))
    assert lost is not None and (lost.rank, lost.pid, lost.returncode) == (1, victim.pid, -9)
    # The first rank may see its connection break and say so before the agent ends it.
    assert launched.returncode in (128 + signal.SIGKILL, 70)
    assert ended.view.exit is not None and "rank 1" in ended.view.exit.sentence
    assert "rank 1" in stderr and "OOM" not in lost.sentence


@pytest.mark.soak
def test_a_request_to_stop_is_followed_by_all_ranks_after_the_same_step(
    kit: Kit, tmp_path: Path
) -> None:
    run, launched = _long_run(kit, tmp_path)
    launched.send_signal(signal.SIGINT)
    launched.communicate(timeout=240)
    ended = wait_until_ended(run)
    assert ended.state == "stopped" and launched.returncode == 130
    step = ended.view.last_step
    assert ended.view.checkpoints[-1].step == step
    assert [beat.step for beat in read_beats(RunFolder(run))] == [step, step]
    few = ("--set", "train.stop_after=2", "--allow-change", "train.stop_after")
    resumed = engine("distill", "--resume", run, *few)
    assert resumed.returncode == 0, resumed.stderr
    assert Follower(RunFolder(run)).read_all().last_step == step + 2


def _long_run(kit: Kit, folder: Path) -> tuple[Path, subprocess.Popen[str]]:
    """A run of two ranks that has made its first steps."""
    spec = kit.spec(folder, train__steps=400, train__rows=2, checkpoint__every=0, eval__every=0)
    launched = start("distill", spec, "--gpus", 2, "--out", folder / "run")
    wait_for(folder / "run", lambda view: view.last_step >= 3)
    return folder / "run", launched


@pytest.mark.soak
def test_parts_that_two_ranks_wrote_are_continued_by_one_process_as_if_it_had(
    kit: Kit, alone: RunView, tmp_path: Path
) -> None:
    parts = dict(checkpoint__sharded="on", train__stop_after=3, student__reshard="on")
    half = _run(kit, tmp_path / "half", **parts)
    assert {d.knob: d.choice for d in half.decisions}["checkpoint.sharded"] == "on"
    assert half.checks["checkpoint_reloads"].level == "pass"
    run = tmp_path / "half" / "run"
    files = {path.name for path in (run / "checkpoints" / "step-00000003").iterdir()}
    shards = {f"shard-0000{n}-model-00001-of-00001.safetensors" for n in (1, 2)}
    assert files == {"MANIFEST.json", "rng.safetensors", "state.json"} | shards
    changed = ("compute.gpus=1", "train.rows=4", "train.stop_after=0")
    sets = [word for each in changed for word in ("--set", each)]
    sets += [word for each in changed for word in ("--allow-change", each.partition("=")[0])]
    done = engine("distill", "--resume", run, *sets)
    assert done.returncode == 0, done.stderr
    whole = Follower(RunFolder(run)).read_all()
    assert whole.steps.values("loss") == pytest.approx(alone.steps.values("loss"), rel=2e-5)


@pytest.mark.soak
def test_a_teacher_in_parts_teaches_as_a_whole_one_to_the_bit(
    kit: Kit, pair: Path, tmp_path: Path
) -> None:
    whole = _run(kit, tmp_path / "whole")
    shared = Follower(RunFolder(pair)).read_all()
    assert {d.knob: d.choice for d in whole.decisions}["teacher.shard"] == "off"
    for name in ("loss", "ce", "kd", "agreement", "grad_norm"):
        assert shared.steps.values(name) == whole.steps.values(name), name
    heldout = [(e.subject, e.step, e.loss) for e in whole.evals]
    assert [(e.subject, e.step, e.loss) for e in shared.evals] == heldout


@pytest.mark.soak
def test_a_created_run_is_carried_out_by_torchrun_itself(
    kit: Kit, alone: RunView, tmp_path: Path
) -> None:
    spec = kit.spec(tmp_path, **(COMMON | {"train__rows": 2}))
    made = engine("distill", spec, "--gpus", 2, "--out", tmp_path / "run", "--create")
    assert made.returncode == 0 and made.stdout.strip() == str(tmp_path / "run")
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    done = subprocess.run(
        [sys.executable, "-m", *command, "engine.train", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    view = Follower(RunFolder(tmp_path / "run")).read_all()
    assert view.finished is not None and view.finished.state == "completed"
    assert view.steps.values("loss") == pytest.approx(alone.steps.values("loss"), rel=2e-5)


def test_only_ranks_that_compute_on_a_gpu_need_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    second = Ranks(rank=1, world=2, local_rank=1)
    use_own_gpu(second, "cpu")
    for wanted in ("auto", "cuda"):
        with pytest.raises(BadInput, match="a GPU of its own, found 1"):
            use_own_gpu(second, wanted)


def test_without_torchruns_variables_a_run_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert not ranks_here().many


def test_resume_and_gpus_do_not_go_together(kit: Kit, tmp_path: Path) -> None:
    refused = engine_here("distill", "--resume", tmp_path, "--gpus", 2)
    assert refused.returncode == 64 and "--gpus" in refused.stderr
