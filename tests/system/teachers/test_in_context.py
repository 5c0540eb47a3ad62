"""A teacher that reads a context before each document: what the student learns from it, and what is refused."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import SpecError
from engine.formats.adapter import ADAPTER_FILE
from engine.log.events import Judged, StepDone
from engine.models.load import base_of, load_packed_decoder
from engine.models.packed import stored_tensor, tensor_names
from engine.quant.planes import PackedMatrix
from engine.spec import load_spec
from engine.teachers.context_passes import pass_tokens, passes
from engine.teachers.frozen import DequantizedTeacher
from engine.teachers.in_context import TeacherInContext
from tests.support.finished_runs import carried_out, resumed_here
from tests.support.kit import Kit
from tests.support.packed_models import lively, make_batch, make_config, write
from tests.support.running import engine_here
from tests.system.train.test_adapter import LORA, of

CONTEXT = "You are a careful reader. "


@pytest.mark.parametrize("rows", [1, 3])
def test_each_document_is_read_behind_the_context_and_by_itself(rows: int) -> None:
    plain = DequantizedTeacher(lively(make_config()))
    context = [5, 9, 2]
    batch = make_batch(rows, 24)
    tokens_BT, documents_BT, _ = batch.to_torch(torch.device("cpu"))
    found_BTE = TeacherInContext(plain, context).hidden(tokens_BT, documents_BT)
    assert found_BTE.shape[:2] == tokens_BT.shape
    for row in range(rows):
        for document in documents_BT[row].unique():
            of_it = documents_BT[row] == document
            ids = torch.cat([torch.tensor(context), tokens_BT[row][of_it]])[None]
            alone_TE = plain.hidden(ids, torch.zeros_like(ids))[0, len(context) :]
            assert torch.allclose(found_BTE[row][of_it], alone_TE, atol=1e-5)
    assert not torch.allclose(found_BTE, plain.hidden(tokens_BT, documents_BT), atol=1e-3)


def test_passes_have_one_size_and_keep_each_token_once() -> None:
    starts, context = [0, 1, 7, 8, 20, 32, 40, 64], 5
    size = pass_tokens(2, 32, context)
    kept = []
    for pass_M, documents_1M, kept_K in passes(starts, context, size):
        assert len(pass_M) == documents_1M.shape[1] == size
        kept += pass_M[kept_K].tolist()
        for number in np.unique(documents_1M):
            places = pass_M[documents_1M[0] == number]
            assert places[0] >= 64, "a document begins with the context"
    assert kept == list(range(64))
    assert pass_tokens(1, 32, context) == 37


def in_context(kit: Kit) -> dict[str, Any]:
    return LORA | {
        "teacher__path": str(kit.teacher),
        "student__path": str(kit.teacher),
        "teacher__context": CONTEXT,
        "loss__alpha": 0.0,
        "checkpoint__every": 0,
    }


def test_adapters_learn_what_a_context_tells_their_own_base(kit: Kit, tmp_path: Path) -> None:
    run, code = carried_out(kit, tmp_path, **in_context(kit))
    assert code == 0
    levels = {one.id: one.level for one in of(run, Judged)}
    assert "fail" not in levels.values()
    assert levels["teacher_not_student"] == levels["step_student"] == "pass"
    assert levels["step_teacher"] == "unknown"
    losses = [one.loss for one in of(run, StepDone)]
    assert 0 < losses[-1] < losses[0]
    done = engine_here("verify", run.path, "--all")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_base_that_is_its_teacher_is_refused_without_a_context(
    kit: Kit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, code = carried_out(kit, tmp_path, **in_context(kit) | {"teacher__context": ""})
    said = capsys.readouterr().err
    assert code == 65 and "other weights than the teacher's" in said and "teacher.context" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"teacher__path": "", "loss__alpha": 1.0}, "found none"),
        ({"teacher__shard": "on"}, 'expected teacher.shard = "off"'),
        ({"teacher__cache": "stored"}, "found stored outputs"),
        ({"rollout__share": 0.5, "rollout__by": "teacher"}, "generates rows without the context"),
    ],
)
def test_what_cannot_have_a_context_is_refused(
    kit: Kit, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(SpecError, match=said):
        load_spec(kit.spec(tmp_path, **in_context(kit) | change))


def test_a_context_that_leaves_no_position_for_a_row_is_refused(
    kit: Kit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, code = carried_out(kit, tmp_path, **in_context(kit) | {"teacher__context": "word " * 200})
    assert code == 65
    assert re.search(r"positions, found 32 and \d+ of teacher.context", capsys.readouterr().err)


@pytest.mark.parametrize("blocks", [False, True])
def test_base_and_teacher_are_one_copy_of_the_layers(tmp_path: Path, blocks: bool) -> None:
    decoder = lively(make_config(tied=False))
    held = load_packed_decoder(write(tmp_path / "m.gguf", decoder, "Q8_0")) if blocks else decoder
    teacher = DequantizedTeacher(held).decoder
    base = base_of(teacher)
    for name in tensor_names(teacher):
        one, other = stored_tensor(teacher, name), stored_tensor(base, name)
        if isinstance(other, PackedMatrix):
            assert isinstance(one, PackedMatrix) and one.data is other.data
        elif not isinstance(one, PackedMatrix):
            assert one.data_ptr() == other.data_ptr(), name
    tokens_BT = torch.arange(20)[None] % 90
    with torch.no_grad():
        assert torch.allclose(
            base.hidden(tokens_BT, None), teacher.hidden(tokens_BT, None), atol=1e-5
        )


def test_a_run_in_context_that_resumes_has_the_same_adapters(kit: Kit, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    how = in_context(kit) | {"checkpoint__every": 3}
    whole, code = carried_out(kit, tmp_path / "whole", **how)
    assert code == 0
    parts, code = carried_out(kit, tmp_path / "parts", **how, train__stop_after=3)
    assert code == 0 and resumed_here(parts.path).returncode == 0
    saved = [(run.student / ADAPTER_FILE).read_bytes() for run in (whole, parts)]
    assert saved[0] == saved[1]


def test_a_teacher_that_is_the_adapter_gone_on_from_is_not_taken_for_its_base(
    kit: Kit, tmp_path: Path
) -> None:
    for name in ("first", "same", "copied"):
        (tmp_path / name).mkdir()
    first, code = carried_out(kit, tmp_path / "first", **in_context(kit))
    assert code == 0
    copy = shutil.copytree(first.student, tmp_path / "copy")
    how = in_context(kit) | {
        "student__path": str(first.student),
        "data__tokenizer": str(kit.teacher),
    }
    losses = []
    for name, teacher in (("same", first.student), ("copied", copy)):
        run, code = carried_out(kit, tmp_path / name, **how | {"teacher__path": str(teacher)})
        assert code == 0
        losses.append([one.loss for one in of(run, StepDone)])
    assert losses[0] == losses[1]
