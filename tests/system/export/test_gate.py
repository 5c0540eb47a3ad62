"""The gates of a distillation: each holds where it should, fails where it must, and is unknown where nothing
was measured.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from engine.cli.main import main
from engine.data.batches import Batch
from engine.evaluate.statistics import wilson
from engine.export.gate.gate import Subject, does_not_apply, verdict_of
from engine.export.gate.results import eval_threshold, heldout_target
from engine.export.gate.run import run_gates
from engine.export.gate.smoke import least_cross_entropy, smoke
from engine.export.outcome import Outcome, answered
from engine.log.folder import RunFolder
from engine.receipts.context import spec_hash, view_of
from engine.spec import load_spec, spec_from_dict
from engine.verdict import Level
from tests.support.finished_runs import finish, results_file
from tests.support.kit import Kit


def of_spec(spec: Path, *sets: str) -> Subject:
    return Subject(spec=load_spec(spec, list(sets))[0], run=None, view=None)


def of_run(run: RunFolder, *evaluations: Path, **gate: float) -> Subject:
    tree = json.loads(run.effective.read_text())["spec"]
    tree["gate"] = gate
    return Subject(
        spec=spec_from_dict(tree), run=run, view=view_of(run), evaluations=tuple(evaluations)
    )


@pytest.fixture(scope="module")
def whole(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return finish(kit, tmp_path_factory.mktemp("gate"))


@pytest.fixture
def spec(kit: Kit, tmp_path: Path) -> Path:
    return kit.spec(tmp_path)


# Smoke


def test_a_student_that_learns_passes_the_smoke_gate(spec: Path) -> None:
    gate = smoke(of_spec(spec, "gate.smoke_steps=12"))
    assert gate.level == "pass"
    assert gate.numbers["final_loss"] < gate.numbers["initial_loss"]
    assert gate.numbers["least_cross_entropy"] < 0.5 * gate.numbers["initial_cross_entropy"]


def test_every_step_of_the_smoke_gate_has_the_same_rows(
    spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.train.step import Fetched
    from engine.train.trainer import Trainer

    seen = []
    whole = Trainer._on_device

    def noted(self: Trainer, fetched: Fetched):  # type: ignore[no-untyped-def]
        seen.append(fetched.batch.row_ids.tolist())
        return whole(self, fetched)

    monkeypatch.setattr(Trainer, "_on_device", noted)
    subject = of_spec(spec, "gate.smoke_steps=3")
    smoke(subject)
    first = subject.rows.batches.take(0, 4).row_ids.tolist()
    assert len(seen) >= 3 and all(rows == first for rows in seen)


@pytest.mark.parametrize("lr", ["1e-30", "1e6"])
def test_a_step_that_teaches_nothing_fails_the_smoke_gate(lr: str, spec: Path) -> None:
    gate = smoke(of_spec(spec, "gate.smoke_steps=4", f"train.lr={lr}", "train.warmup_steps=0"))
    assert gate.level == "fail", gate


def batch_of(tokens: list[list[int]], labels: list[list[int]]) -> Batch:
    return Batch(
        tokens_BT=np.array(tokens),
        documents_BT=np.zeros_like(tokens),
        labels_BT=np.array(labels),
        row_ids=np.arange(len(tokens)),
    )


def test_labels_that_the_context_does_not_decide_have_their_entropy() -> None:
    """The unlearnable batch: equal inputs, another label in each row."""
    equal = batch_of([[7, 7]] * 4, [[-100, label] for label in range(4)])
    assert least_cross_entropy(equal) == pytest.approx(math.log(4))
    shifted = batch_of([[7, 7], [8, 7]], [[-100, 1], [-100, 2]])
    assert least_cross_entropy(shifted) == 0.0
    assert least_cross_entropy(batch_of([[1, 2]], [[-100, -100]])) is None
    restarted = Batch(
        tokens_BT=np.array([[7, 8, 8]]),
        documents_BT=np.array([[0, 1, 2]]),
        labels_BT=np.array([[3, 4, 5]]),
        row_ids=np.arange(1),
    )
    assert least_cross_entropy(restarted) == pytest.approx(2 * math.log(2) / 3)


def test_a_batch_that_cannot_be_learnt_is_unknown_however_its_loss_falls(
    spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.export.gate.smoke.least_cross_entropy", lambda batch: 5.0)
    gate = smoke(of_spec(spec, "gate.smoke_steps=4"))
    assert gate.level == "unknown" and "cannot be learnt" in gate.reason


# Held-out target


def test_the_held_out_gate_reads_the_end_of_a_completed_run(whole: RunFolder) -> None:
    gate = heldout_target(of_run(whole))
    loss, before = gate.numbers["student_loss"], gate.numbers["untrained_loss"]
    assert gate.level == "pass" and loss < before
    assert heldout_target(of_run(whole, heldout_loss=loss + 0.01)).level == "pass"
    assert heldout_target(of_run(whole, heldout_loss=loss - 0.01)).level == "fail"
    share = (before - loss) / (before - gate.numbers["teacher_loss"])
    assert heldout_target(of_run(whole, heldout_share=share - 0.01)).level == "pass"
    assert heldout_target(of_run(whole, heldout_share=share + 0.01)).level == "fail"


def test_without_a_completed_run_the_held_out_gate_is_unknown(
    spec: Path, whole: RunFolder, tmp_path: Path
) -> None:
    assert heldout_target(of_spec(spec)).level == "unknown"
    run = RunFolder(Path(shutil.copytree(whole.path, tmp_path / "run")))
    lines = run.events.read_text().splitlines(keepends=True)
    run.events.write_text("".join(lines[:-1]))  # killed before it said how it ended
    gate = heldout_target(of_run(run))
    assert gate.level == "unknown" and f"engine distill --resume {run.path}" in gate.reason


def test_the_held_out_gate_is_of_the_saved_student_as_its_files_are_now(
    whole: RunFolder, tmp_path: Path
) -> None:
    run = RunFolder(Path(shutil.copytree(whole.path, tmp_path / "run")))
    lines = run.events.read_text()
    run.events.write_text(lines.replace('"saved":true', '"saved":false'))
    gate = heldout_target(of_run(run))
    assert gate.level == "unknown" and "no held-out loss of the saved student" in gate.reason
    run.events.write_text(lines)
    assert heldout_target(of_run(run)).level == "pass"
    text = run.receipt.read_text()
    receipt = json.loads(text)
    receipt["heldout_loss_nats"]["student"] += 1e-9
    run.receipt.write_text(json.dumps(receipt))
    gate = heldout_target(of_run(run))
    assert gate.level == "fail" and "the held-out loss of the student is " in gate.reason
    run.receipt.write_text(text)
    with (run.student / "model.safetensors").open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"\x01")
    gate = heldout_target(of_run(run))
    assert gate.level == "unknown" and "sha256 of model.safetensors" in gate.reason
    run.receipt.unlink()
    assert "no receipt" in heldout_target(of_run(run)).reason


# Evaluation


def test_the_eval_gate_goes_by_the_lower_end_of_the_interval(
    whole: RunFolder, tmp_path: Path
) -> None:
    results = results_file(tmp_path / "r.jsonl", whole, right=40, judged=164, problems=164)
    interval = wilson(40, 164)
    assert interval is not None and interval.low < 0.2 < 40 / 164
    assert eval_threshold(of_run(whole, results, pass_at_1=interval.low - 0.001)).level == "pass"
    # The share itself would be enough.
    gate = eval_threshold(of_run(whole, results, pass_at_1=0.2))
    assert gate.level == "fail" and gate.numbers["low"] == interval.low
    # What was left out of the problems is said where the share is.
    assert "without" not in gate.reason
    results.write_text(results.read_text().replace('"without": []', '"without": ["Own/7"]'))
    assert "(without Own/7)" in eval_threshold(of_run(whole, results, pass_at_1=0.2)).reason


def test_an_evaluation_that_is_not_there_or_not_whole_or_of_others_is_unknown(
    whole: RunFolder, tmp_path: Path
) -> None:
    assert eval_threshold(of_run(whole)).level == "n/a"
    none = eval_threshold(of_run(whole, pass_at_1=0.1))
    assert none.level == "unknown" and "engine eval humaneval" in none.reason
    half = results_file(tmp_path / "half.jsonl", whole, right=80, judged=80, problems=164)
    assert eval_threshold(of_run(whole, half, pass_at_1=0.1)).level == "unknown"
    good = results_file(tmp_path / "good.jsonl", whole, right=90, judged=164, problems=164)
    other = tmp_path / "other.jsonl"
    other.write_text(good.read_text().replace('"weights_sha256": "', '"weights_sha256": "0'))
    gate = eval_threshold(of_run(whole, good, other, pass_at_1=0.1))
    assert gate.level == "unknown" and "other weights" in gate.reason


# All of them


def test_the_verdict_is_the_lowest_of_those_that_apply() -> None:
    def level(*gates: Outcome) -> Level:
        return verdict_of(gates).level

    holds = answered("smoke", Level.PASS, "it does")
    assert level(holds, does_not_apply("eval", "none")) == Level.PASS
    assert level(holds, answered("eval", Level.UNKNOWN, "not asked")) == Level.UNKNOWN
    assert level(does_not_apply("eval", "none")) == Level.UNKNOWN


def test_what_keeps_one_gate_from_being_measured_leaves_the_others(
    whole: RunFolder, tmp_path: Path
) -> None:
    run = RunFolder(Path(shutil.copytree(whole.path, tmp_path / "run")))
    effective = json.loads(run.effective.read_text())
    effective["spec"]["teacher"]["path"] = str(tmp_path / "gone")
    run.effective.write_text(json.dumps(effective))
    found = {gate.id: gate for gate in run_gates(of_run(run))}
    assert found["smoke"].level == "unknown" and "gone" in found["smoke"].reason
    assert found["heldout"].level == "pass"


def test_the_command_prints_each_gate_and_exits_by_the_lowest(
    whole: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(whole.path)
    assert main(["gate", run, "--set", "gate.smoke_steps=4", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    levels = {gate["id"]: gate["level"] for gate in printed["gates"]}
    assert levels == {
        "smoke": "pass",
        "heldout": "pass",
        "eval": "n/a",
    }
    assert main(["gate", run, "--only", "heldout", "--set", "gate.heldout_loss=0.001"]) == 1
    assert main(["gate", run, "--only", "heldout,eval", "--set", "gate.pass_at_1=0.5"]) == 2
    assert "unknown eval" in capsys.readouterr().out
    assert main(["gate", run, "--only", "smke"]) == 64
    assert main(["gate", run, "--set", "train.lr=1"]) == 64


def test_gates_are_no_part_of_the_experiment(spec: Path) -> None:
    plain, asked = load_spec(spec, [])[0], load_spec(spec, ["gate.pass_at_1=0.3"])[0]
    assert plain != asked and plain.sha256 == asked.sha256


def test_settings_that_came_later_leave_the_hash_of_an_earlier_run(
    whole: RunFolder, tmp_path: Path
) -> None:
    run = RunFolder(Path(shutil.copytree(whole.path, tmp_path / "run")))
    effective = json.loads(run.effective.read_text())
    # As an earlier version wrote it, which did not have this setting.
    from engine.spec import settings_sha256

    del effective["spec"]["watch"]["on_thrash"]
    effective["spec_sha256"] = settings_sha256(effective["spec"])
    run.effective.write_text(json.dumps(effective))
    found = spec_hash(run)
    assert found["recorded"] == found["found"] != spec_hash(whole)["found"]
    assert spec_from_dict(effective["spec"]).watch.on_thrash == "stop"
