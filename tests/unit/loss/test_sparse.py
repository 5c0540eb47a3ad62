"""The loss against some ids of each token, against float64 autograd of what it says it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from engine.loss.chunks import SparseTargets
from engine.loss.kd_loss import (
    LARGEST_DZ_SUM,
    LOWEST_DIVERGENCE,
    LossTerms,
    distillation_loss,
)

# Shapes: N tokens, V vocabulary, D student width, K ids of a token


def make(rows: int = 19, vocabulary: int = 37, width: int = 8, seed: int = 0) -> dict[str, Tensor]:
    """Hidden states, a head, teacher logits and labels, of which every fourth is none."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    labels_N = torch.randint(0, vocabulary, (rows,), generator=generator)
    labels_N[3::4] = -100
    return dict(
        hidden_ND=normal(rows, width).requires_grad_(),
        head_VD=normal(vocabulary, width).requires_grad_(),
        teacher_NV=2 * normal(rows, vocabulary),
        labels_N=labels_N,
    )


def top_k(teacher_NV: Tensor, count: int, temperature: float) -> SparseTargets:
    log_probs_NV = torch.log_softmax(teacher_NV / temperature, dim=1)
    values_NK, ids_NK = log_probs_NV.topk(count, dim=1)
    return SparseTargets(ids_NK=ids_NK, log_probs_NK=values_NK)


def run(case: dict[str, Tensor], targets: SparseTargets, **changes: Any) -> LossTerms:
    given: dict[str, Any] = dict(alpha=0.3, temperature=2.0, chunk_rows=5) | changes
    labels_N = case["labels_N"]
    return distillation_loss(
        case["hidden_ND"],
        case["head_VD"],
        None,
        None,
        labels_N,
        denominator=float((labels_N >= 0).sum()),
        targets=targets,
        **given,
    )


def slopes(case: dict[str, Tensor], loss: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, (case["hidden_ND"], case["head_VD"]))


def oracle(
    case: dict[str, Tensor], targets: SparseTargets, alpha: float, temperature: float
) -> Tensor:
    """The objective row by row, by its definition, for autograd."""
    total = torch.zeros((), dtype=torch.float64)
    logits_NV = case["hidden_ND"] @ case["head_VD"].t()
    rows = (case["labels_N"] >= 0).nonzero().flatten().tolist()
    for row in rows:
        log_q_V = torch.log_softmax(logits_NV[row] / temperature, 0)
        ids_K = targets.ids_NK[row].long()
        if targets.log_probs_NK is None:
            kd = -log_q_V[ids_K].mean()
        else:
            log_p_K = targets.log_probs_NK[row].double()
            rest = torch.ones_like(log_q_V, dtype=torch.bool)
            rest[ids_K] = False
            tail_p = (1 - log_p_K.exp().sum()).clamp(min=0)
            kd = (log_p_K.exp() * (log_p_K - log_q_V[ids_K])).sum()
            if tail_p > 0:
                kd = kd + tail_p * (tail_p.log() - log_q_V[rest].exp().sum().log())
        ce = F.cross_entropy(logits_NV[row], case["labels_N"][row])
        total = total + alpha * ce + (1 - alpha) * temperature**2 * kd
    return total / len(rows)


def assert_is(case: dict[str, Tensor], targets: SparseTargets, alpha: float, T: float) -> None:
    found = run(case, targets, alpha=alpha, temperature=T)
    wanted = oracle(case, targets, alpha, T)
    assert float(found.loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-10)
    for mine, theirs in zip(slopes(case, found.loss), slopes(case, wanted), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-10)


@given(
    count=st.integers(1, 36),
    alpha=st.sampled_from([0.0, 0.3]),
    temperature=st.sampled_from([1.0, 2.0, 0.7]),
    seed=st.integers(0, 5),
)
@settings(max_examples=30, deadline=None)
def test_top_k_with_a_tail_is_the_objective_and_its_gradient(
    count: int, alpha: float, temperature: float, seed: int
) -> None:
    case = make(seed=seed)
    assert_is(case, top_k(case["teacher_NV"], count, temperature), alpha, temperature)


