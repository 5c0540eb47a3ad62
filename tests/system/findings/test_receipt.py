"""Receipts: what a run really did, checked against the folder that it left."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.data.batches import epoch_order
from engine.log.folder import RunFolder
from engine.receipts.context import checkout_state, view_of
from engine.receipts.receipt import rows_of
from tests.support.findings import ask, hanging_run
from tests.support.paths import ROOT
from tests.support.run_folders import completed

IDENTITY = (
    *("tool", "config", "seeds", "data", "weights", "device_facts", "environment", "times"),
    "outcome",
)
STEPS, ROWS = 20, 4


@pytest.fixture
def finished(whole: Path) -> RunFolder:
    return RunFolder(whole)


@pytest.fixture
def run(finished: RunFolder, tmp_path: Path) -> RunFolder:
    return RunFolder(Path(shutil.copytree(finished.path, tmp_path / "run")))


def receipt_of(run: RunFolder) -> dict[str, Any]:
    receipt = run.read_receipt()
    assert receipt is not None
    return receipt


def test_what_identifies_a_run_comes_first_and_none_of_it_is_empty(finished: RunFolder) -> None:
    receipt = receipt_of(finished)
    assert tuple(receipt)[2:11] == IDENTITY and all(receipt[name] for name in IDENTITY)
    assert receipt["outcome"] == "completed"
    assert receipt["config"]["recorded"] == receipt["config"]["found"] == receipt["spec_sha256"]
    assert receipt["seeds"]["train.seed"] == receipt["spec"]["train"]["seed"]
    assert receipt["tool"]["version"] == receipt["engine"]
    assert set(receipt["weights"]) == {"teacher", "student"}
    times = receipt["times"]
    assert len(times["sessions"]) == 1 and times["boot_id"] == times["sessions"][0]["boot_id"]
    assert times["session_ended_monotonic_s"] > times["session_started_monotonic_s"] > 0
    assert receipt["device_facts"]["machine"]
    assert receipt["environment"]["variables"]["OMP_NUM_THREADS"] == "1"


def test_the_tool_is_named_by_commit_and_by_what_differs_from_it(finished: RunFolder) -> None:
    tool = receipt_of(finished)["tool"]
    # None where the suite runs from a copy without git; `checkout_state` has tests of its own.
    assert tool["commit"] == checkout_state(ROOT, only="engine")["commit"]
    assert (tool["dirty_files"] == 0) == (tool["dirty_sha256"] is None)
    assert isinstance(tool["changed_since_start"], list)


def test_the_order_hash_is_of_the_rows_that_training_met(finished: RunFolder) -> None:
    receipt = receipt_of(finished)
    rows = receipt["data"]["epoch_rows"]
    seed = receipt["seeds"]["train.seed"]
    epochs = [epoch_order(rows, seed, epoch) for epoch in range(STEPS * ROWS // rows + 1)]
    order = np.concatenate(epochs)[: STEPS * ROWS].astype("<i8")
    assert receipt["data"]["order_sha256"] == hashlib.sha256(order.tobytes()).hexdigest()


def test_decisions_are_those_that_were_taken(finished: RunFolder) -> None:
    taken = {d["knob"]: d["choice"] for d in receipt_of(finished)["decisions"]}
    logged = {d.knob: d.choice for d in view_of(finished).decisions}
    assert taken == logged and taken["teacher.backend"] == "dequantized"


def test_rows_are_counted_from_the_log(finished: RunFolder) -> None:
    receipt = receipt_of(finished)
    assert receipt["rows"]["rows_seen"] == receipt["rows"]["rows_trained"] == STEPS * ROWS
    assert receipt["rows_trained"] == STEPS * ROWS == receipt["rows"]["position"]
    assert receipt["tokens_trained"] == STEPS * ROWS * 32


def test_a_receipt_agrees_with_its_run(finished: RunFolder) -> None:
    ran = ask("evidence", "receipt", finished.path)
    assert ran.code == 0 and "FAIL" not in ran.out, ran.out
    for text in (
        "sha256 of model.safetensors",
        "bytes of events.jsonl",
        f"manifest of step {STEPS}",
        "dequantized",
    ):
        assert text in ran.out, text
    value = ask("evidence", "receipt", finished.path, "--json").json
    assert value["level"] == "pass" and value["is_receipt"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("student/model.safetensors", "sha256 of model.safetensors"),
        ("student/config.json", "sha256 of config.json"),
        ("events.jsonl", "bytes of events.jsonl"),
        ("device.jsonl", "bytes of device.jsonl"),
        (f"checkpoints/step-{STEPS:08d}/MANIFEST.json", f"manifest of step {STEPS}"),
    ],
)
def test_a_changed_byte_of_what_a_run_left_is_found(run: RunFolder, name: str, said: str) -> None:
    file = run.path / name
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    ran = ask("evidence", "receipt", run.path)
    assert ran.code == 1
    assert any(line.startswith("FAIL") and said in line for line in ran.out.splitlines()), ran.out


def test_a_changed_receipt_is_not_the_one_that_the_log_names(run: RunFolder) -> None:
    receipt = receipt_of(run)
    del receipt["decisions"]
    run.receipt.write_text(json.dumps(receipt))
    ran = ask("evidence", "receipt", run.path)
    assert ran.code == 1 and "FAIL     sha256 of receipt.json, as logged" in ran.out


def _altered(run: RunFolder, change: Callable[[dict[str, Any]], object], *, seal: bool) -> None:
    """Change a receipt, and with `seal` also the hash of it in the log, as somebody would who knows of that."""
    receipt = receipt_of(run)
    change(receipt)
    old = hashlib.sha256(run.receipt.read_bytes()).hexdigest()
    run.receipt.write_text(json.dumps(receipt))
    if seal:
        new = hashlib.sha256(run.receipt.read_bytes()).hexdigest()
        log = run.events.read_text()
        assert old in log
        run.events.write_text(log.replace(old, new))


def _spoilt(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


def _no_student_files(run: RunFolder, seal: bool) -> None:
    _spoilt(run.student / "model.safetensors")
    _altered(run, lambda receipt: receipt["student_files"].clear(), seal=seal)


def _student_files_of_another_name(run: RunFolder, seal: bool) -> None:
    def renamed(receipt: dict[str, Any]) -> None:
        receipt["student_files"] = {"x": receipt["student_files"].pop("config.json")}

    _altered(run, renamed, seal=seal)


def _no_logs(run: RunFolder, seal: bool) -> None:
    _altered(run, lambda receipt: receipt["logs"].clear(), seal=seal)


def _logs_are_none(run: RunFolder, seal: bool) -> None:
    _altered(run, lambda receipt: receipt.update(logs=None), seal=seal)


def _no_files(run: RunFolder, seal: bool) -> None:
    _spoilt(run.path / "rows" / "0.bin")
    _altered(run, lambda receipt: receipt["files"].clear(), seal=seal)


def _one_file_left_out(run: RunFolder, seal: bool) -> None:
    _spoilt(run.path / "tokenizer.json")
    _altered(run, lambda receipt: receipt["files"].pop("tokenizer.json"), seal=seal)


def _cut(name: str, covered: int) -> Callable[[RunFolder, bool], None]:
    def tamper(run: RunFolder, seal: bool) -> None:
        def cut(receipt: dict[str, Any]) -> None:
            first = (run.path / name).read_bytes()[:covered]
            receipt["logs"][name] = {
                "bytes": len(first),
                "sha256": hashlib.sha256(first).hexdigest(),
            }

        _altered(run, cut, seal=seal)

    return tamper


def _extra(name: str) -> Callable[[RunFolder, bool], None]:
    def tamper(run: RunFolder, seal: bool) -> None:
        (run.path / name).parent.mkdir(exist_ok=True)
        (run.path / name).write_text("import os")

    return tamper


def _empty(name: str) -> Callable[[RunFolder, bool], None]:
    def tamper(run: RunFolder, seal: bool) -> None:
        (run.path / name).write_bytes(b"")

    return tamper


def _missing(name: str) -> Callable[[RunFolder, bool], None]:
    def tamper(run: RunFolder, seal: bool) -> None:
        (run.path / name).unlink()

    return tamper


def _linked(run: RunFolder, seal: bool) -> None:
    (run.student / "weights.bin").symlink_to(run.student / "model.safetensors")


def _log_without_the_receipt(run: RunFolder, seal: bool) -> None:
    lines = run.events.read_bytes().splitlines(keepends=True)
    run.events.write_bytes(b"".join(line for line in lines if b"receipt_written" not in line))
    _altered(run, lambda receipt: receipt.update(tool={}), seal=False)


def _other_weights_by_the_same_name(run: RunFolder, seal: bool) -> None:
    _spoilt(run.student / "model.safetensors")
    made = hashlib.sha256((run.student / "model.safetensors").read_bytes()).hexdigest()

    def named(receipt: dict[str, Any]) -> None:
        receipt["student_files"]["model.safetensors"]["sha256"] = made

    _altered(run, named, seal=False)


CUT = [
    pytest.param(_cut("events.jsonl", 100), id="events_cut"),
    pytest.param(_cut("events.jsonl", 0), id="events_cut_to_nothing"),
    pytest.param(_cut("device.jsonl", 100), id="device_cut"),
    pytest.param(_cut("watch.jsonl", 10), id="watch_cut"),
]
"""Who knows of the receipt's hash in the log can rewrite both: a receipt is no signature."""


