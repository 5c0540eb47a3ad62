"""How fast a run could be: against the sums of the reference, and no number for an unknown device."""

from __future__ import annotations

import pytest

from engine.bench.teacher import config_named
from engine.train.roofline import Bound, flops_per_token, peak_flops

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


def test_a_share_is_of_the_device_that_is_named_and_an_unknown_one_has_none() -> None:
    flops = flops_per_token(STUDENT, TEACHER, 1024)
    share = Bound(flops_per_token=flops, peak=peak_flops("NVIDIA H200")).share(10_000)
    assert share.number == pytest.approx(10_000 * 17.44e9 / 989.4e12, rel=1e-3)
    assert "datasheet" in share.source
    two = Bound(flops_per_token=flops, peak=peak_flops("NVIDIA H200", 2)).share(20_000)
    assert two.number == pytest.approx(share.number) and "2 GPUs" in two.source
    unknown = Bound(flops_per_token=flops, peak=peak_flops("NVIDIA GB10")).share(10_000)
    assert unknown.number is None and "GB10" in str(unknown.absent)
