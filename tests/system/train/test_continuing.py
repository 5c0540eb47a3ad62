"""Going on with a run: nothing is begun again unasked, no check keeps a saved run from its owner, and no more
room is asked for than will be written.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint_folders import published
from engine.checks import runner
from engine.errors import DiskFull
from engine.log.fold import Follower
from engine.log.folder import RunFolder
from engine.log.text import decision_lines
from engine.plan.inputs import check_inputs
from engine.spec import load_spec, settings_sha256
from engine.train import run as trainer_module
from engine.verdict import failed
from engine.watch.rules.rule import read_settings
from tests.support.checked_runs import World, make_world
from tests.support.finished_runs import carried_out
from tests.support.kit import Kit
from tests.support.paths import EVIDENCE
from tests.support.running import engine_here


@pytest.fixture(scope="module")
def world(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(kit, tmp_path_factory.mktemp("world"))


# A check that is not certain says so


# A run that goes on


@pytest.fixture(scope="module")
def saved(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of 8 steps that was stopped after 6, with checkpoints of steps 2, 4 and 6."""
    run, code = carried_out(
        kit,
        tmp_path_factory.mktemp("saved"),
        train__steps=8,
        train__stop_after=6,
        checkpoint__every=2,
        checkpoint__keep_last=3,
    )
    assert code == 0
    return run


def copied(saved: RunFolder, folder: Path) -> RunFolder:
    shutil.copytree(saved.path, folder / "run")
    return RunFolder(folder / "run")


def steps_saved(run: RunFolder) -> list[int]:
    return [int(path.name[5:]) for path in published(run.checkpoints)][::-1]


def go_on(run: RunFolder, *, allow_restart: bool = False) -> int:
    return trainer_module.run(
        run.path, resume=True, allow_fallback=False, allow_restart=allow_restart, keep_alive_fd=None
    )


def test_without_any_checkpoint_nothing_is_begun_again_unasked(
    saved: RunFolder, tmp_path: Path
) -> None:
    run = copied(saved, tmp_path)
    shutil.rmtree(run.checkpoints)
    log = run.events.read_bytes()
    for detach in ([], ["--detach"]):
        refused = engine_here("distill", "--resume", run.path, *detach)
        assert refused.returncode == 65
        assert "the checkpoint of step 6" in refused.stderr and "--allow-restart" in refused.stderr
    assert run.events.read_bytes() == log
    # The trainer refuses by itself, too: it may be started by torchrun.
    assert go_on(run) == 65
    ended = Follower(run).read_all().finished
    assert ended is not None and ended.step == 6 and "--allow-restart" in ended.reason
    assert go_on(run, allow_restart=True) == 0
    view = Follower(run).read_all()
    assert any("step 6 is gone" in note.text for note in view.notes)
    assert view.started is not None and view.started.resumed_from == 0


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_what_a_resumed_run_prints_goes_into_a_file_of_its_own(
    saved: RunFolder, tmp_path: Path, kind: str
) -> None:
    run, elsewhere = copied(saved, tmp_path / "run"), tmp_path / "elsewhere"
    elsewhere.write_text("mine\n")
    run.stderr.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(run.stderr)
    else:
        run.stderr.symlink_to(elsewhere)
    done = engine_here("distill", "--resume", run.path)
    assert done.returncode == 65 and str(run.stderr) in done.stderr, done.stderr
    assert elsewhere.read_text() == "mine\n"


def test_an_untouched_run_is_told_nothing_of_missing_checkpoints(
    saved: RunFolder, tmp_path: Path
) -> None:
    run = copied(saved, tmp_path)
    assert go_on(run) == 0
    assert not [note for note in Follower(run).read_all().notes if "was saved" in note.text]


def test_a_damaged_newest_checkpoint_names_the_option_that_goes_on(
    saved: RunFolder, tmp_path: Path
) -> None:
    run = copied(saved, tmp_path)
    (run.checkpoints / "step-00000006" / "state.json").write_text("{}")
    assert go_on(run) == 65
    ended = Follower(run).read_all().finished
    assert ended is not None and "--allow-fallback" in ended.reason and ended.step == 6


