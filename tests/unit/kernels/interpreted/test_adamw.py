"""The kernels of the update compute what torch's AdamW does, for any number of tensors of any size; and a
step that is left out leaves everything.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from engine.kernels import adamw
from engine.spec import TrainSection
from engine.train.optimizer import build_optimizer, total_norm, update_if_finite

CPU = torch.device("cpu")
SIZES = ((1,), (7, 5), (2048,), (3, 1366))
"""Below, at and beyond what one program takes, one element too."""


class Tensors(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.held = torch.nn.ParameterList(torch.randn(*s, generator=random) for s in SIZES)


def trained(update: str, steps: int, *, bad: int | None = None, **settings: Any) -> list[Tensor]:
    """Weights, moments and counts after some steps, of which one may have a loss that is infinite."""
    # The interpreter passes a double on as a float: these are the same in both.
    train = TrainSection(lr=2**-6, beta1=0.875, beta2=0.9375, update=update, **settings)
    model = Tensors()
    optimizer = build_optimizer(model, train, CPU)
    random = torch.Generator().manual_seed(1)
    for step in range(steps):
        for parameter in model.held:
            parameter.grad = 3 * torch.randn(parameter.shape, generator=random)
        grads = [p.grad for p in model.held if p.grad is not None]
        norm = total_norm(grads, fused=update == "fused")
        loss = torch.tensor(torch.inf if step == bad else 1.0)
        update_if_finite(optimizer, loss, norm, clip_norm=train.clip_norm)
    states = [optimizer.state[p] for p in model.held]
    names = ("exp_avg", "exp_avg_sq", "step")
    return [p.detach() for p in model.held] + [s[name] for s in states for name in names]


@pytest.mark.parametrize("clip_norm", [0.0, 2.0, pytest.param(1e6, marks=pytest.mark.soak)])
def test_steps_are_those_of_torch(clip_norm: float) -> None:
    settings = dict(clip_norm=clip_norm, weight_decay=0.25)
    for found, wanted in zip(
        trained("fused", 2, **settings), trained("torch", 2, **settings), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-8)


def test_a_step_that_is_left_out_leaves_weights_moments_and_counts() -> None:
    found, wanted = trained("fused", 3, bad=1), trained("torch", 3, bad=1)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-8)
    assert {float(count) for count in found[len(SIZES) + 2 :: 3]} == {2.0}


def test_the_first_steps_of_a_slow_average_are_not_lost_to_rounding() -> None:
    """1 - b^t with b near 1, in double."""
    weight, grad = torch.zeros(4), torch.full((4,), 3.0)
    moments = [torch.zeros(4), torch.zeros(4)]
    count, one, zero = torch.zeros(()), torch.ones(()), torch.zeros(())
    betas = (1 - 2.0**-20, 1 - 2.0**-22)
    adamw.update(
        [weight], [grad], [moments[0]], [moments[1]], [count],
        divisor=one, skip=zero, lr=0.5, betas=betas, eps=1e-8, decay=0.0,
    )  # fmt: skip
    # The first step of AdamW is the rate itself, whatever the betas.
    torch.testing.assert_close(weight, torch.full((4,), -0.5), rtol=1e-6, atol=0)


def test_the_sum_of_squares_is_of_every_number_once() -> None:
    tensors = [torch.full(size, 1.0) for size in SIZES]
    assert float(adamw.squares(tensors)) == sum(x.numel() for x in tensors)


@pytest.mark.parametrize("bad", ["bf16", "strided", "unaligned"])
def test_what_a_kernel_cannot_read_is_refused(bad: str) -> None:
    given = {
        "bf16": torch.zeros(8, dtype=torch.bfloat16),
        "strided": torch.zeros(8, 2)[:, 0],
        "unaligned": torch.zeros(9)[1:],
    }[bad]
    with pytest.raises(AssertionError):
        adamw.squares([given])
