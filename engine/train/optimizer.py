"""AdamW, and an update that a non-finite number cannot reach, decided where the number is.

A fused AdamW takes two numbers from the device, which were made for scaled losses and serve here:

    grad_scale     gradients are divided by it in the optimizer's own pass over them: clipping without
                   a pass of its own, by max(1, norm / clip_norm)
    found_inf      1 makes the pass change nothing, neither weights nor moments nor their count

So the host need not know whether a step is finite before it launches the next one.

    torch    the oracle, anywhere: torch's fused AdamW and its norm
    fused    on one GPU: kernels of ours (`engine.kernels.adamw`), which read and write each number once,
             and a tied embedding's gradient added in place to that of the head (`Looked`)

Both hold the same state under the same names, so a run may go on with either.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.models.decoder import Decoder
from engine.spec import TrainSection

# Shapes: B rows, T tokens, D student width


def build_optimizer(
    student: nn.Module, train: TrainSection, device: torch.device
) -> torch.optim.AdamW:
    """AdamW with decay on matrices only; norms and biases are scales and offsets, which decay
    would bias towards 0.
    """
    matrices = [p for p in student.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in student.parameters() if p.requires_grad and p.ndim < 2]
    make = FusedAdamW if train.update == "fused" else AdamW
    return make(
        [
            {"params": matrices, "weight_decay": train.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        fused=True,
    )


def _plain(owner: type[torch.optim.Optimizer], name: str) -> Any:
    """A method of torch's optimizers as it was before it was wrapped."""
    return inspect.unwrap(getattr(owner, name))


class Uncompiled(torch.optim.Optimizer):
    """Without what keeps torch.compile out of these methods: torch loads its compiler to say so, which
    takes more than a second. Only layers and losses are compiled here, never an update.
    """

    add_param_group = _plain(torch.optim.Optimizer, "add_param_group")
    zero_grad = _plain(torch.optim.Optimizer, "zero_grad")
    state_dict = _plain(torch.optim.Optimizer, "state_dict")
    load_state_dict = _plain(torch.optim.Optimizer, "load_state_dict")


class AdamW(Uncompiled, torch.optim.AdamW):
    """torch's, so."""

    step = torch.no_grad()(_plain(torch.optim.AdamW, "step"))


class FusedAdamW(AdamW):
    """torch's, but for the pass over memory."""

    grad_scale: Tensor | None
    found_inf: Tensor

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """An update by `grad_scale` and `found_inf`, which have to be there."""
        from engine.kernels.adamw import update

        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            if not moved:
                continue
            states = [self._state_of(p) for p in moved]
            divisor = self.grad_scale
            update(
                moved,
                [p.grad for p in moved],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [state["step"] for state in states],
                divisor=torch.ones_like(self.found_inf) if divisor is None else divisor,
                skip=self.found_inf,
                lr=float(group["lr"]),
                betas=group["betas"],
                eps=group["eps"],
                decay=group["weight_decay"],
            )

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


def total_norm(grads: Sequence[Tensor], *, fused: bool) -> Tensor:
    """The norm of all gradients together, fp32, 0-d."""
    if not fused:
        return nn.utils.get_total_norm(grads).detach().float()
    from engine.kernels.adamw import squares

    return squares(grads).sqrt().float()


def update_if_finite(
    optimizer: torch.optim.Optimizer, loss: Tensor, norm: Tensor, *, clip_norm: float
) -> None:
    """One update with gradients of global norm `norm`, clipped to `clip_norm` (0 never clips), when
    loss and norm, both 0-d, are finite. Waits for nothing.
    """
    told = cast(Any, optimizer)
    told.grad_scale = ((norm + 1e-6) / clip_norm).clamp(min=1.0) if clip_norm > 0 else None
    told.found_inf = (~(torch.isfinite(loss) & torch.isfinite(norm))).float()
    optimizer.step()


class Looked:
    """The embedding's rows of a batch, as a leaf of their own where the embedding is the head too.

    Such a weight has two gradients: the head's, dense, and the embedding's, of some thousand rows.
    autograd makes the second as large as the first, in zeros, and adds them. Here the rows are a leaf;
    when the backward pass has left the head's gradient, theirs is added to it in place.
    """

    def __init__(self, student: Decoder, tokens_BT: Tensor) -> None:
        self._weight, self._tokens_BT = student.embed.weight, tokens_BT
        self.rows_BTD = self._weight.detach()[tokens_BT].requires_grad_()

    @staticmethod
    def possible(student: Decoder) -> bool:
        return student.head is None and student.embed.weight.requires_grad

    def add_gradient(self) -> None:
        """After the backward pass."""
        grad_VD, rows_BTD = self._weight.grad, self.rows_BTD.grad
        assert grad_VD is not None and rows_BTD is not None
        grad_VD.index_add_(0, self._tokens_BT.flatten(), rows_BTD.flatten(0, 1))
