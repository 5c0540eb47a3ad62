"""The probe inside a user's process: the run is the same to the byte, and the log says what the script says."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.log.beats import read_beats
from engine.log.events import LogOpened, Phase, StepDone, Watched
from engine.log.fold import fold
from engine.log.folder import RunFolder
from engine.log.read import Liveness, LogReader
from engine.log.text import event_text, status_text
from engine.log.view import RunView
from tests.support import attached_scripts as scripts
from tests.support.attached import (
    PROBE,
    Ran,
    agree,
    run_forked,
    run_twice,
    run_watched,
    watched_once,
)
from workbench.feed import Snapshot
from workbench.panes import speed_words


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A plain loop with the probe, which is as without it, where every warning is an error."""
    return watched_once(tmp_path_factory, "plain", scripts.PLAIN, "-W", "error")


def test_a_plain_loop_is_the_same_to_the_byte_and_every_step_is_in_the_log(
    plain: Ran,
) -> None:
    agree(plain)
    assert len(plain.steps) == 12
    (facts,) = plain.of_kind("watched")
    assert facts["parameters"] == 8 * 16 + 16 + 16 + 1
    assert (facts["optimizer"], facts["device"]) == ("AdamW", "cpu")
    assert (facts["rank"], facts["world"]) == (0, 1)
    assert plain.lines[-1]["how"] == "returned"
    events = LogReader(plain.folder / "run" / "events.jsonl").poll()
    assert [type(event) for event in events[:3]] == [LogOpened, Watched, Phase]
    assert [event.step for event in events if isinstance(event, StepDone)] == [*range(1, 13)]


def test_without_a_framework_a_step_says_the_batch_of_its_pass_and_no_total(
    plain: Ran,
) -> None:
    passes = [(step["batch"], step["batches"]) for step in plain.steps]
    # The data that is only tested on has a pass of its own between these two.
    assert passes == [(batch, 6) for batch in range(1, 7)] * 2
    assert not any("total_steps" in step for step in plain.steps)
    view = view_of(plain)
    assert view.total_steps is None and view.batch == (6, 6)
    shown = cast(Snapshot, SimpleNamespace(view=view))
    assert [line.split()[0] for line in speed_words(shown, 80, True)[1:6]] == [
        "data",
        "forward",
        "backward",
        "optimizer",
        "rest",
    ]
    status = status_text(view, Liveness(trainer=True, supervisor=True))
    assert status.startswith("RUNNING | step 12 | batch 6/6 of this epoch | loss ")


def view_of(ran: Ran) -> RunView:
    events = LogReader(ran.folder / "run" / "events.jsonl").poll()
    return fold(RunView(), "events", events)