def write_state(checkpoint: Path, state: dict[str, Any]) -> None:
    """Write the state of a checkpoint so that it verifies."""
    text = json.dumps(state).encode()
    (checkpoint / "state.json").write_bytes(text)
    manifest = json.loads((checkpoint / "MANIFEST.json").read_text())
    manifest["files"]["state.json"] = {
        "sha256": hashlib.sha256(text).hexdigest(),
        "size": len(text),
    }
    (checkpoint / "MANIFEST.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("saved_before_the_change", [False, True])
def test_a_run_with_a_setting_that_is_gone_goes_on(
    saved: RunFolder, tmp_path: Path, saved_before_the_change: bool
) -> None:
    run = copied(saved, tmp_path)
    effective = run.read_effective()
    hashes = {}
    for value in ("auto", "dequantize"):
        effective["spec"]["teacher"]["kernel"] = value
        hashes[value] = settings_sha256(effective["spec"])
    change = {"key": "teacher.kernel", "was": "auto", "is": "dequantize"}
    effective |= {
        "spec_sha256": hashes["dequantize"],
        "changes": [change | {"spec_sha256": hashes["auto"]}],
    }
    run.effective.write_text(json.dumps(effective))
    sha256 = hashes["auto" if saved_before_the_change else "dequantize"]
    for checkpoint in published(run.checkpoints):
        state = json.loads((checkpoint / "state.json").read_text())
        write_state(checkpoint, state | {"spec_sha256": sha256})
    assert go_on(run) == 0
    assert Follower(run).read_all().last_step == 8


def test_decisions_about_settings_that_are_gone_are_shown() -> None:
    run = RunFolder(EVIDENCE / "distill" / "within")
    assert read_settings(run) is not None
    lines = [line for one in Follower(run).read_all().decisions for line in decision_lines(one)]
    assert any(line.startswith("teacher.kernel: dequantize") for line in lines), lines


@pytest.mark.usefixtures("trainer_here")
def test_a_newest_checkpoint_that_is_gone_is_told_and_a_resume_that_a_check_stops_says_what_goes_on(
    saved: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied(saved, tmp_path)
    shutil.rmtree(run.checkpoints / "step-00000006")
    monkeypatch.setitem(runner.FUNCTIONS, "weights_alive", lambda context: failed("planted"))
    (run.checkpoints / "step-00000006").with_suffix(".mine").mkdir()
    kept = steps_saved(run)
    stopped = engine_here("distill", "--resume", run.path)
    assert "a checkpoint of step 6 was saved" in stopped.stderr
    view = Follower(run).read_all()
    notes = [note.text for note in view.notes if "step 6 was saved" in note.text]
    assert len(notes) == 1 and "the run resumes from step 4" in notes[0]

    assert stopped.returncode == 1 and "check weights_alive" in stopped.stderr
    assert "The risk: " in stopped.stderr
    ended = view.finished
    assert ended is not None and ended.step == 4
    advice = [line for line in stopped.stderr.splitlines() if line.startswith("continue")]
    assert len(advice) == 1 and advice[0] in stopped.stderr.splitlines()
    words = shlex.split(advice[0].split(": ", 1)[1])
    assert words[0] == "engine"
    assert " ".join(words) in ended.reason
    assert steps_saved(run) == kept
    again = engine_here(*words[1:])
    assert again.returncode == 0, again.stderr
    view = Follower(run).read_all()
    assert view.checks["weights_alive"].level == "fail"
    assert view.steps.values("step") == [float(step) for step in range(1, 9)]
    assert view.finished is not None and view.finished.state == "completed"


# Room on the disk


def room_asked(
    kit: Kit,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Path | None = None,
    **changes: object,
) -> bool:
    """Whether a run is refused on a disk with a kilobyte left."""
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    try:
        check_inputs(load_spec(kit.spec(folder, **changes))[0], run or folder / "run")
    except DiskFull:
        return True
    return False


def test_room_is_asked_for_what_will_be_written(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: RunFolder
) -> None:
    none = {"checkpoint__every": 0, "checkpoint__at_end": False}
    assert not room_asked(kit, tmp_path, monkeypatch, **none)
    assert room_asked(kit, tmp_path, monkeypatch, **(none | {"checkpoint__at_end": True}))
    assert room_asked(kit, tmp_path, monkeypatch, **(none | {"checkpoint__every": 20}))
    # The run ends before the first that is due.
    assert not room_asked(kit, tmp_path, monkeypatch, **(none | {"checkpoint__every": 21}))
    late = none | {"checkpoint__every": 5, "train__stop_after": 4}
    assert not room_asked(kit, tmp_path, monkeypatch, **late)
    # Its next one is beyond the pause, counted from where it goes on.
    resumed = none | {"checkpoint__every": 5, "train__steps": 20, "train__stop_after": 3}
    assert not room_asked(kit, tmp_path, monkeypatch, saved.path, **resumed)
    later = resumed | {"train__stop_after": 4}
    assert room_asked(kit, tmp_path, monkeypatch, saved.path, **later)


@pytest.mark.parametrize(
    ("changes", "times"),
    [
        ({"checkpoint__every": 0}, 1.5),
        ({"checkpoint__every": 10}, 2.5),
        ({"checkpoint__every": 1, "checkpoint__keep_last": 1}, 3.5),
        ({"checkpoint__every": 1, "checkpoint__keep_last": 1000}, 20.5),
    ],
    ids=str,
)
def test_as_much_room_is_asked_as_the_checkpoints_take_that_are_there_at_once(
    kit: Kit,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    saved: RunFolder,
    changes: dict[str, object],
    times: float,
) -> None:
    newest = max(saved.checkpoints.iterdir())
    size = sum(file.stat().st_size for file in newest.iterdir())
    spec = load_spec(kit.spec(tmp_path, **changes))[0]
    usage = shutil.disk_usage(tmp_path)
    for share, enough in ((1.05, True), (0.9, False)):
        free = round(size * times * share)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        if enough:
            check_inputs(spec, tmp_path / "run")
        else:
            with pytest.raises(DiskFull):
                check_inputs(spec, tmp_path / "run")
