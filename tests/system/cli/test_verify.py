"""`engine verify RUN`: a record is what its spec, data and code give, or what differs first is named."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.log.folder import RunFolder
from engine.spec import RunSpec
from engine.verify import replay
from engine.verify.sessions import Stretch
from tests.support.finished_runs import carry_out
from tests.support.kit import Kit
from tests.support.running import engine_here

STEPS = 4
ALL = f"steps 1 to {STEPS}"


@pytest.fixture(scope="module")
def own_kit(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Kit:
    """A kit whose corpus is its own."""
    corpus = tmp_path_factory.mktemp("verify") / "corpus"
    shutil.copytree(kit.corpus, corpus)
    return Kit(teacher=kit.teacher, student=kit.student, corpus=corpus)


@pytest.fixture(scope="module")
def finished(own_kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    spec = own_kit.spec(folder, train__steps=STEPS, train__warmup_steps=1, checkpoint__every=2)
    run, code = carry_out(spec, folder / "run")
    assert code == 0
    return run.path


@pytest.fixture(scope="module")
def replayed(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder that a replay of the run in another process leaves."""
    scratch = tmp_path_factory.mktemp("scratch")
    done = verified(finished, "--scratch", scratch, "--keep")
    assert done["level"] == "pass", done
    return Path(done["replay"]) / "run-1"


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    made = Path(shutil.copytree(finished, tmp_path / "copy"))
    (made / "verified.json").unlink(missing_ok=True)  # of another test
    return made