@pytest.mark.parametrize("tamper", CUT)
def test_a_receipt_that_covers_less_of_a_log_is_not_the_one_that_the_log_names(
    run: RunFolder, tamper: Callable[[RunFolder, bool], None]
) -> None:
    tamper(run, False)
    assert ask("evidence", "receipt", run.path).code in (1, 2, 65)


@pytest.mark.parametrize("seal", [False, True], ids=["", "and-the-log"])
@pytest.mark.parametrize(
    "tamper",
    [
        _no_student_files,
        _student_files_of_another_name,
        _no_logs,
        _logs_are_none,
        _no_files,
        _one_file_left_out,
        pytest.param(_extra("student/modeling_x.py"), id="code_beside_the_student"),
        pytest.param(_extra("student/__pycache__/x.pyc"), id="code_below_the_student"),
        pytest.param(_extra("sitecustomize.py"), id="code_in_the_folder"),
        pytest.param(_extra("rows/1.bin"), id="rows_of_another_rank"),
        _linked,
        pytest.param(_empty("tokenizer.json"), id="emptied"),
        pytest.param(_empty("student/config.json"), id="emptied_of_the_student"),
        pytest.param(_empty("rows/0.bin"), id="rows_emptied"),
        pytest.param(_missing("rows/0.bin"), id="rows_missing"),
        pytest.param(_missing("spec.toml"), id="spec_missing"),
        pytest.param(_missing("student/tokenizer.json"), id="tokenizer_missing"),
        pytest.param(_missing("device.jsonl"), id="log_missing"),
        _log_without_the_receipt,
        _other_weights_by_the_same_name,
    ],
)
def test_no_way_to_tamper_with_a_run_or_its_receipt_verifies(
    run: RunFolder, tamper: Callable[[RunFolder, bool], None], seal: bool
) -> None:
    assert ask("evidence", "receipt", run.path).code == 0
    tamper(run, seal)
    ran = ask("evidence", "receipt", run.path)
    assert ran.code in (1, 2, 65), ran.out


def test_what_a_receipt_does_not_answer_for_is_said(run: RunFolder) -> None:
    (run.path / "notes.json").write_text('{"note": "a note", "tags": []}')
    ran = ask("evidence", "receipt", run.path)
    assert ran.code == 0
    for what in ("notes.json", "checkpoints", "events.jsonl", "the machine"):
        assert f"not checked: {what}" in ran.out, what


def test_a_run_without_a_receipt_says_what_its_logs_say(tmp_path: Path) -> None:
    ran = ask("evidence", "receipt", hanging_run(tmp_path / "run").path)
    assert ran.code == 2 and "no receipt: the run did not finish" in ran.out


def test_a_step_that_was_not_applied_is_seen_and_not_trained(tmp_path: Path) -> None:
    run = completed(tmp_path / "run", total=10, nan={4})
    rows = rows_of(view_of(run))
    assert rows["rows_seen"] - rows["rows_trained"] == 16 and rows["steps_not_applied"] == 1
