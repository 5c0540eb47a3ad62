"""The numbers of a step, of all ranks."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from engine.train.step import StepNumbers


class Two:
    """Two ranks, of which the other's numbers are these."""

    many = True

    def __init__(self, other: StepNumbers[Tensor]) -> None:
        self._other = other

    def gather(self, own: Tensor) -> Tensor:
        return torch.stack([own, torch.stack(self._other).double()])


def test_the_longest_wait_of_any_rank_is_that_of_the_step() -> None:
    zero = torch.tensor(0.0)
    own, other = (
        StepNumbers(
            loss=zero,
            ce=zero,
            kd=zero,
            agreement=zero,
            asked_to_stop=zero,
            waited_s=torch.tensor(waited_s),
            grad_norm=torch.tensor(norm),
            lowest_kl=zero,
            largest_dz_sum=zero,
        )
        for waited_s, norm in ((0.125, 3.0), (0.5, 4.0))
    )
    found = StepNumbers.over_ranks(own, cast(Any, Two(other)))
    assert float(found.waited_s) == 0.5 and float(found.grad_norm) == 5.0
