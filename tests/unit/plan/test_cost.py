"""What a step costs: against the sums of published shapes, and no rate for an unknown device."""

from __future__ import annotations

import pytest

from engine.plan.cost import LAUNCHES, flops_per_token, peak_flops, step_costs
from evidence.bench.shapes import config_named

STUDENT, TEACHER = config_named("qwen2.5-0.5b"), config_named("qwen2.5-7b")


@pytest.mark.parametrize(
    ("seq_len", "teacher_gflop", "student_gflop"),
    [(1024, 14.35, 3.10), (2048, 14.55, 3.23), (8192, 15.79, 4.02)],
)
def test_operations_of_a_token_are_those_of_the_published_shapes(
    seq_len: int, teacher_gflop: float, student_gflop: float
) -> None:
    alone = flops_per_token(STUDENT, None, seq_len)
    assert alone / 1e9 == pytest.approx(student_gflop, abs=0.01)
    both = flops_per_token(STUDENT, TEACHER, seq_len)
    assert (both - alone) / 1e9 == pytest.approx(teacher_gflop, abs=0.01)


def test_a_peak_is_of_the_device_that_is_named_and_an_unknown_one_has_none() -> None:
    one, two = peak_flops("NVIDIA H200"), peak_flops("NVIDIA H200", 2)
    assert one.number == 989.4e12 and "datasheet" in one.source
    assert two.number == 2 * 989.4e12 and "2 GPUs" in two.source
    unknown = peak_flops("NVIDIA GB10")
    assert unknown.number is None and "GB10" in str(unknown.absent)


def test_the_parts_of_a_step_are_those_of_its_models() -> None:
    parts = step_costs(STUDENT, TEACHER, 4096, 1024, 2, recomputes=True, chunk_rows=500)
    assert parts["backward"].flops == 3 * parts["student"].flops
    assert parts["backward"].launches == 3 * parts["student"].launches == 3 * 2 * 24 * LAUNCHES
    # A micro-batch of 2048 tokens ends with a chunk that is not full.
    assert parts["loss"].launches == LAUNCHES * 2 * 5
    assert parts["teacher"].flops > 10 * parts["student"].flops
    stored = step_costs(STUDENT, TEACHER, 4096, 1024, stored=True)["teacher"]
    assert stored.flops == 0.0 < stored.moved_bytes
    assert "teacher" not in step_costs(STUDENT, None, 4096, 1024)
