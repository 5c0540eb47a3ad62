"""The gradient of a divergence of logarithms rounds more than that of forward KL, within its bound."""

from __future__ import annotations

import torch

from engine.audit.judge import LOG_ROUNDINGS
from engine.loss.kd_loss import distillation_loss


def excess(divergence: str, seed: int) -> float:
    """The largest error of a position's gradient in fp32 over the floor that one rounding explains."""
    generator = torch.Generator().manual_seed(seed)
    ids, width, rows = 2048, 64, 64
    heads = [torch.randn(ids, width, generator=generator) * 0.05 for _ in range(2)]
    # From flat to peaked.
    scale = 16 * torch.rand(rows, 1, generator=generator)
    student = torch.randn(rows, width, generator=generator) * scale
    teacher = torch.randn(rows, width, generator=generator) * 12
    labels = torch.randint(0, ids, (rows,), generator=generator)
    found = []
    for dtype in (torch.float32, torch.float64):
        hidden = student.to(dtype).detach().clone().requires_grad_()
        terms = distillation_loss(
            *(hidden, heads[0].to(dtype), teacher.to(dtype), heads[1].to(dtype), labels),
            alpha=0.0,
            temperature=1.0,
            denominator=float(rows),
            divergence=divergence,
        )
        terms.loss.backward()
        assert hidden.grad is not None
        found.append(hidden.grad.double())
    largest = max(
        float((student @ heads[0].T).abs().max()), float((teacher @ heads[1].T).abs().max())
    )
    floor = 16 * 2.0**-24 * largest * float(heads[0].norm(dim=1).mean()) / rows
    return float(((found[0] - found[1]).norm(dim=1) / floor).max())


def test_a_divergence_of_logarithms_rounds_more_and_stays_within_its_bound() -> None:
    forward = max(excess("forward_kl", seed) for seed in range(6))
    reverse = max(excess("reverse_kl", seed) for seed in range(6))
    assert forward < 1
    assert 2 * forward < reverse < LOG_ROUNDINGS