TRAININGS = 8
LOOPS = scripts.ACCUMULATION + scripts.STREAM + scripts.NON_FINITE + scripts.OTHER_STEPS


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Loops of other forms, one training after the other: 1, 1, 1 and 5."""
    return watched_once(tmp_path_factory, "loops", LOOPS, twice=False)


def steps_of(ran: Ran, training: int) -> list[dict[str, Any]]:
    return [line for line in ran.trainings[training] if line["kind"] == "step"]


def test_micro_batches_of_a_step_are_summed_whichever_backward_was_called(loops: Ran) -> None:
    agree(loops, TRAININGS, compared=slice(0, 1))
    assert len(steps_of(loops, 0)) == 5


def test_data_of_unknown_length_says_nothing_of_its_pass(loops: Ran) -> None:
    agree(loops, TRAININGS, compared=slice(1, 2))
    steps = steps_of(loops, 1)
    assert len(steps) == 3
    assert not any({"batch", "batches", "total_steps"} & set(step) for step in steps)


def test_closures_and_several_optimizers_have_the_steps_of_the_first(loops: Ran) -> None:
    """LBFGS, a GAN, an optimizer inside another one whose step once raises, one for each parameter that steps in
    the backward pass, and a gradient scaler that leaves out a step; one training after the other."""
    agree(loops, TRAININGS, compared=slice(3, 8))


def test_non_finite_numbers_are_named_beside_a_null(loops: Ran) -> None:
    agree(loops, TRAININGS, compared=slice(2, 3))
    found = [(step["loss"], step["grad_norm"], step.get("nf")) for step in steps_of(loops, 2)]
    assert found[0][0] == 3.0 and found[0][2] is None
    assert found[1:] == [
        (None, None, {"loss": "nan", "grad_norm": "nan"}),
        (None, None, {"loss": "+inf", "grad_norm": "+inf"}),
    ]


def test_workers_of_a_loader_write_nothing(tmp_path: Path) -> None:
    """Those that are forked, and those that are spawned."""
    watched = run_watched(tmp_path, scripts.WORKERS)
    assert watched.returncode == 0, watched.stderr
    agree(watched, trainings=2)
    assert all(any(step["data_s"] > 0 for step in steps_of(watched, number)) for number in (0, 1))


@pytest.mark.soak
@pytest.mark.parametrize(
    "script", [LOOPS, scripts.WORKERS, scripts.FORKS], ids=["loops", "workers", "forks"]
)
def test_none_of_them_is_changed_by_being_watched(tmp_path: Path, script: str) -> None:
    run_twice(tmp_path, script)


def test_a_forked_child_leaves_the_log_to_its_parent_and_has_one_of_its_own(tmp_path: Path) -> None:
    watched = run_watched(tmp_path, scripts.FORKS)
    assert watched.returncode == 0, watched.stderr
    # The first child ends well, and the second keeps the files that it opened.
    assert [line for line in watched.stdout.splitlines() if line[0] != "{"] == ["0", "True"]
    children = watched.trainings[1:]
    assert [len([line for line in log if line["kind"] == "step"]) for log in children] == [2, 1]
    for path in watched.folder.glob("run-*"):
        shutil.rmtree(path)
    agree(watched)


@pytest.mark.soak
def test_compiling_makes_the_same_graphs_breaks_and_recompiles(tmp_path: Path) -> None:
    """A loop that recompiles late, and behind it a training of compiled functions of many forms."""
    watched, _ = run_twice(tmp_path, scripts.RECOMPILED + scripts.COMPILED)
    agree(watched, trainings=2)


def test_a_compilation_after_the_first_steps_is_told_with_the_guard_that_failed(
    tmp_path: Path,
) -> None:
    compiled = run_watched(tmp_path, scripts.RECOMPILED)
    assert compiled.returncode == 0, compiled.stderr
    agree(compiled)
    view = view_of(compiled)
    forward = [one for one in view.compiles if "backward" not in one.kernel]
    assert [one.after_warm_up for one in forward] == [False, False, True]
    first, again, late = forward
    assert all("forward (" in one.kernel and "train.py:" in one.kernel for one in forward)
    assert all(one.compiler == "torch.compile" and (one.compile_s or 0) > 0 for one in forward)
    assert first.differs == [] and "the guard" in again.differs[0]
    assert "expected 8, actual 4" in late.differs[0]
    assert event_text(late).startswith("COMPILE AFTER WARM-UP: torch.compile: forward (")
    # It is told of when the step that waited for it ends.
    kinds = [(line["kind"], line.get("step")) for line in compiled.lines]
    assert kinds.index(("step", 7)) < max(
        at for at, (kind, _) in enumerate(kinds) if kind == "compile"
    )


@pytest.mark.parametrize("fails", [False, pytest.param(True, marks=pytest.mark.soak)])
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


def test_a_log_that_is_locked_is_left_alone(tmp_path: Path, plain: Ran) -> None:
    place = tmp_path / "run" / "events.jsonl"
    place.parent.mkdir(parents=True)
    with place.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        strict = "import warnings\nwarnings.simplefilter('error')\n"
        ran = run_watched(tmp_path, strict + scripts.PLAIN)
    assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", plain.stdout)
    assert ran.weights == plain.weights
    assert place.read_bytes() == b""


def test_a_rank_that_is_not_the_first_writes_how_far_it_has_come_and_nothing_else(
    tmp_path: Path, plain: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "os.environ.update(RANK='1', WORLD_SIZE='2')\n" + scripts.PLAIN
    ran = run_watched(tmp_path, script)
    assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", plain.stdout)
    assert not ran.lines
    made = {p.name for p in (tmp_path / "run").iterdir()}
    assert made == {"effective.json", "owner", "ranks", "stacks"}
    (beat,) = read_beats(RunFolder(tmp_path / "run"))
    # Each of the twelve steps begins a backward pass and an update.
    assert (beat.rank, beat.step, beat.entered) == (1, 12, 24)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A process that installs the probe once for each fault."""
    folder = tmp_path_factory.mktemp("faulty")
    ran = run_forked(folder, scripts.FAULTS, watched=False, path=PROBE)
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran


def test_a_log_that_has_lines_or_cannot_be_opened_is_left_alone(faulty: Ran) -> None:
    old, shut = faulty.said[:2]
    assert old == {"name": "old", "same": True, "restored": True, "left": "a line\n"}
    assert shut == {"name": "shut", "same": True, "restored": True, "left": []}


def test_a_fault_in_any_hook_removes_the_probe_and_nothing_else(faulty: Ran) -> None:
    *faults, signalled = faulty.said[2:]
    assert len(faults) == 38
    for fault in faults:
        assert fault["called"] and fault["same"] and fault["restored"], fault
        if fault["steps"]:
            (note,) = fault["notes"]
            assert note.startswith("the probe removed itself") and "ValueError: planted" in note
    assert sum(bool(fault["steps"]) for fault in faults) >= 15
    # What a signal handler of the script's raises is the script's, wherever it was raised.
    assert signalled["called"] and signalled["weights"] == "stopped"