@given(
    count=st.integers(1, 50),
    alpha=st.sampled_from([0.0, 0.3]),
    temperature=st.sampled_from([1.0, 2.0]),
    seed=st.integers(0, 5),
)
@settings(max_examples=30, deadline=None)
def test_draws_are_the_objective_and_its_gradient_with_repeats(
    count: int, alpha: float, temperature: float, seed: int
) -> None:
    case = make(seed=seed)
    p_NV = torch.softmax(case["teacher_NV"] / temperature, 1)
    ids_NK = torch.multinomial(
        p_NV, count, replacement=True, generator=torch.Generator().manual_seed(seed)
    )
    targets = SparseTargets(ids_NK=ids_NK.int(), log_probs_NK=None)
    assert_is(case, targets, alpha, temperature)


def whole(case: dict[str, Tensor], **changes: Any) -> LossTerms:
    """Against the teacher's own logits: a head that is the identity."""
    vocabulary = case["teacher_NV"].shape[1]
    labels_N = case["labels_N"]
    given: dict[str, Any] = dict(alpha=0.0, temperature=2.0, chunk_rows=5) | changes
    return distillation_loss(
        case["hidden_ND"],
        case["head_VD"],
        case["teacher_NV"],
        torch.eye(vocabulary, dtype=torch.float64),
        labels_N,
        denominator=float((labels_N >= 0).sum()),
        **given,
    )


@pytest.mark.parametrize("count", [36, 37])
def test_all_ids_are_the_whole_divergence(count: int) -> None:
    """With all but one, the tail is that one; with all, it is empty."""
    case = make()
    expected = whole(case)
    found = run(case, top_k(case["teacher_NV"], count, 2.0), alpha=0.0)
    assert found.kd is not None and expected.kd is not None
    assert float(found.kd) == pytest.approx(float(expected.kd), rel=1e-9)
    for mine, theirs in zip(slopes(case, found.loss), slopes(case, expected.loss), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-9)
    assert found.agreement is not None and expected.agreement is not None
    assert float(found.agreement) == float(expected.agreement)


def test_the_mean_of_all_draws_is_the_gradient_of_the_whole_divergence() -> None:
    """One draw each: its gradients, weighted with the probability of the draw, are those of the KL."""
    case = make(rows=3, vocabulary=9)
    case["labels_N"][:] = torch.tensor([1, -100, -100])
    expected = slopes(case, whole(case).loss)
    p_V = torch.softmax(case["teacher_NV"][0] / 2.0, 0)
    mean = [torch.zeros_like(slope) for slope in expected]
    for id_, probability in enumerate(p_V):
        targets = SparseTargets(ids_NK=torch.full((3, 1), id_), log_probs_NK=None)
        for total, slope in zip(
            mean, slopes(case, run(case, targets, alpha=0.0).loss), strict=True
        ):
            total += probability * slope
    for found, wanted in zip(mean, expected, strict=True):
        assert torch.allclose(found, wanted, rtol=0, atol=1e-12)


def test_a_student_that_ignores_the_kept_ids_pays_for_it() -> None:
    """Renormalised over the kept ids, a student with no mass on them would score 0."""
    case = make(rows=4, vocabulary=20)
    targets = top_k(case["teacher_NV"], 3, 1.0)
    with torch.no_grad():
        case["head_VD"].copy_(torch.randn(20, 8))
        case["hidden_ND"].copy_(torch.randn(4, 8))
        away = torch.linalg.lstsq(
            case["head_VD"], torch.zeros(20, 4).double().scatter_(0, targets.ids_NK.t(), -40.0)
        ).solution
        case["hidden_ND"].copy_(3 * away.t())
    found = run(case, targets, alpha=0.0, temperature=1.0)
    assert float(found.loss.detach()) > 1
    assert found.lowest_kl is not None and float(found.lowest_kl) >= 0


