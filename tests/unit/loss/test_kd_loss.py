"""The chunked distillation loss against its float64 oracle, its own finite differences, and planted
mistakes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.loss.chunks import default_chunk_rows
from engine.loss.kd_loss import IGNORE_LABEL, LossTerms, distillation_loss
from tests.support.reference_loss import reference_loss

# Shapes: N tokens, V student vocabulary, W teacher vocabulary, D student width, E teacher width.

SHAPES = [(16, 32, 32, 8, 8), (41, 401, 417, 33, 47), (1, 5, 9, 3, 2)]
LossFunction = Callable[..., LossTerms]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    hidden_ND: Tensor
    head_VD: Tensor
    teacher_hidden_NE: Tensor
    teacher_head_WE: Tensor
    labels_N: Tensor

    @property
    def labelled(self) -> int:
        return int((self.labels_N != IGNORE_LABEL).sum())


def make_case(
    shape: tuple[int, int, int, int, int] = SHAPES[1],
    dtype: torch.dtype = torch.float32,
    masked: float = 0.3,
) -> Case:
    n, v, w, d, e = shape
    random = torch.Generator().manual_seed(sum(shape))

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, dtype=torch.float64)

    labels_N = torch.randint(0, v, (n,), generator=random)
    labels_N[torch.rand(n, generator=random) < masked] = IGNORE_LABEL
    labels_N[0] = v - 1  # at least one label, and the last id
    return Case(
        hidden_ND=normal(n, d).to(dtype).requires_grad_(),
        head_VD=normal(v, d).to(dtype).requires_grad_(),
        teacher_hidden_NE=normal(n, e).to(dtype),
        teacher_head_WE=normal(w, e).to(dtype),
        labels_N=labels_N,
    )


def run(
    case: Case,
    alpha: float,
    temperature: float,
    *,
    loss: LossFunction = distillation_loss,
    denominator: float | Tensor | None = None,
    chunk_rows: int | None = 7,
) -> LossTerms:
    return loss(
        case.hidden_ND,
        case.head_VD,
        case.teacher_hidden_NE,
        case.teacher_head_WE,
        case.labels_N,
        alpha=alpha,
        temperature=temperature,
        denominator=max(case.labelled, 1) if denominator is None else denominator,
        chunk_rows=chunk_rows,
    )


def gradients(case: Case, loss: Tensor) -> tuple[Tensor, Tensor]:
    hidden, head = torch.autograd.grad(loss, (case.hidden_ND, case.head_VD))
    return hidden, head


def run_reference(case: Case, alpha: float, temperature: float) -> tuple[LossTerms, Case]:
    """The oracle on the same numbers widened to float64 before the logits are made."""
    wide = Case(
        hidden_ND=case.hidden_ND.detach().double().requires_grad_(),
        head_VD=case.head_VD.detach().double().requires_grad_(),
        teacher_hidden_NE=case.teacher_hidden_NE.double(),
        teacher_head_WE=case.teacher_head_WE.double(),
        labels_N=case.labels_N,
    )
    terms = reference_loss(
        wide.hidden_ND @ wide.head_VD.t(),
        wide.teacher_hidden_NE @ wide.teacher_head_WE.t(),
        wide.labels_N,
        alpha,
        temperature,
    )
    return terms, wide


def assert_close(name: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Largest error against the largest expected value: a gradient's small entries carry its large
    ones' rounding.
    """
    error = (found.detach().double() - expected.detach().double()).abs()
    scale = expected.detach().double().abs().max().clamp_min(1e-3)
    worst = float(error.max() / scale)
    assert worst <= tolerance, f"{name}: max error {worst:.2e}, mean {float(error.mean()):.2e}"


# fp32 products of width 33 with logits up to about 20: 1e-6 relative in a logit, 1e-5 in what is
# made of it, T = 4 more.
FP32 = 5e-5


def assert_is_the_objective(
    loss: LossFunction, case: Case, alpha: float, temperature: float
) -> None:
    """The one check that a right loss passes and every planted mistake must fail: values and
    gradients against the oracle.
    """
    expected, wide = run_reference(case, alpha, temperature)
    found = run(case, alpha, temperature, loss=loss)
    assert_close("loss", found.loss, expected.loss, FP32)
    assert_close("ce", found.ce, expected.ce, FP32)
    assert (found.kd is None) == (expected.kd is None) == (alpha == 1)
    if found.kd is not None and expected.kd is not None:
        assert_close("kd", found.kd, expected.kd, FP32)
    if found.agreement is not None and expected.agreement is not None:
        assert_close("agreement", found.agreement, expected.agreement, 1e-6)
    assert int(found.labelled) == case.labelled
    pairs = zip(gradients(case, found.loss), gradients(wide, expected.loss), strict=True)
    for name, (mine, theirs) in zip(("dH", "dW"), pairs, strict=True):
        assert_close(name, mine, theirs, FP32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0, 4.0])
