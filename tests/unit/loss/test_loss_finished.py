"""Gradients that the loss finishes on its way, and chunks whose products are made together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.loss import kd_loss
from engine.loss.chunks import Job, Totals
from engine.loss.eager import EagerChunks
from engine.loss.kd_loss import distillation_loss

N, V, D, E = 41, 61, 12, 20


def answer(factor: float = 1.0, **changes: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and the gradients of `factor` times it for hidden states and head."""
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    hidden_ND, head_VD = random(N, D).requires_grad_(), random(V, D).requires_grad_()
    labels_N = torch.randint(0, V, (N,), generator=generator)
    labels_N[::4] = -100
    given: dict[str, Any] = dict(alpha=0.3, temperature=2.0, denominator=30.0, chunk_rows=5)
    terms = distillation_loss(
        hidden_ND, head_VD, random(N, E), random(V, E), labels_N, **(given | changes)
    )
    dh_ND, dw_VD = torch.autograd.grad(factor * terms.loss, (hidden_ND, head_VD))
    return terms.loss.detach(), dh_ND, dw_VD


@pytest.mark.parametrize("denominator", [30.0, torch.tensor(30.0)])
def test_a_loss_that_nothing_multiplies_has_the_same_gradients(denominator: float | Tensor) -> None:
    wanted = answer(denominator=30.0)
    found = answer(denominator=denominator, backward_from_loss=True)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def test_a_promise_that_is_broken_makes_gradients_nan() -> None:
    _, dh_ND, _ = answer(factor=2.0, backward_from_loss=True)
    assert bool(dh_ND[1].isnan().all()), "of a row with a label"
    torch.testing.assert_close(answer(factor=2.0)[1], 2 * answer()[1])


def test_a_broken_promise_is_seen_where_the_head_alone_learns() -> None:
    hidden_ND, head_VD = torch.randn(3, D), torch.randn(V, D, requires_grad=True)
    terms = distillation_loss(
        hidden_ND,
        head_VD,
        None,
        None,
        torch.tensor([1, 2, 3]),
        alpha=1.0,
        temperature=1.0,
        denominator=3.0,
        backward_from_loss=True,
    )
    (dw_VD,) = torch.autograd.grad(2 * terms.loss, head_VD)
    assert bool(dw_VD.isnan().all())


def test_finished_gradients_are_given_once() -> None:
    head_VD = torch.randn(V, D, requires_grad=True)
    terms = distillation_loss(
        torch.randn(2, D),
        head_VD,
        None,
        None,
        torch.tensor([1, 2]),
        alpha=1.0,
        temperature=1.0,
        denominator=2.0,
        backward_from_loss=True,
    )
    terms.loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    assert head_VD.grad is not None
    with pytest.raises(AssertionError, match="one backward pass"):
        terms.loss.backward()  # type: ignore[no-untyped-call]


class HoldsThree:
    """The eager form, with dz of three chunks kept until it is asked for."""

    held = 3

    def __init__(self, job: Job, shape: tuple[int, int], like: Tensor) -> None:
        self._inner, self._kept = EagerChunks(job, shape, like), list[Tensor]()
        self.groups: list[slice] = []

    def differentiate(self, h_CD: Tensor, w_VD: Tensor, chunk: slice) -> None:
        self._inner.differentiate(h_CD, w_VD, chunk)
        self._kept.append(self._inner.gradient(chunk).clone())

    def gradient(self, group: slice) -> Tensor:
        dz_GV, self._kept = torch.cat(self._kept), []
        self.groups.append(group)
        return dz_GV

    def totals(self) -> Totals:
        return self._inner.totals()


@pytest.mark.parametrize("backward_from_loss", [False, True])
def test_products_of_several_chunks_at_once_give_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch, backward_from_loss: bool
) -> None:
    wanted = answer()
    made: list[HoldsThree] = []

    def form(job: Job, shape: tuple[int, int], like: Tensor) -> HoldsThree:
        made.append(HoldsThree(job, shape, like))
        return made[-1]

    monkeypatch.setattr(kd_loss, "_form", form)
    for mine, theirs in zip(answer(backward_from_loss=backward_from_loss), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    # 30 labelled rows in chunks of 5: two groups.
    assert made[0].groups == [slice(0, 15), slice(15, 30)]
