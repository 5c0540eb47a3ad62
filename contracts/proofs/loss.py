"""The objective over the reals, as z3 can say it: probabilities and logarithms by their axioms. Over
fp32 the same questions are not answered in a minute. The model is compared with the plain objective in
float64.
"""

from __future__ import annotations

from typing import Any

import torch

from contracts.proofs.methods import unsatisfiable
from engine.contracts.proving import Proved
from tests.support.reference_loss import reference_loss

IDS = 4
SAMPLES = 200
ROUNDING = 1e-12


def _distribution(z3: Any, name: str) -> tuple[list[Any], Any]:
    p = [z3.Real(f"{name}{i}") for i in range(IDS)]
    return p, z3.And(*(x > 0 for x in p), z3.Sum(p) == 1)


def kl_is_not_negative() -> Proved:
    """KL = -sum p ln(q/p) and ln x <= x - 1, so p ln(q/p) <= q - p."""
    import z3

    p, is_p = _distribution(z3, "p")
    q, is_q = _distribution(z3, "q")
    # r_i stands for p_i ln(q_i / p_i)
    r = [z3.Real(f"r{i}") for i in range(IDS)]
    axiom = z3.And(*(r[i] <= q[i] - p[i] for i in range(IDS)))
    equal = z3.And(*((r[i] == q[i] - p[i]) == (p[i] == q[i]) for i in range(IDS)))
    kl = -z3.Sum(r)
    differs = z3.Or(*(p[i] != q[i] for i in range(IDS)))
    return unsatisfiable(
        {
            "KL < 0": z3.And(is_p, is_q, axiom, kl < 0),
            "KL = 0 of two that differ": z3.And(is_p, is_q, axiom, equal, differs, kl == 0),
        },
        limit_s=30,
        agrees=_samples_that_agree(),
    )


def gradient_rows_sum_to_zero() -> Proved:
    import z3

    q, is_q = _distribution(z3, "q")
    soft, is_soft = _distribution(z3, "s")
    teacher, is_teacher = _distribution(z3, "t")
    alpha, temperature = z3.Reals("alpha T")
    label = [z3.If(z3.Int("y") == i, z3.RealVal(1), z3.RealVal(0)) for i in range(IDS)]
    inside = z3.And(z3.Int("y") >= 0, z3.Int("y") < IDS)
    # Sums first: the products with alpha and T are then of two numbers, not of a sum of products.
    ce = z3.Sum(q) - z3.Sum(label)
    kd = z3.Sum(soft) - z3.Sum(teacher)
    total = alpha * ce + (1 - alpha) * temperature * kd
    known = z3.And(is_q, is_soft, is_teacher, inside, alpha >= 0, alpha <= 1, temperature > 0)
    return unsatisfiable(
        {"a row of the gradient that does not sum to 0": z3.And(known, total != 0)},
        limit_s=30,
        agrees=_samples_that_agree(),
    )


def _samples_that_agree() -> int:
    """Random rows for which the code's KL is not negative and its gradient sums to 0; 0 where one does
    otherwise."""
    generator = torch.Generator().manual_seed(0)
    z_NV = torch.randn(SAMPLES, IDS, generator=generator, dtype=torch.float64) * 5
    t_NV = torch.randn(SAMPLES, IDS, generator=generator, dtype=torch.float64) * 5
    labels_N = torch.randint(IDS, (SAMPLES,), generator=generator)
    for row in range(SAMPLES):
        z_1V = z_NV[row : row + 1].requires_grad_()
        terms = reference_loss(z_1V, t_NV[row : row + 1], labels_N[row : row + 1], 0.3, 2.0)
        (gradient_1V,) = torch.autograd.grad(terms.loss, z_1V)
        assert terms.kd is not None
        if float(terms.kd) < 0 or abs(float(gradient_1V.sum())) > ROUNDING:
            return 0
    return SAMPLES
