"""Whole runs with a teacher in blocks: the run that its dequantised values give, cut to the student's
ids, and its own teacher refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.load import load_decoder, save_decoder
from tests.support.finished_runs import finish
from tests.support.kit import Kit, tiny_config
from tests.support.packed_models import lively, make_config, write
from tests.support.running import engine

TEACHER_IDS, STUDENT_IDS = 320, 304


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = make_config(vocab_size=TEACHER_IDS)
    return write(tmp_path_factory.mktemp("teacher") / "m.gguf", lively(config), "Q4_K")


def settings(kit: Kit, folder: Path, teacher: Path, **changes: object) -> dict[str, object]:
    student = folder / "student.json"
    student.write_text(json.dumps(tiny_config(vocab_size=STUDENT_IDS)))
    values: dict[str, object] = {
        "teacher__path": str(teacher),
        "student__config": str(student),
        "data__tokenizer": str(kit.teacher),
        "train__steps": 4,
        "checks__skip": "teacher_knows_text",  # its weights are random
    }
    return values | changes


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == kind]


def test_a_run_with_blocks_is_the_run_with_their_values(
    kit: Kit, tmp_path: Path, teacher: Path
) -> None:
    losses, cuts = [], []
    for backend in ("dequantized", "quantized"):
        folder = tmp_path / backend
        folder.mkdir()
        changes = settings(kit, folder, teacher, teacher__backend=backend)
        every = dict(checkpoint__every=5, eval__every=10)
        receipt = finish(kit, folder, **(changes | every)).read_receipt()
        assert receipt is not None
        steps = events(folder / "run", "step")
        losses.append([*receipt["heldout_loss_nats"].values(), *(s["kd"] for s in steps)])
        cuts += events(folder / "run", "vocabulary_cut")
        (decision,) = [
            d for d in events(folder / "run", "decision") if d["knob"] == "teacher.backend"
        ]
        assert decision["choice"] == backend
        notes = [note["text"] for note in events(folder / "run", "note")]
        assert (
            "vocabulary: the teacher's tokenizer is not known, so its ids were not compared"
            in notes
        )
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    for cut in cuts:
        assert (cut["teacher_ids"], cut["student_ids"]) == (TEACHER_IDS, STUDENT_IDS)
        assert 0 < cut["dropped_mass_mean"] <= cut["dropped_mass_max"] < 1
    assert cuts[1]["dropped_mass_mean"] == pytest.approx(cuts[0]["dropped_mass_mean"], rel=1e-4)


@pytest.mark.soak
def test_a_student_out_of_its_teachers_file_is_refused_unless_that_is_asked_for(
    kit: Kit, tmp_path: Path, teacher: Path
) -> None:
    student = tmp_path / "same"
    save_decoder(load_decoder(teacher), student, torch.bfloat16)
    changes: dict[str, object] = {
        "teacher__backend": "quantized",
        "student__path": str(student),
        "student__config": "",
        "train__steps": 2,
    }
    for allowed in (False, True):
        folder = tmp_path / str(allowed)
        folder.mkdir()
        allowing = settings(kit, folder, teacher, teacher__allow_identical=allowed, **changes)
        spec = kit.spec(folder, **allowing)
        ran = engine("distill", spec, "--out", folder / "run", "--json")
        if allowed:
            assert ran.returncode == 0, ran.stderr
            notes = [note["text"] for note in events(folder / "run", "note")]
            assert any("the student has its teacher's values" in note for note in notes)
        else:
            assert ran.returncode == 65
            assert "expected other weights than the teacher's, found the same values" in ran.stderr
