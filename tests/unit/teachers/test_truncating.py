"""A teacher cut to its student's ids, and the probability that the cut drops."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.errors import BadInput
from engine.loss.kd_loss import distillation_loss
from engine.models.decoder import Decoder
from engine.models.load import load_packed_decoder
from engine.teachers import truncating
from engine.teachers.build import build_teacher
from engine.teachers.frozen import DequantizedTeacher, QuantizedTeacher, matmul_precision
from engine.teachers.protocol import Teacher
from engine.teachers.truncating import TruncatingTeacher
from tests.support.packed_models import lively, make_batch, make_config, write

CPU = torch.device("cpu")
IDS, KEPT = 101, 83


def teacher() -> DequantizedTeacher:
    return DequantizedTeacher(lively(make_config()))


def dropped_by_hand(decoder: Decoder, kept: int, temperature: float, rows: int) -> Tensor:
    """1 - the kept probability, in float64, of the labelled tokens of `make_batch(rows, 21)`."""
    tokens_BT, documents_BT, labels_BT = make_batch(rows, 21).to_torch(CPU)
    with torch.no_grad():
        hidden_BTE = decoder.hidden(tokens_BT, documents_BT)
        logits_BTW = hidden_BTE.double() @ decoder.head_weight.double().T
    p_NW = (logits_BTW[labels_BT >= 0] / temperature).softmax(-1)
    return p_NW[:, kept:].sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("kept", [1, KEPT, IDS - 1])
def test_the_dropped_mass_is_what_the_softmax_says(
    kept: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Parts that the cut falls into, and chunks with a short last one.
    monkeypatch.setattr(truncating, "PART_ROWS", 24)
    monkeypatch.setattr(truncating, "CHUNK", 17)
    frozen = teacher()
    found = TruncatingTeacher(frozen, kept).dropped_mass(
        [make_batch(3, 21)], CPU, temperature=temperature
    )
    expected_N = dropped_by_hand(frozen.decoder, kept, temperature, 3)
    assert found.tokens == 60
    assert found.mean == pytest.approx(float(expected_N.mean()), rel=1e-5)
    assert found.largest == pytest.approx(float(expected_N.max()), rel=1e-5)


def test_a_mass_below_the_rounding_of_one_is_still_measured() -> None:
    decoder = lively(make_config())
    with torch.no_grad():
        decoder.head_weight[KEPT:] = 0
        decoder.head_weight[:KEPT] *= 8
    frozen = DequantizedTeacher(decoder)
    found = TruncatingTeacher(frozen, KEPT).dropped_mass([make_batch(2, 21)], CPU, temperature=1.0)
    expected_N = dropped_by_hand(frozen.decoder, KEPT, 1.0, 2)
    assert 0 < float(expected_N.min()) < 2**-25
    assert found.mean == pytest.approx(float(expected_N.mean()), rel=1e-4)


def test_without_a_labelled_token_there_is_no_number() -> None:
    found = TruncatingTeacher(teacher(), KEPT).dropped_mass([], CPU, temperature=1.0)
    assert found.tokens == 0 and math.isnan(found.mean) and math.isnan(found.largest)


def test_a_packed_teacher_drops_what_its_values_drop(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", lively(make_config()), "Q6_K")
    batches = [make_batch(2, 21)]
    built = build_teacher(
        path, backend="quantized", precision="fp32", device=CPU, student_vocab=KEPT
    )
    assert isinstance(built.teacher, TruncatingTeacher)
    assert isinstance(built.teacher.inner, QuantizedTeacher)
    dense = build_teacher(
        path, backend="dequantized", precision="fp32", device=CPU, student_vocab=KEPT
    )
    assert isinstance(dense.teacher, TruncatingTeacher)
    assert isinstance(dense.teacher.inner, DequantizedTeacher)
    found, expected = (
        t.dropped_mass(batches, CPU, temperature=2.0) for t in (built.teacher, dense.teacher)
    )
    assert 0.01 < found.mean < 0.5 and found.mean == pytest.approx(expected.mean, rel=1e-4)


def test_the_cut_is_before_the_softmax() -> None:
    frozen = teacher()
    cut = TruncatingTeacher(frozen, KEPT)
    assert cut.vocab_size == cut.head().vocab_size == KEPT
    ((_, weight_VE),) = cut.head().slices(KEPT, torch.float32)
    assert torch.equal(weight_VE, frozen.decoder.head_weight[:KEPT])
    # Nothing beyond the cut is given out, whatever is asked for.
    assert sum(len(s) for _, s in cut.head().slices(IDS, torch.float32)) == KEPT


def test_the_loss_is_that_of_the_teacher_itself() -> None:
    frozen = teacher()
    tokens_BT, documents_BT, labels_BT = make_batch(2, 21, KEPT).to_torch(CPU)
    student = lively(make_config(vocab_size=KEPT), seed=5)

    def loss(teaching: Teacher) -> float:
        terms = distillation_loss(
            student.hidden(tokens_BT, documents_BT).flatten(0, 1),
            student.head_weight,
            teaching.hidden(tokens_BT, documents_BT).flatten(0, 1),
            teaching.head(),
            labels_BT.flatten(),
            alpha=0.3,
            temperature=2.0,
            denominator=40.0,
        )
        return float(terms.loss.detach())

    assert loss(TruncatingTeacher(frozen, KEPT)) == loss(frozen)


def test_a_student_with_more_ids_is_refused() -> None:
    with pytest.raises(BadInput, match="at most the teacher's 101 ids, found 102"):
        TruncatingTeacher(teacher(), 102)


def test_equal_vocabularies_are_not_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", lively(make_config()), "Q8_0")
    for backend, kind in (("quantized", QuantizedTeacher), ("dequantized", DequantizedTeacher)):
        built = build_teacher(
            path,
            backend=backend,
            precision="bf16",
            device=CPU,
            student_vocab=IDS,
        )
        assert type(built.teacher) is kind
        assert built.teacher.hidden(*make_batch(1, 5).to_torch(CPU)[:2]).dtype == torch.bfloat16


@pytest.mark.parametrize("packed", [False, True])
def test_a_teacher_has_nothing_that_a_gradient_could_reach(tmp_path: Path, packed: bool) -> None:
    frozen: DequantizedTeacher | QuantizedTeacher = teacher()
    if packed:
        path = write(tmp_path / "m.gguf", frozen.decoder, "Q8_0")
        frozen = QuantizedTeacher(load_packed_decoder(path))
    decoder = frozen.decoder
    assert list(decoder.parameters()) == [] and not decoder.training
    decoder.requires_grad_(True)
    tokens_BT, documents_BT, _ = make_batch(1, 9).to_torch(CPU)
    hidden_BTE = frozen.hidden(tokens_BT, documents_BT)
    assert hidden_BTE.is_inference() and not hidden_BTE.requires_grad
    assert not any(s.requires_grad for _, s in frozen.head().slices(IDS, torch.float32))
    assert not hasattr(frozen, "parameters")


def test_a_teacher_answers_the_same_under_autocast() -> None:
    frozen = teacher()
    tokens_BT, documents_BT, _ = make_batch(1, 9).to_torch(CPU)
    expected_BTE = frozen.hidden(tokens_BT, documents_BT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(frozen.hidden(tokens_BT, documents_BT), expected_BTE)


def test_tf32_lasts_as_long_as_the_teacher_computes() -> None:
    before = torch.get_float32_matmul_precision()
    with matmul_precision("fp32"):
        assert torch.get_float32_matmul_precision() == before
    with pytest.raises(ZeroDivisionError), matmul_precision("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
        _ = 1 / 0
    assert torch.get_float32_matmul_precision() == before
