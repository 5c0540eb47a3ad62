"""resolved.json: every automatic setting with its value, by which alone the trainer works; what was asked for stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.log.events import StepDone
from engine.log.folder import RunFolder
from engine.log.read import events_of
from engine.plan.knobs import KNOBS
from engine.spec import RunSpec, spec_from_dict
from engine.train.build import Builder
from engine.train.trainer import Trainer
from tests.support.finished_runs import carried_out, resumed_here
from tests.support.kit import Kit


def resolved(run: RunFolder) -> RunSpec:
    return spec_from_dict(json.loads(run.resolved.read_text())["spec"])


def losses(run: RunFolder) -> list[float | None]:
    return [event.loss for event in events_of(run.events) if isinstance(event, StepDone)]


@pytest.mark.parametrize("teacher", [True, False])
def test_every_automatic_setting_has_its_value_and_the_trainer_has_no_other(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, teacher: bool
) -> None:
    built: list[tuple[Builder, Trainer]] = []
    made = Builder.trainer

    def trainer(builder: Builder, *args: Any) -> Trainer:
        built.append((builder, made(builder, *args)))
        return built[-1][1]

    monkeypatch.setattr(Builder, "trainer", trainer)
    alone: dict[str, object] = {"teacher__path": "", "loss__alpha": 1.0}
    tokenizer = {"data__tokenizer": str(kit.teacher)}
    run, code = carried_out(
        kit, tmp_path, compute__threads=0, **({} if teacher else alone | tokenizer)
    )
    assert code == 0
    found = resolved(run)
    assert [key for key in KNOBS if found.value(key) in ("auto", 0)] == []
    ((builder, one),) = built
    assert builder.spec == found and one.loss == found.loss and one.train == found.train
    assert found.teacher.backend == ("dequantized" if teacher else "none")
    # Nothing but automatic settings is another one than was asked for.
    asked = spec_from_dict(run.read_effective()["spec"])
    automatic = {key: asked.value(key) for key in KNOBS}
    assert found.with_values(automatic) == asked
    assert (run.read_receipt() or {})["spec_sha256"] == asked.sha256 != found.sha256
    assert run.resolved.name in (run.read_receipt() or {})["files"]


def test_a_resume_decides_anew_from_what_was_asked_and_trains_to_the_same_bits(
    kit: Kit, tmp_path: Path
) -> None:
    whole, code = carried_out(kit, tmp_path / "whole")
    assert code == 0
    run, code = carried_out(kit, tmp_path / "cut", train__stop_after=3)
    assert code == 0
    before, asked = run.resolved.read_text(), run.effective.read_text()
    other = json.loads(before)
    other["spec"]["loss"]["chunk_rows"] = 7
    run.resolved.write_text(json.dumps(other))
    assert resumed_here(run.path).returncode == 0
    assert run.resolved.read_text() == before and run.effective.read_text() == asked
    assert losses(run) == losses(whole)
    # What is set is what was decided: the same numbers again.
    decided = resolved(whole)
    settings = {key.replace(".", "__"): decided.value(key) for key in KNOBS}
    again, code = carried_out(kit, tmp_path / "again", **settings)
    assert code == 0 and losses(again) == losses(whole)
