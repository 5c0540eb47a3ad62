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
from tests.support.finished_runs import carry_out
from tests.support.kit import Kit
from tests.support.running import engine_here

STEPS = 4


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
    return Path(done["replay"])


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

    def train_again(spec: RunSpec, steps: int) -> RunFolder:
        return RunFolder(replayed)

    monkeypatch.setattr(replay, "train_again", train_again)


def edit_step(run: Path, step: int, change: Callable[[dict[str, Any]], object]) -> None:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    change(next(line for line in lines if line["kind"] == "step" and line["step"] == step))
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_healthy_run_is_what_its_spec_gives_to_the_bit(finished: Path, replayed: Path) -> None:
    assert not (replayed / "student").exists() and not (replayed / "checkpoints").exists()
    done = engine_here("verify", finished, "--steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert last == f"{finished}: pass: the replay gives 2 recorded steps to the bit"
    assert any("every bit the same" in line for line in lines)
    assert f"not compared: steps 3 to {STEPS}: not asked for" in lines
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
        "field": "loss",
        "recorded": was[0] * (1 + 1e-12),
        "replayed": was[0],
    }
    assert by_name(found)["steps"][1].startswith("step 3: loss: recorded ")
    assert by_name(found)["receipt: events.jsonl"][0] == "fail"


@pytest.mark.usefixtures("at_hand")
def test_what_the_log_lacks_is_unknown(copy: Path) -> None:
    (copy / "receipt.json").unlink()
    lines = (copy / "events.jsonl").read_text().splitlines()
    cut = next(i for i, line in enumerate(lines) if '"receipt_written"' in line)
    (copy / "events.jsonl").write_text("".join(f"{line}\n" for line in lines[:cut]))
    edit_step(copy, 2, lambda line: line.pop("rows_digest"))
    found = verified(copy, code=2)
    assert by_name(found)["steps"][0] == "pass"
    assert by_name(found)["steps: rows_digest"] == (
        "unknown",
        f"1 of {STEPS} steps of the log do not have it",
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
    assert by_name(found)["steps"][0] == "pass"
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
    assert by_name(found)["steps"][0] == "pass"


@pytest.mark.usefixtures("at_hand")
def test_a_step_that_the_settings_do_not_have_is_named(copy: Path) -> None:
    lines = [json.loads(line) for line in (copy / "events.jsonl").read_text().splitlines()]
    last = next(
        i for i, line in enumerate(lines) if line["kind"] == "step" and line["step"] == STEPS
    )
    lines.insert(last + 1, lines[last] | {"step": STEPS + 1})
    text = "".join(json.dumps(line | {"seq": seq}) + "\n" for seq, line in enumerate(lines))
    (copy / "events.jsonl").write_text(text)
    found = by_name(verified(copy, code=1))["steps"]
    assert found == ("fail", f"the log has step {STEPS + 1}, and the settings end at step {STEPS}")


@pytest.mark.usefixtures("at_hand")
def test_settings_that_were_altered_are_named(copy: Path) -> None:
    effective = json.loads((copy / "effective.json").read_text())
    effective["spec"]["train"]["lr"] *= 2
    (copy / "effective.json").write_text(json.dumps(effective))
    found = verified(copy, code=1)
    assert by_name(found)["settings"][0] == "fail"
    assert by_name(found)["steps"] == ("unknown", "no replay: its settings are not there")


def test_without_its_corpus_a_run_is_unknown(copy: Path, own_kit: Kit) -> None:
    away = own_kit.corpus.with_name("away")
    own_kit.corpus.rename(away)
    try:
        found = verified(copy, code=2)
    finally:
        away.rename(own_kit.corpus)
    level, reason = by_name(found)["steps"]
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
    assert found["reason"] == f"the replay gives {STEPS} recorded steps to the bit"
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
