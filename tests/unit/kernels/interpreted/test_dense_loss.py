"""The kernel of the fused loss computes what float64 autograd does, row by row, however a row is cut into
segments. In fp32: the interpreter's bf16 is wrong.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.divergences import DIVERGENCES, fused_divergences

pytest.importorskip("triton")

from engine.kernels.dense_loss import LossRows, Tuning, row_buffer

# Columns beyond V are -infinity, and their difference is masked; sums that overflow are made again.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
]

# Shapes: C rows, V vocabulary

CPU = torch.device("cpu")
SMALL = Tuning(segment=512, deep=2, warps=1, lag=2)
"""Two tiles a segment, and so short that small rows have several, and whole ones too."""


def buffers(z_CV: Tensor, t_CV: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Logits in buffers whose padding is NaN, and a dz that is NaN all over."""

    def of(x_CV: Tensor) -> Tensor:
        room_CV = row_buffer(*x_CV.shape, torch.float32, CPU)
        assert room_CV._base is not None
        room_CV._base.fill_(torch.nan)
        return room_CV.copy_(x_CV)

    dz_CV = of(torch.full_like(z_CV, torch.nan))
    return of(z_CV), None if t_CV is None else of(t_CV), dz_CV


def differentiate(
    z_CV: Tensor,
    t_CV: Tensor | None,
    labels_C: Tensor,
    *,
    tuning: Tuning = SMALL,
    cut: int | None = None,
    **settings: Any,
) -> tuple[LossRows, Tensor]:
    """All rows, or two chunks of them with a cut between."""
    rows, vocabulary = z_CV.shape
    z_CV, t_CV, dz_CV = buffers(z_CV, t_CV)
    found = LossRows.empty(rows, vocabulary, CPU, tuning)
    edges = [0, rows] if cut is None else [0, cut, rows]
    for first, last in itertools.pairwise(edges):
        part = slice(first, last)
        found.differentiate(
            z_CV[part],
            None if t_CV is None else t_CV[part],
            dz_CV[part],
            labels_C,
            first,
            **settings,
        )
    return found, dz_CV


