"""A student that is its own teacher is found by its values, whatever they are kept in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.errors import BadInput
from engine.export.convert import convert
from engine.models.decoder import Decoder
from engine.models.load import load_decoder, load_packed_decoder, new_decoder, save_decoder
from engine.quant.blocks import LAYOUTS, WRITTEN
from engine.teachers import same_model
from engine.teachers.frozen import FrozenDecoder
from engine.teachers.same_model import check_not_identical, same_values
from tests.support.packed_models import lively, make_config, write


def teacher_of(decoder: Decoder) -> Decoder:
    """As a run holds it."""
    return FrozenDecoder(decoder).decoder


MADE = [name for name in LAYOUTS if name in WRITTEN]


@pytest.mark.parametrize(
    ("blocks", "tied"),
    [
        *((blocks, False) for blocks in MADE),
        ("Q4_K", True),
        *(
            pytest.param(blocks, True, marks=pytest.mark.soak)
            for blocks in MADE
            if blocks != "Q4_K"
        ),
    ],
)
def test_one_gguf_as_packed_teacher_and_dense_student_is_found(
    tmp_path: Path, blocks: str, tied: bool
) -> None:
    path = write(tmp_path / "m.gguf", lively(make_config(tied=tied)), blocks)
    student = load_decoder(path)
    for dtype in (torch.float32, torch.bfloat16):
        assert same_values(teacher_of(load_packed_decoder(path, dtype)), student)
        assert same_values(teacher_of(load_decoder(path, dtype)), student)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_one_folder_at_two_dtypes_is_found(tmp_path: Path, stored: torch.dtype) -> None:
    save_decoder(lively(make_config()), tmp_path / "plain", stored)
    student = load_decoder(tmp_path / "plain")
    for dtype in (torch.float32, torch.bfloat16):
        assert same_values(teacher_of(load_decoder(tmp_path / "plain", dtype)), student)


def test_a_teacher_in_another_format_is_found(tmp_path: Path) -> None:
    save_decoder(lively(make_config("llama")), tmp_path / "plain", torch.float32)
    for name in ("m.gguf", "m.apr"):
        convert(tmp_path / "plain", tmp_path / name, "bf16" if name == "m.gguf" else "f32")
        teacher = teacher_of(load_decoder(tmp_path / name))
        assert same_values(teacher, load_decoder(tmp_path / "plain"))


def test_a_tied_model_and_one_that_repeats_its_embedding_are_the_same() -> None:
    tied, loose = new_decoder(make_config(tied=True), 3), new_decoder(make_config(), 3)
    loose.load_state_dict({**tied.state_dict(), "head.weight": tied.head_weight})
    assert same_values(tied, loose) and same_values(loose, tied)
    with torch.no_grad():
        loose.head_weight[5, 7] += 1
    assert not same_values(tied, loose)


def test_one_value_of_any_tensor_makes_another_model() -> None:
    teacher, student = lively(make_config()), lively(make_config())
    assert same_values(teacher, student)
    for name, parameter in student.named_parameters():
        last = (-1,) * parameter.dim()
        with torch.no_grad():
            before = parameter[last].clone()
            parameter[last] = before * 1.02 + 1e-6
            assert not same_values(teacher, student), name
            parameter[last] = before
    assert same_values(teacher, student)


def test_a_quantized_teacher_of_the_student_is_another_model(tmp_path: Path) -> None:
    decoder = lively(make_config())
    path = write(tmp_path / "m.gguf", decoder, "Q8_0")
    assert not same_values(teacher_of(load_packed_decoder(path)), decoder)


@pytest.mark.parametrize(
    "changes",
    [{"num_hidden_layers": 3}, {"vocab_size": 90}, {"intermediate_size": 256}, {"family": "qwen3"}],
)
def test_other_shapes_are_told_apart_without_a_comparison_of_values(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(same_model, "_equal")
    assert not same_values(lively(make_config()), lively(make_config(**changes)))  # type: ignore[arg-type]


def test_the_first_difference_ends_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def counting(one: Tensor, other: Tensor) -> bool:
        compared.append(tuple(one.shape))
        return compare(one, other)

    compare = same_model._equal
    monkeypatch.setattr(same_model, "_equal", counting)
    config = make_config()
    assert not same_values(lively(config), lively(config, seed=9))
    assert compared == [(config.vocab_size, config.hidden_size)]


def test_blocks_of_the_same_bytes_are_not_dequantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "m.gguf", lively(make_config()), "Q8_0")
    one, other = (load_packed_decoder(path) for _ in range(2))
    monkeypatch.delattr(same_model, "dequantize_rows_reference")
    assert same_values(one, other)


def test_a_value_that_is_no_number_equals_itself() -> None:
    one, other = lively(make_config()), lively(make_config())
    for decoder in (one, other):
        with torch.no_grad():
            decoder.head_weight[3, 1] = float("nan")
    assert same_values(one, other)


def test_working_in_small_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = lively(make_config()), lively(make_config())
    monkeypatch.setattr(same_model, "PART_VALUES", 1000)
    assert same_values(one, other)
    with torch.no_grad():
        other.head_weight[-1, -1] += 1
    assert not same_values(one, other)


def test_it_is_refused_unless_it_is_asked_for() -> None:
    teacher, student = lively(make_config()), lively(make_config())
    with pytest.raises(BadInput, match=r"student.path: there — expected other weights") as caught:
        check_not_identical(teacher, student, "there", allowed=False)
    assert "teacher.allow_identical=true" in str(caught.value.hint)
    note = check_not_identical(teacher, student, "there", allowed=True)
    assert note is not None and "teaches nothing" in note
    other = lively(make_config(), seed=4)
    for allowed in (False, True):
        assert check_not_identical(teacher, other, "there", allowed=allowed) is None
