"""Whole steps beside other libraries: the same work for all, and a row for each that was asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from engine.bench import kd_rivals
from engine.bench.kd import KdRow, bench_kd, row_of, run_arm, table
from engine.bench.kd_arm import measure
from engine.bench.kd_shape import KdShape, batches_of
from engine.cli.main import main
from engine.errors import BadInput
from engine.train.roofline import flops_per_token

CPU = torch.device("cpu")
TINY = KdShape(teacher="tiny", student="tiny", rows=2, seq_len=16, steps=2, warm_up=1)


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return measure("transformers", CPU, TINY)


@pytest.mark.parametrize("arm", ["engine", "engine packed"])
def test_ours_and_the_plain_loop_do_the_same_work(arm: str, plain: dict[str, Any]) -> None:
    """Equal weights, rows and objective give an equal loss before the first update, and equal
    optimizers nearly equal ones after it; neither is 0, and they move."""
    ours = measure(arm, CPU, TINY)
    assert ours["first_loss"] == pytest.approx(plain["first_loss"], rel=1e-4)
    assert ours["last_loss"] == pytest.approx(plain["last_loss"], rel=1e-3)
    assert ours["first_loss"] != ours["last_loss"] > 1
    for found in (ours, plain):
        assert len(found["step_s"]) == TINY.steps and all(s > 0 for s in found["step_s"])
        assert found["peak_bytes"] is None and found["state"] == "measured"
    assert "transformers" in plain["versions"] and "transformers" not in ours["versions"]


@pytest.mark.parametrize("rival", ["liger", "trl"])
def test_a_rival_that_is_installed_runs_and_one_that_is_not_says_what_is_missing(
    rival: str, plain: dict[str, Any]
) -> None:
    why = kd_rivals.missing(rival)
    if why is not None:
        assert why.startswith("not installed: ") and "(pip install " in why
        return
    found = measure(rival, CPU, TINY)
    if rival == "liger":
        assert found["first_loss"] == pytest.approx(plain["first_loss"], rel=1e-3)
    assert len(found["step_s"]) == TINY.steps


def test_no_row_is_seen_twice_and_every_token_has_a_label() -> None:
    batches = batches_of(TINY)
    taken = [batches.batch_at(at) for at in range(TINY.warm_up + TINY.steps)]
    ids = [int(row) for batch in taken for row in batch.row_ids]
    assert len(set(ids)) == len(ids) == batches.rows_per_epoch
    assert all(batch.labelled == TINY.tokens for batch in taken)


def test_an_arm_that_breaks_or_hangs_is_a_row_with_its_reason() -> None:
    broke = run_arm("engine", "cpu", '{"teacher": "nobody"}', timeout_s=120)
    assert broke["state"] == "failed" and "nobody" in broke["why"]
    hung = run_arm("engine", "cpu", TINY.dumps(), timeout_s=0.01)
    assert hung["state"] == "failed" and "no answer in 0.01 s" in hung["why"]


def test_a_table_has_a_row_for_every_arm_that_was_asked_for() -> None:
    teacher, student = TINY.configs()
    found = {
        "arm": "engine",
        "state": "measured",
        "objective": "CE + T^2 KL",
        "versions": "torch",
        "ready_s": 1.0,
        "step_s": [0.25, 0.2, 0.15],
        "first_loss": 6.5,
        "last_loss": 6.4,
        "peak_bytes": 24 * 2**30,
    }

    def measured(arm: str) -> KdRow:
        answer = found if arm == "engine" else {"arm": arm, "state": "failed", "why": "exit code 1"}
        flop = 8192 / 0.1 * flops_per_token(student, teacher, 16)
        return row_of(
            answer, tokens=8192, seq_len=16, teacher=teacher, student=student, flop_per_s=flop
        )

    said: list[str] = []
    rows = bench_kd(
        {"engine": None, "trl": "not installed: trl", "liger": None}, measured, said.append
    )
    assert [(row.arm, row.state) for row in rows] == [
        *(("engine", "measured"), ("trl", "absent"), ("liger", "failed"))
    ]
    assert said == ["  engine", "  liger"]
    ours = rows[0]
    assert ours.step_s == 0.2 and ours.spread == pytest.approx(0.5)
    assert ours.tokens_per_s == pytest.approx(40960) and ours.share_of_bound == pytest.approx(0.5)
    lines = table(rows)
    assert lines[1].split() == (
        ["engine", "41.0k", "50%", "200.0", "50%", "24.0", "GiB", "6.5000", "CE", "+", "T^2", "KL"]
    )
    assert lines[-2:] == ["trl: absent: not installed: trl", "liger: failed: exit code 1"]


@pytest.mark.parametrize(
    "words, found",
    [
        ("--against trl,nemo", "found nemo"),
        ("--steps 0", "--steps"),
        ("--rows 0", "--rows"),
        ("--alpha 1", "nothing to distil"),
        ("--temperature 0", "above 0"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(
    words: str, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["bench", "kd", "--shape", "tiny", "--device", "cpu", *words.split()])
    assert code == BadInput.exit_code
    said = capsys.readouterr().err
    assert found in said and "measuring" not in said


@pytest.mark.soak
def test_the_command_prints_one_value_with_every_arm(capsys: pytest.CaptureFixture[str]) -> None:
    words = "bench kd --shape tiny --device cpu --rows 1 --seq-len 16 --steps 1 --json"
    assert main([*words.split(), "--against", "transformers,trl"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["arm"] for row in found["rows"]] == [
        *("engine", "engine packed", "transformers", "trl")
    ]
    assert found["work"]["seq_len"] == 16
    assert all(row["tokens_per_s"] > 0 for row in found["rows"] if row["state"] == "measured")