def test_value_and_gradient_equal_the_reference(
    shape: tuple[int, int, int, int, int], alpha: float, temperature: float
) -> None:
    assert_is_the_objective(distillation_loss, make_case(shape), alpha, temperature)


def swapped_alpha(*tensors: Any, alpha: float, **rest: Any) -> LossTerms:
    return distillation_loss(*tensors, alpha=1 - alpha, **rest)


def gradient_without_t_squared(
    *tensors: Any, alpha: float, temperature: float, **rest: Any
) -> LossTerms:
    """The returned number carries T^2 and the gradient does not."""

    def terms_at(weight: float) -> LossTerms:
        return distillation_loss(*tensors, alpha=weight, temperature=temperature, **rest)

    right = terms_at(alpha)
    trained = alpha * terms_at(1).loss + (1 - alpha) * terms_at(0).loss / temperature**2
    return LossTerms(
        loss=right.loss.detach() + (trained - trained.detach()),
        ce=right.ce,
        kd=right.kd,
        agreement=right.agreement,
        labelled=right.labelled,
    )


@pytest.mark.parametrize("mistake", [swapped_alpha, gradient_without_t_squared])
def test_a_planted_mistake_fails_the_check_that_the_loss_passes(mistake: LossFunction) -> None:
    case = make_case()
    assert_is_the_objective(distillation_loss, case, 0.3, 2.0)
    with pytest.raises(AssertionError, match="max error"):
        assert_is_the_objective(mistake, case, 0.3, 2.0)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0, 4.0])
