"""Real runs, really killed: what was acknowledged is there, what is said is true, and a resumed
run is the run itself.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.checkpoint_folders import published
from engine.errors import RunLogError
from engine.log.events import LauncherGone, LogOpened, Note, RunFinished
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.log.view import RunView
from engine.log.write import LogWriter
from engine.train import run as trainer_module
from engine.train.__main__ import ALLOCATOR_SETTINGS, grow_segments
from engine.train.loop import TrainingLoop
from engine.train.trainer import Trainer
from engine.watch.start_and_stop import stop
from tests.support.finished_runs import carried_out, finish, resumed_here
from tests.support.kit import Kit
from tests.support.running import (
    DEADLINE_S,
    engine,
    engine_here,
    files_of,
    start,
    wait_for,
    wait_until_ended,
)

LAST = "step-00000020"


ACTIVE = {"compute__thread_wait": "active"}
"""As `whole` is: a checkpoint names the settings that it was made with."""


@pytest.fixture(scope="module")
def killed(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, whose trainer was killed after its checkpoint of step 10."""
    folder = tmp_path_factory.mktemp("killed")
    return kill_at(kit, folder, 12)


@contextmanager
def held_after(steps: int, how: str, folder: Path) -> Iterator[None]:
    """A trainer that is started meanwhile stands still when so many steps are in its log."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("APR_WORKBENCH_TRAINER", "tests.support.holding engine.train.__main__")
        patch.setenv("HOLD", "engine.train.loop:log_step")
        patch.setenv("HOLD_AFTER", str(steps))
        patch.setenv("HOLD_IN", how)
        patch.setenv("HELD", str(folder / "held"))
        yield


def kill_at(kit: Kit, folder: Path, seen: int) -> Path:
    """A run whose trainer is killed when step `seen` is in its log, and what was said of it."""
    run = folder / "run"
    with held_after(seen, "stop", folder):
        launched = start("distill", kit.spec(folder, **ACTIVE), "--out", run)
    follower = wait_for(run, lambda view: view.last_step >= seen)
    assert follower.view.trainer_pid is not None
    os.kill(follower.view.trainer_pid, signal.SIGKILL)
    _, stderr = launched.communicate(timeout=DEADLINE_S)
    ended = wait_until_ended(run)
    assert ended.view.finished is None and launched.returncode == 137
    assert ended.view.exit is not None and ended.view.exit.signal == "SIGKILL"
    assert "OOM" not in ended.view.exit.sentence.replace("not the kernel's OOM killer", "")
    assert "--resume" in stderr
    return run


def test_a_run_ends_with_a_student_a_receipt_and_one_json_result(whole: Path) -> None:
    from transformers import AutoModelForCausalLM  # seconds, which only this test needs

    result = json.loads((whole.parent / "result.json").read_text())
    follower = Follower(RunFolder(whole))
    view = follower.read_all()
    assert follower.state == result["state"] == "completed"
    assert result["steps"] == view.last_step == 20
    assert result["rows_trained"] == 20 * 4 and result["tokens_trained"] == 20 * 4 * 32
    losses = result["heldout_loss_nats"]
    assert losses["student"] < losses["untrained"]
    assert {"teacher", "untrained", "student"} == set(losses)
    assert [c.step for c in view.checkpoints] == [5, 10, 15, 20]
    kept = sorted(p.name for p in (whole / "checkpoints").iterdir())
    assert kept[-2:] == ["step-00000015", LAST]
    model = AutoModelForCausalLM.from_pretrained(whole / "student")
    assert sum(p.numel() for p in model.parameters()) == view.models["student"].parameters


def test_logged_numbers_are_those_of_the_update(whole: Path) -> None:
    steps = Follower(RunFolder(whole)).read_all().steps
    assert steps.values("step") == [float(i) for i in range(1, 21)]
    for index in range(20):
        loss, ce, kd = (steps.value(n, index) for n in ("loss", "ce", "kd"))
        assert loss is not None and ce is not None and kd is not None
        assert loss == pytest.approx(0.3 * ce + 0.7 * kd, rel=1e-5)
    assert steps.value("lr", 1) == pytest.approx(3e-4)  # the peak, at the end of two warm-up steps
    assert steps.value("lr", 19) == pytest.approx(3e-5)  # a tenth of it, at the last step


def test_every_evaluation_is_named_before_it_is_made(whole: Path) -> None:
    """A teacher that hangs in the first one is not looked for in the phase before."""
    lines = (whole / "events.jsonl").read_text().splitlines()
    phase: dict[str, str] = {}
    found = []
    for event in map(json.loads, lines):
        if event["kind"] == "phase":
            phase = event
        elif event["kind"] == "eval":
            found.append((event["subject"], phase["name"], phase["detail"].split(",")[0]))
    assert found[0] == ("teacher", "evaluating", "the teacher")
    assert {name for _, name, _ in found} == {"evaluating"}
    assert all("student" in detail for subject, _, detail in found if subject != "teacher")


def test_a_run_on_a_cpu_loads_no_compiler(whole: Path) -> None:
    """Neither torch's, nor the algebra it computes shapes with: they are half of what a start costs."""
    lines = (whole / "stderr.txt").read_text().splitlines()
    imported = {line.rsplit("|")[-1].strip() for line in lines if line.startswith("import time:")}
    assert {"torch", "engine.train.run"} <= imported
    assert not imported & {"torch._dynamo", "torch._inductor", "sympy", "triton"}


