"""What teacher and student may be compared by: each against its definition in float64, and its gradient
against autograd of that.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from engine.divergences import DIVERGENCES, Divergence, Logits
from engine.errors import BadInput
from engine.loss.kd_loss import (
    LARGEST_DZ_SUM,
    LOWEST_DIVERGENCE,
    LossTerms,
    distillation_loss,
)
from engine.plan.knobs import choose_loss_kernel
from engine.spec import options
from tests.support.reference_loss import reference_loss

# Shapes: N tokens, V vocabulary, W teacher vocabulary, D student width, E teacher width

ALL: list[tuple[str, float]] = [
    ("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.5), ("jsd", 0.1), ("jsd", 0.9),
]  # fmt: skip


def tensors(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(13, 6), (29, 6), (13, 5), (31, 5)]
    found = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    found = [(scale * x).to(dtype) for x in found]
    return [found[0].requires_grad_(), found[1].requires_grad_(), *found[2:]]


LABELS_N = torch.tensor([0, 28, -100, *range(10)])


def run(parts: list[Tensor], divergence: str, beta: float, **changes: float) -> LossTerms:
    settings = dict(alpha=0.3, temperature=2.0) | changes
    return distillation_loss(
        *parts[:4],
        LABELS_N,
        denominator=12.0,
        chunk_rows=5,
        divergence=divergence,
        beta=beta,
        alpha=settings["alpha"],
        temperature=settings["temperature"],
    )


def oracle(parts: list[Tensor], divergence: str, beta: float, **changes: float) -> LossTerms:
    settings = dict(alpha=0.3, temperature=2.0) | changes
    return reference_loss(
        parts[0] @ parts[1].t(),
        parts[2] @ parts[3].t(),
        LABELS_N,
        settings["alpha"],
        settings["temperature"],
        divergence=divergence,
        beta=beta,
    )


@pytest.mark.parametrize(("divergence", "beta"), ALL)
@pytest.mark.parametrize(
    ("alpha", "temperature"), list(itertools.product([0.0, 0.3], [1.0, 2.0, 0.7]))
)
def test_value_and_gradient_are_those_of_the_definition(
    divergence: str, beta: float, alpha: float, temperature: float
) -> None:
    parts = tensors()
    settings = dict(alpha=alpha, temperature=temperature)
    found = run(parts, divergence, beta, **settings)
    wanted = oracle(parts, divergence, beta, **settings)
    assert float(found.loss.detach()) == pytest.approx(float(wanted.loss.detach()), rel=1e-11)
    assert found.kd is not None and wanted.kd is not None
    assert float(found.kd) == pytest.approx(float(wanted.kd), rel=1e-11)
    slopes = [torch.autograd.grad(terms.loss, parts[:2]) for terms in (found, wanted)]
    for mine, theirs in zip(*slopes, strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("divergence", "beta"), ALL)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_equal_models_have_divergence_and_gradient_exactly_zero(
    divergence: str, beta: float, temperature: float
) -> None:
    parts = tensors(torch.float32)
    parts = [*parts[:2], parts[0].detach(), parts[1].detach()]
    terms = run(parts, divergence, beta, alpha=0.0, temperature=temperature)
    assert terms.kd is not None and float(terms.kd) == 0
    assert terms.lowest_kl is not None and float(terms.lowest_kl) == 0
    for slope in torch.autograd.grad(terms.loss, parts[:2]):
        assert float(slope.abs().max()) == 0


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_jsd_of_models_without_anything_in_common_is_the_entropy_of_the_weight(
    temperature: float,
) -> None:
    """p and q apart: b log(1/b) + (1-b) log(1/(1-b)), ln 2 at one half; and no overflow on the way."""
    parts = tensors(torch.float32, scale=40.0)
    parts[2], parts[3] = -parts[0].detach(), parts[1].detach()
    terms = run(parts, "jsd", 0.5, alpha=0.0, temperature=temperature)
    assert terms.kd is not None
    assert float(terms.kd) / temperature**2 == pytest.approx(0.6931, rel=1e-3)
    for slope in torch.autograd.grad(terms.loss, parts[:2]):
        assert torch.isfinite(slope).all()


@pytest.mark.parametrize(("divergence", "beta"), ALL)
@pytest.mark.parametrize("near", [True, False])
def test_no_row_is_below_zero_and_every_row_of_dz_sums_to_zero(
    divergence: str, beta: float, near: bool
) -> None:
    parts = tensors(torch.float32)
    if near:
        parts = [*parts[:2], parts[0].detach() * (1 + 1e-5), parts[1].detach()]
    terms = run(parts, divergence, beta)
    assert terms.lowest_kl is not None and terms.largest_dz_sum is not None
    assert float(terms.lowest_kl) >= LOWEST_DIVERGENCE / 10
    assert float(terms.largest_dz_sum) <= LARGEST_DZ_SUM / 10


def test_the_lowest_divergence_is_that_of_the_lowest_row() -> None:
    parts = tensors()
    log_p, log_q = (
        torch.log_softmax(x[:, :29] / 2.0, 1)
        for x in (parts[2] @ parts[3].t(), (parts[0] @ parts[1].t()).detach())
    )
    rows = (log_p.exp() * (log_p - log_q)).sum(1)[LABELS_N >= 0]
    terms = run(parts, "forward_kl", 0.5)
    assert terms.lowest_kl is not None
    assert float(terms.lowest_kl) == pytest.approx(float(rows.min()), rel=1e-9)


def test_without_a_teacher_or_a_row_there_is_no_lowest_divergence() -> None:
    parts = tensors()
    terms = run(parts, "forward_kl", 0.5, alpha=1.0)
    assert terms.lowest_kl is None and terms.largest_dz_sum is not None
    none = distillation_loss(
        *parts[:4], torch.full((13,), -100), alpha=0.3, temperature=2.0, denominator=1.0
    )
    assert none.lowest_kl is None and none.largest_dz_sum is None


# Which form of the loss


GPU: dict[str, object] = dict(
    device="cuda", capability=(9, 0), has_triton=True, divergence="forward_kl"
)


@pytest.mark.parametrize(
    ("wanted", "change", "choice", "reason"),
    [
        ("auto", {}, "fused", "one kernel"),
        ("fused", {}, "fused", "one kernel"),
        ("eager", {}, "eager", "plain torch"),
        ("auto", {"divergence": "reverse_kl"}, "fused", "one kernel"),
        ("auto", {"device": "cpu", "capability": None}, "eager", "needs a GPU; found a CPU"),
        ("auto", {"capability": (7, 5)}, "eager", "capability 8.0 or later; found"),
        ("auto", {"has_triton": False}, "eager", "needs triton; found none installed"),
        ("auto", {"divergence": "jsd"}, "fused", "one kernel"),
    ],
)
def test_the_kernel_is_chosen_with_its_reason(
    wanted: str, change: dict[str, object], choice: str, reason: str
) -> None:
    decision = choose_loss_kernel(wanted, **(GPU | change))  # type: ignore[arg-type]
    assert decision.knob == "loss.kernel" and decision.choice == choice
    assert reason in " ".join(decision.lines())
    assert decision.overridden == (wanted != "auto")


@pytest.mark.parametrize("change", [{"device": "cpu", "capability": None}, {"has_triton": False}])
def test_fused_where_it_cannot_run_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(BadInput, match=r"loss.kernel: fused — expected .*, found ") as caught:
        choose_loss_kernel("fused", **(GPU | change))  # type: ignore[arg-type]
    assert "loss.kernel=auto" in str(caught.value)


def test_every_divergence_is_tested() -> None:
    assert DIVERGENCES.keys() == {name for name, _ in ALL}


def test_the_spec_offers_and_explains_every_divergence() -> None:
    (option,) = (option for option in options() if option.key == "loss.divergence")
    assert option.allowed == tuple(DIVERGENCES)
    for name, row in DIVERGENCES.items():
        assert name in option.doc and row.doc in option.doc


def test_a_row_that_is_added_is_trained_with_and_chosen_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of the forward KL, as one row of the table."""
    forward = DIVERGENCES["forward_kl"]

    def half(logits: Logits, beta: float) -> tuple[Tensor, Tensor]:
        value_C, slope_CV = forward.differentiate(logits, beta)
        return value_C / 2, slope_CV / 2

    def half_reference(log_p_MV: Tensor, log_q_MV: Tensor, beta: float) -> Tensor:
        return forward.reference(log_p_MV, log_q_MV, beta) / 2

    toy = Divergence(
        doc="half of KL(teacher || student)", differentiate=half, reference=half_reference
    )
    monkeypatch.setitem(DIVERGENCES, "toy", toy)
    parts = tensors()
    found, wanted = run(parts, "toy", 0.5), oracle(parts, "toy", 0.5)
    assert float(found.loss.detach()) == pytest.approx(float(wanted.loss.detach()), rel=1e-11)
    decision = choose_loss_kernel("auto", **(GPU | {"divergence": "toy"}))  # type: ignore[arg-type]
    assert decision.choice == "eager" and "found toy" in " ".join(decision.lines())