def test_reported_loss_falls_along_its_gradient_as_finite_differences_say(
    alpha: float, temperature: float
) -> None:
    case = make_case((11, 23, 29, 5, 4), dtype=torch.float64)
    slopes = gradients(case, run(case, alpha, temperature).loss)
    squared_norm = float(sum((slope**2).sum() for slope in slopes))
    step = 1e-5 / squared_norm**0.5
    values = []
    for sign in (1, -1):
        moved = Case(
            hidden_ND=case.hidden_ND.detach() + sign * step * slopes[0],
            head_VD=case.head_VD.detach() + sign * step * slopes[1],
            teacher_hidden_NE=case.teacher_hidden_NE,
            teacher_head_WE=case.teacher_head_WE,
            labels_N=case.labels_N,
        )
        values.append(float(run(moved, alpha, temperature).loss.detach()))
    slope = (values[0] - values[1]) / (2 * step)
    assert slope == pytest.approx(squared_norm, rel=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_kd_and_its_gradient_are_exactly_zero_when_student_equals_teacher(
    temperature: float,
) -> None:
    case = make_case((41, 401, 401, 33, 33))
    same = Case(
        hidden_ND=case.hidden_ND,
        head_VD=case.head_VD,
        teacher_hidden_NE=case.hidden_ND.detach(),
        teacher_head_WE=case.head_VD.detach(),
        labels_N=case.labels_N,
    )
    terms = run(same, 0.0, temperature)
    assert terms.kd is not None and float(terms.kd) == 0
    assert terms.agreement is not None and float(terms.agreement) == 1
    for slope in gradients(same, terms.loss):
        assert float(slope.abs().max()) == 0


def test_small_kl_keeps_its_digits_in_fp32() -> None:
    case = make_case((41, 401, 401, 33, 33))
    near = Case(
        hidden_ND=case.hidden_ND,
        head_VD=case.head_VD,
        teacher_hidden_NE=case.hidden_ND.detach() * (1 + 1e-3),
        teacher_head_WE=case.head_VD.detach(),
        labels_N=case.labels_N,
    )
    expected, wide = run_reference(near, 0.0, 1.0)
    found = run(near, 0.0, 1.0)
    assert expected.kd is not None and 0 < float(expected.kd) < 1e-4
    # KL is a difference of logarithms of size 10 here, so fp32 leaves about 1e-6 of it; the
    # gradient is p - q and loses nothing
    assert found.kd is not None and float(found.kd) == pytest.approx(float(expected.kd), abs=2e-6)
    for name, mine, theirs in zip(
        ("dH", "dW"), gradients(near, found.loss), gradients(wide, expected.loss), strict=True
    ):
        error = float((mine.double() - theirs).norm() / theirs.norm())
        assert error < 5e-3, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_reference_is_unchanged_when_a_constant_is_added_to_a_row_of_logits(side: str) -> None:
    case = make_case()
    student_NV = (case.hidden_ND @ case.head_VD.t()).detach()
    teacher_NW = case.teacher_hidden_NE @ case.teacher_head_WE.t()
    before = reference_loss(student_NV, teacher_NW, case.labels_N, 0.3, 2.0)
    shift_N1 = torch.linspace(-8, 8, student_NV.shape[0]).unsqueeze(1)
    if side == "student":
        student_NV = student_NV + shift_N1
    else:
        teacher_NW = teacher_NW + shift_N1
    after = reference_loss(student_NV, teacher_NW, case.labels_N, 0.3, 2.0)
    # fp32 logits move by up to 1e-6 when 8 is added to them
    assert float(after.loss) == pytest.approx(float(before.loss), rel=1e-6)


def test_truncated_teacher_columns_have_no_effect() -> None:
    case = make_case()
    vocabulary = case.head_VD.shape[0]
    before = run(case, 0.3, 2.0)
    case.teacher_head_WE[vocabulary:] = 1e4
    after = run(case, 0.3, 2.0)
    assert torch.equal(before.loss, after.loss)
    narrow = Case(
        hidden_ND=case.hidden_ND,
        head_VD=case.head_VD,
        teacher_hidden_NE=case.teacher_hidden_NE,
        teacher_head_WE=case.teacher_head_WE[:vocabulary].clone(),
        labels_N=case.labels_N,
    )
    assert torch.equal(before.loss, run(narrow, 0.3, 2.0).loss)


def test_masked_tokens_change_nothing_and_get_no_gradient() -> None:
    case = make_case()
    masked_N = case.labels_N == IGNORE_LABEL
    before = run(case, 0.3, 2.0)
    dh_before, dw_before = gradients(case, before.loss)
    assert masked_N.any() and float(dh_before[masked_N].abs().max()) == 0
    with torch.no_grad():
        case.hidden_ND[masked_N] = float("nan")
        case.teacher_hidden_NE[masked_N] = float("inf")
    after = run(case, 0.3, 2.0)
    dh_after, dw_after = gradients(case, after.loss)
    assert torch.equal(before.loss, after.loss)
    assert torch.equal(dh_before, dh_after) and torch.equal(dw_before, dw_after)


def test_kd_approaches_half_the_variance_of_the_logit_gap_at_high_temperature() -> None:
    """T^2 KL -> Var_v(t - z) / 2, which has no T in it: so the T^2 is right, and without it the
    term would vanish as 1/T^2.
    """
    case = make_case((17, 64, 64, 6, 6), dtype=torch.float64, masked=0)
    gap_NV = case.teacher_hidden_NE @ case.teacher_head_WE.t() - case.hidden_ND @ case.head_VD.t()
    limit = float(gap_NV.detach().var(dim=1, correction=0).mean() / 2)
    cool, hot = (run(case, 0.0, temperature).kd for temperature in (1e3, 1e4))
    assert cool is not None and hot is not None
    assert float(cool) == pytest.approx(limit, rel=1e-2)
    assert float(hot) == pytest.approx(limit, rel=1e-3)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_pieces_of_a_batch_with_one_denominator_give_the_gradient_of_the_whole(
    as_tensor: bool,
) -> None:
    case = make_case()
    n = torch.tensor(float(case.labelled)) if as_tensor else float(case.labelled)
    whole = run(case, 0.3, 2.0, denominator=n)
    expected = gradients(case, whole.loss)
    pieces = []
    for rows in (slice(0, 3), slice(3, 30), slice(30, 41)):
        terms = distillation_loss(
            case.hidden_ND[rows],
            case.head_VD,
            case.teacher_hidden_NE[rows],
            case.teacher_head_WE,
            case.labels_N[rows],
            alpha=0.3,
            temperature=2.0,
            denominator=n,
        )
        torch.autograd.backward(terms.loss)
        pieces.append(terms)
    assert case.hidden_ND.grad is not None and case.head_VD.grad is not None
    assert_close("dH", case.hidden_ND.grad, expected[0], 1e-5)  # sums of fp32 in another order
    assert_close("dW", case.head_VD.grad, expected[1], 1e-5)
    assert sum(float(piece.loss.detach()) for piece in pieces) == pytest.approx(
        float(whole.loss.detach()), rel=1e-6
    )
    assert sum(int(piece.labelled) for piece in pieces) == int(whole.labelled)


def test_alpha_one_is_cross_entropy_and_never_touches_the_teacher() -> None:
    case = make_case()
    expected = F.cross_entropy(case.hidden_ND @ case.head_VD.t(), case.labels_N)
    wanted = gradients(case, expected)
    poison_NE = torch.full((41, 47), float("nan"))
    for hidden_NE, head_WE in ((None, None), (poison_NE, case.teacher_head_WE)):
        terms = distillation_loss(
            case.hidden_ND,
            case.head_VD,
            hidden_NE,
            head_WE,
            case.labels_N,
            alpha=1,
            temperature=2.0,
            denominator=case.labelled,
        )
        assert terms.kd is None and terms.agreement is None
        assert_close("loss", terms.loss, expected, 1e-6)
        for name, mine, theirs in zip(
            ("dH", "dW"), gradients(case, terms.loss), wanted, strict=True
        ):
            assert_close(name, mine, theirs, 1e-5)


@pytest.mark.parametrize("denominator", [5.0, torch.tensor(0.0)])
@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_all_masked_input_has_loss_zero_and_zero_gradients(
    alpha: float, denominator: float | Tensor
) -> None:
    case = make_case()
    case.labels_N.fill_(IGNORE_LABEL)
    terms = run(case, alpha, 2.0, denominator=denominator)
    assert float(terms.loss.detach()) == 0 and float(terms.ce) == 0 and int(terms.labelled) == 0
    for slope in gradients(case, terms.loss):
        assert float(slope.abs().max()) == 0
    logits_NV = (case.hidden_ND @ case.head_VD.t()).detach()
    assert float(reference_loss(logits_NV, None, case.labels_N, 1.0, 2.0).loss) == 0


def test_gradients_follow_a_scaled_upstream_gradient_and_may_be_asked_for_twice() -> None:
    case = make_case()
    terms = run(case, 0.3, 2.0)
    once = torch.autograd.grad(terms.loss, (case.hidden_ND, case.head_VD), retain_graph=True)
    scaled = torch.autograd.grad(1024 * terms.loss, (case.hidden_ND, case.head_VD))
    for plain, large in zip(once, scaled, strict=True):
        assert torch.equal(1024 * plain, large)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_logit_gives_a_non_finite_loss(alpha: float, value: float) -> None:
    case = make_case((16, 32, 32, 8, 8), masked=0)
    with torch.no_grad():
        case.hidden_ND[3, 2] = value
    assert not torch.isfinite(run(case, alpha, 2.0).loss)


def test_a_non_finite_teacher_gives_a_non_finite_loss() -> None:
    case = make_case((16, 32, 32, 8, 8), masked=0)
    case.teacher_hidden_NE[3, 2] = float("nan")
    assert not torch.isfinite(run(case, 0.3, 2.0).loss)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_gradient_of_the_logits_sums_to_zero_in_every_row(alpha: float, temperature: float) -> None:
    vocabulary = 37
    case = make_case((19, vocabulary, 40, vocabulary, 8))
    with torch.no_grad():
        case.head_VD.copy_(torch.eye(vocabulary))  # hidden states are the logits, so dH is dz
    dz_NV, _ = gradients(case, run(case, alpha, temperature).loss)
    # V fp32 terms of at most T/n each
    assert float(dz_NV.sum(dim=1).abs().max()) < 1e-6
    assert float(dz_NV.abs().max()) > 1e-3


def test_chunk_size_does_not_change_the_objective() -> None:
    case = make_case()
    whole = gradients(case, run(case, 0.3, 2.0, chunk_rows=None).loss)
    for chunk_rows in (1, 5, 41, 1000):
        for name, mine, theirs in zip(
            ("dH", "dW"),
            gradients(case, run(case, 0.3, 2.0, chunk_rows=chunk_rows).loss),
            whole,
            strict=True,
        ):
            assert_close(f"{name} in chunks of {chunk_rows}", mine, theirs, 1e-5)


def test_default_chunk_is_bounded_in_bytes_and_never_empty() -> None:
    assert default_chunk_rows("cpu", 4096) == 256
    assert default_chunk_rows("cuda", 151_936) == 1104
    assert default_chunk_rows("cuda", 151_936, fused=True) == 2208
    assert default_chunk_rows("cpu", 10**9) == 16


def test_a_tied_head_adds_its_gradient_to_the_embedding() -> None:
    ids_N = torch.tensor([1, 4, 2, 0])
    labels_N = torch.tensor([4, 2, 0, 3])
    embedding_VD = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))

    def gradient(chunked: bool) -> Tensor:
        weight_VD = embedding_VD.clone().requires_grad_()
        hidden_ND = torch.tanh(F.embedding(ids_N, weight_VD))
        if chunked:
            terms = distillation_loss(
                hidden_ND, weight_VD, None, None, labels_N, alpha=1, temperature=1, denominator=4
            )
            torch.autograd.backward(terms.loss)
        else:
            torch.autograd.backward(F.cross_entropy(hidden_ND @ weight_VD.t(), labels_N))
        assert weight_VD.grad is not None
        return weight_VD.grad

    assert_close("embedding", gradient(True), gradient(False), 1e-5)


