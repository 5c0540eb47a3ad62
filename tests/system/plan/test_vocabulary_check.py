"""An id must be one token to teacher, student and text; what is not known is said."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.data.corpus import Document
from engine.errors import BadInput, TokenizerError
from engine.formats.tokenizer import Tokenizer, open_tokenizer
from engine.models.load import save_decoder
from engine.plan.inputs import Inputs, check_inputs
from engine.spec import load_spec
from engine.teachers.vocabulary import check_vocabularies, compare
from tests.support.kit import Kit, tiny_config
from tests.support.packed_models import lively, make_config, write
from tests.support.train_tokenizer import train_bpe

TEXT = "def one(two):\n    return one(two) + two  # the one and the two\n" * 20
Make = Callable[..., Tokenizer]


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(train_bpe([Document(name="a", text=TEXT)], 300))
    return parsed


def with_ids_exchanged(record: dict[str, Any], *pairs: tuple[int, int]) -> dict[str, Any]:
    vocab = dict(record["model"]["vocab"])
    names = {token_id: name for name, token_id in vocab.items()}
    for a, b in pairs:
        vocab[names[a]], vocab[names[b]] = b, a
    return {**record, "model": {**record["model"], "vocab": vocab}}


@pytest.fixture
def make(tmp_path: Path, record: dict[str, Any]) -> Make:
    def opened(*pairs: tuple[int, int], extra: int = 0, name: str = "t.json") -> Tokenizer:
        changed = with_ids_exchanged(record, *pairs)
        size = len(record["model"]["vocab"])
        changed["added_tokens"] = [
            *record["added_tokens"],
            *(
                {**record["added_tokens"][0], "id": size + i, "content": f"<|extra {i}|>"}
                for i in range(extra)
            ),
        ]
        path = tmp_path / name
        path.write_text(json.dumps(changed))
        return open_tokenizer(path)

    return opened


def test_the_same_tokens_are_passed_in_silence(make: Make) -> None:
    assert check_vocabularies({"teacher": make(), "student": make()}, 300) == ()


def test_differing_ids_are_refused_with_the_first_and_their_count(make: Make) -> None:
    teacher, student = make(), make((40, 70), (50, 80), name="other.json")
    names = teacher.tokens()
    with pytest.raises(TokenizerError) as caught:
        check_vocabularies({"teacher": teacher, "student": student}, 300)
    message = caught.value.message
    assert "the same token for every id below 300, found 4 that differ" in message
    assert f"id 40: teacher {names[40]!r}, student {names[70]!r}" in message
    assert "id 70:" in message and "id 80:" not in message and "and 1 more" in message
    assert "t.json (teacher)" in message and "other.json (student)" in message


def test_ids_that_are_cut_are_not_compared(make: Make) -> None:
    pair = {"teacher": make(), "student": make((40, 70), name="other.json")}
    assert check_vocabularies(pair, 40) == ()
    found = compare(pair["teacher"], pair["student"], 40)
    assert (found.differing, found.one_sided, found.shared) == ((), 0, 40)
    with pytest.raises(TokenizerError, match="found 1 that differ"):
        check_vocabularies(pair, 41)


def test_a_token_that_one_side_lacks_is_said_and_not_refused(make: Make) -> None:
    teacher, student = make(extra=3), make(name="other.json")
    size = student.vocab_size
    (note,) = check_vocabularies({"teacher": teacher, "student": student}, size + 10)
    assert f"{size} of {size + 10} ids are the same token in teacher and student" in note
    assert "3 are a token in one of them alone" in note


def test_a_tokenizer_that_is_not_known_is_said_and_the_others_are_compared(make: Make) -> None:
    (note,) = check_vocabularies({"teacher": None, "student": make()}, 300)
    assert note == "vocabulary: the teacher's tokenizer is not known, so its ids were not compared"
    known = {"data.tokenizer": make(), "teacher": None, "student": make((4, 7), name="o.json")}
    with pytest.raises(TokenizerError, match=r"data\.tokenizer"):
        check_vocabularies(known, 300)


def test_it_needs_no_torch() -> None:
    code = "import sys, engine.teachers.vocabulary, engine.models.packed_size; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


# Before a run


def inputs(kit: Kit, folder: Path, **changes: object) -> Inputs:
    spec, _ = load_spec(kit.spec(folder, **changes))
    return check_inputs(spec)


@pytest.fixture
def trained(kit: Kit, tmp_path: Path) -> Path:
    """A student with weights and a tokenizer of its own: a copy of the teacher."""
    folder = tmp_path / "trained"
    shutil.copytree(kit.teacher, folder)
    return folder


IDENTICAL: dict[str, object] = {"teacher__allow_identical": True}
"""The student of these tests is a copy of the teacher."""


def test_a_student_with_other_ids_is_refused_before_the_run(
    kit: Kit, tmp_path: Path, trained: Path
) -> None:
    path = trained / "tokenizer.json"
    found = inputs(kit, tmp_path, student__path=str(trained), student__config="", **IDENTICAL)
    assert found.notes == ()
    path.write_text(json.dumps(with_ids_exchanged(json.loads(path.read_text()), (60, 90))))
    with pytest.raises(TokenizerError, match="found 2 that differ"):
        inputs(kit, tmp_path, student__path=str(trained), student__config="", **IDENTICAL)


def test_a_text_tokenizer_with_other_ids_than_the_teachers_is_refused(
    kit: Kit, tmp_path: Path
) -> None:
    other = tmp_path / "tokenizer.json"
    raw = json.loads((kit.teacher / "tokenizer.json").read_text())
    other.write_text(json.dumps(with_ids_exchanged(raw, (60, 90))))
    with pytest.raises(TokenizerError, match=r"\(data\.tokenizer\), .* \(teacher\)"):
        inputs(kit, tmp_path, data__tokenizer=str(other))
    # A teacher that is switched off is asked nothing.
    found = inputs(
        kit, tmp_path, data__tokenizer=str(other), teacher__backend="none", loss__alpha=1.0
    )
    assert found.tokenizer.path == other


def test_a_student_without_a_tokenizer_is_noted(kit: Kit, tmp_path: Path, trained: Path) -> None:
    (trained / "tokenizer.json").unlink()
    found = inputs(kit, tmp_path, student__path=str(trained), student__config="", **IDENTICAL)
    assert found.notes == (
        "vocabulary: the student's tokenizer is not known, so its ids were not compared",
    )


def test_unequal_widths_are_cut_or_refused_as_the_spec_says(kit: Kit, tmp_path: Path) -> None:
    student = tmp_path / "student.json"
    student.write_text(json.dumps(tiny_config(vocab_size=300)))
    wide = tmp_path / "wide"
    decoder = lively(make_config(vocab_size=320, hidden_size=64, head_dim=8))
    save_decoder(decoder, wide, torch.float32, extra_files=[kit.teacher / "tokenizer.json"])
    changes: dict[str, object] = {"teacher__path": str(wide), "student__config": str(student)}
    assert inputs(kit, tmp_path, **changes).teacher is not None
    with pytest.raises(BadInput, match=r"teacher's 320 ids, because vocab\.align is refuse"):
        inputs(kit, tmp_path, vocab__align="refuse", **changes)
    assert inputs(kit, tmp_path, vocab__align="refuse") is not None


def test_a_quantized_teacher_needs_blocks_and_says_so_before_the_run(
    kit: Kit, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match="found floats alone"):
        inputs(kit, tmp_path, teacher__backend="quantized")
    path = write(tmp_path / "m.gguf", lively(make_config(vocab_size=300)), "Q4_K")
    tokenizer = str(kit.teacher / "tokenizer.json")
    found = inputs(
        kit,
        tmp_path,
        teacher__backend="quantized",
        teacher__path=str(path),
        data__tokenizer=tokenizer,
    )
    assert found.teacher_size is not None and found.teacher_size.matrices == 16
    assert found.notes == (
        f"teacher: {tmp_path / 'm.gguf'}: no tokenizer.json: the file brings no tokenizer",
        "vocabulary: the teacher's tokenizer is not known, so its ids were not compared",
    )