def wanted(
    z_CV: Tensor,
    t_CV: Tensor,
    labels_C: Tensor,
    alpha: float,
    temperature: float,
    divergence: str,
    beta: float = 0.5,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cross entropy, divergence, agreement and dz, by float64 autograd."""
    z_CV = z_CV.double().requires_grad_()
    ce_C = torch.nn.functional.cross_entropy(z_CV, labels_C, reduction="none")
    log_p_CV = torch.log_softmax(t_CV.double() / temperature, 1)
    log_q_CV = torch.log_softmax(z_CV / temperature, 1)
    reference = DIVERGENCES[divergence].reference
    divergence_C = torch.stack(
        [reference(p[None], q[None], beta) for p, q in zip(log_p_CV, log_q_CV, strict=True)]
    )
    loss = (alpha * ce_C + (1 - alpha) * temperature**2 * divergence_C).sum()
    (dz_CV,) = torch.autograd.grad(loss, z_CV)
    agree_C = z_CV.argmax(1) == t_CV.argmax(1)
    return ce_C.detach(), divergence_C.detach(), agree_C, dz_CV


def random(rows: int, vocabulary: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of both sides, which agree on the first id in every second row; labels."""
    generator = torch.Generator().manual_seed(seed)
    z_CV, t_CV = (4 * torch.randn(rows, vocabulary, generator=generator) for _ in range(2))
    z_CV[::2, vocabulary // 2] = t_CV[::2, vocabulary // 2] = 17
    labels_C = torch.randint(0, vocabulary, (rows,), generator=generator)
    labels_C[0], labels_C[-1] = 0, vocabulary - 1
    return z_CV, t_CV, labels_C


LONG = [((3, 1101), temperature, 0.3) for temperature in (1.0, 2.0, 4.0)]
CASES = [
    *itertools.product([(5, 7)], [1.0, 2.0, 4.0, 3.0, 0.7], [0.3]),
    # Rows of several segments; the short ones above go through every temperature.
    *LONG,
    *(((3, 1101), temperature, 0.3) for temperature in (3.0, 0.7)),
    *itertools.product([(1, 512), (2, 1024)], [2.0], [0.0, 0.3, 1.0]),
]
"""Rows and vocabulary, T, alpha."""


@pytest.mark.parametrize(
    ("shape", "temperature", "alpha", "divergence"),
    [
        pytest.param(
            *case, divergence, marks=pytest.mark.soak if place % every or case in LONG else ()
        )
        for divergence in fused_divergences()
        # The other direction shares all but its last lines.
        for every in (1 if divergence == "forward_kl" else 3,)
        for place, case in enumerate(CASES)
    ],
)
def test_rows_are_those_of_float64(
    shape: tuple[int, int], temperature: float, alpha: float, divergence: str
) -> None:
    z_CV, t_CV, labels_C = random(*shape)
    settings: dict[str, Any] = dict(alpha=alpha, temperature=temperature, divergence=divergence)
    ce_C, divergence_C, agree_C, slope_CV = wanted(z_CV, t_CV, labels_C, **settings)
    cut = 2 if shape[0] > 2 else None
    found, dz_CV = differentiate(z_CV, t_CV, labels_C, cut=cut, **settings)
    # fp32 exponentials of arguments up to 30, and a division by T
    assert torch.allclose(found.ce_M.double(), ce_C, rtol=0, atol=1e-5)
    assert torch.allclose(found.divergence_M.double(), divergence_C, rtol=1e-5, atol=1e-5)
    assert torch.allclose(dz_CV.double(), slope_CV, rtol=0, atol=1e-5)
    assert found.agree_M.bool().tolist() == agree_C.tolist()
    assert float(found.dz_sums_MS.sum(1).abs().max()) < 1e-5
    assert float(found.divergence_M.min()) > -1e-5


@pytest.mark.parametrize("beta", [0.05, 0.9])
def test_the_mixture_may_have_any_weight(beta: float) -> None:
    z_CV, t_CV, labels_C = random(3, 1101)
    # Probabilities that one side has, and the other not: beyond what e^x of their ratio can say.
    z_CV[1, 7], t_CV[1, 9] = -300.0, -300.0
    settings: dict[str, Any] = dict(alpha=0.3, temperature=1.0, divergence="jsd", beta=beta)
    _, divergence_C, _, slope_CV = wanted(z_CV, t_CV, labels_C, **settings)
    found, dz_CV = differentiate(z_CV, t_CV, labels_C, cut=1, **settings)
    assert torch.allclose(found.divergence_M.double(), divergence_C, rtol=1e-5, atol=1e-6)
    assert torch.allclose(dz_CV.double(), slope_CV, rtol=0, atol=1e-6)


@pytest.mark.parametrize("vocabulary", [7, 401, 512])
def test_without_a_teacher_it_is_cross_entropy_at_temperature_one(vocabulary: int) -> None:
    z_CV, _, labels_C = random(3, vocabulary)
    ce_C, _, _, slope_CV = wanted(z_CV, z_CV, labels_C, 1.0, 1.0, "forward_kl")
    found, dz_CV = differentiate(
        z_CV, None, labels_C, alpha=1.0, temperature=2.0, divergence="forward_kl"
    )
    assert torch.allclose(found.ce_M.double(), ce_C, rtol=0, atol=1e-5)
    assert torch.allclose(dz_CV.double(), slope_CV, rtol=0, atol=1e-6)


@pytest.mark.parametrize("divergence", fused_divergences())
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_equal_rows_have_divergence_and_gradient_exactly_zero(
    divergence: str, temperature: float
) -> None:
    z_CV, _, labels_C = random(3, 401)
    found, dz_CV = differentiate(
        z_CV, z_CV, labels_C, alpha=0.0, temperature=temperature, divergence=divergence
    )
    assert float(found.divergence_M.abs().max()) == 0
    assert float(dz_CV.abs().max()) == 0
    assert found.agree_M.tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("value", "side", "alpha"),
    [
        pytest.param(
            value, side, alpha, marks=[pytest.mark.soak] * (alpha != 0.3 and value is not torch.nan)
        )
        for value in (torch.nan, torch.inf, -torch.inf)
        for side in ("student", "teacher")
        for alpha in (0.0, 0.3, 1.0)
    ],
)
def test_a_non_finite_logit_reaches_its_row_and_no_other(
    alpha: float, side: str, value: float
) -> None:
    z_CV, t_CV, labels_C = random(3, 401)
    labels_C[1] = 300
    (z_CV if side == "student" else t_CV)[1, 300] = value
    found, _ = differentiate(
        z_CV, t_CV, labels_C, alpha=alpha, temperature=2.0, divergence="forward_kl"
    )
    losses_C = alpha * found.ce_M + (1 - alpha) * found.divergence_M
    assert torch.isfinite(losses_C).tolist() == [True, False, True]


@pytest.mark.parametrize("height", [61.0, 1e4])
@pytest.mark.parametrize("place", [0, 300, 700])
def test_a_logit_far_above_the_others_costs_no_digits(height: float, place: int) -> None:
    """Wherever it stands: the first of its lane, or one that the lane's first did not foretell."""
    z_CV, t_CV, labels_C = random(2, 1024)
    z_CV[0, place] = t_CV[0, place] = z_CV[1, place] = height
    labels_C[:] = place
    settings: dict[str, Any] = dict(alpha=0.3, temperature=1.0, divergence="forward_kl")
    ce_C, divergence_C, _, slope_CV = wanted(z_CV, t_CV, labels_C, **settings)
    found, dz_CV = differentiate(z_CV, t_CV, labels_C, **settings)
    assert torch.allclose(found.ce_M.double(), ce_C, rtol=1e-5, atol=1e-5)
    assert torch.allclose(found.divergence_M.double(), divergence_C, rtol=1e-5, atol=1e-5)
    assert torch.allclose(dz_CV.double(), slope_CV, rtol=0, atol=1e-5)


def test_a_constant_added_to_a_row_changes_rounding_and_nothing_else() -> None:
    z_CV, t_CV, labels_C = random(2, 401)
    settings: dict[str, Any] = dict(alpha=0.3, temperature=2.0, divergence="forward_kl")
    one, dz_CV = differentiate(z_CV, t_CV, labels_C, **settings)
    other, moved_CV = differentiate(z_CV + 64, t_CV - 64, labels_C, **settings)
    assert torch.allclose(one.divergence_M, other.divergence_M, rtol=0, atol=5e-5)
    assert torch.allclose(dz_CV, moved_CV, rtol=0, atol=1e-5)


@pytest.mark.parametrize("lag", [1, pytest.param(3, marks=pytest.mark.soak), 50])
def test_rows_may_wait_as_long_as_they_like_for_their_gradient(lag: int) -> None:
    z_CV, t_CV, labels_C = random(4, 601)
    settings: dict[str, Any] = dict(alpha=0.3, temperature=2.0, divergence="forward_kl")
    usual, dz_CV = differentiate(z_CV, t_CV, labels_C, **settings)
    tuning = Tuning(segment=512, deep=2, warps=1, lag=lag)
    found, other_CV = differentiate(z_CV, t_CV, labels_C, tuning=tuning, cut=1, **settings)
    assert torch.equal(dz_CV, other_CV) and torch.equal(usual.ce_M, found.ce_M)


def test_a_label_outside_of_the_vocabulary_is_nan_and_reads_nothing() -> None:
    z_CV, t_CV, labels_C = random(3, 401)
    labels_C[:] = torch.tensor([401, -1, 400])
    found, _ = differentiate(
        z_CV, t_CV, labels_C, alpha=0.3, temperature=2.0, divergence="forward_kl"
    )
    assert found.ce_M.isnan().tolist() == [True, True, False]


def test_padding_is_written_as_zero() -> None:
    z_CV, t_CV, labels_C = random(2, 401)
    _, dz_CV = differentiate(
        z_CV, t_CV, labels_C, alpha=0.3, temperature=2.0, divergence="forward_kl"
    )
    assert dz_CV._base is not None and dz_CV._base.shape[1] == 416
    assert float(dz_CV._base[:, 401:].abs().max()) == 0


def test_what_is_no_row_buffer_is_refused() -> None:
    rows = LossRows.empty(2, 401, CPU)
    good, labels_M = row_buffer(2, 401, torch.float32, CPU), torch.zeros(2, dtype=torch.int64)
    settings: dict[str, Any] = dict(alpha=0.3, temperature=2.0, divergence="forward_kl")
    for z_CV, t_CV, dz_CV, labels in (
        (torch.zeros(2, 401), None, good, labels_M),
        (good, torch.zeros(2, 401), good, labels_M),
        (good.double(), None, good, labels_M),
        (good, None, torch.zeros(2, 401), labels_M),
        (good, None, good, labels_M.int()),
    ):
        with pytest.raises(AssertionError):
            rows.differentiate(z_CV, t_CV, dz_CV, labels, 0, **settings)