def test_a_teacher_that_asks_for_a_gradient_gets_none() -> None:
    case = make_case()
    case.teacher_head_WE.requires_grad_()
    case.teacher_hidden_NE.requires_grad_()
    torch.autograd.backward(run(case, 0.3, 2.0).loss)
    assert case.teacher_head_WE.grad is None and case.teacher_hidden_NE.grad is None


def test_a_teacher_run_under_inference_mode_teaches_the_same() -> None:
    case = make_case()
    expected = run(case, 0.3, 2.0)
    with torch.inference_mode():
        hidden_NE, head_WE = case.teacher_hidden_NE.clone(), case.teacher_head_WE.clone()
    frozen = Case(
        hidden_ND=case.hidden_ND,
        head_VD=case.head_VD,
        teacher_hidden_NE=hidden_NE,
        teacher_head_WE=head_WE,
        labels_N=case.labels_N,
    )
    found = run(frozen, 0.3, 2.0)
    assert torch.equal(found.loss, expected.loss)
    for mine, theirs in zip(
        gradients(frozen, found.loss), gradients(case, expected.loss), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_without_grad_mode_the_terms_are_the_same_and_carry_no_graph() -> None:
    case = make_case()
    expected = run(case, 0.3, 2.0)
    with torch.no_grad():
        found = run(case, 0.3, 2.0)
    assert torch.equal(found.loss, expected.loss) and not found.loss.requires_grad
    assert not expected.ce.requires_grad and expected.kd is not None
    assert not expected.kd.requires_grad


def test_bf16_hidden_states_under_cpu_autocast_keep_fp32_logits() -> None:
    case = make_case()
    narrow = Case(
        hidden_ND=case.hidden_ND.detach().bfloat16().requires_grad_(),
        head_VD=case.head_VD,
        teacher_hidden_NE=case.teacher_hidden_NE.bfloat16(),
        teacher_head_WE=case.teacher_head_WE.bfloat16(),
        labels_N=case.labels_N,
    )
    expected, wide = run_reference(narrow, 0.3, 2.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        terms = run(narrow, 0.3, 2.0)
    dh_ND, dw_VD = gradients(narrow, terms.loss)
    assert dh_ND.dtype == torch.bfloat16 and dw_VD.dtype == torch.float32
    assert_close("loss", terms.loss, expected.loss, FP32)
    wanted = gradients(wide, expected.loss)
    assert_close("dH", dh_ND, wanted[0], 2**-8)  # one rounding to bf16
    assert_close("dW", dw_VD, wanted[1], FP32)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_bf16_autocast_on_a_gpu_keeps_the_fp32_accumulator(alpha: float) -> None:
    case = make_case((257, 4099, 4160, 64, 96))
    device = torch.device("cuda")
    with torch.no_grad():
        moved = Case(
            hidden_ND=(case.hidden_ND * 0.3).bfloat16().to(device).requires_grad_(),
            head_VD=case.head_VD.bfloat16().float().to(device).requires_grad_(),  # fp32 master
            teacher_hidden_NE=(case.teacher_hidden_NE * 0.3).bfloat16().to(device),
            teacher_head_WE=case.teacher_head_WE.bfloat16().to(device),
            labels_N=case.labels_N,
        )
    on_device = Case(
        hidden_ND=moved.hidden_ND,
        head_VD=moved.head_VD,
        teacher_hidden_NE=moved.teacher_hidden_NE,
        teacher_head_WE=moved.teacher_head_WE,
        labels_N=moved.labels_N.to(device),
    )
    expected, wide = run_reference(on_device, alpha, 2.0)
    torch.cuda.set_sync_debug_mode(
        "error"
    )  # labels in host memory: nothing below may wait for the device
    try:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            terms = run(moved, alpha, 2.0, chunk_rows=100)
        slopes = gradients(moved, terms.loss)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert slopes[1].dtype == torch.float32
    # both sides start from the same bf16 numbers, so the logits differ by fp32 rounding; dz is
    # rounded to bf16 for its products
    assert_close("loss", terms.loss, expected.loss, FP32)
    for name, mine, theirs in zip(
        ("dH", "dW"), slopes, gradients(wide, expected.loss), strict=True
    ):
        assert_close(name, mine, theirs, 2**-7)
