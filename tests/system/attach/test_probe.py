"""The probe inside a user's process: the run is the same to the byte, and the log says what the script says."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import pytest

from engine.log.beats import read_beats
from engine.log.events import LogOpened, Phase, StepDone, Watched
from engine.log.folder import RunFolder
from engine.log.read import LogReader
from tests.support import attached_scripts as scripts
from tests.support.attached import PROBE, Ran, agree, begin_run, end_run, run_twice, run_watched


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Ran]:
    """A plain loop with and without the probe, where every warning is an error."""
    return run_twice(tmp_path_factory.mktemp("plain"), scripts.PLAIN, "-W", "error")


def test_a_plain_loop_is_the_same_to_the_byte_and_every_step_is_in_the_log(
    plain: tuple[Ran, Ran],
) -> None:
    watched, alone = plain
    agree(watched)
    assert len(watched.steps) == 12 and not alone.lines
    (facts,) = watched.of_kind("watched")
    assert facts["parameters"] == 8 * 16 + 16 + 16 + 1
    assert (facts["optimizer"], facts["device"]) == ("AdamW", "cpu")
    assert (facts["rank"], facts["world"]) == (0, 1)
    assert watched.lines[-1]["how"] == "returned"
    events = LogReader(watched.folder / "run" / "events.jsonl").poll()
    assert [type(event) for event in events[:3]] == [LogOpened, Watched, Phase]
    assert [event.step for event in events if isinstance(event, StepDone)] == [*range(1, 13)]


def test_micro_batches_of_a_step_are_summed_whichever_backward_was_called(tmp_path: Path) -> None:
    watched, _ = run_twice(tmp_path, scripts.ACCUMULATION)
    agree(watched)
    assert len(watched.steps) == 5


def test_closures_and_several_optimizers_have_the_steps_of_the_first(tmp_path: Path) -> None:
    """LBFGS, a GAN, an optimizer inside another one whose step once raises, one for each parameter that steps in
    the backward pass, and a gradient scaler that leaves out a step; one training after the other."""
    watched, _ = run_twice(tmp_path, scripts.OTHER_STEPS)
    agree(watched, trainings=5)


@pytest.mark.parametrize(("workers", "how"), [(2, "fork"), (1, "spawn")])
def test_workers_of_a_loader_write_nothing(tmp_path: Path, workers: int, how: str) -> None:
    watched, _ = run_twice(tmp_path, scripts.WORKERS % (workers, how))
    agree(watched)
    assert all(step["data_s"] > 0 for step in watched.steps)


def test_a_forked_child_leaves_the_log_to_its_parent_and_has_one_of_its_own(tmp_path: Path) -> None:
    watched, _ = run_twice(tmp_path, scripts.FORKS)
    children = watched.trainings[1:]
    assert [len([line for line in log if line["kind"] == "step"]) for log in children] == [2, 1]
    for path in watched.folder.glob("run-*"):
        shutil.rmtree(path)
    agree(watched)


def test_compiling_makes_the_same_graphs_breaks_and_recompiles(tmp_path: Path) -> None:
    watched, _ = run_twice(tmp_path, scripts.COMPILED)
    agree(watched)


@pytest.mark.parametrize("fails", [False, True])
def test_modules_of_the_user_are_imported_as_without_the_probe(tmp_path: Path, fails: bool) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    text = "import random\nMINE, STATE = 'my sitecustomize', random.getstate()\n"
    (mine / "sitecustomize.py").write_text(text + "raise ValueError('mine')\n" * fails)
    script = scripts.SURROUNDINGS
    for name in ("watched", "alone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "engine.py").write_text("MINE = 'my engine'\n")
    if fails:
        script = "print('sitecustomize' in sys.modules)\nsave(model())\n"
    watched, _ = run_twice(tmp_path, script, path=mine)
    assert ("Error in sitecustomize" in watched.stderr) == fails


def test_non_finite_numbers_are_named_beside_a_null(tmp_path: Path) -> None:
    watched = run_watched(tmp_path, scripts.NON_FINITE)
    found = [(step["loss"], step["grad_norm"], step.get("nf")) for step in watched.steps]
    assert found[0][0] == 3.0 and found[0][2] is None
    assert found[1:] == [
        (None, None, {"loss": "nan", "grad_norm": "nan"}),
        (None, None, {"loss": "+inf", "grad_norm": "+inf"}),
    ]


def test_a_log_that_is_locked_or_has_lines_or_cannot_be_opened_is_left_alone(
    tmp_path: Path, plain: tuple[Ran, Ran]
) -> None:
    places = {name: tmp_path / name / "run" / "events.jsonl" for name in ("held", "old", "shut")}
    for place in places.values():
        place.parent.mkdir(parents=True)
    places["old"].write_text("a line\n")
    # A folder of that name stands for a run folder that cannot be written: root may write everywhere.
    places["shut"].mkdir()
    places["shut"].parent.chmod(0o555)
    with places["held"].open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for name in places:
            folder = tmp_path / name
            ran = end_run(folder, begin_run(folder, scripts.PLAIN, "-W", "error", watched=True))
            assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", plain[1].stdout), name
            assert ran.weights == plain[1].weights
    assert places["held"].read_bytes() == b""
    assert places["old"].read_text() == "a line\n"
    assert not os.listdir(places["shut"])


def test_a_rank_that_is_not_the_first_writes_how_far_it_has_come_and_nothing_else(
    tmp_path: Path, plain: tuple[Ran, Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "os.environ.update(RANK='1', WORLD_SIZE='2')\n" + scripts.PLAIN
    ran = run_watched(tmp_path, script)
    assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", plain[1].stdout)
    assert not ran.lines
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["owner", "ranks", "stacks"]
    (beat,) = read_beats(RunFolder(tmp_path / "run"))
    # Each of the twelve steps begins a backward pass and an update.
    assert (beat.rank, beat.step, beat.entered) == (1, 12, 24)


def test_a_fault_in_any_hook_removes_the_probe_and_nothing_else(tmp_path: Path) -> None:
    ran = end_run(tmp_path, begin_run(tmp_path, scripts.FAULTS, watched=False, path=PROBE))
    assert ran.returncode == 0, ran.stderr
    *faults, signalled = ran.said
    assert len(faults) == 31
    for fault in faults:
        assert fault["called"] and fault["same"] and fault["restored"], fault
        if fault["steps"]:
            (note,) = fault["notes"]
            assert note.startswith("the probe removed itself") and "ValueError: planted" in note
    assert sum(bool(fault["steps"]) for fault in faults) >= 15
    # What a signal handler of the script's raises is the script's, wherever it was raised.
    assert signalled["called"] and signalled["weights"] == "stopped"
