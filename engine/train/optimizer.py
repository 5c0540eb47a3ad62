"""AdamW with gradient clipping, and an update that the device skips if the loss or the gradients are not finite.

torch's fused AdamW reads two tensors on the device, which torch's gradient scaler uses for loss scaling. Here they
clip gradients and skip updates:

    grad_scale     gradients are divided by it in the optimizer's own pass over them. With
                   max(1, norm / clip_norm) this clips without another pass over memory
    found_inf      1 leaves weights, moments and the step count unchanged

So the host can launch the next step before it knows whether this one is finite.

    torch    the reference, on any device: torch's fused AdamW and its norm
    fused    on one GPU: the kernels of `engine.kernels.adamw`, which read and write each number once. The
             gradient of a tied embedding is added in place to that of the head (`EmbeddingRows`)

Both keep the same state under the same names, so a run may be resumed with either.
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
    """Return AdamW with weight decay on matrices only.

    Norm weights and biases are scales and offsets, which decay would pull towards 0.
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


def _unwrapped(owner: type[torch.optim.Optimizer], name: str) -> Any:
    """Return a method of torch's optimizers without its wrapper."""
    return inspect.unwrap(getattr(owner, name))


class UnwrappedOptimizer(torch.optim.Optimizer):
    """torch's optimizer without the wrappers that exclude its methods from torch.compile.

    The wrappers import torch's compiler, which takes more than a second. The engine never compiles an optimizer.
    """

    add_param_group = _unwrapped(torch.optim.Optimizer, "add_param_group")
    zero_grad = _unwrapped(torch.optim.Optimizer, "zero_grad")
    state_dict = _unwrapped(torch.optim.Optimizer, "state_dict")
    load_state_dict = _unwrapped(torch.optim.Optimizer, "load_state_dict")


class AdamW(UnwrappedOptimizer, torch.optim.AdamW):
    """torch's AdamW without the wrappers of `UnwrappedOptimizer`."""

    step = torch.no_grad()(_unwrapped(torch.optim.AdamW, "step"))


class FusedAdamW(AdamW):
    """AdamW with torch's state, updated by the kernel of `engine.kernels.adamw`."""

    grad_scale: Tensor | None
    found_inf: Tensor

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Apply one update. `grad_scale` and `found_inf` must be set first."""
        from engine.kernels.adamw import update

        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            states = [self._state_of(p) for p in parameters]
            divisor = self.grad_scale
            update(
                parameters,
                [p.grad for p in parameters],
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
    """Return the global norm of all gradients: fp32, 0-d."""
    if not fused:
        return nn.utils.get_total_norm(grads).detach().float()
    from engine.kernels.adamw import squares

    return squares(grads).sqrt().float()


def update_if_finite(
    optimizer: torch.optim.Optimizer, loss: Tensor, norm: Tensor, *, clip_norm: float
) -> None:
    """Apply one update if `loss` and `norm`, both 0-d, are finite, without waiting for the device.

    `norm` is the global norm of the gradients. They are clipped to `clip_norm`; 0 never clips.
    """
    scaled = cast(Any, optimizer)
    scaled.grad_scale = ((norm + 1e-6) / clip_norm).clamp(min=1.0) if clip_norm > 0 else None
    scaled.found_inf = (~(torch.isfinite(loss) & torch.isfinite(norm))).float()
    optimizer.step()


class EmbeddingRows:
    """The embedding rows of a batch as a leaf tensor, for a student whose embedding is also its head.

    A tied weight has two gradients: that of the head, which is dense, and that of the embedding, which has only
    some thousand rows. autograd would expand the embedding's gradient to full size with zeros and add the two. Here
    the looked-up rows are a separate leaf, and after the backward pass their gradient is added in place to the
    gradient of the head.
    """

    def __init__(self, student: Decoder, tokens_BT: Tensor) -> None:
        self._weight, self._tokens_BT = student.embed.weight, tokens_BT
        self.rows_BTD = self._weight.detach()[tokens_BT].requires_grad_()

    @staticmethod
    def applies_to(student: Decoder) -> bool:
        """Return whether the student's embedding is trained and is also its head."""
        return student.config.native and student.head is None and student.embed.weight.requires_grad

    def add_gradient(self) -> None:
        """Add the rows' gradient to the weight's. Call it after the backward pass."""
        grad_VD, rows_BTD = self._weight.grad, self.rows_BTD.grad
        assert grad_VD is not None and rows_BTD is not None
        grad_VD.index_add_(0, self._tokens_BT.flatten(), rows_BTD.flatten(0, 1))