def test_a_healthy_run_raises_nothing(whole: Path) -> None:
    view = Follower(RunFolder(whole)).read_all()
    assert view.alert_count == 0 and view.stack_dump is None
    judged = engine_here("diagnose", whole, "--all")
    assert judged.returncode == 0, judged.stdout
    assert (
        "could not judge" in judged.stdout and "gpu_idle: the run computes on cpu" in judged.stdout
    )


@pytest.mark.parametrize("seen", [12, pytest.param(13, marks=pytest.mark.soak)])
def test_twenty_steps_equal_ten_then_sigkill_then_the_rest_bit_for_bit(
    kit: Kit, whole: Path, killed: Path, tmp_path: Path, seen: int
) -> None:
    run = tmp_path / "run"
    if seen == 12:
        shutil.copytree(killed, run)
    else:
        kill_at(kit, tmp_path, seen)
    resumed = resumed_here(run)
    assert resumed.returncode == 0, resumed.stderr
    view = Follower(RunFolder(run)).read_all()
    assert view.steps.values("step") == [float(i) for i in range(1, 21)]
    theirs = files_of(whole / "checkpoints" / LAST)
    assert files_of(run / "checkpoints" / LAST) == theirs
    assert files_of(run / "rows") == files_of(whole / "rows")
    undisturbed = Follower(RunFolder(whole)).read_all()
    for name in ("loss", "ce", "kd", "lr", "grad_norm"):
        assert view.steps.values(name) == undisturbed.steps.values(name), name