def test_a_tail_that_rounding_made_negative_is_empty() -> None:
    case = make()
    exact = top_k(case["teacher_NV"], 37, 2.0)
    assert exact.log_probs_NK is not None
    targets = SparseTargets(ids_NK=exact.ids_NK, log_probs_NK=exact.log_probs_NK + 1e-6)
    found = run(case, targets, alpha=0.0)
    assert torch.isfinite(found.loss)
    assert found.lowest_kl is not None and float(found.lowest_kl) >= LOWEST_DIVERGENCE


def test_an_id_of_probability_zero_costs_nothing() -> None:
    case = make()
    case["teacher_NV"][:, 5] = -torch.inf
    assert_is(case, top_k(case["teacher_NV"], 36, 2.0), 0.3, 2.0)


def test_half_precision_log_probabilities_move_the_loss_by_their_rounding() -> None:
    case = make()
    exact = top_k(case["teacher_NV"], 12, 2.0)
    assert exact.log_probs_NK is not None
    rounded = SparseTargets(ids_NK=exact.ids_NK.int(), log_probs_NK=exact.log_probs_NK.half())
    found, wanted = run(case, rounded), run(case, exact)
    assert float(found.loss.detach()) == pytest.approx(float(wanted.loss.detach()), rel=2e-3)


def test_alpha_one_leaves_the_targets_alone() -> None:
    case = make()
    targets = SparseTargets(ids_NK=torch.full((19, 2), 10**6), log_probs_NK=None)
    found = run(case, targets, alpha=1.0)
    assert found.kd is None and found.agreement is None and torch.isfinite(found.loss)


def test_draws_have_no_first_id_and_no_lowest_row() -> None:
    case = make()
    targets = SparseTargets(ids_NK=torch.zeros(19, 2, dtype=torch.int64), log_probs_NK=None)
    found = run(case, targets)
    assert found.kd is not None and found.agreement is None and found.lowest_kl is None
    assert found.largest_dz_sum is not None and float(found.largest_dz_sum) < 1e-12


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["top_k", "sampled"])
def test_the_fused_form_is_the_eager_one(kind: str) -> None:
    random = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, device="cuda")

    hidden_ND = normal(515, 64).bfloat16().requires_grad_()
    head_VD = (0.3 * normal(20_001, 64)).requires_grad_()
    teacher_NV = 3 * normal(515, 20_001)
    labels_N = torch.randint(0, 20_001, (515,))
    labels_N[3::4] = -100
    targets = top_k(teacher_NV, 64, 2.0)
    if kind == "sampled":
        drawn_NK = torch.multinomial(torch.softmax(teacher_NV / 2, 1), 64, replacement=True)
        targets = SparseTargets(ids_NK=drawn_NK.int(), log_probs_NK=None)
    found = []
    for kernel in ("eager", "fused"):
        terms = distillation_loss(
            hidden_ND, head_VD, None, None, labels_N,
            alpha=0.3, temperature=2.0, denominator=387.0, chunk_rows=100, targets=targets,
            kernel=kernel,  # type: ignore[arg-type]
        )  # fmt: skip
        found.append((terms, torch.autograd.grad(terms.loss, (hidden_ND, head_VD))))
    (eager, slopes_eager), (fused, slopes_fused) = found
    for name in ("loss", "ce", "kd", "agreement"):
        one, other = getattr(eager, name), getattr(fused, name)
        assert (one is None) == (other is None)
        if one is not None:
            assert float(other.detach()) == pytest.approx(
                float(one.detach()), rel=1e-5, abs=1e-6
            ), name
    assert fused.largest_dz_sum is not None and float(fused.largest_dz_sum) < LARGEST_DZ_SUM
    for mine, theirs in zip(slopes_fused, slopes_eager, strict=True):
        # Both round dz to bf16.
        assert float((mine.float() - theirs.float()).norm() / theirs.float().norm()) < 4e-3
