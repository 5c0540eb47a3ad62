"""Defects of a resume: one part of the state is not as the checkpoint has it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from engine.drills.planting import replaced
from engine.models.decoder import Decoder
from engine.train.checkpoint import keeper, state
from engine.train.trainer import Trainer

LAYER = "layers.1."


def _restoring(
    spoil: Callable[[Decoder, torch.optim.Optimizer, dict[str, Tensor]], None],
) -> AbstractContextManager[None]:
    """Spoil what was restored; `spoil` also gets the weights as they were before."""

    def make(restore: Callable[..., None]) -> Callable[..., None]:
        @torch.no_grad()
        def spoilt(found: Any, student: Decoder, optimizer: torch.optim.Optimizer) -> None:
            before = {name: p.detach().clone() for name, p in student.named_parameters()}
            restore(found, student, optimizer)
            spoil(student, optimizer, before)

        return spoilt

    return replaced(state, "restore", make)


def layer_not_restored() -> AbstractContextManager[None]:
    def spoil(student: Decoder, _: torch.optim.Optimizer, before: dict[str, Tensor]) -> None:
        for name, parameter in student.named_parameters():
            if name.startswith(LAYER):
                parameter.copy_(before[name])

    return _restoring(spoil)


def moment_zeroed() -> AbstractContextManager[None]:
    def spoil(student: Decoder, optimizer: torch.optim.Optimizer, _: dict[str, Tensor]) -> None:
        optimizer.state[student.embed.weight]["exp_avg_sq"].zero_()

    return _restoring(spoil)


def counters_reset() -> AbstractContextManager[None]:
    """AdamW corrects its moments as in its first step."""

    def spoil(_: Decoder, optimizer: torch.optim.Optimizer, __: dict[str, Tensor]) -> None:
        for held in optimizer.state.values():
            held["step"].fill_(1)

    return _restoring(spoil)


def random_not_restored() -> AbstractContextManager[None]:
    def spoil(_: Decoder, __: torch.optim.Optimizer, ___: dict[str, Tensor]) -> None:
        torch.rand(1)

    return _restoring(spoil)


def position_off() -> AbstractContextManager[None]:
    """The data goes on one step further than it was."""

    def make(restore: Callable[..., Any]) -> Callable[..., Any]:
        def spoilt(self: Any, resumed: Trainer, *others: Any) -> Any:
            answer = restore(self, resumed, *others)
            resumed.position += resumed.train.rows * resumed.train.accumulation
            return answer

        return spoilt

    return replaced(keeper.Keeper, "restore", make)