def test_sigterm_finishes_the_step_saves_and_exits_143_and_resume_is_exact(
    kit: Kit, whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    spec = kit.spec(tmp_path, checkpoint__every=0, **ACTIVE)
    with held_after(2, "signal", tmp_path):
        launched = start("distill", spec, "--out", run)
    wait_for(run, lambda view: view.last_step >= 2 and (tmp_path / "held").exists())
    launched.terminate()
    launched.communicate(timeout=DEADLINE_S)
    view = wait_until_ended(run).view
    assert view.finished is not None
    assert (launched.returncode, view.finished.state) == (143, "stopped")
    assert view.checkpoints[-1].step == view.last_step < 20
    resumed = resumed_here(run)
    assert resumed.returncode == 0, resumed.stderr
    weights = "student.safetensors"
    assert (
        files_of(run / "checkpoints" / LAST)[weights]
        == files_of(whole / "checkpoints" / LAST)[weights]
    )


def test_a_run_is_ended_before_its_trainer_has_begun_to_log(kit: Kit, tmp_path: Path) -> None:
    out = tmp_path / "run"
    begun = engine("distill", kit.spec(tmp_path, train__steps=100000), "--out", out, "--detach")
    assert begun.returncode == 0
    wait_for(out, lambda view: view.trainer_pid is not None)
    assert "killed the trainer" in stop(RunFolder(out), now=True)
    follower = wait_until_ended(out)
    assert follower.view.exit is not None and follower.view.exit.returncode == -signal.SIGKILL


def test_a_killed_supervisor_is_noticed_saved_for_and_written_down(
    kit: Kit, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    launched = start("distill", kit.spec(tmp_path, train__steps=100000), "--out", run)
    follower = wait_for(run, lambda view: view.last_step >= 2)
    os.kill(follower.view.clocks["watch"].pid, signal.SIGKILL)
    launched.communicate(timeout=DEADLINE_S)
    view = wait_until_ended(run).view
    assert view.finished is not None and view.finished.state == "stopped"
    assert "supervisor lost" in view.finished.reason
    assert view.checkpoints[-1].step == view.last_step
    assert any("supervisor is gone" in note.text for note in view.notes)
    assert launched.returncode == 143


@pytest.mark.soak  # a lost terminal, which is told in another byte, is a test of test_fault_rows
def test_a_killed_launcher_leaves_the_run_going_and_the_log_says_so(
    kit: Kit, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    launched = start("distill", kit.spec(tmp_path, train__steps=100000), "--out", run)
    wait_for(run, lambda view: view.last_step >= 2)
    launched.kill()
    launched.communicate(timeout=DEADLINE_S)
    step = wait_for(run, lambda view: view.launcher_gone is not None).view.last_step
    follower = wait_for(run, lambda view: view.last_step > step + 5)
    assert follower.view.launcher_gone == "killed"
    gone = [e.event.how for e in follower.view.lines if isinstance(e.event, LauncherGone)]
    assert gone == ["killed"]
    stopped = engine_here("stop", run, "--now")
    assert stopped.returncode == 0, stopped.stderr
    assert wait_until_ended(run).state.startswith("killed")


def test_an_end_that_did_not_reach_the_disk_is_none_in_the_log_either(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = LogWriter.sync

    def fails_once(log: LogWriter) -> None:
        if '"kind":"run_finished"' in log.path.read_text().splitlines()[-1]:
            monkeypatch.setattr(LogWriter, "sync", sync)
            raise RunLogError.expected("run log", str(log.path), "to reach the disk", "EIO")
        sync(log)

    monkeypatch.setattr(LogWriter, "sync", fails_once)
    with pytest.raises(RunLogError):
        carried_out(kit, tmp_path / "own")
    run = RunFolder(tmp_path / "own" / "run")
    ended = Follower(run).read_all().finished
    assert ended is not None and ended.state == "failed" and "to reach the disk" in ended.reason
    assert trainer_module.run(run.path, resume=True, allow_fallback=False, keep_alive_fd=None) == 0
    again = Follower(run).read_all().finished
    assert again is not None and again.state == "completed"


def test_a_nan_is_seen_stops_the_run_and_reaches_no_checkpoint(kit: Kit, tmp_path: Path) -> None:
    settings = {"train__steps": 20, "train__lr": 1e30, "checkpoint__every": 1}
    run, code = carried_out(kit, tmp_path, **settings)
    assert code == 1
    view = Follower(run).read_all()
    assert view.finished is not None and view.finished.state == "failed"
    assert view.non_finite and view.non_finite[0].step == view.last_step
    assert all(c.step < view.non_finite[0].step for c in view.checkpoints)
    assert (
        view.non_finite[0].text in ("nan", "+inf")
        and view.non_finite[0].text in view.finished.reason
    )


def test_a_damaged_newest_checkpoint_is_refused_by_name_and_passed_over_only_on_request(
    whole: Path, killed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(killed, run)
    assert Follower(RunFolder(run)).read_all().finished is None
    # A kill may leave a folder that was being written, which is no checkpoint.
    newest = next(published(run / "checkpoints"))
    weights = newest / "student.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    refused = resumed_here(run)
    assert refused.returncode == 65 and "student.safetensors" in refused.stderr
    resumed = resumed_here(run, allow_fallback=True)
    assert resumed.returncode == 0, resumed.stderr
    notes = [n.text for n in Follower(RunFolder(run)).read_all().notes if isinstance(n, Note)]
    assert any(newest.name in text for text in notes)
    assert files_of(run / "checkpoints" / LAST) == files_of(whole / "checkpoints" / LAST)


def test_one_row_at_a_time_with_accumulation_trains_what_four_rows_at_once_train(
    kit: Kit, tmp_path: Path, whole: Path
) -> None:
    run = finish(kit, tmp_path, train__steps=20, train__rows=1, train__accumulation=4)
    split = Follower(run).read_all().steps
    at_once = Follower(RunFolder(whole)).read_all().steps
    # Equal up to fp32 rounding, which 20 steps of AdamW carry on.
    assert split.values("loss") == pytest.approx(at_once.values("loss"), rel=1e-4)
    assert split.values("labelled") == at_once.values("labelled")


def lines_of_session(view: RunView) -> int:
    """Lines the newest trainer has written."""
    seqs = [line.event.seq for line in view.lines if line.source == "events"]
    opened = [
        line.event.seq
        for line in view.lines
        if line.source == "events" and isinstance(line.event, LogOpened)
    ]
    return seqs[-1] - opened[-1] + 1 if seqs and opened else 0


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(40))
def test_a_run_killed_at_random_moments_always_comes_to_the_same_end(
    kit: Kit, whole: Path, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    run = tmp_path / "run"
    spec = kit.spec(tmp_path, checkpoint__every=2)
    begun = engine("distill", spec, "--out", run, "--detach")
    assert begun.returncode == 0, begun.stderr

    def completed(view: RunView) -> bool:
        return view.finished is not None and view.finished.state == "completed"

    for session in range(1, 9):
        # Any line of the new trainer's log may be its last: while it reads, loads, trains or saves.
        lines = rng.randrange(1, 50)
        follower = wait_for(
            run,
            lambda view, n=session, lines=lines: (
                completed(view)  # type: ignore[misc]
                or (view.sessions == n and lines_of_session(view) >= lines)
            ),
        )
        if completed(follower.view):
            break
        # One death in five is the supervisor's: then the trainer saves and stops by itself.
        victim = follower.view.clocks[rng.choice(["events"] * 4 + ["watch"])]  # type: ignore[index]
        os.kill(victim.pid, signal.SIGKILL)
        if completed(wait_until_ended(run).view):
            break
        begun = engine("distill", "--resume", run, "--detach")
        assert begun.returncode == 0, begun.stderr
    view = wait_for(run, completed).view
    wait_until_ended(run)
    assert view.finished is not None and view.finished.state == "completed"
    assert view.steps.values("step") == [float(i) for i in range(1, 21)]
    for name in ("student.safetensors", "optimizer.safetensors"):
        theirs = files_of(whole / "checkpoints" / LAST)[name]
        assert files_of(run / "checkpoints" / LAST)[name] == theirs


@pytest.mark.parametrize("own", ALLOCATOR_SETTINGS)
def test_the_allocator_grows_its_segments_unless_the_user_says_how_it_works(own: str) -> None:
    none: dict[str, str] = {}
    grow_segments(none)
    assert none == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    theirs = {own: "max_split_size_mb:64"}
    grow_segments(theirs)
    assert theirs == {own: "max_split_size_mb:64"}


def test_evaluations_of_the_start_that_a_stop_left_out_are_made_by_the_resume(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"train__steps": 3, "checkpoint__every": 0, "eval__every": 0}
    whole = finish(kit, tmp_path / "whole", **settings)
    train = TrainingLoop.train

    def stopped_before(loop: TrainingLoop, trainer: Trainer) -> RunFinished | None:
        loop.after_first_step = None
        return train(loop, trainer)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "train", stopped_before)
        run, code = carried_out(kit, tmp_path / "cut", **settings, train__stop_after=1)
    assert code == 0 and Follower(run).read_all().eval_of("untrained") is None
    for _ in range(2):
        assert resumed_here(run.path).returncode == 0
    found, wanted = Follower(run).read_all(), Follower(whole).read_all()
    for subject in ("teacher", "untrained"):
        one, other = found.eval_of(subject), wanted.eval_of(subject)
        assert one is not None and other is not None
        assert (one.loss, one.step) == (other.loss, 0)
    assert sum(one.subject == "untrained" for one in found.evals) == 1