def verified(run: Path, *words: object, code: int = 0) -> dict[str, Any]:
    done = engine_here("verify", run, *words, "--json")
    assert done.returncode == code, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def by_name(found: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {one["name"]: (one["level"], one["reason"]) for one in found["compared"]}


@pytest.fixture
def at_hand(replayed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replay is the one that was made: another would only add its start-up time."""

    def train_again(spec: RunSpec, stretch: Stretch, checkpoint: Path | None) -> RunFolder:
        return RunFolder(replayed)

    monkeypatch.setattr(replay, "train_again", train_again)


def edit_step(run: Path, step: int, change: Callable[[dict[str, Any]], object]) -> None:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    change(next(line for line in lines if line["kind"] == "step" and line["step"] == step))
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.usefixtures("trainer_here")
def test_a_healthy_run_is_what_its_spec_gives_to_the_bit(finished: Path, replayed: Path) -> None:
    assert not (replayed / "student").exists() and not (replayed / "checkpoints").exists()
    done = engine_here("verify", finished, "--steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert last == f"{finished}: pass: the replay matches 2 recorded steps to the bit"
    assert any("every bit the same" in line for line in lines)
    assert f"not compared: steps 3 to {STEPS}: not requested" in lines
    # Nothing is left beside the run.
    assert sorted(path.name for path in finished.parent.iterdir()) == ["run", "spec.toml"]


@pytest.mark.usefixtures("at_hand")
def test_an_altered_loss_is_named_by_its_step_and_both_values(copy: Path) -> None:
    was: list[float] = []

    def alter(line: dict[str, Any]) -> None:
        was.append(line["loss"])
        line["loss"] *= 1 + 1e-12

    edit_step(copy, 3, alter)
    found = verified(copy, code=1)
    assert found["level"] == "fail"
    assert found["first_difference"] == {
        "step": 3,
        "stage": "step_loss",
        "field": "loss",
        "recorded": was[0] * (1 + 1e-12),
        "replayed": was[0],
    }
    assert by_name(found)[ALL][1].startswith("step 3: step_loss: loss: recorded ")
    assert by_name(found)["receipt: events.jsonl"][0] == "fail"


@pytest.mark.usefixtures("at_hand")
def test_what_the_log_lacks_is_unknown(copy: Path) -> None:
    (copy / "receipt.json").unlink()
    lines = (copy / "events.jsonl").read_text().splitlines()
    cut = next(i for i, line in enumerate(lines) if '"receipt_written"' in line)
    (copy / "events.jsonl").write_text("".join(f"{line}\n" for line in lines[:cut]))
    edit_step(copy, 2, lambda line: line.pop("rows_digest"))
    found = verified(copy, code=2)
    assert by_name(found)[ALL][0] == "pass"
    assert by_name(found)["steps: rows_digest"] == (
        "unknown",
        f"1 of {STEPS} recorded steps lack this field",
    )


@pytest.mark.usefixtures("at_hand")
def test_on_another_machine_losses_may_be_rounded_and_rows_may_not(copy: Path) -> None:
    lines = [json.loads(line) for line in (copy / "events.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "run_started":
            line["torch"] = "1.0"
        elif line["kind"] == "step":
            line["loss"] *= 1.0005
    (copy / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = verified(copy, code=1)  # the receipt says that the log was changed
    assert by_name(found)[ALL][0] == "pass"
    assert "because of torch 1.0, replayed with " in found["rounding"]
    edit_step(copy, 2, lambda line: line.update(rows_digest="0" * 16))
    assert verified(copy, code=1)["first_difference"]["field"] == "rows_digest"


@pytest.mark.usefixtures("at_hand")
def test_a_student_that_was_altered_after_the_receipt_is_named(copy: Path) -> None:
    weights = next((copy / "student").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    found = verified(copy, code=1)
    failed = {name for name, (level, _) in by_name(found).items() if level == "fail"}
    assert f"receipt: student/{weights.name}" in failed
    assert by_name(found)[ALL][0] == "pass"


@pytest.mark.usefixtures("at_hand")
def test_a_step_that_the_settings_do_not_have_is_named(copy: Path) -> None:
    lines = [json.loads(line) for line in (copy / "events.jsonl").read_text().splitlines()]
    last = next(
        i for i, line in enumerate(lines) if line["kind"] == "step" and line["step"] == STEPS
    )
    lines.insert(last + 1, lines[last] | {"step": STEPS + 1})
    text = "".join(json.dumps(line | {"seq": seq}) + "\n" for seq, line in enumerate(lines))
    (copy / "events.jsonl").write_text(text)
    found = by_name(verified(copy, code=1))[f"steps 1 to {STEPS + 1}"]
    assert found == (
        "fail",
        f"the replay has no step {STEPS + 1}: the settings end at step {STEPS}",
    )


@pytest.mark.usefixtures("at_hand")
def test_settings_that_were_altered_are_named(copy: Path) -> None:
    effective = json.loads((copy / "effective.json").read_text())
    effective["spec"]["train"]["lr"] *= 2
    (copy / "effective.json").write_text(json.dumps(effective))
    found = verified(copy, code=1)
    assert by_name(found)["settings"][0] == "fail"
    assert by_name(found)["steps"] == ("unknown", "no replay: the settings are missing")


def test_without_its_corpus_a_run_is_unknown(copy: Path, own_kit: Kit) -> None:
    away = own_kit.corpus.with_name("away")
    own_kit.corpus.rename(away)
    try:
        found = verified(copy, code=2)
    finally:
        away.rename(own_kit.corpus)
    level, reason = by_name(found)[ALL]
    assert level == "unknown" and reason.startswith("no replay: ")
    assert str(own_kit.corpus) in reason
    assert list(copy.parent.iterdir()) == [copy]


def test_what_is_no_finished_run_is_refused(tmp_path: Path) -> None:
    done = engine_here("verify", tmp_path / "none")
    assert done.returncode == 65
    assert "expected a run, found nothing there" in done.stderr


def kept(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "verified.json").read_text())
    return found


@pytest.mark.usefixtures("at_hand")
def test_the_outcome_is_kept_in_the_run_folder_and_bound_to_its_log(copy: Path) -> None:
    log = (copy / "events.jsonl").read_bytes()
    verified(copy)
    found = kept(copy)
    assert (found["level"], found["steps"], found["rounding"]) == ("pass", STEPS, "")
    assert found["reason"] == f"the replay matches {STEPS} recorded steps to the bit"
    assert found["log"] == {"bytes": len(log), "sha256": hashlib.sha256(log).hexdigest()}
    # The receipt does not answer for the file: verified again, the run still passes.
    assert verified(copy, "--steps", 2)["level"] == "pass"


@pytest.mark.usefixtures("at_hand")
def test_a_shorter_verification_replaces_a_longer_one_only_where_it_fails(copy: Path) -> None:
    verified(copy)
    longer = kept(copy)
    done = engine_here("verify", copy, "--steps", "2")
    assert done.returncode == 0 and kept(copy) == longer
    assert f"verified.json keeps the earlier outcome, of {STEPS} steps: pass" in done.stderr
    weights = next((copy / "student").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    verified(copy, "--steps", 2, code=1)
    assert (kept(copy)["level"], kept(copy)["steps"]) == ("fail", 2)


@pytest.mark.usefixtures("at_hand")
def test_a_folder_that_cannot_be_written_to_is_verified_all_the_same(copy: Path) -> None:
    (copy / "verified.json").mkdir()
    done = engine_here("verify", copy)
    assert done.returncode == 0, done.stderr
    assert "verified.json is not written: " in done.stderr
    assert not list(copy.glob("*.partial-*"))


@pytest.fixture(scope="module")
def stopped(own_kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after half of its steps."""
    folder = tmp_path_factory.mktemp("stopped")
    sets = {"train__steps": STEPS, "train__warmup_steps": 1, "train__stop_after": STEPS // 2}
    run, code = carry_out(own_kit.spec(folder, **sets), folder / "run")
    assert code == 0
    return run.path


def resumed(stopped: Path, folder: Path, *words: str) -> Path:
    run = Path(shutil.copytree(stopped, folder / "run"))
    done = engine_here("distill", "--resume", run, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return run


@pytest.mark.usefixtures("trainer_here")
def test_a_resumed_run_is_replayed_in_one(stopped: Path, tmp_path: Path) -> None:
    run = resumed(stopped, tmp_path)
    found = verified(run)
    assert found["level"] == "pass" and by_name(found)[ALL][0] == "pass"
    assert found["steps"] == STEPS and not found["rounding"]


@pytest.mark.usefixtures("trainer_here")
def test_behind_changed_settings_a_replay_goes_on_from_the_checkpoint(
    stopped: Path, tmp_path: Path
) -> None:
    run = resumed(stopped, tmp_path, "--set", "train.lr=1e-4", "--allow-change", "train.lr")
    half = STEPS // 2
    found = verified(run)
    assert found["level"] == "pass" and found["steps"] == STEPS and not found["rounding"]
    assert {f"steps 1 to {half}", f"steps {half + 1} to {STEPS}"} <= by_name(found).keys()
    shutil.rmtree(run / "checkpoints")
    level, reason = by_name(verified(run, code=2))[f"steps {half + 1} to {STEPS}"]
    assert (level, reason) == (
        "unknown",
        f"settings were changed at step {half}, whose checkpoint no longer exists",
    )


@pytest.mark.usefixtures("trainer_here")
def test_from_checkpoint_to_checkpoint_what_was_saved_is_compared_too(copy: Path) -> None:
    found = by_name(verified(copy, "--all"))
    assert {level for level, _ in found.values()} == {"pass"}
    assert {
        "corpus",
        "checkpoint of step 2",
        f"checkpoint of step {STEPS}",
        "saved student",
    } <= set(found)
    weights = next((copy / "student").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    found = by_name(verified(copy, "--all", code=1))
    assert found["saved student"][0] == "fail"
    assert found["checkpoint of step 2"][0] == "pass" == found["steps 1 to 2"][0]


@pytest.mark.usefixtures("at_hand")
def test_a_corpus_that_has_changed_since_is_named(copy: Path, own_kit: Kit) -> None:
    assert by_name(verified(copy, "--data"))["corpus"][0] == "pass"
    added = own_kit.corpus / "added.py"
    added.write_text("other = 1\n" * 50)
    try:
        found = by_name(verified(copy, "--data", code=1))
    finally:
        added.unlink()
    assert found["corpus"][0] == "fail" and "recorded " in found["corpus"][1]


@pytest.mark.usefixtures("trainer_here")
def test_one_step_is_compared_stage_by_stage_with_its_record_and_a_textbook(copy: Path) -> None:
    found = verified(copy, "--step", "4")
    stages = [name for name in by_name(found) if name.startswith("step_")]
    assert len(stages) == 5 and found["level"] == "pass"
    # From the checkpoint of step 2: the step before is compared on the way.
    assert by_name(found)["steps 3 to 3"][0] == "pass" and found["steps"] == 2

    def other(line: dict[str, Any]) -> None:
        line["kd"] *= 1.5
        line["grad_norm"] *= 2

    edit_step(copy, 4, other)
    found = verified(copy, "--step", "4", code=1)
    failed = [name for name, (level, _) in by_name(found).items() if level == "fail"]
    assert {"step_loss", "step_gradients"} <= set(failed)
    assert found["first_difference"]["stage"] == "step_loss"
    done = engine_here("verify", copy, "--step", "5")
    assert done.returncode == 64 and "1 to 4" in done.stderr
