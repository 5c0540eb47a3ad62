"""Whole runs whose teacher comes another way are the same runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.kit import Kit
from tests.support.running import engine

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("suffix", ["gguf", "apr"])
def test_a_run_with_its_teacher_in_one_file_is_the_same_run(
    kit: Kit, tmp_path: Path, suffix: str
) -> None:
    teacher = tmp_path / f"teacher.{suffix}"
    done = engine("convert", kit.teacher, teacher, "--quant", "f32", "--json")
    assert done.returncode == 0, done.stderr
    receipts = []
    for name, path in (("folder", kit.teacher), ("file", teacher)):
        folder = tmp_path / name
        folder.mkdir()
        spec = kit.spec(folder, teacher__path=str(path), train__steps=4)
        ran = engine("distill", spec, "--out", folder / "run", "--json")
        assert ran.returncode == 0, ran.stderr
        assert (folder / "run" / "student" / "tokenizer.json").is_file()
        receipts.append(json.loads(ran.stdout))
    for key in ("model_sha256", "heldout_loss_nats", "train_sha256"):
        assert receipts[0][key] == receipts[1][key], key
